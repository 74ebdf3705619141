"""The support table: every cell rests on a test, and the test is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "support.md"
_NAMED = re.compile(r"`((?:\w+/)+test_\w+\.py)((?:::\w+)*)`")


def sections() -> list[str]:
    return re.split(r"^#+ .*$", PAGE.read_text(), flags=re.M)


def rows() -> list[str]:
    """Of the tables that name a test in each row; another table rests on what its section names."""
    found = [line for section in sections() if "| the test |" in section for line in section.splitlines()]
    return [line for line in found if line.startswith("| ") and not line.endswith("| the test |")]


def exists(file: str, path: list[str]) -> bool:
    """Whether `path` (a class and a function, or either) is defined in the file."""
    if not (TESTS / file).is_file():
        return False
    body = ast.parse((TESTS / file).read_text()).body
    for name in path:
        found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


def test_there_are_tables() -> None:
    assert len(rows()) > 15
    assert not exists("unit/watching/test_watch.py", ["test_that_nobody_wrote"])
    assert not exists("unit/test_of_nothing.py", [])


def test_every_table_names_tests_that_exist() -> None:
    for section in sections():
        named = _NAMED.findall(section)
        assert named or "|---|" not in section
        assert [file + path for file, path in named if not exists(file, path.split("::")[1:])] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip())
def test_every_row_names_tests_that_exist(row: str) -> None:
    last = row.rstrip(" |").rpartition("|")[2]
    named = _NAMED.findall(last)
    assert named
    assert re.sub(r"[,\s]", "", _NAMED.sub("", last)) == "", "the last cell holds tests and nothing else"
    missing = [file + path for file, path in named if not exists(file, path.split("::")[1:])]
    assert missing == []
