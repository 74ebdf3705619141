"""The import contracts of pyproject.toml name every room, so that a new one cannot stand outside of them."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
ROOMS = {path.stem for path in (ROOT / "src/steadystep").iterdir() if path.suffix == ".py" or path.is_dir()}
ROOMS -= {"__init__", "__pycache__"}


def contract(name: str) -> dict[str, object]:
    (found,) = (each for each in CONTRACTS if name in each["name"])
    return found


def test_every_room_has_its_place_in_the_layers() -> None:
    layers = contract("below it")
    placed = [room for layer in layers["layers"] for room in re.split(r" [|:] ", layer)]
    assert sorted(placed) == sorted(ROOMS)
    assert layers["exhaustive"]


def test_contracts_name_rooms_that_exist() -> None:
    lists = ("modules", "source_modules", "protected_modules", "allowed_importers")
    named = {module for each in CONTRACTS for key in lists for module in each.get(key, ())}
    assert {module.split(".")[1] for module in named if "." in module} <= ROOMS


def test_the_old_names_are_protected_module_by_module() -> None:
    """`steadystep` among the importers would stand for the whole package otherwise."""
    assert contract("Old names")["as_packages"] is False
