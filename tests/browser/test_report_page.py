"""The report from disk, with the network switched off."""

from pathlib import Path
from typing import Any

import pytest

from steadystep.pages.incident_groups import Headline
from steadystep.pages.report import report_page
from tests.unit.pages.report_runs import made_run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    run = made_run(3000, name="</script><script>alert(1)</script>")
    path.write_text(report_page(run, Headline(said="All is well.", healthy=True)))
    return path.as_uri()


def test_it_opens_from_disk_with_no_network(open_page: Any, report: str) -> None:
    page = open_page(report)
    page.context.set_offline(True)
    page.reload()
    assert page.locator(".verdict").inner_text() == "All is well."
    assert page.locator("h1").inner_text() == "</script><script>alert(1)</script>"
    assert page.locator("#charts svg").count() == 3
    assert page.locator("[data-panel=loss] path.curve").count() == 3
    assert page.locator("[data-panel=loss] path.bad").count() >= 1, "NaN is marked"


def test_the_cursor_tells_the_values_in_all_charts(open_page: Any, report: str) -> None:
    page = open_page(report)
    page.hover("[data-panel=loss] .plot svg", position={"x": 400, "y": 100})
    step = page.locator("[data-panel=loss] .at").inner_text()
    assert step.startswith("step ")
    assert page.locator("[data-panel=lr] .at").inner_text() == step
    assert float(page.locator("[data-panel=lr] .key b").inner_text()) > 0


def test_the_heat_map_is_painted_and_answers(open_page: Any, report: str) -> None:
    page = open_page(report)
    canvas = page.locator("#heat .grid canvas")
    canvas.scroll_into_view_if_needed()
    page.hover("#heat .grid canvas", position={"x": 200, "y": 7})
    assert page.locator("#heat .at").inner_text().startswith("embed.weight: ")
    painted = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some(v => v && v < 255)"
    assert canvas.evaluate(painted)
    page.click("text=relative to its own median")
    assert page.locator("#heat .ends").inner_text().startswith("1/")


def test_a_case_shows_the_steps_around_it(open_page: Any, report: str) -> None:
    page = open_page(report)
    page.locator("#case-1500 summary").click()
    page.locator("#case-1500 .near svg path.curve").first.wait_for()
    assert page.locator("#case-1500 .near svg").count() == 2


def test_a_logarithmic_axis_at_a_click(open_page: Any, report: str) -> None:
    page = open_page(report)
    before = page.locator("[data-panel=loss] path.curve").first.get_attribute("d")
    page.click("[data-panel=loss] header button")
    assert page.locator("[data-panel=loss] path.curve").first.get_attribute("d") != before


def test_a_foreign_script_would_not_run(open_page: Any, report: str) -> None:
    page = open_page(report, expect_errors=True)
    added = "const s = document.createElement('script'); s.textContent = 'window.ran = true'; document.body.append(s)"
    page.evaluate(added)
    assert page.evaluate("window.ran") is None


def test_the_report_fits_a_phone(open_page: Any, report: str) -> None:
    page = open_page(report, width=360)
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert Path(page.url.removeprefix("file://")).stat().st_size < 1_000_000
