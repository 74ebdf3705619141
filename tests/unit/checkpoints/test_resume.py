"""A run that is resumed ends like one that was never interrupted; what does not fit is refused with nothing changed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import steadystep
from steadystep import schedule
from steadystep._deprecated import STATE_PARTS
from steadystep._utils.rng import all_random_state
from steadystep.checkpoints import loop_state
from steadystep.checkpoints.checkpoint import write_checkpoint
from tests.loops import assert_same, full_state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)


class Noisy(TensorDataset):
    """Draws from all three generators in the main process."""

    def __getitem__(self, index: int) -> Any:
        (x,) = super().__getitem__(index)
        return x + 0.01 * random.random() + 0.01 * np.random.rand() + 0.01 * torch.rand(1)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(26):
            yield torch.randn(4)


def data() -> Tensor:
    return torch.randn(26, 4, generator=torch.Generator().manual_seed(7))


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(data()), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(data()), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "a list": lambda: list(data().split(4)),
}


class Average:
    """EMA weights, as a user would write them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for value, p in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


class CrashedError(Exception):
    pass


def train(
    run_dir: Path | None,
    *,
    optimizer: str = "AdamW",
    loader: str = "shuffled",
    training: dict[str, Any] | None = None,
    frequency: int | str = 3,
    epochs: int = 3,
    crash_at: int | None = None,
    save_at: int | None = None,
) -> tuple[dict[str, Any], steadystep.Guard, list[Tensor]]:
    """One program; started again after a crash it is the same program."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    config = {"training": training or {}, "monitoring": {"checkpoint_frequency": frequency}}
    if run_dir is None:
        guard = steadystep.Guard(model, made, config=config)
    else:
        guard = steadystep.Guard.resume(model, made, run_dir=run_dir, config=config)
    average = Average(model)
    guard.keep("average", average)
    source = LOADERS[loader]()
    for _ in range(guard.epoch, epochs):
        for batch in guard.batches(source):
            if guard.attempts == crash_at:
                raise CrashedError
            guard.step(lambda x: model(x).square().mean() + 0.1 * model(x + 1).mean(), batch=batch)
            average.update()
            if guard.attempts == save_at:
                guard.save()
    state = full_state(model, made)
    state["calls"] = model.calls.clone()
    guard.close()
    return state, guard, average.values


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("save_at", [1, 5, 7, 8])
def test_what_is_saved_after_a_step_contains_its_batch(tmp_path: Path, loader: str, save_at: int) -> None:
    """Where the loop is then still holds that batch: the first of a pass, one in its middle, its last."""
    whole, _, average = train(None, loader=loader, epochs=2)
    with pytest.raises(CrashedError):
        train(tmp_path, loader=loader, epochs=2, frequency=1000, save_at=save_at, crash_at=save_at + 2)
    state, guard, again = train(tmp_path, loader=loader, epochs=2, frequency=1000)
    assert guard.attempts == 14
    assert_same(whole, state)
    assert all(map(torch.equal, average, again))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("optimizer", "training"),
    [
        ("AdamW", {}),
        ("SGD", {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}),
        ("AdamW", {"mixed_precision": "fp16", "lr_scheduler": "cosine", "warmup_steps": 3, "total_steps": 40}),
        ("AdamW", {"gradient_accumulation_steps": 3, "clip_rule": "zscore", "lr_scheduler": "plateau"}),
    ],
    ids=["plain", "bf16-accumulated", "fp16-cosine", "accumulated-plateau"],
)
def test_killed_twice_and_resumed_it_ends_like_the_run_that_was_not(
    tmp_path: Path, loader: str, optimizer: str, training: dict[str, Any]
) -> None:
    setting = {"optimizer": optimizer, "loader": loader, "training": training}
    expected, whole, average = train(None, **setting)
    for crash_at in (4, 7):
        with pytest.raises(CrashedError):
            train(tmp_path, crash_at=crash_at, **setting)
    got, guard, got_average = train(tmp_path, **setting)
    assert_same(got, expected)
    assert_same(dict(enumerate(got_average)), dict(enumerate(average)))
    assert (guard.updates, guard.attempts, guard.epoch) == (whole.updates, whole.attempts, whole.epoch)
    # a look at the first few batches that was cut short begins again: evidence for a person, no part of a decision
    mine, theirs = (guard.state_dict() | {"run history": None, "inputs": None} for guard in (guard, whole))
    assert json.dumps(mine) == json.dumps(theirs)


def test_a_finished_run_that_is_started_again_has_nothing_left_to_do(tmp_path: Path) -> None:
    expected, *_ = train(tmp_path)
    got, guard, _ = train(tmp_path)
    assert_same(got, expected)
    assert guard.attempts == 21


def test_workers_too(tmp_path: Path) -> None:
    def run(folder: Path | None, stop: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"monitoring": {"checkpoint_frequency": 2}}
        loader = DataLoader(Noisy(data()), batch_size=4, shuffle=True, num_workers=1)
        if folder is None:
            guard = steadystep.Guard(model, optimizer)
        else:
            guard = steadystep.Guard.resume(model, optimizer, run_dir=folder, config=config)
        for batch in guard.batches(loader):
            if guard.attempts == stop:
                raise CrashedError
            guard.step(lambda x: model(x).square().mean(), batch=batch)
        guard.close()
        return [p.detach().clone() for p in model.parameters()]

    with pytest.raises(CrashedError):
        run(tmp_path, 5)
    for a, b in zip(run(None, None), run(tmp_path, None), strict=True):
        assert torch.equal(a, b)


def small(tmp_path: Path, **settings: Any) -> tuple[nn.Module, steadystep.Guard]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, steadystep.Guard.resume(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path, **settings)


def steps(model: nn.Module, guard: steadystep.Guard, count: int) -> None:
    for x in data().split(2)[:count]:
        guard.step(lambda x: model(x).square().mean(), batch=x)


def test_without_batches_it_is_saved_before_the_next_step(tmp_path: Path) -> None:
    model, guard = small(tmp_path, config={"monitoring": {"checkpoint_frequency": 4}})
    steps(model, guard, 6)
    saved = guard._run_state.checkpoints.flush()
    assert saved.name == "step-00000004"
    again, resumed = small(tmp_path / "other", path=tmp_path)
    assert resumed.attempts == 4
    steps(again, resumed, 0)


def test_losses_given_as_tensors_are_saved_before_the_next_forward_pass(tmp_path: Path) -> None:
    def run(stop: int | None, **more: Any) -> tuple[nn.Module, steadystep.Guard]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = steadystep.Guard.resume(
            model, optimizer, run_dir=tmp_path, config={"monitoring": {"checkpoint_frequency": 3}}, **more
        )
        for x in data().split(2)[guard.attempts : stop]:
            guard.step(model(x).square().mean())
        return model, guard

    _, guard = run(8)
    guard._run_state.checkpoints.flush()
    model, guard = run(None)
    assert guard.attempts == 13
    torch.manual_seed(0)
    twin = Net()
    plain = steadystep.Guard(twin, torch.optim.AdamW(twin.parameters(), lr=0.01))
    for x in data().split(2):
        plain.step(twin(x).square().mean())
    assert_same(full_state(model, guard._optimizer), full_state(twin, plain._optimizer))


def test_keep_checkpoints_is_how_many_stay_and_the_best_one(tmp_path: Path) -> None:
    monitoring = {"checkpoint_frequency": 1, "keep_checkpoints": 2}
    model, guard = small(tmp_path, config={"monitoring": monitoring})
    for i, x in enumerate(data().split(2)[:8]):
        guard.step(lambda x: model(x).square().mean(), batch=x)
        guard.validate(val_loss=[3.0, 2.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0][i])
        guard.save()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-00000003",
        "step-00000007",
        "step-00000008",
    ]


def test_checkpoint_frequency_in_minutes(tmp_path: Path) -> None:
    model, guard = small(tmp_path, config={"monitoring": {"checkpoint_frequency": "10 min"}})
    now = [0.0]
    guard._run_state.checkpoints._clock = lambda: now[0]
    guard._run_state.checkpoints._last_time = 0.0
    for i, x in enumerate(data().split(2)[:6]):
        now[0] = 150.0 * i
        guard.step(lambda x: model(x).square().mean(), batch=x)
    assert guard._run_state.checkpoints.flush().name == "step-00000004"


@pytest.mark.parametrize("wrong", ["soon", "-1 min", "0 s", "1.2.3 h", 0, True])
def test_a_wrong_frequency_says_what_is_right(wrong: object) -> None:
    with pytest.raises(steadystep.ConfigError, match="checkpoint_frequency"):
        steadystep.Config.load({"monitoring": {"checkpoint_frequency": wrong}})


def test_save_checkpoints_writes_the_last_state_at_the_end_and_needs_a_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"monitoring": {"save_checkpoints": True}}
    with pytest.raises(steadystep.ConfigError, match="run_dir"):
        steadystep.Guard(model, optimizer, config=config)
    with steadystep.Guard(model, optimizer, config=config, run_dir=tmp_path) as guard:
        steps(model, guard, 3)
    again, resumed = small(tmp_path)
    assert resumed.attempts == 3
    assert torch.equal(again.weight, model.weight)
    resumed.close()

    def crash() -> None:
        with steadystep.Guard(model, optimizer, config=config, run_dir=tmp_path / "b") as guard:
            steps(model, guard, 3)
            raise CrashedError  # in the middle of something: that state is nobody's

    with pytest.raises(CrashedError):
        crash()
    assert not list((tmp_path / "b").rglob("step-*"))


def test_save_and_resume_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()))
    steps(model, guard, 3)
    with pytest.raises(steadystep.MisuseError, match="run_dir"):
        guard.save()
    path = guard.save(tmp_path / "mine")
    for where in (path, tmp_path / "mine"):
        again, resumed = small(tmp_path / "run", path=where)
        assert resumed.updates == 3
        assert torch.equal(again.weight, model.weight)
        resumed.close()
    with pytest.raises(steadystep.CheckpointError, match="no checkpoint"):
        small(tmp_path / "run", path=tmp_path)


def test_what_does_not_fit_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    model, guard = small(tmp_path)
    steps(model, guard, 3)
    guard.close()

    def attempt(model: nn.Module, optimizer: torch.optim.Optimizer, says: str) -> None:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(steadystep.CheckpointError, match=says):
            steadystep.Guard.resume(model, optimizer, run_dir=tmp_path)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        steadystep.Guard(model, optimizer).close()  # the optimizer is free again

    other = nn.Linear(5, 2)
    attempt(
        other,
        torch.optim.AdamW(other.parameters()),
        r"weight has the shape \[2, 4\] in the checkpoint and \[2, 5\] in this model",
    )
    other = nn.Linear(4, 2, bias=False)
    attempt(other, torch.optim.AdamW(other.parameters()), "this model has no parameter bias")
    other = nn.Linear(4, 2)
    attempt(other, torch.optim.SGD(other.parameters(), lr=0.1), "a different optimizer")
    other = nn.Linear(4, 2)
    groups = [{"params": [p]} for p in other.parameters()]
    attempt(other, torch.optim.AdamW(groups), "parameter groups")


class Caching(nn.Linear):
    """Keeps tables of a size of its own, which are no part of a saved model."""

    def __init__(self, tables: int, size: int) -> None:
        super().__init__(4, 2)
        for i in range(tables):
            self.register_buffer(f"table_{i}", torch.full((size,), float(size)), persistent=False)


@pytest.mark.parametrize(
    ("tables", "named"),
    [(1, "table_0"), (3, "table_0, table_1, table_2"), (5, "table_0, table_1, table_2 and 2 more")],
)
def test_tables_of_another_size_stay_as_they_are(tmp_path: Path, tables: int, named: str) -> None:
    model = Caching(tables, 2)
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()))
    steps(model, guard, 2)
    saved = guard.save(tmp_path / "mine")
    other = Caching(tables, 3)
    with pytest.warns(UserWarning, match=f"keep this model's values: {named}$"):
        steadystep.Guard.resume(other, torch.optim.AdamW(other.parameters()), run_dir=tmp_path, path=saved).close()
    assert torch.equal(other.weight, model.weight)
    assert other.table_0.tolist() == [3.0] * 3


def test_a_state_that_is_refused_late_leaves_the_random_numbers_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guard = small(tmp_path)
    steps(model, guard, 3)
    guard.close()
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    restored = loop_state.restore_all

    def refuse(state: Any, device: torch.device) -> None:
        restored(state, device)
        monkeypatch.undo()
        raise steadystep.CheckpointError("late")

    monkeypatch.setattr(loop_state, "restore_all", refuse)
    other = nn.Linear(4, 2)
    torch.manual_seed(7)
    with pytest.raises(steadystep.CheckpointError, match="late"):
        steadystep.Guard.resume(other, torch.optim.AdamW(other.parameters()), run_dir=tmp_path)
    assert torch.equal(torch.randn(3), expected)


def rewritten(tmp_path: Path, **changes: Any) -> tuple[nn.Module, Path]:
    """A checkpoint after three steps with another content in some of its parts."""
    model, guard = small(tmp_path / "run")
    steps(model, guard, 3)
    state = guard._run_state.loop.gather()
    guard.close()
    for part, change in changes.items():
        state[part] = change(state.get(part))
    (tmp_path / "changed").mkdir()
    return model, write_checkpoint(tmp_path / "changed", state, step=3, updates=3)


def test_a_checkpoint_with_the_parts_of_before_is_resumed(tmp_path: Path) -> None:
    old_names = {new: old for old, new in STATE_PARTS.items()}
    model, path = rewritten(tmp_path, guard=lambda s: {old_names.get(k, k): v for k, v in s.items()})
    again, guard = small(tmp_path / "other", path=path)
    assert guard.updates == 3
    assert guard.state_dict().keys() >= set(STATE_PARTS.values())
    assert torch.equal(again.weight, model.weight)
    guard.close()


def test_a_detector_that_is_newer_than_the_checkpoint_starts_afresh(tmp_path: Path) -> None:
    model, path = rewritten(tmp_path, guard=lambda s: {k: v for k, v in s.items() if k != "detector odd-replica"})
    again, guard = small(tmp_path / "other", path=path)
    assert guard.updates == 3
    assert torch.equal(again.weight, model.weight)
    guard.close()


def test_a_guards_state_with_a_hole_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    _, path = rewritten(tmp_path, guard=lambda s: {k: v for k, v in s.items() if k != "budget"})
    other = nn.Linear(4, 2)
    before = other.weight.detach().clone()
    with pytest.raises(steadystep.CheckpointError, match="lacks budget"):
        steadystep.Guard.resume(other, torch.optim.AdamW(other.parameters()), run_dir=tmp_path / "other", path=path)
    assert torch.equal(other.weight, before)


def test_one_process_goes_on_in_the_data_where_two_ranks_were(tmp_path: Path) -> None:
    """Each had used seven batches of its own half: fourteen of the whole."""
    began = {"random": all_random_state(torch.device("cpu")), "generator": None, "started": False}
    _, path = rewritten(tmp_path, ranks=lambda _: 2, data=lambda d: {**d, "batch": 7, "began": began})
    with pytest.warns(UserWarning, match="by 2 ranks and this run has 1"):
        _, guard = small(tmp_path / "other", path=path)
    assert guard._run_state.data.batch == 14
    guard.close()


def test_moments_in_another_dtype_stay_exact(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).bfloat16()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    guard = steadystep.Guard(model, optimizer)
    x = data()[:4].bfloat16()
    guard.step(lambda: model(x).square().mean())
    for state in optimizer.state.values():  # what optimizers with fp32 master states do
        state["momentum_buffer"] = state["momentum_buffer"].float() + 1e-4
    guard.save(tmp_path)
    again, other = made()
    steadystep.Guard.resume(again, other, run_dir=tmp_path / "run", path=tmp_path)
    assert_same(full_state(again, other), full_state(model, optimizer))


def test_early_stopping_after_patience_validations_without_improvement(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    config = {"training": {"early_stopping": True, "patience": 2}}
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=0.1), config=config)
    assert not guard.restore_best()
    said = []
    best = None
    for i, loss in enumerate([2.0, 1.0, float("nan"), 1.5]):
        steps(model, guard, 2)
        guard.validate(val_loss=loss)
        best = model.weight.detach().clone() if i == 1 else best
        said.append(guard.should_stop)
    assert said == [False, False, False, True]
    assert guard.restore_best()
    assert torch.equal(model.weight, best)


def test_without_early_stopping_nobody_says_stop() -> None:
    model = nn.Linear(4, 2)
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()))
    for _ in range(100):
        guard.validate(val_loss=1.0)
    assert not guard.should_stop


def test_the_best_weights_come_from_disk_after_a_resume(tmp_path: Path) -> None:
    config = {"training": {"early_stopping": True, "patience": 1}}
    model, guard = small(tmp_path, config=config)
    steps(model, guard, 2)
    guard.validate(val_loss=1.0)
    best = model.weight.detach().clone()
    steps(model, guard, 2)
    guard.validate(val_loss=2.0)
    guard.close()
    again, resumed = small(tmp_path, config=config)
    assert resumed.should_stop
    assert not torch.equal(again.weight, best)
    assert resumed.restore_best()
    assert torch.equal(again.weight, best)


def test_a_schedule_is_where_its_updates_are(tmp_path: Path) -> None:
    rates = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with steadystep.Guard.resume(model, optimizer, run_dir=tmp_path, schedule=schedule.linear(10)) as guard:
            steps(model, guard, 3)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.08, 0.05])


def test_rolled_back_data_is_given_again_when_batches_are_not_skipped() -> None:
    position = steadystep.Guard(m := nn.Linear(4, 1), torch.optim.SGD(m.parameters(), lr=0.1))._run_state.data
    seen = []
    for number, batch in enumerate(position.batches(range(10), lambda: None)):
        seen.append(batch)
        if number == 5:
            position.load_state_dict({"place": [0, 2]})
    assert seen == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (position.epoch, position.batch) == (1, 0)


def test_a_save_that_was_asked_for_and_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, guard = small(tmp_path)
    steps(model, guard, 2)

    def full(*_: Any, **__: Any) -> None:
        raise steadystep.CheckpointError("no space left on device")

    monkeypatch.setattr("steadystep.checkpoints.store.write_checkpoint", full)
    with pytest.warns(UserWarning, match="no space left"), pytest.raises(steadystep.CheckpointError, match="warning"):
        guard.save()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="written to .* again"):
        assert guard.save().exists()
