"""Applies safe fixes: one at a time, each checked again before it is kept, and the file replaced in one step."""

import contextlib
import difflib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from steadystep._utils.text import must_end
from steadystep.errors import ConfigError
from steadystep.lint.check import check_script
from steadystep.lint.encoding import encoding_of
from steadystep.lint.patch import apply, plain
from steadystep.lint.repairs import edits, why_unsafe
from steadystep.lint.report import Hit, Report

_FOLLOW_UPS = 3  # fixes that one fix may need: a clip that is moved may have to be unscaled


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A script after its safe fixes."""

    text: str
    """The new text, with the line endings of the old one."""
    report: Report
    """What is left."""
    applied: tuple[Hit, ...]
    """The hits that were fixed, with their lines in the text at that moment."""
    reasons: dict[Hit, str]
    """For each hit with a fix that is left: why it was not applied."""
    diff: str = ""
    """All of it as one unified diff."""


def fix_script(text: str, path: str = "script.py", *, wanted: Callable[[str], bool] = lambda code: True) -> Fixed:
    """Apply every safe fix to the text of a script.

    A fix is kept if the result is valid Python, the hit is gone and no other one has come up.

    Args:
        text: the script.
        path: its name in the report.
        wanted: which codes to fix.

    Raises:
        ConfigError: it is not Python, or nested too deeply.
    """
    before, report = text, check_script(plain(text), path)
    applied: list[Hit] = []
    reasons: dict[Hit, str] = {}
    while True:
        reasons = {}
        for hit in (h for h in report.hits if h.diff and wanted(h.code)):
            done = _one(text, report, hit, wanted)
            if isinstance(done, str):
                reasons[hit] = done
            else:
                text, report, made = done
                applied += made
                break
        else:
            diff = _whole_diff(before, text, path)
            return Fixed(text=text, report=report, applied=tuple(applied), reasons=reasons, diff=diff)


def _one(text: str, report: Report, hit: Hit, wanted: Callable[[str], bool]) -> str | tuple[str, Report, list[Hit]]:
    """The text and report after one fix and what it needs; or why it is not applied."""
    had, made = Counter(h.code for h in report.hits), list[Hit]()
    for _ in range(_FOLLOW_UPS):
        why = why_unsafe(hit, plain(text))
        changed = None if why else apply(text, edits(hit))
        if changed is None:
            return why or "it does not fit the file"
        text = changed
        report = check_script(plain(text), report.path)
        made.append(hit)
        has = Counter(h.code for h in report.hits)
        if has[made[0].code] >= had[made[0].code]:
            return "the fault would remain"
        fresh = has - had
        if not fresh:
            return text, report, made
        follow = next((h for h in report.hits if h.code in fresh and h.diff and wanted(h.code)), None)
        if follow is None:
            return f"it would lead to {', '.join(sorted(fresh))}"
        hit = follow
    return "it would need further changes"


def unfixed(report: Report, fixed: Fixed) -> dict[Hit, str]:
    """Return the hits of a report that the fixes leave, as they were before, each with the reason if it has a fix."""
    rest = Counter(_known_by(hit, fixed.report) for hit in fixed.report.hits)
    reasons = {_known_by(hit, fixed.report): why for hit, why in fixed.reasons.items()}
    found: dict[Hit, str] = {}
    for hit in report.hits:
        key = _known_by(hit, report)
        if rest[key] > 0:
            rest[key] -= 1
            found[hit] = reasons.get(key, "")
    return found


def _known_by(hit: Hit, report: Report) -> tuple[str, str, str]:
    """What stays when lines above change."""
    line = report.source[hit.line - 1] if 0 < hit.line <= len(report.source) else ""
    return hit.code, hit.message, line.strip()


def _whole_diff(old: str, new: str, path: str) -> str:
    if old == new:
        return ""
    lines = difflib.unified_diff(
        plain(old).splitlines(), plain(new).splitlines(), f"a/{path}", f"b/{path}", lineterm="", n=2
    )
    return "\n".join(lines)


def fix_file(path: Path, *, wanted: Callable[[str], bool] = lambda code: True, write: bool = True) -> Fixed:
    """Apply every safe fix to a script on disk, or only find out what they would be.

    Raises:
        ConfigError: it cannot be read, is not Python, or cannot be written; then it is unchanged.
    """
    must_end(path)
    try:
        raw = path.read_bytes()
        encoding = encoding_of(raw)
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a {encoding.removesuffix('-sig').upper()} text file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    fixed = fix_script(text, str(path), wanted=wanted)
    if write and fixed.applied:
        _replace(path, raw, fixed.text.encode(encoding))
    return fixed


def _replace(path: Path, old: bytes, new: bytes) -> None:
    """New content under the same name, with the same mode; a link stays a link."""
    target = Path(os.path.realpath(path))
    made: str | None = None
    try:
        status = target.stat()
        if not status.st_mode & 0o222 or not os.access(target, os.W_OK):
            raise ConfigError(f"{path}: not fixed: the file is read-only")
        handle, made = tempfile.mkstemp(dir=target.parent, prefix=".steadystep-")
        with os.fdopen(handle, "wb") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        shutil.copystat(target, made)
        os.utime(made)
        if hasattr(os, "chown"):
            with contextlib.suppress(PermissionError):
                os.chown(made, status.st_uid, status.st_gid)
        if target.read_bytes() != old:
            raise ConfigError(f"{path}: not fixed: the file was changed while it was being checked")
        os.replace(made, target)
        made = None
    except OSError as error:
        raise ConfigError(f"{path}: not fixed: cannot be written ({error.strerror or error})") from None
    finally:
        if made is not None:
            Path(made).unlink(missing_ok=True)
