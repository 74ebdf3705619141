"""The source tree stays within its bars: few, full files and short functions."""

from statistics import median

from tools import house


def test_files_are_few_and_none_is_long() -> None:
    lines = {str(path): house.lines_of(path) for path in house.files()}
    assert len(lines) <= house.MOST_FILES
    assert house.MEDIAN[0] <= median(lines.values()) <= house.MEDIAN[1]
    every = house.files(lint=True)
    assert {path.name for path in every if house.lines_of(path) > house.MOST_LINES} == set()


def test_functions_are_short() -> None:
    found = [each for path in house.files(lint=True) for each in house.functions(path)]
    assert [each for each in found if each.lines > house.MOST_IN_FUNCTION] == []
    assert len(found) > 4000


def test_a_function_is_counted_without_its_docstring(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    file = tmp_path / "a.py"
    file.write_text('def f(\n    x,\n):\n    """One\n    two."""\n\n    def g():\n        pass\n    return g\n')
    assert sorted(house.functions(file)) == [(2, "a.py", "g"), (7, "a.py", "f")]
