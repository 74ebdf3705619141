"""HTML pages of runs: reports and comparisons as one file, and a live dashboard over a folder of runs.

`Library` and `make_app` load on first use: the server needs `pip install 'steadystep[dashboard]'`.
"""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steadystep._utils import lazy_names, text
from steadystep.pages.charts import packed
from steadystep.runs.curve import Curve
from steadystep.runs.run import Run
from steadystep.version import __version__

if TYPE_CHECKING:
    from steadystep.pages.charts import Thinned, thin
    from steadystep.pages.library import Library
    from steadystep.pages.report import compare_page, report_page
    from steadystep.pages.server import make_app

__all__ = ["Library", "Thinned", "compare_page", "make_app", "report_page", "thin"]

__getattr__ = lazy_names(
    __name__,
    {
        "charts": ("Thinned", "thin"),
        "library": ("Library",),
        "report": ("compare_page", "report_page"),
        "server": ("make_app",),
    },
)


_STYLE = ("base.css", "run.css", "list.css")
_SCRIPT = (
    "numbers.js",
    "scale.js",
    "lines.js",
    "chart.js",
    "hand.js",
    "strip.js",
    "heat.js",
    "save.js",
    "many.js",
    "theme.js",
    "run.js",
    "live.js",
    "list.js",
)
# What a page that stands alone does without.
_SPARED = {
    "report.html": frozenset({"many.js", "live.js", "list.js", "list.css"}),
    "compare.html": frozenset({"strip.js", "heat.js", "live.js", "list.js"}),
}


@cache
def template_engine() -> Environment:
    """The template engine, with escaping on and unknown names an error."""
    made = Environment(
        loader=PackageLoader("steadystep.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=text.number, island=island, packed=packed)
    made.globals.update(version=__version__, count=text.count)
    return made


@cache
def style(without: frozenset[str] = frozenset()) -> str:
    """All of the style; dark by choice, and where the system is and nothing was chosen."""
    dark = _asset("dark.css")
    unchosen = dark.replace('[data-theme="dark"]', ":not([data-theme])")
    both = f"{dark}@media (prefers-color-scheme: dark) {{\n{unchosen}}}"
    return "\n".join([both, *(_asset(name) for name in _STYLE if name not in without)])


@cache
def script(without: frozenset[str] = frozenset()) -> str:
    """All of the script, in one closed scope."""
    parts = [_asset(name) for name in _SCRIPT if name not in without]
    start = "startRun();" if "live.js" in without else "startLive(startRun());\nstartList();"
    return '"use strict";\n(() => {\n' + "\n".join([*parts, "startTheme();", start]) + "\n})();\n"


def island(data: Any) -> Markup:
    r"""JSON that can stand inside a page: no character of it can end the element it stands in.

    >>> print(island({"name": "</script>"}))
    {"name":"\u003c/script\u003e"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def self_contained(template: str, **context: Any) -> str:
    """A page with its style and script inside, which may run this very script and nothing else."""
    spared = _SPARED.get(template, frozenset())
    styled, run = style(spared), script(spared)
    policy = (
        f"default-src 'none'; script-src '{_hash(run)}'; style-src '{_hash(styled)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    inside = {"policy": policy, "style": Markup(styled), "script": Markup(run)}
    return template_engine().get_template(template).render(**inside, **context)


def _asset(name: str) -> str:
    """A file of ours without indentation and comments: it stands in every report."""
    lines = (files("steadystep.pages") / "assets" / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if not line.strip().startswith(("//", "/*"))) + "\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_BARS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "×"  # noqa: RUF001 - it stands for itself
_MOST = 0.95  # of the parts fit; higher ones are cut off
_WIDE = 50.0  # from smallest to largest: beyond that in logarithms


def sparkline(run: Run, *, width: int = 60) -> str:
    """Empty for a run without points."""
    curve = Curve.of(run)
    series = curve.raw
    if len(series) < 2:
        return ""
    bounds = np.linspace(0, len(series), min(width, len(series)) + 1).astype(int)
    tops = np.array([_top(series.values[a:b]) for a, b in pairwise(bounds)])
    good = np.isfinite(tops)
    if not good.any():
        return f"{curve.name} {_NO_NUMBER * len(tops)}"
    low, high = float(tops[good].min()), float(np.quantile(tops[good], _MOST))  # the first losses dwarf all others
    if low > 0.0 and high / low > _WIDE:
        tops, low, high = np.log(tops), float(np.log(low)), float(np.log(high))
    with np.errstate(invalid="ignore", over="ignore"):
        places = (tops / 2 - low / 2) / max(high / 2 - low / 2, 1e-300) * (len(_BARS) - 1)  # halves cannot overflow
        places = np.clip(places, 0, len(_BARS) - 1)
    bars = "".join(_BARS[round(float(p))] if g else _NO_NUMBER for p, g in zip(places, good, strict=True))
    first, last = (f"{value:.4g}" for value in (series.values[0], series.level))
    return f"{curve.name} {first} {bars} {last}"


def _top(part: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """NaN where the part holds more of what is no number than of numbers."""
    finite = part[np.isfinite(part)]
    return float(finite.max()) if 2 * len(finite) > len(part) else float("nan")
