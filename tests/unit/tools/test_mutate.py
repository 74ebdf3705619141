"""The tool that breaks the code: what it breaks, and that the list kept by hand speaks of the code of today."""

import ast
import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tools.mutate.in_place import exchange
from tools.mutate.mutant import PACKAGE, enclosing_function
from tools.mutate.operators import mutants_of
from tools.mutate.promises import StaleError, entries, located
from tools.mutate.reach import Reach
from tools.mutate.sandbox import overlay
from tools.mutate.verdicts import Verdict, table


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry['promise']}-{entry['symbol']}")
def test_every_entry_names_what_is_there(entry: dict[str, Any]) -> None:
    promise = located(entry)
    source = (PACKAGE / promise.mutant.path).read_bytes()
    compile(promise.mutant.apply(source), promise.mutant.path, "exec")
    assert promise.tests


def test_every_promise_has_some() -> None:
    assert {entry["promise"] for entry in entries()} == set(range(1, 12))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"symbol": "Nowhere.at_all"}, "there is no Nowhere.at_all"),
        ({"find": "a line that was never written"}, "found 0 times"),
        ({"find": "e"}, "times in ConfigError: 'e'"),
        ({"put": "class ConfigError("}, "nothing is changed"),
        ({"tests": []}, "no tests"),
        ({"tests": ["test_nothing_of_this_name"]}, "there is no test test_nothing_of_this_name"),
    ],
)
def test_what_went_stale_is_named(change: dict[str, Any], said: str) -> None:
    good = {
        "symbol": "ConfigError",
        "find": "class ConfigError(",
        "put": "class Other(",
        "tests": ["test_every_promise_has_some"],
    }
    assert located(good).mutant.line > 1
    with pytest.raises(StaleError, match=said):
        located(good | change)


def broken(text: str) -> set[str]:
    source = text.encode()
    return {mutant.apply(source).decode() for mutant in mutants_of("any.py", source)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a < b", {"x = (a <= b)", "x = (a >= b)"}),
        ("x = a and b", {"x = (a or b)", "x = a", "x = b"}),
        ("x = not a", {"x = a"}),
        ("x = 8", {"x = 9", "x = 16"}),
        ("x = a if c else b", {"x = (b if c else a)"}),
        ("def f(a):\n    return a", {"def f(a):\n    return None"}),
        ("def f(self):\n    self.a += b", {"def f(self):\n    pass"}),
        ("f(é, b)", {"pass", "f(b, é)"}),
        ("x = max(a, b)", {"x = min(a, b)"}),
    ],
)
def test_what_is_broken(text: str, expected: set[str]) -> None:
    assert broken(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "def f(a: 'Literal[3]') -> 'Literal[4]': ...",
        "@dataclass(slots=True)\nclass A:\n    '''Says 3 < 4.'''",
        "def f():\n    raise ValueError(f'{3 + 4}')",
        "def f():\n    logger.warning('%d', 3)",
        "class A:\n    def __repr__(self):\n        return str(3)",
        "class A:\n    def __init__(self, b):\n        self.b = b",
        "if TYPE_CHECKING:\n    x = 3",
        "x = f'{3 + 4}' + 'a'",
    ],
)
def test_what_no_test_is_meant_to_notice_stays(text: str) -> None:
    assert broken(text) == set()


def test_the_broken_package_is_the_real_one_but_for_one_file() -> None:
    path = "detectors/__init__.py"
    with overlay(path, b"broken") as folder:
        seen = {str(file.relative_to(folder / PACKAGE.name)): file for file in _sources(folder / PACKAGE.name)}
        assert set(seen) == {str(file.relative_to(PACKAGE)) for file in _sources(PACKAGE)}
        assert [name for name, file in seen.items() if file.read_bytes() != (PACKAGE / name).read_bytes()] == [path]


