"""A state that this program could not have written is refused whole; what a user changed since is honoured or said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import steadystep
from steadystep.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from steadystep.errors import CheckpointError
from steadystep.state import DETECTOR
from steadystep.state.detectors import DETECTORS
from steadystep.state.parts import PART_SCHEMAS
from tests.loops import assert_same, full_state

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self, size: int = 8, *, persistent: bool = True) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("mask", torch.ones(size, size).tril(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x)) @ self.mask[:8, :8])


class Average:
    def __init__(self) -> None:
        self.value = torch.ones(8)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value.copy_(state["value"])


def made(
    run_dir: Path, *, seed: int = 0, net: nn.Module | None = None, **training: Any
) -> tuple[nn.Module, torch.optim.Optimizer, steadystep.Guard]:
    torch.manual_seed(seed)
    model = net or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"training": training, "monitoring": {"sinks": []}}
    return model, optimizer, steadystep.Guard.resume(model, optimizer, run_dir=run_dir, config=config)


def run(model: nn.Module, guard: steadystep.Guard, count: int = 6, size: int = 8) -> None:
    for number, x in enumerate(guard.batches(DataLoader(X, batch_size=size))):  # type: ignore[arg-type]
        guard.step(lambda x: model(x).square().mean(), batch=x, metrics={"entropy": 1.0, "reward": 0.5, "kl": 0.1})
        if number + 1 == count:
            break


def forged(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A run of six steps whose only checkpoint was changed, under checksums that fit."""
    model, _, guard = made(tmp_path / "source")
    guard.keep("average", Average())
    run(model, guard)
    guard.close()
    state = dict(read_checkpoint(tmp_path / "source" / "checkpoints" / "step-00000006").state)
    change(state)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_checkpoint(tmp_path / "run" / "checkpoints", state, step=6, updates=6)
    return tmp_path / "run"


def put(*way: Any) -> Callable[[dict[str, Any]], object]:
    *path, last, value = way

    def change(state: dict[str, Any]) -> None:
        for key in path:
            state = state[key]
        state[last] = value

    return change


MOMENTS = ("optimizer", "state", 0)
FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a buffer of another shape": (put("buffers", "mask", torch.ones(4, 4)), r"mask has the shape \[4, 4\]"),
    "no statistics": (lambda s: s["buffers"].pop("norm.running_var"), "no buffer norm.running_var"),
    "whole numbers": (
        put("buffers", "norm.running_var", torch.ones(8, dtype=torch.long)),
        "is torch.int64 in the checkpoint",
    ),
    "weights as text": (put("parameters", "inner.bias", "x"), "inner.bias is a str"),
    "a moment of another shape": (put(*MOMENTS, "exp_avg", torch.zeros(4, 8)), r"exp_avg has shape \[4, 8\]"),
    "a moment that is missing": (lambda s: s["optimizer"]["state"][0].pop("exp_avg_sq"), "exp_avg_sq is missing"),
    "squares below zero": (put(*MOMENTS, "exp_avg_sq", -torch.ones(8, 4)), "is negative"),
    "a rate of text": (put("optimizer", "param_groups", 0, "lr", "fast"), "group 0: lr is 'fast'"),
    "betas above one": (put("optimizer", "param_groups", 0, "betas", (0.9, 1.5)), "[Ii]nvalid beta"),
    "numpy's place": (put("random", "numpy", "state", "pos", 10**6), "random.numpy is not a random state"),
    "python's words": (put("random", "python", (3, (1, 2), None)), "random.python is not a random state"),
    "half a generator": (put("random", "torch", torch.zeros(7, dtype=torch.uint8)), "random.torch is not a random"),
    "a batch of text": (put("data", "batch", "six"), "data.batch is 'six'"),
    "a count of text": (put("guard", "budget", "skips_in_a_row", "3"), "budget: skips_in_a_row"),
    "a negative count": (put("guard", "detector zero-gradient", "in_a_row", -1), "zero-gradient: in_a_row"),
    "a NaN": (put("guard", "detector loss-spike", "values", [float("nan")]), "loss-spike"),
    "columns of two lengths": (put("guard", "run history", "trace", "losses", [1.0]), "run history: trace: .*lengths"),
    "a key nobody knows": (put("guard", "inputs", "more", 1), "inputs: it has more"),
    "a part that is a list": (put("guard", "rollback trial", [1]), "rollback trial: a list, not a dict"),
    "updates from the future": (put("guard", "updates", 7), "7 updates in 6 attempts"),
    "a far future": (put("guard", "rollback trial", "quiet_until", 10**15), "not a count of this run"),
    "a scaler": (put("guard", "precision", {"scale": 2.0}), "precision"),
    "no kept objects": (put("kept", None), "kept is a NoneType"),
}
UNREADABLE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a flag": (put("finite", "buffers", True), "finite.buffers is True"),
    "a number": (put("finite", "infinite", 0.5), "finite.infinite is 0.5"),
    "numbers": (put("finite", "kept", [3]), r"finite.kept is \[3\]"),
    "text": (put("finite", "all"), "finite is a str"),
}


