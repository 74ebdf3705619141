"""What TensorBoard's own readers make of our files."""

import math
from pathlib import Path

import pytest
import torch

import steadystep
from steadystep import tracking
from steadystep.testing import check_sink
from steadystep.tracking import Broadcast, RunStart, TensorBoard
from tests.loops import batches, small_net, squared

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as NewAccumulator,
)


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return found.Reload()


def points(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def train(run_dir: Path, steps: int, *, bad: int = -1, checkpoint_at: int = 0, **monitoring) -> list:
    model = small_net()
    guard = steadystep.Guard.resume(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5e-2),
        config={"monitoring": {"checkpoint_frequency": 10_000, **monitoring}},
        run_dir=run_dir,
    )
    outcomes = []
    for i, x in enumerate(batches(steps)):
        if i < guard.attempts:
            continue
        factor = math.nan if i == bad else 1.0
        outcomes.append(
            guard.step(lambda x=x, factor=factor: squared(model, x * factor), metrics={"accuracy": i / 100})
        )
        if i == checkpoint_at:
            guard.validate(val_loss=2.0, accuracy=0.5)
            guard.save()
    guard._parts.log.close()  # as if killed here: the state after the checkpoint is lost, what was shown is not
    guard._end(save=False)
    return outcomes


def test_curves_incidents_and_histograms_are_what_tensorboard_reads(tmp_path: Path) -> None:
    outcomes = train(tmp_path, 60, bad=40, checkpoint_at=29, log_frequency=20, sink_frequency=10)
    main = read(tmp_path / "tensorboard")
    assert points(main, "Loss/train") == [
        (o.step, pytest.approx(o.loss, rel=1e-6, nan_ok=True)) for o in outcomes
    ]  # the beginning is shown in full
    assert points(main, "Grad/norm")[5] == (5, pytest.approx(outcomes[5].signals.grad_norm, rel=1e-6))
    assert [value for _, value in points(main, "LR")] == pytest.approx([0.005] * 60)
    assert points(main, "accuracy")[-1] == (59, pytest.approx(0.59))
    assert points(main, "Loss/validation") == [(29, 2.0)]
    assert points(main, "Validation/accuracy") == [(29, 0.5)]
    assert [step for step, _ in points(main, "Grad/layer/0.weight")] == [0, 20, 40]
    assert points(main, "Incidents/non-finite-loss") == [(40, 4.0)]
    assert [h.step for h in main.Histograms("Grad/log10_norm_over_layers")] == [0, 20]  # at 40 none is finite
    (values,) = main.Histograms("Grad/values/0.weight")
    assert values.step == 20
    assert values.histogram_value.num == 96 == sum(values.histogram_value.bucket)
    text = main.Tensors("Incidents")[0].tensor_proto.string_val[0].decode()
    assert "Step 40: non-finite-loss" in text
    assert "update skipped" in text
    assert '"log_frequency": 20' in main.Tensors("Settings")[0].tensor_proto.string_val[0].decode()


def test_combined_is_one_tag_of_two_runs_which_tensorboard_draws_in_one_chart(tmp_path: Path) -> None:
    train(tmp_path, 12, checkpoint_at=9)
    for name, count in (("train", 12), ("validation", 1)):
        found = read(tmp_path / "tensorboard" / f"Loss_Combined_{name}")
        assert found.Tags()["scalars"] == ["Loss/Combined"]
        assert len(found.Scalars("Loss/Combined")) == count


def test_a_resumed_run_shows_each_step_once_and_keeps_the_validation_it_starts_from(tmp_path: Path) -> None:
    train(tmp_path, 30, checkpoint_at=19)  # saved at 20, went on to 29, was killed
    train(tmp_path, 40, checkpoint_at=35)
    folder = tmp_path / "tensorboard"
    for tag in ("Loss/train", "Grad/norm", "accuracy"):
        assert [step for step, _ in points(read(folder), tag)] == list(range(40))
    assert [step for step, _ in points(read(folder), "Loss/validation")] == [19, 35]
    new = NewAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in new.Tensors("Loss/train")] == list(range(40))


def test_sinks_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batches(1)[0]

    def run(folder: Path, **monitoring) -> bool:
        with steadystep.Guard(model, optimizer, run_dir=folder, config={"monitoring": monitoring}) as guard:
            guard.step(lambda: squared(model, x))
        return (folder / "tensorboard").exists()

    assert run(tmp_path / "default")
    assert run(tmp_path / "asked", sinks=["tensorboard"])
    assert not run(tmp_path / "none", sinks=[])
    with pytest.raises(steadystep.ConfigError, match="run_dir"):
        steadystep.Guard(model, optimizer, config={"monitoring": {"sinks": ["tensorboard"]}})
    with pytest.raises(steadystep.ConfigError, match=r"monitoring\.sinks"):
        run(tmp_path / "unknown", sinks=["tensorbord"])
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert not run(tmp_path / "not installed")
    with pytest.raises(steadystep.ConfigError, match=r"pip install 'steadystep\[tensorboard\]'"):
        run(tmp_path / "missing", sinks=["tensorboard"])
    assert not (tmp_path / "missing").exists()


def test_it_keeps_the_contract() -> None:
    check_sink(TensorBoard)


def test_without_a_folder_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    broadcast = Broadcast([TensorBoard()], RunStart(name="a"), every=1, layers_every=1)
    broadcast.validated(1, {"val_loss": 1.0})
    broadcast.validated(2, {"val_loss": 1.0})
    broadcast.close()
    assert caplog.text.count("TensorBoard needs a folder") == 1
