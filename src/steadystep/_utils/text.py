"""Words for people: names as they know them, numbers, warnings; and text from files that people give."""

import difflib
import html
import logging
import math
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

from steadystep.errors import ConfigError


def alike(wanted: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.5) -> list[str]:
    """The known names that `wanted` may stand for, the likeliest first."""
    return difflib.get_close_matches(wanted, list(known), n=count, cutoff=cutoff)


def nearest_names(wanted: str, known: Sequence[str], *, count: int = 3) -> str:
    """A clause for an error message: the known names nearest to `wanted`, or the first few."""
    named = [name for name in known if name]
    shown = alike(wanted.strip("*."), named, count=count, cutoff=0.4) or named[:count]
    return f": did you mean {', '.join(repr(name) for name in shown)}?" if shown else ""


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """A dotted name without what torch.compile, FSDP and checkpointing put in between.

    >>> plain_name("blocks.0._orig_mod.mlp")
    'blocks.0.mlp'
    """
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def install(extra: str) -> str:
    """The command that brings what an extra needs.

    >>> install("lab")
    "pip install 'steadystep[lab]'"
    """
    return f"pip install 'steadystep[{extra}]'"


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings below each other as one list.

    >>> list(dotted({"mode": "observe", "clip": {"max_norm": 1.0}}))
    [('mode', 'observe'), ('clip.max_norm', 1.0)]
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def state_of(step: int | None) -> str:
    """What a rollback restored, by the last step that is in it; before the first there is none."""
    return "the initial state" if step is not None and step < 0 else f"step {step}"


_PACKAGE = str(Path(__file__).parent.parent)


PREFIX = "steadystep: "
"""Of every line that is logged and every warning: a handler on the root logger often leaves the logger's name out."""


@final
class _Prefixed(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f"{PREFIX}{msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line above the progress bars of tqdm, if there are any: a bar is drawn again after it."""
        bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with bars.external_write_mode(file=sys.stderr) if getattr(bars, "_instances", None) else nullcontext():
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


logger = _Prefixed(logging.getLogger("steadystep"), {})
"""The only way to the `steadystep` logger."""


def warn(message: str) -> None:
    """A UserWarning attributed to the first caller outside this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"{PREFIX}{message}", stacklevel=depth)


def note(message: str) -> None:
    """A line for whoever reads the `steadystep` logger at level INFO."""
    logger.info(message)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Nothing but errors on the `steadystep` logger: a table or a screen tells what happened."""
    log = logger.logger
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


LARGEST_FILE = 32 << 20  # bytes of settings, a script or a record: far beyond any that a person wrote


def must_end(path: Path) -> None:
    """Refuse what has no end (a device, a pipe) or no possible name.

    Raises:
        ConfigError: one line that says what it is.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(f"{_shown(path)}: no such file or directory") from None
    except OSError as error:
        raise ConfigError(f"{_shown(path)}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{_shown(path)}: not a valid file name ({error})") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"{_shown(path)}: a device or pipe, not a file: save it to a file and pass that")


def text_of(path: Path, *, encoding: str = "utf-8", largest: int = LARGEST_FILE) -> str:
    """All of it.

    Raises:
        ConfigError: it cannot be read, has no end, is too large, or is no text in that encoding.
    """
    must_end(path)
    try:
        if path.stat().st_size > largest:
            raise ConfigError(f"{path}: {path.stat().st_size >> 20} MB, more than the limit of {largest >> 20} MB")
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a {encoding.removesuffix('-sig').upper()} text file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:80]}… ({len(text)} characters)"


NOTHING = "\u2013"


def number(value: float | None) -> str:
    """Three to four digits, whatever the size.

    >>> number(0.000123456), number(2.34567), number(12345.0), number(float("nan"))
    ('1.23e-04', '2.346', '12,345', 'NaN')
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def short(value: int) -> str:
    """A large count in few characters.

    >>> short(950), short(1_106_944), short(7_000_000_000)
    ('950', '1.11M', '7B')
    """
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**4, "k")):
        if value >= size:
            return f"{value / (1000 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,}"


def count(number_of: int, thing: str) -> str:
    """A number with its noun.

    >>> count(1, "rollback"), count(1200, "step")
    ('1 rollback', '1,200 steps')
    """
    return f"{number_of:,} {thing}{'' if number_of == 1 else 's'}"


def share(part: int, whole: int) -> str:
    """A share in per cent, never rounded down to nothing.

    >>> share(0, 10), share(1, 100000), share(1, 3)
    ('0 %', '< 0.1 %', '33 %')
    """
    if not part or not whole:
        return "0 %"
    percent = 100 * part / whole
    return "< 0.1 %" if percent < 0.1 else (f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %")


_TONES = {"good": "#2e7d4f", "bad": "#b3261e", "": "#8a8a8a"}


def html_card(title: str, rows: Iterable[tuple[str, object]], *, tone: str = "", below: str = "") -> str:
    """Return a small HTML table for a notebook. All text is escaped; `below` is markup and stays as it is.

    >>> html_card("a<b", [("loss", 0.5)]).count("&lt;")
    1
    """
    cells = "".join(
        f'<tr><td style="opacity:.65;text-align:left">{html.escape(name)}</td>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in rows
        if value not in ("", None)
    )
    style = f"border-left:3px solid {_TONES.get(tone, _TONES[''])};padding-left:.7em"
    return f'<div style="{style}"><b>{html.escape(title)}</b><table>{cells}</table>{below}</div>'


def guard_line(guard: Any) -> str:
    """Return what `repr` shows of a guard."""
    return f"Guard({', '.join(f'{name} {value}' for name, value in _about_guard(guard))})"


def guard_card(guard: Any) -> str:
    """Return a table for a notebook: progress and the diagnosis so far."""
    first = guard.diagnose()[0]
    rows = [*_about_guard(guard), ("diagnosis", first.cause), ("evidence", first.evidence), ("try", first.advice)]
    return html_card("Guard", rows, tone="good" if first.cause == "healthy" else "bad")


def _about_guard(guard: Any) -> list[tuple[str, object]]:
    name = "+".join(type(one).__name__ for one in getattr(guard._optimizer, "each", (guard._optimizer,)))
    told: list[tuple[str, object]] = [("mode", guard.config.mode), ("optimizer", name)]
    told += [("steps", f"{guard.attempts:,}"), ("applied", f"{guard.updates:,}")]
    folder = getattr(getattr(guard._parts.log, "log", None), "path", None)
    told += [("run_dir", folder.parent)] if folder is not None else []
    return [*told, ("state", "closed")] if guard._closed else told


def is_folder(place: Path) -> bool:
    """Whether it is a folder and not a file; ConfigError for anything else."""
    try:
        if place.is_dir():
            return True
        if place.is_file():
            return False
    except (OSError, ValueError) as error:  # a name too long, or with a NUL in it
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{str(place)[:80]!r}: not a path ({why})") from None
    what = "not a regular file" if place.exists() else "no such file or directory"
    raise ConfigError(f"{place}: {what}")
