"""The dashboard as a person uses it."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.browser.conftest import EVIL


def names(page: Any) -> set[str]:
    return set(page.locator(".run:visible .name a").all_inner_texts())


def test_the_list_opens_with_all_runs_and_their_health(open_page: Any, site: str) -> None:
    page = open_page(site)
    assert names(page) == {"calm", "broken", "growing", EVIL}
    broken = page.locator(".run[data-run=broken]")
    broken.locator(".tag.critical", has_text="2 incidents").wait_for()
    page.locator(".run[data-run=calm] .tag.good", has_text="healthy").wait_for()
    assert page.locator(".run[data-run=growing]").get_attribute("data-state") == "running"
    assert page.locator(".run[data-run=calm] .spark path").get_attribute("d").startswith("M")


def test_filter_by_word_and_by_state(open_page: Any, site: str) -> None:
    page = open_page(site)
    page.fill("#filter", "brok")
    assert names(page) == {"broken"}
    page.fill("#filter", "nothing like this")
    assert page.locator("#none").is_visible()
    page.fill("#filter", "")
    page.click("[data-state-button=running]")
    assert names(page) == {"growing"}
    assert page.url == f"{site}?state=running"
    page.fill("#filter", "loss<1")
    page.reload()
    assert page.locator("#none").is_visible(), "what is shown stands in the address"
    page.goto(f"{site}?q=loss%3C1.8")
    assert names(page) == {"calm"}
    page.goto(f"{site}?sort=-steps&group=state&columns=loss,steps")
    order = [name for name in page.locator(".run .name a").all_inner_texts() if name != "growing"]
    assert order[-1] == EVIL, "200 steps, the fewest of those that are finished"
    assert page.locator(".group").all_inner_texts()[0].startswith("finished 3 runs, best validation")
    page.click("th[data-sort=steps] button")
    assert page.locator("th[data-sort=steps]").get_attribute("aria-sort") == "ascending"
    assert page.locator(".run .name a").first.inner_text() == EVIL
    page.click("text=columns")
    page.uncheck("#columns >> text=steps")
    assert page.locator("th[data-sort=steps]").count() == 0


def test_a_run_grows_while_one_looks(open_page: Any, site: str, runs: Path) -> None:
    page = open_page(f"{site}run?name=growing")
    page.locator(".facts dd", has_text="300").wait_for()
    page.evaluate("document.querySelector('#charts').dataset.kept = 'yes'")
    with (runs / "growing" / "run.jsonl").open("a") as log:
        for step in range(300, 350):
            log.write(f'{{"step":{step},"loss":2.5,"norm":1.0,"lr":0.001}}\n')
    page.locator(".facts dd", has_text="350").wait_for(timeout=5000)
    plot = page.locator("[data-panel=loss] .plot svg")
    plot.hover(position={"x": plot.bounding_box()["width"] - 3, "y": 80})
    assert page.locator("[data-panel=loss] .at").inner_text() == "step 349"
    assert page.locator("#charts[data-kept=yes]").count() == 1, "the page was not loaded again"


def test_two_runs_over_each_other(open_page: Any, site: str) -> None:
    page = open_page(site)
    for name in ("calm", "broken"):
        page.check(f".run[data-run={name}] input")
    page.click("text=compare 2 runs")
    page.locator("h1", has_text="2 runs compared").wait_for()
    assert "calm is better" in page.locator(".verdict").inner_text()
    assert page.locator("[data-panel=loss] path.curve.c0:not(.raw)").count() == 1
    assert page.locator("[data-panel=loss] path.curve.c1:not(.raw)").count() == 1
    assert page.locator("text=best held-out loss").is_visible()
    page.click(".legend [data-name=broken]")
    assert page.locator("[data-panel=loss] path.curve.c1").count() == 0, "one legend for all charts"
    assert page.locator("[data-panel=norm] path.curve.c1").count() == 0
    page.click("th >> text=incidents")
    page.click("th >> text=incidents")
    assert "broken" in page.locator(".sum tbody tr").first.inner_text()


def test_an_incident_opens_from_its_mark_and_shows_every_step_around_it(open_page: Any, site: str) -> None:
    page = open_page(f"{site}run?name=broken")
    page.locator("#strip [data-step='2250']").click()
    case = page.locator("#case-2250")
    assert case.get_attribute("open") is not None
    assert "rolled back to step 20" in case.inner_text()
    assert case.locator("td.n", has_text="NaN").count() == 2
    case.locator(".near svg path.curve").first.wait_for()
    assert page.url.endswith("#case-2250")
    again = open_page(page.url)
    assert again.locator("#case-2250").get_attribute("open") is not None


def test_looking_closer_and_back(open_page: Any, site: str) -> None:
    page = open_page(f"{site}run?name=broken")
    box = page.locator("[data-panel=loss] .plot svg").bounding_box()
    page.mouse.move(box["x"] + 430, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 630, box["y"] + 100, steps=3)
    page.mouse.up()
    assert page.locator("#reset-zoom").is_visible()
    ticks = [
        int(t.replace(",", "")) for t in page.locator("[data-panel=norm] text[text-anchor=middle]").all_text_contents()
    ]
    assert min(ticks) > 1000, "all charts follow"
    assert max(ticks) < 2000
    page.click("#reset-zoom")
    assert page.locator("#reset-zoom").is_hidden()


def test_a_run_named_script_is_only_a_name(open_page: Any, site: str) -> None:
    page = open_page(site)
    page.click(f"text={EVIL}")
    assert page.locator("h1").inner_text() == EVIL
    assert page.title().startswith(EVIL)
    assert unquote(page.url) == f"{site}run?name={EVIL}"
    page.locator("[data-panel=loss] path.curve").first.wait_for()


def test_nothing_there(open_page: Any, site: str) -> None:
    page = open_page(f"{site}run?name=nope", expect_errors=True)
    assert page.locator("h1").inner_text() == "404"
    page.click("text=All runs")
    assert names(page) == {"calm", "broken", "growing", EVIL}


def test_a_phone_shows_it_all_without_scrolling_sideways(open_page: Any, site: str) -> None:
    for address in (site, f"{site}run?name=broken", f"{site}compare?run=calm&run=broken"):
        page = open_page(address, width=360)
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, address
    page = open_page(f"{site}run?name=broken", width=360)
    assert page.locator("[data-panel=lr] svg").bounding_box()["width"] > 280


def test_dark_and_light(open_page: Any, site: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(site), open_page(site, scheme="dark")
    assert light.evaluate(colour) != dark.evaluate(colour)
    light.click("[data-theme-button]")
    assert light.evaluate(colour) == dark.evaluate(colour)
    light.reload()
    assert light.evaluate(colour) == dark.evaluate(colour), "remembered"