@pytest.mark.parametrize("value", [torch.ones(2), 10**5000, -1, 1.0, True, "1", None], ids=lambda v: type(v).__name__)
def test_the_format_is_a_small_number(tmp_path: Path, value: object) -> None:
    _, _, guard = made(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"^this state has format .{1,20}; this version of steadystep reads complete states of format 1",
    ):
        guard.load_state_dict(guard.state_dict() | {"format": value})
    guard.close()


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_to_be_finite_is_said_by_names(tmp_path: Path, name: str) -> None:
    """Anything else is a damaged checkpoint: an older one would be used, and there is none."""
    change, says = UNREADABLE[name]
    run_dir = forged(tmp_path, change)
    with pytest.warns(UserWarning, match=rf"step-00000006.state\.json: .*{says}"), pytest.raises(CheckpointError):
        made(run_dir)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_state_is_refused_with_nothing_changed(tmp_path: Path, name: str) -> None:
    change, says = FORGERIES[name]
    run_dir = forged(tmp_path, change)
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = full_state(model, optimizer), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=says):
        steadystep.Guard.resume(model, optimizer, run_dir=run_dir)
    assert_same(full_state(model, optimizer), before[0])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_live_guard_is_left_as_it_was(tmp_path: Path) -> None:
    model, _, guard = made(tmp_path)
    run(model, guard)
    saved = guard.state_dict()
    text = json.dumps(saved)
    for part in saved:
        if part in PART_SCHEMAS or part.startswith(DETECTOR):
            with pytest.raises(CheckpointError):
                guard.load_state_dict({**json.loads(text), part: {"x": []}, "attempts": 99} | {"updates": "x"})
            assert json.dumps(guard.state_dict()) == text
    guard.load_state_dict(json.loads(text))
    assert json.dumps(guard.state_dict()) == text
    guard.close()


class Picky:
    """A user's detector that refuses what it is given, after it has taken some of it."""

    name = "picky"

    def __init__(self) -> None:
        self.seen = 0

    def update(self, signals: object) -> tuple[()]:
        self.seen += 1
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        if self.seen == 77:
            raise KeyError("77")


def test_a_users_detector_that_refuses_takes_everything_back() -> None:
    model, picky = Net(), Picky()
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()), detectors=[picky])
    run(model, guard)
    before = json.dumps(guard.state_dict())
    changed = json.loads(before) | {f"{DETECTOR}picky": {"seen": 77}, "accumulation": {"largest_weight": 3.0}}
    with pytest.raises(CheckpointError, match="does not match: '77'"):
        guard.load_state_dict(changed)
    assert json.dumps(guard.state_dict()) == before


