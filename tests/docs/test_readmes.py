"""The two READMEs say the same: headings, code, links and the numbers of the tables."""

import re
from pathlib import Path

import pytest
from tools.index_readme import for_index, urls

ROOT = Path(__file__).parent.parent.parent
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
_FENCED = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
# A name between @@ stands for a number that is still to be filled in.
_NUMBER = re.compile(r"@@\w+@@|\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def prose(name: str) -> str:
    """The page without its fenced code, where # and | mean other things."""
    return _FENCED.sub("", (ROOT / name).read_text(encoding="utf-8"))


def levels(name: str) -> list[int]:
    """The level of each heading."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(name), re.M)]


def code(name: str) -> list[str]:
    """Every fenced block, fences included."""
    return _FENCED.findall((ROOT / name).read_text(encoding="utf-8"))


def targets(name: str) -> list[str]:
    """Where links and pictures lead, apart from the other language and places in the same page."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(name))
    return sorted(target for target in found if target not in {ENGLISH, CHINESE} and not target.startswith("#"))


def numbers(name: str) -> list[list[list[str]]]:
    """The numbers in each cell of each row of the tables; within a cell languages order them differently."""
    rows = re.findall(r"^\|(.*)\|$", prose(name), re.M)
    return [[sorted(_NUMBER.findall(cell)) for cell in row.split("|")] for row in rows]


def test_the_headings_have_the_same_levels_in_the_same_order() -> None:
    assert levels(ENGLISH)
    assert levels(CHINESE) == levels(ENGLISH)


def test_the_code_is_the_same_byte_for_byte() -> None:
    assert code(ENGLISH)
    assert code(CHINESE) == code(ENGLISH)


def test_the_links_lead_to_the_same_places() -> None:
    assert targets(ENGLISH)
    assert targets(CHINESE) == targets(ENGLISH)


def test_the_tables_hold_the_same_numbers_cell_by_cell() -> None:
    assert numbers(ENGLISH)
    assert numbers(CHINESE) == numbers(ENGLISH)


@pytest.mark.parametrize(("name", "other"), [(ENGLISH, CHINESE), (CHINESE, ENGLISH)])
def test_each_names_the_other_below_its_title(name: str, other: str) -> None:
    title, _, language = prose(name).splitlines()[:3]
    assert title == "# steadystep"
    assert language.endswith(f"]({other})")


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_places_in_the_same_page_are_headings_of_it(name: str) -> None:
    text = prose(name)
    headings = {
        re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in re.findall(r"^#+ (.+)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)\s]+)\)", text)) <= headings


def test_it_is_read_in_a_minute() -> None:
    assert len((ROOT / ENGLISH).read_text().split()) <= 900


def test_on_a_package_index_every_link_and_picture_is_an_address() -> None:
    text = (ROOT / ENGLISH).read_text()
    shown = for_index(text, {"GITHUB_REPOSITORY": "owner/name", "GITHUB_SHA": "abc"})
    found = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", shown)
    assert len(found) == len(re.findall(r"\]\(", text))
    assert all(target.startswith("https://") for _, target in found)
    assert ("!", "https://raw.githubusercontent.com/owner/name/abc/docs/images/report.png") in found
    assert ("", "https://github.com/owner/name/blob/abc/docs/benchmarks.md#overhead") in found


def test_a_build_that_knows_no_repository_links_nowhere() -> None:
    shown = for_index((ROOT / ENGLISH).read_text(), {})
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)\s]+)\)", shown))
    assert "Quickstart · tutorial" in shown


def test_the_addresses_of_a_release_are_those_it_is_built_from() -> None:
    assert urls({}) == {}
    told = urls({"GITHUB_REPOSITORY": "owner/name"})
    assert told["Source"] == "https://github.com/owner/name"
    assert set(told) == {"Source", "Documentation", "Changelog", "Issues"}
