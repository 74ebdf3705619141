"""What a person sees of a run: on a terminal, over ssh, in a log file."""

import io
import math
import re

import pytest
import torch
from rich.console import Console

import steadystep
from steadystep.testing import check_sink
from steadystep.tracking import Incident, RunStart, StepRow, Terminal
from steadystep.tracking.display import DisplayedProgress, Trail

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Watched:
    """A terminal sink on a console that remembers, with a clock that is moved by hand."""

    def __init__(self, *, tty: bool, width: int = 100, total: int | None = 1000) -> None:
        self.now = 0.0
        self.out = io.StringIO()
        self.console = Console(file=self.out, force_terminal=tty, width=width, highlight=False, color_system=None)
        self.sink = Terminal(self.console, total=total, clock=lambda: self.now)
        self.sink.start(RunStart(name="a [bold]run", settings={"training": {"lr_scheduler": None}}, parameters=1234))

    def steps(self, first: int, last: int, *, seconds_each: float = 0.125, loss: float = 2.5) -> None:
        for step in range(first, last):
            self.now += seconds_each
            self.sink.step(StepRow(step=step, loss=loss, grad_norm=0.5, lr=1e-3))

    @property
    def text(self) -> str:
        return self.out.getvalue()


def incident(step: int, cause: str = "exploding-gradient", severity: str = "act") -> Incident:
    return Incident(
        step=step,
        cause=cause,
        severity=severity,
        evidence="the gradient norm is 9.31 times its baseline of 0.721",
        done="gradient scaled down to 0.721",
        advice="lower the learning rate",
        bundle="runs/a/incidents/x",
    )


def test_in_a_log_file_there_are_plain_lines_now_and_then() -> None:
    seen = Watched(tty=False)
    seen.steps(0, 300)
    seen.sink.validation(300, {"val_loss": 2.25})
    seen.sink.incident(incident(300))
    seen.steps(300, 500)
    seen.sink.close()
    lines = seen.text.splitlines()
    assert not CONTROL.search(seen.text)
    assert lines[0] == "a [bold]run, 1,234 parameters"
    assert lines[1].startswith("step 1/1000  loss 2.5  norm 0.5  lr 1.00e-03")
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) == 8  # one in ten seconds, and the last
    assert progress[-1] == (
        "step 500/1000  loss 2.5  norm 0.5  lr 1.00e-03  8 steps/s  0:01:02 left  validation 2.25  1 incident"
    )
    assert "! step 300: exploding-gradient (act)" in lines
    assert "    done     gradient scaled down to 0.721" in lines
    assert "    try      lower the learning rate" in lines


def test_on_a_terminal_it_is_drawn_twice_a_second_and_incidents_are_cards() -> None:
    seen = Watched(tty=True)
    seen.steps(0, 81)
    drawings = seen.text.count("learning rate")
    assert drawings == 21
    seen.sink.incident(incident(100))
    seen.sink.validation(101, {"val_loss": 2.25})
    seen.sink.close()
    last = seen.text[seen.text.rindex("a [bold]run") :]
    for part in (
        "81/1,000 steps",
        "8 steps/s",
        "0:01:55 left",
        "2.5",
        "1.00e-03",
        "best 2.25",
        "last: step 100",
    ):
        assert part in last
    assert "─ step 100: exploding-gradient ─" in seen.text.replace("  ", " ")
    assert "lower the learning rate" in seen.text


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    seen = Watched(tty=True, width=width)
    seen.steps(0, 50)
    seen.sink.incident(incident(49))
    seen.sink.close()
    for line in re.sub(r"\x1b\[[0-9?]*[A-Za-z]|\r", "\n", seen.text).splitlines():
        assert len(line) <= width


def test_incidents_of_one_kind_that_follow_each_other_are_counted() -> None:
    seen = Watched(tty=False)
    for step in (10, 11, 12, 50):
        seen.sink.incident(incident(step))
    seen.sink.incident(incident(51, severity="info", cause="loss-scale"))
    seen.sink.incident(incident(52, cause="bad-batch"))
    seen.sink.incident(incident(300, cause="bad-batch"))
    heads = [line for line in seen.text.splitlines() if line.startswith(("!", "  …"))]
    assert heads == [
        "! step 10: exploding-gradient (act)",
        "  … repeated 3 times (steps 11-50)",
        "! step 52: bad-batch (act)",
        "! step 300: bad-batch (act)",
    ]


def test_without_a_total_there_is_no_guess_about_the_end() -> None:
    seen = Watched(tty=False, total=None)
    seen.steps(0, 300)
    assert "left" not in seen.text
    scheduled = Terminal(Console(file=io.StringIO()))
    scheduled.start(RunStart(name="a", settings={"training": {"lr_scheduler": "cosine", "total_steps": 77}}))
    assert scheduled._progress.total == 77


def test_control_codes_in_names_do_not_reach_the_terminal() -> None:
    seen = Watched(tty=False)
    seen.sink.incident(incident(1, cause="\x1b[2Jx\x07"))
    assert not CONTROL.search(seen.text)


def test_console_is_this_terminal_for_any_guard(capsys: pytest.CaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    config = {"monitoring": {"sinks": ["console"]}}
    with steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config) as guard:
        for value in (1.0, math.nan, 1.0):
            guard.step(lambda value=value: (model(torch.ones(1, 2)) * value).sum())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "run, 3 parameters"
    assert lines[1].startswith("step 1  loss")
    assert lines[2] == "! step 1: non-finite-loss (critical)"
    assert lines[-1].startswith("step 3  loss")
    assert lines[-1].endswith("1 incident")


def test_it_keeps_the_contract() -> None:
    for tty in (True, False):
        console = Console(file=io.StringIO(), force_terminal=tty, width=80)
        check_sink(lambda console=console: Terminal(console))


def test_a_trail_keeps_the_shape_and_every_peak() -> None:
    trail = Trail()
    for i in range(10_000):
        trail.add(100.0 if i == 7_777 else i / 10_000)
    trail.add(math.nan)
    assert 32 <= len(trail.values) <= 64
    assert max(trail.values) == 100.0
    smooth = [value for value in trail.values if value != 100.0]
    assert smooth == sorted(smooth)


def test_speed_is_that_of_the_last_half_minute() -> None:
    progress = DisplayedProgress(total=1000)
    for step in range(100):
        progress.step(StepRow(step=step, loss=1.0, grad_norm=1.0, lr=0.1), now=step * 10.0)
    for step in range(100, 500):
        progress.step(StepRow(step=step, loss=1.0, grad_norm=1.0, lr=0.1), now=1000.0 + (step - 100) * 0.1)
    assert progress.speed == pytest.approx(10.0, rel=0.02)
    assert progress.seconds_left == pytest.approx(50.0, rel=0.02)