def test_a_kept_object_that_refuses_its_state_takes_everything_back(tmp_path: Path) -> None:
    run_dir = forged(tmp_path, put("kept", "average", "value", torch.zeros(1)))
    model, _, guard = made(tmp_path / "other")
    average = Average()
    guard.keep("average", average)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = read_checkpoint(run_dir / "checkpoints" / "step-00000006").state
    with pytest.raises(
        CheckpointError, match=r"state of 'average' was rejected \(value has shape \[1\] in the checkpoint"
    ):
        guard._run_state.loop.put_back(state)
    assert torch.equal(average.value, torch.ones(8))
    assert guard.updates == 0
    assert_same(dict(model.state_dict()), before)
    guard.close()


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"mixed_precision": "fp16", "clip_rule": "percentile", "lr_scheduler": "plateau", "max_grad_norm": 1.0},
        {"clip_rule": "zscore", "lr_scheduler": "cosine", "learning_rate": 0.02, "early_stopping": True},
        {"clip_rule": "tensor-ema", "gradient_accumulation_steps": 2},
    ],
)
def test_every_part_fits_its_own_schema(tmp_path: Path, training: dict[str, Any]) -> None:
    """Whoever lets a part remember more has to say so there, or resuming would refuse it."""
    model, _, guard = made(tmp_path, **training)
    run(model, guard)
    bad = torch.full((4, 4), torch.nan)
    for _ in range(2):
        guard.step(lambda: model(bad).mean())
    run(model, guard, count=100)
    saved = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
    parts = saved.keys() - {"format", "attempts", "updates"}
    unknown = {part for part in parts if part not in PART_SCHEMAS and part.removeprefix(DETECTOR) not in DETECTORS}
    assert not unknown
    for name in parts & PART_SCHEMAS.keys() - {"precision", "clip rule"}:
        assert saved[name].keys() <= PART_SCHEMAS[name].model_fields.keys(), name
    guard.load_state_dict(saved)
    guard.close()


def test_a_mask_that_is_made_by_the_model_stays_its_own(tmp_path: Path) -> None:
    model, _, guard = made(tmp_path, net=Net(8, persistent=False))
    run(model, guard)
    guard.close()
    with pytest.warns(UserWarning, match="a different shape in the checkpoint keep this model's values: mask"):
        model, _, guard = made(tmp_path, net=Net(16, persistent=False))
    assert model.mask.shape == (16, 16)
    guard.close()


def test_a_learning_rate_changed_since_is_honoured_and_said(tmp_path: Path) -> None:
    model, optimizer, guard = made(tmp_path, learning_rate=0.01)
    run(model, guard)
    optimizer.param_groups[0]["lr"] = 0.004  # a decay of the user's own
    guard.close()
    shutil.copytree(tmp_path, tmp_path / "again")
    _, optimizer, guard = made(tmp_path / "again", learning_rate=0.01)
    assert optimizer.param_groups[0]["lr"] == 0.004
    guard.close()
    with pytest.warns(UserWarning, match=r"learning_rate is 0.005 but was 0.01 .* using 0.005"):
        _, optimizer, guard = made(tmp_path, learning_rate=0.005)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    guard.close()


def test_a_schedule_goes_on_from_the_learning_rate_that_is_asked_for_now(tmp_path: Path) -> None:
    asked = {"lr_scheduler": "linear", "total_steps": 12}
    model, _, guard = made(tmp_path, learning_rate=0.01, **asked)
    run(model, guard)
    guard.close()
    with pytest.warns(UserWarning, match="using 0.02"):
        model, optimizer, guard = made(tmp_path, learning_rate=0.02, **asked)
    run(model, guard, count=1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.5)
    guard.close()


def test_a_batch_size_changed_since_is_said_and_the_place_is_found_again(tmp_path: Path) -> None:
    model, _, guard = made(tmp_path)
    run(model, guard, count=6, size=8)
    guard.close()
    model, _, guard = made(tmp_path)
    loader: Any = DataLoader(X, batch_size=4)  # type: ignore[arg-type]
    with pytest.warns(
        UserWarning, match="batches of 4, the checkpoint was written with batches of 8, so .* after 12 batches"
    ):
        seen = list(guard.batches(loader))
    assert torch.equal(torch.cat(seen), X[48:])
    guard.close()


def test_when_all_checkpoints_are_damaged_it_says_how_to_start_anew(tmp_path: Path) -> None:
    model, _, guard = made(tmp_path)
    run(model, guard)
    guard.close()
    (tmp_path / "checkpoints" / "step-00000006" / "state.json").write_text("{}")
    for settings in ({}, {"path": tmp_path}):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        with (
            pytest.warns(UserWarning, match="no intact checkpoint is left"),
            pytest.raises(CheckpointError, match=r"newest is step-00000006.*To start over, move that folder away"),
        ):
            steadystep.Guard.resume(model, optimizer, run_dir=tmp_path, **settings)
    shutil.rmtree(tmp_path / "checkpoints")
    made(tmp_path)[2].close()
