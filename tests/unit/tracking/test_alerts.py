"""Alerts reach a webhook, a command or a function, not too often, and never hold up the training."""

import http.server
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadystep import ConfigError, Guard
from steadystep.records import Incident
from steadystep.testing import check_sink
from steadystep.tracking import Alert, Alerts, RunStart, StepRow


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def incident(step: int, cause: str = "non-finite-loss", **changes: Any) -> Incident:
    facts = {"severity": "critical", "evidence": "the loss is NaN", "done": "update skipped", "advice": "look <here>"}
    return Incident(step=step, cause=cause, **{**facts, **changes})


@pytest.fixture
def inbox() -> list[Alert]:
    return []


def sink(inbox: list[Alert], **options: Any) -> Alerts:
    made = Alerts(inbox.append, **options)
    made.start(RunStart(name="a"))
    return made


def test_levels_and_repeats(inbox: list[Alert]) -> None:
    clock = Clock()
    alerts = sink(inbox, clock=clock, every_s=60.0, per_hour=4)
    alerts.incident(incident(1, severity="warn"))  # below the level
    for step in range(10, 20):
        alerts.incident(incident(step))
    alerts.incident(incident(20, "data-shift", severity="act"))
    clock.now = 61.0
    alerts.incident(incident(90))
    for step in range(100, 110):
        alerts.incident(incident(step, f"cause-{step}"))
    alerts.close()
    assert [(alert.step, alert.suppressed) for alert in inbox] == [(10, 0), (20, 9), (90, 0), (100, 0)]
    assert inbox[0].text == "a: non-finite-loss at step 10: update skipped"
    assert {alert.kind for alert in inbox} == {"incident"}


def test_a_stall_is_reported_once_and_its_end_too(inbox: list[Alert]) -> None:
    clock = Clock()
    alerts = sink(inbox, clock=clock, level="info", stall_mult=10.0, stall_min_s=30.0)
    for step in range(10):
        clock.now = 5.0 * step
        alerts.step(StepRow(step=step, loss=1.0, grad_norm=1.0, lr=0.1))
    clock.now += 40.0
    alerts.check()  # less than ten times the usual
    clock.now += 20.0
    alerts.check()
    alerts.check()
    clock.now += 400.0
    alerts.step(StepRow(step=10, loss=1.0, grad_norm=1.0, lr=0.1))
    alerts.close()
    assert [alert.text for alert in inbox] == [
        "a: no step for 60 s after step 9 (usually 5 s apart)",
        "a: goes on at step 10 after 460 s",
        "a: ended at step 10 with 0 incidents",
    ]
    assert [alert.level for alert in inbox] == ["critical", "info", "info"]


def test_rows_that_arrive_in_bursts_do_not_shorten_the_usual_time(inbox: list[Alert]) -> None:
    clock = Clock()
    alerts = sink(inbox, clock=clock, stall_mult=10.0, stall_min_s=1.0)
    for step in range(50):
        clock.now = 20.0 * (step // 4)
        alerts.step(StepRow(step=step, loss=1.0, grad_norm=1.0, lr=0.1))
    clock.now += 45.0
    alerts.check()
    clock.now += 20.0
    alerts.check()
    alerts.close()
    assert [alert.text for alert in inbox] == ["a: no step for 65 s after step 49 (usually 5 s apart)"]


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/hook", received
    running.shutdown()
    running.server_close()


def test_a_webhook_gets_json(server: tuple[str, list[Any]]) -> None:
    alerts = Alerts(server[0])
    alerts.start(RunStart(name="a"))
    alerts.incident(incident(7))
    alerts.close()
    (payload,) = server[1]
    assert {key: payload[key] for key in ("kind", "level", "run", "step", "cause", "done")} == {
        "kind": "incident",
        "level": "critical",
        "run": "a",
        "step": 7,
        "cause": "non-finite-loss",
        "done": "update skipped",
    }


def test_slack_gets_one_text_without_markup() -> None:
    alert = Alert(kind="incident", level="act", run="a", step=1, text="a: <b>", evidence="x & y", suppressed=3)
    assert alert.as_slack() == {"text": "a: &lt;b&gt;\nx &amp; y\n(3 more since the last alert)"}


def test_a_command_gets_json_on_its_standard_input(tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    alerts = Alerts([sys.executable, "-c", code])
    alerts.start(RunStart(name="a"))
    alerts.incident(incident(7, evidence="; rm -rf $HOME"))
    alerts.close()
    assert json.loads((tmp_path / "got").read_text())["evidence"] == "; rm -rf $HOME"


def test_training_goes_on_whatever_becomes_of_an_alert(caplog: pytest.LogCaptureFixture) -> None:
    held, tried = threading.Event(), []

    def slow(alert: Alert) -> None:
        tried.append(alert.step)
        held.wait(20.0)
        raise OSError("no network")

    model = nn.Linear(2, 1)
    alerts = Alerts(slow, every_s=0.0, per_hour=10**6, timeout_s=5.0)
    with Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"monitoring": {"sinks": []}}, sinks=[alerts]
    ) as guard:
        for step in range(8):
            x = torch.full((4, 2), 1.0 if step % 2 else float("nan"))
            guard.step(lambda x=x: model(x).square().mean())
        assert guard.attempts == 8
        held.set()
    assert tried == [0, 2, 4, 6]
    assert caplog.text.count("an alert could not be sent (OSError: no network)") == 1


def test_it_is_a_sink() -> None:
    check_sink(lambda: Alerts(lambda alert: None, level="info"))


def test_alerts_is_where_incidents_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    config = {"monitoring": {"sinks": [], "alerts": f"tee {tmp_path / 'got'}"}}
    caplog.set_level(logging.ERROR, "steadystep")
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config) as guard:
        guard.step(lambda: model(torch.full((4, 2), float("nan"))).mean())
    assert json.loads((tmp_path / "got").read_text())["step"] == 0


@pytest.mark.parametrize("to", ["", [], [1]])
def test_a_wrong_target_is_refused(to: Any) -> None:
    with pytest.raises(ConfigError, match="give a webhook"):
        Alerts(to)
    with pytest.raises(ConfigError, match="level = 'loud'"):
        Alerts("true", level="loud")  # type: ignore[arg-type]
