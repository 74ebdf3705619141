"""docs/walk.md tells of the files that a healthy step really calls, and its figure shows them."""

import re
from pathlib import Path

import pytest
from tools.ask_tree import definitions
from tools.step_calls import STAGES, Call, files_by_stage, first_entered, median_step, recorded
from tools.walk_figure import FIGURE, figure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "walk.md").read_text()
ENTRY = re.compile(r"`([\w/]+\.py)`(?:, | \| )`([\w.]+)`")


@pytest.fixture(scope="module")
def step() -> list[Call]:
    return median_step(recorded(counted=21))


def told() -> dict[str, list[tuple[str, str]]]:
    """File and function of each entry, by stage."""
    parts = re.split(r"^##+ (.+)$", PAGE, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {stage: ENTRY.findall(sections[stage]) for stage in STAGES}


def test_the_page_lists_the_files_of_the_recorded_step_in_the_order_of_their_first_call(step: list[Call]) -> None:
    assert {stage: [file for file, _ in rows] for stage, rows in told().items()} == first_entered(step)


def test_each_function_it_names_is_called_in_that_stage(step: list[Call]) -> None:
    named = {Call(stage, *row) for stage, rows in told().items() for row in rows}
    assert named - set(step) == set()


def test_the_figure_shows_the_recorded_step(step: list[Call]) -> None:
    assert FIGURE.read_text() == figure(files_by_stage(step), first_entered(step)), "run python tools/walk_figure.py"


def test_the_step_is_no_longer_than_the_page_says(step: list[Call]) -> None:
    said = re.search(r"at most (\d+) files and (\d+) calls", PAGE)
    assert said is not None
    files, calls = map(int, said.groups())
    assert (files, calls) == (35, 200)
    assert len({call.file for call in step}) <= files
    assert len(step) <= calls


def test_the_other_sections_name_what_is_defined_there() -> None:
    rest = PAGE[PAGE.index("## When something is wrong") :]
    rows = ENTRY.findall(rest)
    defined = definitions()
    assert [row for row in rows if f"src/steadystep/{row[0]}" not in defined.get(row[1], [])] == []
    assert len(rows) > 25


def test_every_file_it_mentions_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert {name for name in named if not any((ROOT / at / name).is_file() for at in ("", "src/steadystep"))} == set()
