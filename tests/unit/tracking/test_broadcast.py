"""What sinks get to see, and when."""

import math
from pathlib import Path

import pytest
import torch

import steadystep
from steadystep.records import Outcome, Signals
from steadystep.tracking import Broadcast, RunStart
from tests.loops import batches, small_net, squared
from tests.promises.test_10_monitoring_cannot_hurt import Notes


def outcome(step: int, count: int = 3, **changes) -> Outcome:
    names = tuple(f"layer{i}" for i in range(count))
    plain = {"loss": 1.0, "grad_norm": 0.5, "lr": 0.1, "names": names, "norms": (0.5,) * count}
    return Outcome(step=step, reading=1.0, stepped=True, signals=Signals(step=step, **plain | changes))


def shown(notes: Notes, method: str) -> list:
    return [arguments for name, arguments in notes.calls if name == method]


def test_sink_frequency_is_how_often_sinks_are_shown(tmp_path: Path) -> None:
    model, notes = small_net(), Notes()
    config = {"monitoring": {"sink_frequency": 40, "log_frequency": 50, "sinks": []}}
    guard = steadystep.Guard(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), config=config, run_dir=tmp_path / "a", sinks=[notes]
    )
    guard._parts.log._sinks._clock = lambda: 0.0  # no time passes
    with guard:
        for i, x in enumerate(batches(190)):
            guard.step(lambda x=x, i=i: squared(model, x * (math.nan if i == 130 else 1.0)))
    steps = [row.step for (row,) in shown(notes, "step")]
    assert steps == [*range(100), 120, 130, 160, 189]  # the beginning, every 40th, the incident, the last
    assert [step for step, _ in shown(notes, "layers")] == [0, 50, 100, 130, 150]
    assert [sample.step for (sample,) in shown(notes, "histograms")] == [50]
    (incident,) = shown(notes, "incident")
    assert (incident[0].step, incident[0].done, incident[0].stepped) == (130, "update skipped", False)
    ((start,),) = shown(notes, "start")
    assert (start.name, start.run_dir, start.step) == ("a", tmp_path / "a", 0)
    assert start.settings["monitoring"]["sink_frequency"] == 40
    order = [name for name, _ in notes.calls]
    assert order[0] == "start"
    assert order[-2:] == ["step", "close"]


def test_slow_steps_are_all_shown() -> None:
    now = [0.0]
    notes = Notes()
    broadcast = Broadcast([notes], RunStart(name="a"), every=10, layers_every=100, clock=lambda: now[0])
    for step in range(1001, 1050):
        now[0] += 0.34 if step < 1030 else 2.0
        broadcast.record(outcome(step))
    broadcast.close()
    steps = [row.step for (row,) in shown(notes, "step")]
    assert steps == [1001, 1004, 1007, 1010, 1013, 1016, 1019, 1020, 1023, 1026, 1029, *range(1030, 1050)]
    assert shown(notes, "start")[0][0].step == 1001


def test_of_many_layers_evenly_chosen_ones_are_shown() -> None:
    notes = Notes()
    broadcast = Broadcast([notes], RunStart(name="a"), every=1, layers_every=1)
    broadcast.record(outcome(0, count=1000))
    broadcast.close()
    names = list(shown(notes, "layers")[0][1])
    assert names == [f"layer{i}" for i in range(0, 1000, 8)]


def test_layers_are_shown_less_often_later_on() -> None:
    notes = Notes()
    broadcast = Broadcast([notes], RunStart(name="a"), every=1000, layers_every=10)
    for step in range(0, 260, 5):
        broadcast.record(outcome(step))
    broadcast.close()
    assert [step for step, _ in shown(notes, "layers")] == [*range(0, 100, 10), 100, 150, 200, 250]


def test_gradients_for_histograms_are_the_gradients() -> None:
    model, notes = torch.nn.Linear(100, 100, bias=False), Notes()
    config = {"monitoring": {"log_frequency": 2, "sinks": []}}
    with steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.0), config=config, sinks=[notes]) as guard:
        for _ in range(41):
            guard.step(lambda: (model.weight * torch.arange(10_000.0).reshape(100, 100)).sum())
    samples = [sample for (sample,) in shown(notes, "histograms")]
    assert [sample.step for sample in samples] == [2, 20, 40]
    values = samples[0].values["weight"]
    assert len(set(values.tolist())) == len(values) == 1024
    assert values.mean() == pytest.approx(5000, rel=0.1)
