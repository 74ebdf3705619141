"""Situations from real loops that a guard must not make worse. Each was a defect once."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from tests.loops import assert_same, full_state

NAN = math.nan
OK = torch.ones(4, 2)
BAD = OK * NAN


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def guarded(model: nn.Module, size: int = 1, **training) -> steadystep.Guard:
    return steadystep.Guard(model, sgd(model), config={"training": {"gradient_accumulation_steps": size, **training}})


class TestClosuresThatDoNotRepeat:
    """Never an update from the wrong batch: the group is is dropped, with one warning."""

    def test_a_loss_that_differs_by_little_is_another_batch(self) -> None:
        model, now = nn.Linear(2, 1), {}
        guard = guarded(model, 4)
        before = full_state(model, guard._optimizer)

        def closure() -> Tensor:
            return model(now["x"]).mean() + 1e3

        for x in (BAD, OK, OK * 1.01):
            now["x"] = x
            guard.step(closure)
        now["x"] = OK * 1.02
        with pytest.warns(UserWarning, match="is dropped") as caught:
            outcome = guard.step(closure)
        assert len(caught) == 1
        assert caught[0].filename == __file__, "the warning points at the user's line"
        assert not outcome.stepped
        assert outcome.left_out == ()
        assert_same(before, full_state(model, guard._optimizer))

    def test_the_member_that_happens_to_repeat_is_not_used_alone(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.model = nn.Linear(2, 1)

            def loss(self) -> Tensor:
                return self.model(self.x).square().mean()

        trainer = Trainer()
        guard = guarded(trainer.model, 4)
        for x in (OK, BAD, OK * 2):
            trainer.x = x
            guard.step(trainer.loss)
        trainer.x = OK * 3
        with pytest.warns(UserWarning, match="is dropped"):
            assert not guard.step(trainer.loss).stepped

    def test_functions_of_the_same_module_are_bound_too(self) -> None:
        space = {"torch": torch, "nn": nn, "guarded": guarded, "OK": OK, "BAD": BAD}
        code = """
model = nn.Linear(2, 1)
guard = guarded(model, 3)
def inner():
    return model(x).square().mean()
def outer():
    return inner()
for x in (OK, BAD, OK * 3):
    outcome = guard.step(lambda: outer())
