"""Promise 10: a failing sink, a full disk or a slow one is reported once, and training goes on, to the same bits."""

import gc
import logging
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import steadystep
from steadystep.tracking import GradientSample, Incident, RunStart, StepRow, TensorBoard
from tests.loops import OPTIMIZERS, assert_same, batches, full_state, plain_run, small_net, squared

METHODS = ["start", "step", "validation", "layers", "histograms", "incident", "close"]


class Notes:
    """A sink that keeps everything, and can be told to misbehave."""

    def __init__(self, *, fails_at: str = "", error: BaseException | None = None, waits_for=None) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self._fails_at = fails_at
        self._error = error or RuntimeError("out of paper")
        self._waits_for = waits_for

    def _note(self, method: str, *arguments: object) -> None:
        self.calls.append((method, arguments))
        if self._waits_for is not None:
            self._waits_for.wait(60)
        if method == self._fails_at:
            raise self._error

    def start(self, run: RunStart) -> None:
        self._note("start", run)

    def step(self, row: StepRow) -> None:
        self._note("step", row)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("validation", step, metrics)

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        self._note("layers", step, norms)

    def histograms(self, sample: GradientSample) -> None:
        self._note("histograms", sample)

    def incident(self, incident: Incident) -> None:
        self._note("incident", incident)

    def close(self) -> None:
        self._note("close")


def run(*sinks: Notes, steps: int = 30, bad: int = 20, run_dir: Path | None = None) -> torch.nn.Module:
    model = small_net()
    config = {"monitoring": {"log_frequency": 10, "sinks": []}}
    guard = steadystep.Guard(
        model, OPTIMIZERS["SGD"](model.parameters()), config=config, run_dir=run_dir, sinks=[*sinks]
    )
    with guard:
        for i, x in enumerate(batches(steps)):
            guard.step(lambda x=x, i=i: squared(model, x * (math.nan if i == bad else 1.0)))
            if i == 15:
                guard.validate(val_loss=1.0)
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [RuntimeError("out of paper"), SystemExit(3), OSError(28, "No space left")])
def test_a_sink_that_raises_is_reported_once_and_dropped(
    method: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Notes(fails_at=method, error=error), Notes()
    model = run(broken, whole)
    assert caplog.text.count("sink Notes failed and is disabled") == 1
    names = [name for name, _ in broken.calls]
    assert names[names.index(method) :] == [method] + ["close"] * (method != "close")  # asked no more
    assert {name for name, _ in whole.calls} == set(METHODS)
    assert [a[0].step for name, a in whole.calls if name == "step"] == list(range(30))
    assert_same(dict(model.state_dict()), dict(run().state_dict()))


def test_training_never_waits_for_a_sink_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    stuck = Notes(waits_for=gate)
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), sinks=[stuck])
    shown = guard._parts.log._sinks
    shown._mailbox._patience_s = 0.2
    shown._mailbox._capacity = 50
    for x in batches(99):
        guard.step(lambda x=x: squared(model, x))
    assert guard.updates == 99  # while the sink still holds on to its first call
    assert [name for name, _ in stuck.calls] == ["start"]
    guard.close()
    gate.set()
    assert caplog.text.count("cannot keep up") == 1
    assert caplog.text.count("its last points may be missing") == 1


def test_a_healthy_run_with_sinks_and_log_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    model, plain = small_net(), small_net()
    optimizer, plain_optimizer = (OPTIMIZERS["AdamW"](m.parameters()) for m in (model, plain))
    torch.manual_seed(5)
    plain_run(plain, plain_optimizer, batches(60))
    torch.manual_seed(5)
    config = {"monitoring": {"log_frequency": 10, "sink_frequency": 1}}
    guard = steadystep.Guard(model, optimizer, config=config, run_dir=tmp_path, sinks=[Notes()])
    with guard:
        for x in batches(60):
            guard.step(lambda x=x: squared(model, x))
    assert_same(full_state(model, optimizer), full_state(plain, plain_optimizer))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_disk_that_is_full_from_the_middle_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    pytest.importorskip("tensorboard")
    files = []
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: files.append(opened(self, *a, **k)) or files[-1])
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), run_dir=tmp_path)
    with caplog.at_level(logging.WARNING):
        for i, x in enumerate(batches(300)):
            if i == 50:
                full = os.open("/dev/full", os.O_WRONLY)
                for file in files:
                    if not file.closed and file.writable():
                        os.dup2(full, file.fileno())
                os.close(full)
            assert guard.step(lambda x=x: squared(model, x)).stepped
        guard.close()
    said = [r.message for r in caplog.records if "training continues" in r.message]
    assert sorted("TensorBoard" in message for message in said) == [False, True]


def test_what_is_left_is_written_without_close(tmp_path: Path) -> None:
    notes = Notes()
    model = small_net()
    guard = steadystep.Guard(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), sinks=[notes], config={"monitoring": {"sinks": []}}
    )
    guard.step(lambda: squared(model, batches(1)[0]))
    del guard
    gc.collect()
    assert [name for name, _ in notes.calls] == ["start", "step", "layers", "close"]


def test_the_default_is_tensorboard_in_the_runs_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert TensorBoard is not None
    model = small_net()
    with steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), run_dir=tmp_path) as guard:
        guard.step(lambda: squared(model, batches(1)[0]))
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
