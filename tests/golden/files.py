"""The stored traces: one text file per run, and the machine that recorded them."""

import json
from dataclasses import asdict
from pathlib import Path

from tests.field.plan import Run
from tests.golden.trace import Trace

FOLDER = Path(__file__).parent / "traces"
_MACHINE = "machine.json"


def name_of(run: Run) -> str:
    """The file's name without its ending."""
    return f"{run.index:03}-{run.face}"


def write(run: Run, trace: Trace, folder: Path = FOLDER) -> None:
    """Store one run: what it is, what was decided, and the bits in the last line."""
    lines = [json.dumps(asdict(run)), *trace.decisions, trace.bits]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name_of(run)}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Run, Trace]:
    """What `write` stored. The run comes from the file, so that another plan of the field changes no trace."""
    head, *decisions, bits = path.read_text(encoding="utf-8").splitlines()
    return Run(**json.loads(head)), Trace(decisions=tuple(decisions), bits=bits)


def stored(folder: Path = FOLDER) -> list[Path]:
    """All traces, by name."""
    return sorted(folder.glob("*.txt"))


def write_machine(found: dict[str, str], folder: Path = FOLDER) -> None:
    """Remember where the bits come from."""
    (folder / _MACHINE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def read_machine(folder: Path = FOLDER) -> dict[str, str]:
    """Where the bits come from."""
    found: dict[str, str] = json.loads((folder / _MACHINE).read_text(encoding="utf-8"))
    return found
