"""A real Chromium, driven by Playwright, and a dashboard in a process of its own."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pages.report_runs import made_run, write_log

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = "<script>alert(1)<script>"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens an address; whatever a page complains about, or asks of another host, fails the test."""
    contexts, complaints = [], []

    def opened(address: str, *, width: int = 1280, scheme: str = "light", expect_errors: bool = False) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: _check(asked.url, complaints))
        if not expect_errors:
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def _check(url: str, complaints: list[str]) -> None:
    if not url.startswith(("http://127.0.0.1:", "file://", "data:")):
        complaints.append(f"asked for {url}")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser") / "runs"
    write_log(root / "calm", made_run(3000, troubled=False, level=1.5))
    write_log(root / "broken", made_run(3000))
    write_log(root / "growing", made_run(300, troubled=False, seed=3), ended=False)
    write_log(root / EVIL, made_run(200, seed=4))
    return root


@pytest.fixture(scope="session")
def site(runs: Path, browser: Any) -> Iterator[str]:
    command = [sys.executable, "-m", "steadystep", "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.send_signal(signal.SIGINT)
            complaints = server.stderr.read()
    assert server.returncode == 0, "Ctrl-C is a clean end"
    assert complaints == "stopped\n"