"""
        exec(code, space)
        assert space["outcome"].left_out == (1,)
        assert space["outcome"].stepped

    def test_functions_inside_functions_are_bound_too(self) -> None:
        model = nn.Linear(2, 1)
        guard = guarded(model, 3)

        def inner() -> Tensor:
            return model(x).square().mean()

        for x in (OK, BAD, OK * 3):  # noqa: B007 - read by inner
            outcome = guard.step(lambda: inner())
        assert outcome.left_out == (1,)

    def test_recursive_and_mutually_nested_functions(self) -> None:
        model = nn.Linear(2, 1)
        guard = guarded(model, 2)

        def loss(x: Tensor, depth: int = 3) -> Tensor:
            return loss(x, depth - 1) if depth else model(x).mean()

        for x in (OK, BAD):
            outcome = guard.step(lambda: loss(x))  # noqa: B023
        assert outcome.left_out == (1,)


def test_an_exception_while_running_again_leaves_the_guard_usable() -> None:
    model = nn.Linear(2, 1)
    guard = guarded(model, 2)

    def once(x: Tensor):
        feed = iter([x])
        return lambda: model(next(feed)).mean()

    guard.step(once(BAD))
    with pytest.raises(StopIteration):
        guard.step(once(OK))
    assert guard.step(lambda: model(OK).mean()).pending
    assert guard.step(lambda: model(OK).mean()).stepped


def test_an_exception_in_the_schedule_costs_the_group_not_the_guard() -> None:
    model, calls = nn.Linear(2, 1), []

    def schedule(updates: int) -> float:
        calls.append(updates)
        if len(calls) == 1:
            raise OSError
        return 1.0

    guard = steadystep.Guard(model, sgd(model), schedule=schedule)
    with pytest.raises(OSError):  # noqa: PT011
        guard.step(lambda: model(OK).mean())
    assert all(p.grad is None for p in model.parameters())
    assert guard.step(lambda: model(OK).mean()).signals.losses == (pytest.approx(model(OK).mean().item(), abs=1),)


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_learning_rate_that_is_no_number_is_refused(value: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    guard = steadystep.Guard(model, sgd(model), schedule=lambda n: value if n == 1 else 1.0, run_dir=tmp_path)
    assert guard.step(lambda: model(OK).sum()).stepped
    outcome = guard.step(lambda: model(OK).sum())
    guard.close()
    assert not outcome.stepped
    assert outcome.diagnosis.cause == "schedule-error"
    assert model.weight.isfinite().all()
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_bad_learning_rate_in_any_group_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for order in ((0.1, NAN), (NAN, 0.1)):
        groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(model, order, strict=True)]
        assert not steadystep.Guard(model, torch.optim.SGD(groups)).step(lambda: model(OK).sum()).stepped


def test_two_models_in_one_loop_do_not_leak_gradients_into_each_other() -> None:
    """A GAN: the generator's backward pass leaves gradients in the discriminator."""
    maker, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    guards = guarded(maker), guarded(judge)
    guards[0].step(lambda: judge(maker(OK)).mean())
    outcome = guards[1].step(lambda: judge(OK).mean())
    assert outcome.signals.grad_norm == pytest.approx(math.sqrt(3.0))
    guards[0].step(lambda: judge(maker(BAD)).mean())
    assert guards[1].step(lambda: judge(OK).mean()).stepped, "nor their NaN"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_exception_inside_optimizer_step_leaves_no_gradients(precision: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": precision}})
    calls = []

    def hook(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError

    optimizer.register_step_pre_hook(hook)
    with pytest.raises(OSError):  # noqa: PT011
        guard.step(lambda: 0.01 * model(OK).float().mean())
    assert all(p.grad is None for p in model.parameters())
    outcome = guard.step(lambda: 0.01 * model(OK).float().mean())
    assert outcome.stepped
    assert outcome.signals.grad_norm == pytest.approx(0.01 * math.sqrt(3.0), rel=1e-3)


def test_closures_first_and_a_bad_loss_tensor_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    guard = guarded(model)
    for _ in range(3):
        guard.step(lambda: model(torch.randn(4, 2)).square().mean())
    before = full_state(model, guard._optimizer)
    assert not guard.step(model(BAD).mean()).stepped
    assert_same(before, full_state(model, guard._optimizer))


ODD = {
    "empty": lambda: torch.empty(0),
    "expanded": lambda: torch.ones(1).expand(3, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "inference": torch.inference_mode()(lambda: torch.ones(2)),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "none": lambda: None,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ODD)
def test_ordinary_buffers_of_every_kind(kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("odd", ODD[kind]())
    guard = guarded(model)
    for x in (torch.randn(4, 2), BAD, torch.randn(4, 2)):
        outcome = guard.step(lambda x=x: model(x).square().mean())
        assert outcome.stepped == bool(x.isfinite().all())
    assert model[1].running_var.isfinite().all()

    def explode() -> Tensor:
        model(OK)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.step(explode)


def test_a_lazy_module_without_parameters_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    guard = guarded(model)
    assert guard.step(lambda: model(torch.randn(4, 2)).square().mean()).stepped


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["sparse", "compressed", "float8"])
def test_a_batch_that_cannot_be_looked_into_is_no_crash(kind: str) -> None:
    model = nn.Linear(2, 1)
    outcome = guarded(model).step(lambda _: model(BAD).mean(), batch=ODD[kind]())
    assert not outcome.stepped
    assert outcome.diagnosis.cause == "non-finite-loss"


class OwnNorm(nn.Module):
    """Running statistics without the batch counter that nn.BatchNorm has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("m", torch.zeros(2))
        self.register_buffer("v", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(self.linear(x), self.m, self.v, training=self.training)


def test_statistics_that_start_to_move_after_a_quiet_phase() -> None:
    model = OwnNorm().eval()
    guard = guarded(model)
    for _ in range(5):
        guard.step(lambda: model(torch.randn(4, 2)).square().mean())
    model.train()
    guard.step(lambda: model(torch.randn(4, 2)).square().mean())
    assert not guard.step(lambda: model(BAD).mean()).stepped
    assert model.m.isfinite().all()
    assert model.v.isfinite().all()


def test_a_buffer_that_the_forward_pass_creates() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("ema", None)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).mean()
            self.ema = y.detach().clone() if self.ema is None else self.ema * 0.9 + y.detach() * 0.1
            return y

    model = Late()
    guard = guarded(model)
    assert not guard.step(lambda: model(BAD)).stepped
    assert model.ema is None
    guard.step(lambda: model(OK))
    kept = model.ema.clone()
    assert not guard.step(lambda: model(BAD)).stepped
    assert torch.equal(model.ema, kept)


def test_a_model_moved_to_another_dtype_keeps_its_precision() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    guard = guarded(model)
    guard.step(lambda: model(torch.randn(4, 2)).mean())
    model.double()
    model[1].running_mean.fill_(1.0 / 3.0)
    before = model[1].running_mean.clone()
    assert not guard.step(lambda: model(BAD.double()).mean()).stepped
    assert torch.equal(model[1].running_mean, before)


def test_what_the_user_made_infinite_is_not_the_forward_passs_doing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("bias_mask", torch.zeros(2))
    guard = guarded(model)
    for _ in range(2):
        guard.step(lambda: model(torch.randn(4, 2)).mean())
    model[1].bias_mask[1] = -math.inf
    assert all(guard.step(lambda: model(torch.randn(4, 2)).mean()).stepped for _ in range(5))


def test_observe_reports_a_bad_buffer_and_leaves_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    guard = steadystep.Guard(model, sgd(model), config=steadystep.observe())
    outcome = guard.step(lambda: model(torch.randn(4, 2) * 1e25).mean())
    assert outcome.signals.bad_buffers == ("1.running_var",)
    assert outcome.stepped
    assert not model[1].running_var.isfinite().all()


def test_observe_puts_nothing_back_after_an_exception_either() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    guard = steadystep.Guard(model, sgd(model), config=steadystep.observe())

    def explode() -> Tensor:
        model(torch.randn(4, 2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.step(explode)
    assert model[1].num_batches_tracked.item() == 1


def test_fp16_with_very_different_weights_keeps_its_scale() -> None:
    model = nn.Linear(2, 1)
    guard = guarded(model, 2, mixed_precision="fp16")
    for _ in range(30):
        for weight in (1, 4096):
            guard.step(lambda: 0.01 * model(OK).float().square().mean(), weight=weight)
    assert guard.precision.state_dict()["scale"] >= 1024
    assert guard.updates >= 24


def test_loading_a_state_drops_the_open_group_and_a_refused_state_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    guard = guarded(model, 2)
    saved = guard.state_dict()
    guard.step(lambda: model(OK * 100).mean())
    guard.load_state_dict(saved)
    assert guard.step(lambda: model(OK).mean()).pending
    with pytest.raises(steadystep.CheckpointError, match="lacks budget"):
        guard.load_state_dict({k: v for k, v in saved.items() if k != "budget"})
    half = guarded(nn.Linear(2, 1), mixed_precision="fp16")
    with pytest.raises(steadystep.CheckpointError):
        guard.load_state_dict({**half.state_dict(), "attempts": 99, "precision": {"scale": 1.0}})
    assert guard.attempts == 0


@pytest.mark.parametrize("guard_first", [True, False])
def test_a_resumed_run_keeps_its_learning_rate(guard_first: bool) -> None:
    model = nn.Linear(2, 1)
    config = {"training": {"learning_rate": 0.1}}
    optimizer = sgd(model, lr=0.5)
    guard = steadystep.Guard(model, optimizer, config=config)
    optimizer.param_groups[0]["lr"] = 0.001  # a scheduler of the user's came this far
    saved = json.loads(json.dumps(guard.state_dict())), optimizer.state_dict()
    again = sgd(model, lr=0.5)
    if guard_first:
        resumed = steadystep.Guard(model, again, config=config)
        again.load_state_dict(saved[1])
    else:
        again.load_state_dict(saved[1])
        resumed = steadystep.Guard(model, again, config=config)
    resumed.load_state_dict(saved[0])
    assert again.param_groups[0]["lr"] == 0.001


def test_groups_without_the_default_rate_keep_their_ratio_to_the_largest() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[1].parameters(), "lr": 1e-5}]
    optimizer = torch.optim.AdamW(groups)
    steadystep.Guard(model, optimizer, config={"training": {"learning_rate": 3e-4}})
    assert [group["lr"] for group in optimizer.param_groups] == [3e-4, pytest.approx(3e-5)]


def test_a_guard_that_could_not_be_made_changed_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model, lr=0.5)
    (tmp_path / "file").write_text("")
    with pytest.raises(steadystep.ConfigError):
        steadystep.Guard(model, optimizer, config={"training": {"learning_rate": 0.1}}, run_dir=tmp_path / "file")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_replaced_parameter_groups_are_measured() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    guard.step(lambda: model(OK).sum())
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model.zero_grad()
    model[1].weight.register_hook(lambda g: g * NAN)
    assert not guard.step(lambda: model(OK).sum()).stepped


@pytest.mark.filterwarnings("ignore:steadystep. these weights are fp16")
def test_a_layer_that_turns_half_later_is_measured_in_full() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    guard = guarded(model)
    guard.step(lambda: model(OK).sum())
    model[1].half()
    model[1].weight.register_hook(lambda grad: torch.full_like(grad, 6e4))  # finite, and its norm is beyond fp16
    outcome = guard.step(lambda: model[1](model[0](OK).half()).float().sum())
    assert outcome.stepped
    assert math.isfinite(outcome.signals.grad_norm)


def test_float64_groups_are_corrected_in_float64() -> None:
    model = nn.Linear(2, 1).double()
    twin = nn.Linear(2, 1).double()
    twin.load_state_dict(model.state_dict())
    parts = [torch.randn(n, 2, dtype=torch.float64) for n in (3, 4)]
    guard = guarded(model, 2)
    for part in parts:
        guard.step(lambda part=part: model(part).square().mean(), weight=len(part))
    guarded(twin).step(lambda: twin(torch.cat(parts)).square().mean())
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-13, atol=1e-13)


def test_value_clipping_of_sparse_gradients_with_repeated_rows() -> None:
    model = nn.Embedding(4, 1, sparse=True)
    guard = steadystep.Guard(
        model, torch.optim.SGD(model.parameters(), lr=1.0), config={"training": {"max_grad_value": 1.0}}
    )
    before = model.weight.detach().clone()
    guard.step(lambda: model(torch.tensor([1, 1, 1])).sum())
    assert (before - model.weight)[1].item() == pytest.approx(1.0)


def test_fp16_when_the_rest_of_a_group_overflows_the_scale_backs_off() -> None:
    model = nn.Linear(2, 1)
    guard = guarded(model, 2, mixed_precision="fp16")
    guard.step(lambda: model(BAD).float().mean())
    outcome = guard.step(lambda: model(OK).float().mean() * 1e4)
    assert not outcome.stepped
    assert guard.precision.state_dict()["scale"] == 32768.0


def test_a_group_in_which_nothing_counts_is_no_update() -> None:
    model = nn.Linear(2, 1)
    guard = guarded(model, 2)
    guard.step(lambda: model(OK).mean(), weight=0)
    assert not guard.step(lambda: model(BAD).mean(), weight=5).stepped
    assert guard.updates == 0


def test_whole_numbers_in_metrics_keep_their_digits() -> None:
    model = nn.Linear(2, 1)
    outcome = guarded(model).step(lambda: model(OK).mean(), metrics={"tokens": torch.tensor(123456789)})
    assert outcome.signals.metrics["tokens"] == 123456789


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_settings_that_cannot_work_are_said_at_once() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    with pytest.raises(steadystep.MisuseError, match="got StepLR"):
        steadystep.Guard(model, optimizer, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(steadystep.ConfigError, match="complex"):
        guarded(nn.Linear(2, 1).to(torch.complex64), mixed_precision="fp16")
    with pytest.warns(UserWarning, match="these weights are fp16"):
        guarded(nn.Linear(2, 1).half())


def test_a_closed_guard_stays_closed() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    first = steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": 2}})
    first.step(lambda: model(OK).mean())
    with pytest.warns(UserWarning, match="1 micro-batches of an incomplete group"):
        first.close()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(steadystep.MisuseError, match="is closed"):
        first.step(lambda: model(OK).mean())
    second = steadystep.Guard(model, optimizer)
    first.close()
    with pytest.raises(steadystep.MisuseError, match="already has a guard"):
        steadystep.Guard(model, optimizer)
    second.close()


def test_yaml_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("training: &base\n  max_grad_norm: 2.0\n  <<: {gradient_accumulation_steps: 3}\n")
    config = steadystep.Config.load(path)
    assert (config.training.max_grad_norm, config.training.gradient_accumulation_steps) == (2.0, 3)
    path.write_text("? [1, 2]\n: 3\n")
    with pytest.raises(steadystep.ConfigError, match="a key must be a string"):
        steadystep.Config.load(path)
    for raw, says in (
        ({"training": {"lr": 1}}, "training.learning_rate"),
        ({"training": {"gradient_clipping": 1.0}}, "max_grad_norm"),
    ):
        with pytest.raises(steadystep.ConfigError, match=says):
            steadystep.Config.load(raw)


def test_a_folder_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = nn.Linear(2, 1)
    steadystep.Guard(model, sgd(model), run_dir="~/run").close()
    assert (tmp_path / "run" / "run.jsonl").exists()


def test_a_large_constant_beside_a_counter_is_not_copied_every_step() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("table", torch.zeros(1000))
    guard = guarded(model)
    for _ in range(6):
        guard.step(lambda: model(torch.randn(4, 2)).square().mean())
    names, _ = guard._parts.measurer._buffers.suspects()
    assert "table" not in names
    assert "running_var" in names
