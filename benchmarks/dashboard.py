"""How quick the dashboard is over many long runs: first paint, opening a run, and how far it is behind a growing log.

python benchmarks/dashboard.py [--runs 50] [--steps 100000]

Needs Chromium. The server is started cold, and the list is opened at once, while it still reads.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FIRST_PAINT = "performance.getEntriesByType('paint').find(one => one.name === 'first-contentful-paint')?.startTime"


# What a person does with the list, each with the layout that follows from it.
ACTS = {
    "a letter in the filter": "get('filter').value = String(i % 10); get('filter').dispatchEvent(new Event('input'))",
    "sort by a column": "document.querySelector('th[data-sort=loss] button').click()",
    "group by state": "get('group').value = i % 2 ? '' : 'state'; get('group').dispatchEvent(new Event('change'))",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--looks", type=int, default=8, help="measurements of each kind")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = sum(write(root / f"run-{i:02d}", asked.steps, seed=i) for i in range(asked.runs))
        print(f"{asked.runs} runs of {asked.steps:,} steps, {size / 1e6:.0f} MB")
        for name, values in measure(root, asked.looks):
            print(
                f"{name:36} median {median(values):7.0f} ms   worst {max(values):7.0f} ms   of {len(values)}",
                flush=True,
            )


def write(folder: Path, steps: int, seed: int) -> int:
    """A run log with a few incidents."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    loss = 2 + 3 * np.exp(-8 * np.arange(steps) / steps) + random.normal(0, 0.05, steps)
    norm = np.exp(random.normal(-0.3, 0.2, steps))
    lines = [
        f'{{"step":{i},"loss":{a:.9g},"norm":{b:.7g},"lr":0.001}}'
        for i, (a, b) in enumerate(zip(loss, norm, strict=True))
    ]
    finding = {"detector": "gradient-spike", "severity": "act", "what": "the gradient norm is 12 times its usual 0.7"}
    diagnosis = {"cause": "exploding-gradient", "evidence": finding["what"], "advice": "", "findings": [finding]}
    for at in range(steps - steps // 8, 0, -steps // 8):
        told = {"kind": "incident", "step": at, "stepped": True, "done": "scaled down", "diagnosis": diagnosis}
        lines.insert(at + 1, json.dumps(told))
    lines.insert(0, json.dumps({"kind": "start", "steadystep": "0.1.0", "settings": {"mode": "autopilot"}}))
    return (folder / "run.jsonl").write_text("\n".join(lines) + "\n")


def measure(root: Path, looks: int) -> Iterator[tuple[str, list[float]]]:
    """All of it, in one browser and one server."""
    command = [sys.executable, "-m", "steadystep", "dashboard", str(root), "--port", "0"]
    program = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    with sync_playwright() as driver, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        try:
            assert server.stdout is not None
            site = server.stdout.readline().split()[0]
            runs = [f"{site}run?name=run-{i:02d}" for i in range(looks)]
            yield "list, cold: first paint", [painted(browser, site)]
            yield "list, while it reads: first paint", [painted(browser, site) for _ in range(looks)]
            yield "a run, while it reads: first paint", [painted(browser, one) for one in runs]
            yield "a run, again: first paint", [painted(browser, one) for one in runs]
            yield "behind a growing log", delays(browser, site, root / "run-00" / "run.jsonl", looks)
            yield "all runs read and judged after", [all_read(browser, site)]
            yield "list: first paint", [painted(browser, site) for _ in range(looks)]
            for name, script in ACTS.items():
                yield f"list: {name}", acted(browser, site, script, looks)
        finally:
            browser.close()
            server.send_signal(signal.SIGINT)


def painted(browser: Browser, address: str) -> float:
    """Milliseconds from the click to the first content on the screen, in a browser that remembers nothing."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(address)
    took: Any = page.evaluate(FIRST_PAINT)
    while took is None:
        page.wait_for_timeout(20)
        took = page.evaluate(FIRST_PAINT)
    page.context.close()
    return float(took)


def acted(browser: Browser, site: str, script: str, looks: int) -> list[float]:
    """Milliseconds from the event until the rows are laid out."""
    page = browser.new_page()
    page.goto(site)
    page.locator(".run").first.wait_for()
    page.wait_for_timeout(1500)  # all rows have come
    timed = (
        "(i) => { const get = (id) => document.getElementById(id); const began = performance.now(); "
        f"{script}; document.body.offsetHeight; return performance.now() - began }}"
    )
    found = [float(page.evaluate(timed, i)) for i in range(looks)]
    page.close()
    return found


def all_read(browser: Browser, site: str) -> float:
    """Until no row says that it is still being read."""
    page = browser.new_page()
    began = time.perf_counter()
    page.goto(site)
    while page.locator(".said", has_text="reading…").count():
        page.wait_for_timeout(200)
    page.close()
    return 1000 * (time.perf_counter() - began)


def delays(browser: Browser, site: str, log: Path, looks: int) -> list[float]:
    """From a line in the log to the number on the page."""
    page: Page = browser.new_page()
    page.goto(f"{site}run?name={log.parent.name}")
    page.wait_for_timeout(1500)
    last = json.loads(log.read_text().rsplit("\n", 2)[1])["step"]
    found = []
    for step in range(last + 1, last + 1 + looks):
        page.wait_for_timeout(137 * (step % 7))  # not in time with the page's own clock
        with log.open("a") as file:
            file.write(f'{{"step":{step},"loss":2.0,"norm":1.0,"lr":0.001}}\n')
        began = time.perf_counter()
        page.locator(".facts dd", has_text=f"{step + 1:,}").wait_for()
        found.append(1000 * (time.perf_counter() - began))
    page.close()
    return found


if __name__ == "__main__":
    main()
