"""The report from disk, with the network switched off."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadystep.pages.incident_groups import Headline
from steadystep.pages.report import report_page
from tests.unit.pages.report_runs import long_run, made_run


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


def test_the_cursor_tells_what_was_known_at_that_step(open_page: Any, report: str) -> None:
    page = open_page(report)
    plot = page.locator("[data-panel=loss] .plot svg")
    plot.hover(position={"x": 400, "y": 100})
    step = page.locator("[data-panel=loss] .at").inner_text()
    assert step.startswith("step ")
    assert page.locator("[data-panel=lr] .at").inner_text() == step
    assert float(page.locator("[data-panel=lr] .key b").inner_text()) > 0
    at = int(step.removeprefix("step ").replace(",", ""))
    assert at % 300 > 20, "not next to a validation"
    validation = page.locator("[data-panel=loss] .key.held-out b").inner_text()
    assert validation.endswith(f" at {at // 300 * 300:,}"), "the last one, never the next"
    middle = plot.bounding_box()["width"] / 2 + 19  # step 1,500, between the edges at 46 and 8 pixels
    page.hover("[data-panel=norm] .plot svg", position={"x": middle, "y": 60})
    assert page.locator("[data-panel=norm] .key.ghosted b").inner_text() == "40", "scaled down, and not in the line"
    assert page.locator("[data-panel=norm] path.ghost").count() == 1


def test_lines_can_be_hidden_smoothed_and_saved(open_page: Any, report: str, tmp_path: Path) -> None:
    page = open_page(report)
    lines = page.locator("[data-panel=loss] path.curve")
    before = [line.get_attribute("d") for line in lines.all()]
    page.click("[data-panel=loss] .key.held-out")
    assert lines.count() == 2
    page.fill("#smooth", "90")
    assert lines.nth(1).get_attribute("d") != before[1]
    page.fill("#smooth", "0")
    page.click("[data-panel=loss] .key.held-out")
    assert [line.get_attribute("d") for line in lines.all()] == before
    with page.expect_download() as table:
        page.click("[data-panel=loss] >> text=CSV")
    rows = Path(table.value.path()).read_text().splitlines()
    assert rows[0] == "step,loss,typical,validation"
    assert "2250,NaN,," in rows
    with page.expect_download() as picture:
        page.click("[data-panel=norm] >> text=PNG")
    assert Path(picture.value.path()).read_bytes()[:4] == b"\x89PNG"
    assert picture.value.suggested_filename.endswith("Gradient-norm.png")


def test_the_heat_map_has_the_zoom_of_the_charts(open_page: Any, report: str) -> None:
    page = open_page(report)
    map_ = page.locator("#heat .plot svg")
    map_.scroll_into_view_if_needed()
    map_.hover(position={"x": 200, "y": 7})
    assert page.locator("#heat .at").inner_text().startswith("embed.weight: ")
    painted = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some(v => v && v < 255)"
    assert page.locator("#heat .plot canvas").evaluate(painted)
    page.click("text=relative to its own median")
    assert page.locator("#heat .ends").inner_text().startswith("1/")
    edges = "e => [e.querySelector('.plot').getBoundingClientRect()].map(b => [b.left, b.right])[0]"
    assert page.locator("#heat").evaluate(edges) == page.locator("[data-panel=loss]").evaluate(edges)
    page.locator("[data-panel=lr] .plot svg").focus()
    page.keyboard.press("+")
    ticks = page.locator("#heat text[text-anchor=middle]").all_text_contents()
    assert ticks == page.locator("[data-panel=loss] text[text-anchor=middle]").all_text_contents()
    assert ticks[0] != "0"


def test_a_case_shows_the_steps_around_it(open_page: Any, report: str) -> None:
    page = open_page(report)
    page.locator("#case-1500 summary").click()
    page.locator("#case-1500 .near svg path.curve").first.wait_for()
    assert page.locator("#case-1500 .near svg").count() == 2
    ring = "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
    page.click("[data-panel=lr] .plot svg")
    assert page.evaluate(ring) == ["svg", "none"], "a ring only for the keyboard"
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(ring) == ["svg", "solid"]
    command = page.locator("#case-2250 pre.command")
    assert not command.is_visible()
    page.emulate_media(media="print")
    command.wait_for(state="visible")  # on paper everything is open
    page.emulate_media(media="screen")
    command.wait_for(state="hidden")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#case-2250 summary")
    page.click("#case-2250 .copy")
    page.wait_for_function("navigator.clipboard.readText().then(t => t.startsWith('steadystep replay runs/a/'))")


def test_a_logarithmic_axis_at_a_click(open_page: Any, report: str) -> None:
    page = open_page(report)
    before = page.locator("[data-panel=loss] path.curve").first.get_attribute("d")
    page.click("[data-panel=loss] >> text=log")
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
    assert page.locator("[data-panel=loss] svg").bounding_box()["y"] < page.locator(".facts").bounding_box()["y"]
    assert Path(page.url.removeprefix("file://")).stat().st_size < 300_000


def test_the_line_without_the_guard_is_drawn_in_its_incident(open_page: Any, tmp_path: Path) -> None:
    bundle = tmp_path / "incidents" / "incident-001500-skip"
    bundle.mkdir(parents=True)
    found = {"format": 1, "step": 1500, "loss": [9.0, 50.0, "nan", "nan"], "norm": [40.0, 90.0, "nan", "nan"]}
    (bundle / "without_guard.json").write_text(json.dumps(found))
    run = made_run(3000, path=tmp_path)
    first, *others = run.incidents
    run = replace(run, incidents=(replace(first, bundle=str(bundle)), *others))
    (tmp_path / "report.html").write_text(report_page(run))
    page = open_page((tmp_path / "report.html").as_uri())
    page.locator("#case-1500 summary").click()
    case = page.locator("#case-1500")
    case.locator("path.curve.without").first.wait_for()
    assert case.locator("path.curve.without").count() == 2
    assert "loss not finite from step 1,502 after 4 steps" in case.inner_text()
    assert case.locator(".key.without").first.inner_text() == "without the guard"
    case.locator(".key.without").first.click()
    assert case.locator("path.curve.without").count() == 1
    case.locator(".near svg").first.hover(position={"x": 300, "y": 50})


def test_a_run_of_200_000_steps_opens_zooms_and_names_ranks(open_page: Any, tmp_path: Path) -> None:
    run = long_run()
    told = tuple(replace(one, ranks=(i % 3,)) for i, one in enumerate(run.incidents))
    page_file = tmp_path / "long.html"
    page_file.write_text(report_page(replace(run, incidents=told)))
    assert page_file.stat().st_size < 300_000
    page = open_page(page_file.as_uri())
    assert page.locator("#strip .label").inner_text() == "Incidents, by rank"
    assert page.locator("#strip text").all_text_contents() == ["rank 0", "rank 1", "rank 2"]
    svg = page.locator("[data-panel=loss] .plot svg")
    svg.hover(position={"x": svg.bounding_box()["width"] - 3, "y": 80})
    assert page.locator("[data-panel=loss] .at").inner_text() == "step 199,999", "the steps are unpacked"
    svg.focus()
    page.keyboard.press("+")
    assert page.locator("#reset-zoom").is_visible()