@pytest.mark.parametrize(
    ("changed", "expected"), [(False, ["at the line"]), (True, ["at the line", "in the function"])]
)
def test_tests_are_found_by_line_and_by_function_once_the_file_has_changed(
    changed: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "records/signals.py"
    source = (PACKAGE / path).read_bytes()
    mutant = next(m for m in mutants_of(path, source) if m.kind == "return")
    function = enclosing_function(path, mutant.line)
    mark = "another" if changed else hashlib.sha256(source).hexdigest()[:16]
    tests = {
        "at the line": {"seconds": 1.0, "lines": {path: [mutant.line]}, "functions": {path: [function]}},
        "in the function": {"seconds": 1.0, "lines": {path: [1, 2]}, "functions": {path: [function]}},
        "elsewhere": {"seconds": 1.0, "lines": {path: [1]}, "functions": {path: ["another"]}},
    }
    (tmp_path / "test_any.py.json").write_text(json.dumps({"mark": "", "sources": {path: mark}, "tests": tests}))
    monkeypatch.setattr("tools.mutate.reach.FOLDER", tmp_path)
    reach = Reach()
    reach.load(["test_any.py"])
    assert reach.of(mutant) == expected


def test_what_is_not_decided_is_not_counted_as_caught() -> None:
    path = "records/signals.py"
    mutants = mutants_of(path, (PACKAGE / path).read_bytes())[:10]
    ways = ["killed"] * 6 + ["timeout", "void", "survived", "unreached"]
    verdicts = {mutant: Verdict(how=how) for mutant, how in zip(mutants, ways, strict=True)}
    head, row = table(verdicts).splitlines()
    assert row.split() == ["records", "10", "6", "1", "1", "2", "40.0%"]
    assert len(row) == len(head)
    assert sum(verdict.caught for verdict in verdicts.values()) == 6


def test_swaps_that_give_the_same_program_are_left_out() -> None:
    assert broken("x = torch.maximum(a, b)") == broken("x = torch.promote_types(a, b)") == set()
    assert broken("x = torch.sub(a, b)") == {"x = torch.sub(b, a)"}


MODULE = """
import functools
LIMIT = 3
def wrap(function):
    @functools.wraps(function)
    def inner(*given):
        return function(*given)
    return inner
class A:
    field: int = 4
    @property
    def size(self):
        return 5
    @staticmethod
    def both(a, b=6, *, c=7):
        return a + b + c
@wrap
def below(x):
    return x < LIMIT
def twice(x):
    def inner(y):
        return y * 2
    return inner(x)
"""


@pytest.mark.parametrize(
    ("old", "put", "value"),
    [
        ("LIMIT = 3", "LIMIT = 30", "[5, 13, True, 14]"),
        ("return 5", "return 50", "[50, 13, False, 14]"),
        ("b=6", "b=60", "[5, 67, False, 14]"),
        ("c=7", "c=70", "[5, 76, False, 14]"),
        ("a + b + c", "a + b - c", "[5, -1, False, 14]"),
        ("x < LIMIT", "x > LIMIT", "[5, 13, True, 14]"),
        ("y * 2", "y / 2", "[5, 13, False, 3.5]"),
    ],
)
def test_a_broken_function_or_constant_is_put_in_the_place_of_the_whole_one(old: str, put: str, value: str) -> None:
    module = ModuleType("steadystep.any")
    module.__file__ = "any.py"
    exec(compile(MODULE, "any.py", "exec"), vars(module))
    values = lambda: repr([module.A().size, module.A.both(0), module.below(7), module.twice(7)])  # noqa: E731
    assert values() == "[5, 13, False, 14]"
    line = MODULE[: MODULE.index(old)].count("\n") + 1
    assert exchange(module, ast.parse(MODULE), MODULE.replace(old, put).encode(), line)
    assert values() == value


def test_a_field_of_a_class_is_left_to_the_sandbox() -> None:
    module = ModuleType("steadystep.any")
    exec(compile(MODULE, "any.py", "exec"), vars(module))
    assert not exchange(module, ast.parse(MODULE), MODULE.replace("= 4", "= 40").encode(), 10)


def _sources(folder: Path) -> list[Path]:
    found = []
    for entry in folder.iterdir():
        found += _sources(entry) if entry.is_dir() else [entry] * (entry.suffix == ".py")
    return found
