"""CONTRIBUTING.md shows the tree that is there, and its recipes name files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "steadystep"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_room_is_shown() -> None:
    table = re.search(r"^\| `src/steadystep/` .*?^$", TEXT, re.M | re.S)
    assert table is not None
    shown = {name for row in table[0].splitlines()[2:] for name in re.findall(r"`([\w./]+)`", row.split("|")[1])}
    there = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir()}
    assert shown == there - {"__pycache__/", "__init__.py", "py.typed"}


def test_recipes_name_files_that_exist() -> None:
    recipes = TEXT[TEXT.index("## Add a detector") :]
    named = {name for name in re.findall(r"`([\w./]+\.(?:py|md|toml))`", recipes) if "<" not in name}
    rooms = (ROOT, PACKAGE, *(PACKAGE / room for room in ("detectors", "lint", "tracking/sinks")))
    folders = (*rooms, ROOT / "tests/unit/tracking")
    assert {name for name in named if not any((folder / name).exists() for folder in folders)} == set()
    assert len(named) > 15
