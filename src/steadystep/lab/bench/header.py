"""Where results come from: the first line of every results file."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, final

from steadystep.lab.bench.study import Choice, Row, Study
from steadystep.version import __version__

_PACKAGE = Path(__file__).parent.parent.parent
_NO_PART = ("cli", "integrations", "lab/bench", "lint", "pages")  # nothing a study's rows depend on


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything needed to make the rows below it again."""

    study: str
    settings: dict[str, Any]
    """What was asked for: quick or not, and which seeds."""
    code: str
    """A digest of the package without its pages and verbs, and of the study itself."""
    commit: str
    """Of the repository the package runs from, with a + when files differ from it; empty outside of one."""
    python: str
    torch: str
    steadystep: str
    cpus: int
    date: str
    command: str

    @classmethod
    def now(cls, study: Study, choice: Choice) -> Self:
        """Of this program, on this machine."""
        import torch

        return cls(
            study=study.store or study.name,
            settings={"quick": choice.quick, "seeds": None if choice.seeds is None else list(choice.seeds)},
            code=code(study),
            commit=commit(),
            python=platform.python_version(),
            torch=torch.__version__,
            steadystep=__version__,
            cpus=os.cpu_count() or 1,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            command=" ".join(["steadystep", *sys.argv[1:]]),
        )

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """From a file; raises TypeError or KeyError if that is not one."""
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def differences(self, other: "Header") -> list[str]:
        """What keeps the rows of one from standing beside those of the other, in words."""
        found = [
            f"{name} {mine} stored, {yours} here"
            for name in ("study", "settings", "torch", "python")
            if (mine := getattr(self, name)) != (yours := getattr(other, name))
        ]
        if self.code != other.code:
            found.append(f"different code (commit {self.commit or 'unknown'} stored, {other.commit or 'unknown'} here)")
        return found

    def __str__(self) -> str:
        return (
            f"{self.command}   commit {self.commit or 'unknown'}, {self.date}, torch {self.torch}, "
            f"python {self.python}, {self.cpus} cores"
        )


def code(study: Study) -> str:
    """A digest of the sources that the study's rows depend on."""
    here, names = Path(__file__).parent, (study.store or study.name, *study.parts)
    shared = [path for path in _PACKAGE.rglob("*.py") if not _is_in(path, _NO_PART)]
    own = [path for path in here.rglob("*.py") if path.relative_to(here).as_posix().startswith(names)]
    digest = hashlib.sha256()
    for path in sorted({*shared, *own}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _is_in(path: Path, folders: tuple[str, ...]) -> bool:
    inside = path.relative_to(_PACKAGE).as_posix()
    return any(inside.startswith(f"{folder}/") for folder in folders)


def commit() -> str:
    """Short; empty when the package is not the one in a repository's src, or git is missing."""
    top = _git("rev-parse", "--show-toplevel")
    if not top or (Path(top) / "src" / "steadystep").resolve() != _PACKAGE.resolve():
        return ""  # why: an installed package often lies inside somebody else's repository
    changed = _git("status", "--porcelain", "--", ".")
    return f"{_git('rev-parse', '--short', 'HEAD')}{'+' if changed else ''}"


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=_PACKAGE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


RESULTS = Path("benchmarks/results")
"""Where both look, from the folder of the repository."""


def stored_rows(name: str = "rivals", folder: Path = RESULTS) -> list[Row]:
    """Of the recovery study ("rivals") or the overhead study ("rivals-overhead"); none where nobody has run them.

    Those of single seeds are in folders of their own.
    """
    rows = []
    paths = sorted([*folder.glob(f"{name}.jsonl"), *folder.glob(f"seed*/{name}.jsonl")])
    for line in (line for path in paths for line in path.read_text(encoding="utf-8").splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:  # a line that was being written when the last run was stopped
            continue
        if "row" in entry:
            rows.append(entry["row"])
    return rows
