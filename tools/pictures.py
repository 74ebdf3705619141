"""The pictures of README and docs, from real runs: small transformers are trained, two of them with injected faults.

python tools/pictures.py [FOLDER]    (`make pictures`; a minute or two; needs Chromium)

Runs that are in FOLDER already are not trained again.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

from steadystep.pages.report import report_page
from steadystep.tracking import Incident, Run, StepRow, read
from steadystep.tracking.display import DisplayedProgress, card, live

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
STEPS = 500
FAULTS = [{"kind": "grad-scale", "at": 250, "factor": 100}, {"kind": "bit-flip", "at": 360, "parameter": "norm.weight"}]
# why: the style that rich brings fetches its font from another host
TERMINAL = """<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}"
xmlns="http://www.w3.org/2000/svg"><style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px;
line-height: {line_height}px; }} {styles}</style><rect fill="#151d25" width="100%" height="100%" rx="10"/>
<g transform="translate({terminal_x}, 22)" class="{unique_id}-matrix">{backgrounds}{matrix}</g></svg>"""


def plan(**changes: Any) -> dict[str, Any]:
    """What `steadystep train` reads."""
    training = {"total_steps": STEPS, "max_grad_norm": 1.0, "lr_scheduler": "cosine", "warmup_steps": 50}
    monitoring = {"log_frequency": 10}
    whole = {"task": "gpt", "validation_frequency": 50, "training": training, "monitoring": monitoring}
    training |= changes.pop("training", {})
    return {**whole, **changes}


PLANS: dict[str, dict[str, Any]] = {
    "gpt": plan(),
    "gpt-two-faults": plan(faults=FAULTS),
    "clusters": plan(
        task="clusters", training={"learning_rate": 0.05}, faults=[{"kind": "bad-input", "at": [250, 252]}]
    ),
    "deep-mlp": plan(task="deep-mlp", training={"learning_rate": 0.03}),
}
GROWING = plan(task="clusters", training={"total_steps": 1_000_000})


def main() -> None:
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))


def draw(folder: Path) -> None:
    os.chdir(folder)  # so that the pictures show short paths
    folder, runs = Path(), Path("runs")
    runs.mkdir(parents=True, exist_ok=True)
    for name, settings in PLANS.items():
        if not (runs / name).exists():
            print(f"training {name} ...", flush=True)
            start(folder, name, settings).wait()
    IMAGES.mkdir(exist_ok=True)
    shutil.rmtree(runs / "clusters-long", ignore_errors=True)
    growing = start(folder, "clusters-long", GROWING)
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            report_pictures(browser, folder, read(runs / "gpt-two-faults"))
            dashboard_pictures(browser, runs)
            browser.close()
    finally:
        growing.send_signal(signal.SIGINT)
        growing.wait()
    for picture in sorted(IMAGES.glob("*.png")):
        print(f"{picture.name}: {picture.stat().st_size / 1000:.0f} kB")


def start(folder: Path, name: str, settings: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """One training, in a process of its own."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "steadystep", "train", str(file), "--run-dir", str(folder / "runs" / name)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=one_thread, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def report_pictures(browser: Browser, folder: Path, run: Run) -> None:
    """The report, light and dark and narrow, and the terminal."""
    page = folder / "report.html"
    page.write_text(report_page(run))
    with opened(browser, page.resolve().as_uri(), height=1000) as tab:
        picture(tab, "report")
        case = tab.locator("details.case.critical").first
        case.locator("summary").click()
        tab.wait_for_timeout(500)
        case.scroll_into_view_if_needed()
        case.screenshot(path=IMAGES / "incident.png")
        tab.locator("#heat").screenshot(path=IMAGES / "layers.png")
    with opened(browser, page.resolve().as_uri(), width=390, height=844, scheme="dark") as tab:
        picture(tab, "phone")
    drawn = folder / "terminal.html"
    drawn.write_text(f"<body style='margin:0'>{terminal(run)}</body>")
    with opened(browser, drawn.resolve().as_uri()) as tab:
        tab.locator("svg").first.screenshot(path=IMAGES / "terminal.png", omit_background=True)


def dashboard_pictures(browser: Browser, runs: Path) -> None:
    """The list and the comparison, as they are while another run grows."""
    command = [sys.executable, "-m", "steadystep", "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        site = server.stdout.readline().split()[0]
        with opened(browser, site, height=460, scheme="dark") as tab:
            growing = tab.locator("[data-state=running] .spark path[d^=M]")
            while tab.locator(".said", has_text="reading").count() or not growing.count():
                tab.wait_for_timeout(500)
            picture(tab, "dashboard")
        with opened(browser, f"{site}compare?run=gpt&run=gpt-two-faults", height=900) as tab:
            picture(tab, "compare")
        server.send_signal(signal.SIGINT)


@contextmanager
def opened(browser: Browser, address: str, *, width: int = 1180, height: int = 800, scheme: Any = "light") -> Any:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_timeout(800)
    yield tab
    context.close()


def picture(tab: Page, name: str) -> None:
    tab.screenshot(path=IMAGES / f"{name}.png")


def terminal(run: Run, *, until: int = 400) -> str:
    """What the terminal showed at that step, drawn from the log by the same functions; the speed is the average."""
    console = Console(record=True, width=92, force_terminal=True, color_system="truecolor", file=io.StringIO())
    progress, seconds = DisplayedProgress(STEPS), seconds_per_step(run)
    last: Incident | None = None
    for step, loss, norm, lr in zip(
        run.loss.steps.tolist(), run.loss.values, run.grad_norm.values, run.lr.values, strict=True
    ):
        if step >= until:
            break
        progress.step(StepRow(step=step, loss=float(loss), grad_norm=float(norm), lr=float(lr)), step * seconds)
        for incident in run.incidents:
            if incident.step == step and incident.severity != "info":
                progress.noticed(incident)
                if last is None or last.cause != incident.cause:
                    console.print(card(incident))
                last = incident
    held_out = run.validation["val_loss"]
    for step, value in zip(held_out.steps.tolist(), held_out.values.tolist(), strict=True):
        if step < until:
            progress.validated(step, {"val_loss": value})
    console.print(live(progress, title=f"{run.name}, {run.parameters:,} parameters", width=92))
    return console.export_svg(title="", code_format=TERMINAL)


def seconds_per_step(run: Run) -> float:
    """On average, from the times in the log."""
    lines = (run.path / "run.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["time"] - json.loads(lines[0])["time"]) / len(run.loss)


if __name__ == "__main__":
    main()
