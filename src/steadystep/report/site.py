"""Templates, style and script of all pages. Whatever comes from a log is escaped by the template engine."""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup

from steadystep.report import words
from steadystep.version import __version__

_STYLE = ("base.css", "run.css", "list.css")
_SCRIPT = (
    "numbers.js",
    "scale.js",
    "lines.js",
    "chart.js",
    "hand.js",
    "heat.js",
    "theme.js",
    "run.js",
    "live.js",
    "list.js",
)


@cache
def environment() -> Environment:
    """The template engine, with escaping on and unknown names an error."""
    # why not PackageLoader for both: it imports the dashboard, and with it a web server that a report does not need
    pages = FileSystemLoader(Path(__file__).parent.parent / "dashboard" / "templates")
    loaders = [PackageLoader("steadystep.report"), pages]
    made = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(number=words.number, island=island)
    made.globals.update(version=__version__, count=words.count)
    return made


@cache
def style() -> str:
    """All of the style."""
    return "\n".join(_asset(name) for name in _STYLE)


@cache
def script() -> str:
    """All of the script, in one closed scope."""
    return '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in _SCRIPT) + "\n})();\n"


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
    policy = (
        f"default-src 'none'; script-src '{_hash(script())}'; style-src '{_hash(style())}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    inside = {"policy": policy, "style": Markup(style()), "script": Markup(script())}
    return environment().get_template(template).render(**inside, **context)


def _asset(name: str) -> str:
    return (files("steadystep.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
