"""The source tree stays within its bars: few, full files and short functions."""

from statistics import median

from tools import house


def test_files_are_few_and_none_is_long() -> None:
    lines = {str(path): house.lines_of(path) for path in house.files()}
    assert len(lines) <= house.most_files(sum(lines.values()))
    assert house.MEDIAN[0] <= median(lines.values()) <= house.MEDIAN[1]
    every = house.files(lint=True)
    assert {path.name for path in every if house.lines_of(path) > house.MOST_LINES} == set()


def test_functions_are_short() -> None:
    found = [each for path in house.files(lint=True) for each in house.functions(path)]
    assert [each for each in found if each.lines > house.MOST_IN_FUNCTION] == []
    assert len(found) > 4000


def test_files_grow_with_lines() -> None:
    assert [house.most_files(lines) for lines in (40_000, 59_000, 59_219, 59_220, 61_200)] == [260, 260, 260, 261, 270]


def test_a_name_stands_for_one_thing() -> None:
    assert list(house.names_twice()) == ["Fault"]  # that of a program and that of an experiment: both are called so


def test_a_function_is_counted_without_its_docstring(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    file = tmp_path / "a.py"
    file.write_text('def f(\n    x,\n):\n    """One\n    two."""\n\n    def g():\n        pass\n    return g\n')
    assert sorted(house.functions(file)) == [(2, "a.py", "g"), (7, "a.py", "f")]
