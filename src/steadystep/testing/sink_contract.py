"""What every sink owes to those who call it, as one function that proves it."""

import copy
import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from steadystep.track.run import Incident
from steadystep.track.sink import GradientSample, RunStart, Sink, StepRow

Make = Callable[[], Sink]
Call = tuple[str, tuple[Any, ...]]


def check_sink(make: Make, *, steps: int = 20) -> None:
    """Lead a sink through made-up runs and raise AssertionError, with the call, for a broken promise.

    The promises: whatever the numbers and names, nothing is raised; it works on another thread than the one that made
    it; what it is given stays as it was; a run can be resumed in the same folder by another one of its kind, at a step
    that an earlier one had passed; `close` works before `start`.

    Args:
        make: gives a fresh sink, such as its class.
        steps: the length of each run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for first, name in ((0, "a run"), (steps // 2, "a resumed run")):
            _on_a_thread(make(), list(_calls(Path(folder), first, steps)), name)
    _on_a_thread(make(), [("close", ())], "closed before it was started")


def _on_a_thread(sink: Sink, calls: list[Call], where: str) -> None:
    problems: list[str] = []

    def lead() -> None:
        for method, arguments in calls:
            before = copy.deepcopy(arguments)
            try:
                getattr(sink, method)(*arguments)
            except BaseException as error:
                problems.append(f"{where}: {method}{arguments!r} raised {error!r}")
                return
            if repr(before) != repr(arguments):
                problems.append(f"{where}: {method} changed what it was given: {arguments!r} instead of {before!r}")
                return

    thread = threading.Thread(target=lead)
    thread.start()
    thread.join()
    if problems:
        raise AssertionError(problems[0])


def _calls(folder: Path, first: int, steps: int) -> Iterator[Call]:
    settings = {"mode": "autopilot", "training": {"max_grad_norm": None, "lr_scheduler": "cosine", "total_steps": 99}}
    yield "start", (RunStart(name="a <b> & c", run_dir=folder, step=first, settings=settings, parameters=6),)
    for step in range(first, first + steps):
        yield "step", (_row(step),)
        if step % 5 == 4:
            norms = {"embed.weight": 0.5, "head.weight": math.nan, "dead.weight": 0.0, "hot.weight": math.inf}
            yield "layers", (step, norms)
            yield "validation", (step + 1, {"val_loss": math.nan if step == 9 else 2.0, "accuracy": 0.25})
        if step % 7 == 6:
            yield "incident", (_incident(step),)
        if step == first + 10:
            empty, odd = np.empty(0, dtype=np.float32), np.array([math.nan, math.inf, 1.0], dtype=np.float32)
            flat, wide = np.zeros(5, dtype=np.float32), np.linspace(-1, 1, 100, dtype=np.float32)
            values = {"empty": empty, "odd": odd, "flat": flat, "wide": wide}
            yield "histograms", (GradientSample(step=step, values=values),)
    yield "layers", (first + steps, {})
    yield "close", ()


def _row(step: int) -> StepRow:
    odd: tuple[float, ...] = (math.nan, math.inf, -math.inf, 0.0, 1e308, 5e-324, -1.0)
    value = odd[step % len(odd)] if step % 3 == 2 else 1.0 / (step + 1)
    metrics = {"reward": value, "accuracy (top 1) %": 0.5, "ünï/cödé": 1.0} if step % 2 else {}
    scale = 65536.0 if step % 4 == 3 else None
    return StepRow(step=step, loss=value, grad_norm=abs(value), lr=1e-3, scale=scale, metrics=metrics)


def _incident(step: int) -> Incident:
    severity = ("info", "warn", "act", "critical")[step // 7 % 4]
    return Incident(
        step=step,
        cause="non-finite-loss",
        severity=severity,
        evidence="the loss is NaN [bold] <script>\nand a second line",
        done="update skipped",
        stepped=False,
        bundle="incidents/incident-000006-skip",
        findings=(("non-finite", severity, "the loss is NaN"),),
    )
