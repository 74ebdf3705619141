"""The lists of deliberate breakages speak of the code and the tests as they are today."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LISTS = sorted((ROOT / "tools" / "mutants").glob("*.toml"))


def out_of_date(mutant: dict[str, Any]) -> list[str]:
    """What such an entry names that is not there."""
    source = ROOT / "src" / "steadystep" / mutant["file"]
    if not source.is_file():
        return [f"there is no {mutant['file']}"]
    times = source.read_text().count(mutant["find"])
    wrong = [] if times == 1 else [f"found {times} times in {mutant['file']}: {mutant['find']!r}"]
    wrong += [f"nothing is changed in {mutant['file']}: {mutant['find']!r}"] if mutant["put"] == mutant["find"] else []
    wrong += [] if mutant["tests"] else [f"no tests for {mutant['file']}: {mutant['find']!r}"]
    return wrong + [f"there is no test {test}" for test in mutant["tests"] if not _is_there(test)]


def _is_there(test: str) -> bool:
    file, *names = test.split("[")[0].split("::")
    path = ROOT / file
    text = path.read_text() if path.is_file() else None
    return text is not None and all(f"def {name}(" in text or f"class {name}:" in text for name in names)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_entry_names_what_is_there(path: Path) -> None:
    mutants = tomllib.loads(path.read_text())["mutant"]
    assert mutants
    assert [wrong for mutant in mutants for wrong in out_of_date(mutant)] == []


def test_the_lists_are_found() -> None:
    assert "judgement" in [path.stem for path in LISTS]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "nowhere.py"}, "there is no nowhere.py"),
        ({"find": "a line that was never written"}, "found 0 times"),
        ({"find": "e"}, "times in errors.py: 'e'"),
        ({"put": "class ConfigError("}, "nothing is changed"),
        ({"tests": []}, "no tests"),
        ({"tests": ["tests/unit/test_nowhere.py"]}, "there is no test tests/unit/test_nowhere.py"),
        ({"tests": ["tests/unit/test_mutant_lists.py::test_nothing[a]"]}, "there is no test"),
    ],
)
def test_what_went_stale_is_named(change: dict[str, Any], said: str) -> None:
    good = {
        "file": "errors.py",
        "find": "class ConfigError(",
        "put": "class Other(",
        "tests": ["tests/unit/test_mutant_lists.py::test_the_lists_are_found"],
    }
    assert out_of_date(good) == []
    (wrong,) = out_of_date(good | change)
    assert said in wrong
