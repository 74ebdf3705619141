"""docs/api.md from the public names: what each is, by the first sentence of its docstring.

python tools/api_page.py    (run it when a public name comes, goes or changes its signature)
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

import steadystep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
PARTS = {
    "checkpoints": "checkpoints.md",
    "clip": "clip.md",
    "detectors": "detectors.md",
    "diagnosis": "diagnosis.md",
    "faults": "faults.md",
    "groups": "groups.md",
    "incidents": "incidents.md",
    "init": "init.md",
    "layers": "layers.md",
    "lint": "check.md",
    "lr_finder": "find_lr.md",
    "memory": "memory.md",
    "pages": "report.md",
    "precision": "precision.md",
    "runs": "diagnose.md",
    "schedule": "schedule.md",
    "testing": "detectors.md",
    "tracking": "track.md",
    "train": "train.md",
    "watching": "watch.md",
}
INTRODUCTION = """# Reference

The public names, from their docstrings (`python tools/api_page.py` writes this page; a test compares the names with
each `__all__`). Arguments and examples are in the docstrings (`help(steadystep.Guard)`) and on the page of each part.
What is not here may change without notice.
"""
DATA: dict[type, str] = {str: "A text.", dict: "A table, by name.", tuple: "All names."}
"""What is said of plain data, which has no docstring of its own."""
ERRORS = """## Errors

```text
SteadystepError
├── ConfigError (also a ValueError)          a setting is unknown, out of range or not built yet
├── MisuseError (also a RuntimeError)        the guard was called in a way that cannot work
├── CheckpointError (also a RuntimeError)    a state cannot be written, or a file is not what was written
├── UnsupportedError (also a NotImplementedError)   a case we know of and do not handle
└── TrainingHalted (also a RuntimeError)     the run cannot go on; nothing bad was applied
```
"""


def page() -> str:
    """The whole page."""
    top = [(name, getattr(steadystep, name)) for name in dir(steadystep)]
    things = [(name, thing) for name, thing in top if not inspect.ismodule(thing)]
    guard = [(f"Guard.{name}", thing) for name, thing in vars(steadystep.Guard).items() if not name.startswith("_")]
    text = [INTRODUCTION, "## steadystep\n", table(things), "## Guard\n", table(guard), ERRORS]
    for part, document in PARTS.items():
        module = importlib.import_module(f"steadystep.{part}")
        text += [f"## steadystep.{part}\n", f"{sentence(module)} Page: [{document.removesuffix('.md')}]({document}).\n"]
        text.append(table([(name, getattr(module, name)) for name in module.__all__]))
    return "\n".join(text)


def table(named: list[tuple[str, Any]]) -> str:
    """One row for each."""
    rows = [f"| `{name}` | {sentence(thing)} |" for name, thing in named]
    return "\n".join(["| name | what it is |", "|---|---|", *rows, ""])


def sentence(thing: Any) -> str:
    """The first line of its docstring; for plain data, what kind it is."""
    thing = thing.__func__ if isinstance(thing, classmethod) else thing
    if not (
        inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing) or isinstance(thing, property)
    ):
        ours = type(thing).__module__.startswith("steadystep")
        return f"A `{type(thing).__name__}`." if ours else DATA.get(type(thing), "A type, for annotations.")
    first = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
    return first.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {len(page().splitlines())} lines")
