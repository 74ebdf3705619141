"""`watch`: a loop that calls backward and step itself, guarded with one line and left as it was with another."""

import functools
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from tests.loops import OPTIMIZERS, assert_same, batches, full_state, is_finite, small_net, squared

PLAIN_BACKWARD = torch.Tensor.backward


def loop(
    *,
    watched: bool = True,
    optimizer: str = "AdamW",
    bad: tuple[int, ...] = (),
    count: int = 24,
    accumulate: int = 1,
    clip: float | None = None,
    scheduled: bool = False,
    closure: bool = False,
    **settings: Any,
) -> tuple[dict[str, Tensor], list[steadystep.Outcome], Any]:
    """The loop everybody writes; with `watched` there is one line more in it."""
    model = small_net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100) if scheduled else None
    watcher = steadystep.watch(model, opt, **settings) if watched else None
    outcomes = []
    torch.manual_seed(1)
    for i, x in enumerate(batches(count)):
        batch = x * math.nan if i in bad else x

        def evaluate(batch: Tensor = batch) -> Tensor:
            opt.zero_grad()
            loss = squared(model, batch)
            loss.backward()
            return loss

        if closure:
            opt.step(evaluate)
        else:
            (squared(model, batch) / accumulate).backward()
            if (i + 1) % accumulate:
                continue
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if watcher is not None:
            outcomes.append(watcher.outcome)
    state = full_state(model, opt)
    if watcher is not None:
        watcher.remove()
    return state, outcomes, scheduler


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["plain", "closure"])
def test_a_healthy_loop_is_bit_identical(optimizer: str, way: str) -> None:
    plain, _, _ = loop(watched=False, optimizer=optimizer, closure=way == "closure")
    watched, outcomes, _ = loop(optimizer=optimizer, closure=way == "closure")
    assert_same(plain, watched)
    assert all(o.stepped and not o.plan.actions for o in outcomes)


@pytest.mark.parametrize("way", [{"clip": 0.5}, {"accumulate": 2}, {"scheduled": True, "clip": 0.1}])
def test_a_healthy_loop_with_trimmings_is_bit_identical(way: dict[str, Any]) -> None:
    plain, _, _ = loop(watched=False, **way)
    watched, outcomes, _ = loop(**way)
    assert_same(plain, watched)
    assert all(o.stepped for o in outcomes)


def test_the_guards_own_clipping_is_torchs() -> None:
    plain, _, _ = loop(watched=False, clip=0.5)
    watched, outcomes, _ = loop(config={"training": {"max_grad_norm": 0.5}})
    assert_same(plain, watched)
    assert all(o.clipped for o in outcomes)


def test_a_loop_that_clips_is_noticed_and_its_true_norms_are_read() -> None:
    _, alone, _ = loop()
    _, clipped, _ = loop(clip=1e9)  # clipping that changes nothing: the norms must be the same
    _, held, _ = loop(clip=1e-3)
    assert [o.signals.grad_norm for o in clipped if o.signals] == [o.signals.grad_norm for o in alone if o.signals]
    assert all(o.signals is not None and o.signals.grad_norm > 0.1 for o in held)


def test_the_loss_of_a_group_is_what_the_update_is_about() -> None:
    _, outcomes, _ = loop(accumulate=3)
    model = small_net()
    torch.manual_seed(1)
    expected = sum(squared(model, x).item() for x in batches(3)) / 3
    assert outcomes[0].loss == pytest.approx(expected, rel=1e-6)
    assert outcomes[0].signals is not None
    assert len(outcomes[0].signals.losses) == 3


@pytest.mark.parametrize("way", [{}, {"closure": True}, {"clip": 0.5}, {"accumulate": 2}, {"optimizer": "SGD"}])
def test_a_bad_batch_leaves_no_trace(way: dict[str, Any]) -> None:
    unguarded, _, _ = loop(watched=False, bad=(10,), **way)
    state, outcomes, _ = loop(bad=(10,), **way)
    assert not is_finite(unguarded)
    assert is_finite(state)
    assert [o.stepped for o in outcomes].count(False) == 1


def test_weight_decay_and_moments_stand_still_on_a_refused_step() -> None:
    model = small_net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    with steadystep.watch(model, opt) as watcher:
        for x in [*batches(3), batches(1)[0] * math.nan]:
            before = full_state(model, opt)
            opt.zero_grad()
            squared(model, x).backward()
            opt.step()
    assert watcher.outcome is not None
    assert not watcher.outcome.stepped
    assert_same(before, full_state(model, opt))


def test_a_scheduler_does_not_advance_on_a_refused_step() -> None:
    _, _, plain = loop(watched=False, scheduled=True, count=21)
    _, outcomes, scheduler = loop(scheduled=True, bad=(0, 7, 8, 15), count=25)
    assert [o.step for o in outcomes if not o.stepped] == [0, 7, 8, 15]
    assert scheduler.last_epoch == plain.last_epoch == 21
    assert scheduler.get_last_lr() == plain.get_last_lr()
    rates = [o.signals.lr for o in outcomes if o.stepped and o.signals]
    assert rates == [pytest.approx(0.5e-2 * (1 + math.cos(math.pi * i / 100))) for i in range(21)]


def test_a_scheduler_of_epochs_moves_even_if_the_last_step_was_refused() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    with steadystep.watch(model, opt):
        for epoch in range(3):
            for i, x in enumerate(batches(4)):
                opt.zero_grad()
                squared(model, x * math.nan if epoch == 1 and i == 3 else x).backward()
                opt.step()
            scheduler.step()
    assert scheduler.last_epoch == 3
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_taking_it_out_leaves_everything_as_it_was() -> None:
    model = small_net()
    opt = torch.optim.AdamW(model.parameters())
    held, module = dict(vars(opt)), {k: dict(v) for k, v in vars(model).items() if "hooks" in k}
    watcher = steadystep.watch(model, opt)
    assert torch.Tensor.backward is not PLAIN_BACKWARD
    squared(model, batches(1)[0]).backward()
    opt.step()
    opt.zero_grad()
    watcher.remove()
    assert torch.Tensor.backward is PLAIN_BACKWARD
    assert vars(opt).keys() == held.keys()
    assert not opt._optimizer_step_pre_hooks
    assert not opt._optimizer_step_post_hooks
    assert {k: dict(v) for k, v in vars(model).items() if "hooks" in k} == module
    (squared(model, batches(1)[0]) * math.nan).backward()
    opt.step()
    assert not is_finite(full_state(model, opt))  # nobody guards it any more
    steadystep.Guard(model, opt).close()


def test_two_models_in_one_loop_are_told_apart() -> None:
    """The losses of a GAN: one backward pass reaches both, and only one of them may count it."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(6, 6), nn.Linear(6, 1)
    opts = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (maker, critic)]
    watchers = [steadystep.watch(m, o) for m, o in zip((maker, critic), opts, strict=True)]
    for x in batches(5):
        for none in (True, False):
            opts[1].zero_grad(set_to_none=none)
            judged = (critic(x) - critic(maker(x).detach())).square().mean()
            judged.backward()
            opts[1].step()
            opts[0].zero_grad(set_to_none=none)
            made = critic(maker(x)).square().mean()
            made.backward()
            opts[0].step()
            assert watchers[1].outcome is not None
            assert watchers[0].outcome is not None
            assert watchers[1].outcome.loss == judged.item()
            assert watchers[0].outcome.loss == made.item()
    for watcher in watchers:
        watcher.remove()
    assert torch.Tensor.backward is PLAIN_BACKWARD


def test_a_watcher_that_is_gone_is_no_listener() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    steadystep.watch(model, opt)
    del model, opt
    gc.collect()
    loop(count=2)
    assert torch.Tensor.backward is PLAIN_BACKWARD


def test_the_loss_can_be_said() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with steadystep.watch(model, opt, find_loss=False) as watcher:
        assert torch.Tensor.backward is PLAIN_BACKWARD
        loss = squared(model, batches(1)[0])
        (watcher.loss(loss) * 7).backward()
        opt.step()
        assert watcher.outcome is not None
        assert watcher.outcome.loss == loss.item()
        opt.zero_grad()
        squared(model, batches(1)[0]).backward()
        with pytest.raises(steadystep.MisuseError, match=r"watcher\.loss"):
            opt.step()
        with pytest.raises(steadystep.MisuseError, match="one real number"):
            watcher.loss(torch.zeros(3))


def test_a_step_without_gradients_does_nothing() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with steadystep.watch(model, opt) as watcher:
        opt.step()
        assert watcher.outcome is None
        assert watcher.guard.attempts == 0


@pytest.mark.parametrize(
    "config",
    [
        {"training": {"mixed_precision": "bf16"}},
        {"training": {"gradient_accumulation_steps": 2}},
        {"monitoring": {"save_checkpoints": True}},
    ],
)
def test_what_the_loop_does_itself_is_refused_as_a_setting(config: dict[str, Any]) -> None:
    model = small_net()
    with pytest.raises(steadystep.ConfigError, match="the loop does this itself"):
        steadystep.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)


def test_a_step_that_raises_leaves_the_learning_rate_alone() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = steadystep.watch(model, opt)
    watcher.guard._parts.learning_rate.ceiling.limit(0.01)

    def fails(*_: Any) -> None:
        raise RuntimeError("in the step")

    handle = opt.register_step_pre_hook(fails)
    squared(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="in the step"):
        opt.step()
    handle.remove()
    watcher.remove()
    assert opt.param_groups[0]["lr"] == 0.1


def test_observe_never_touches() -> None:
    plain, _, _ = loop(watched=False, bad=(10,))
    state, outcomes, _ = loop(bad=(10,), config=steadystep.observe())
    assert_same(plain, state)
    assert outcomes[10].diagnosis.cause == "non-finite-loss"


def test_refusals_have_a_budget() -> None:
    with pytest.raises(steadystep.TrainingHalted):
        loop(bad=tuple(range(5, 24)), config={"recovery": {"max_skips_in_a_row": 4}})
    gc.collect()


def test_the_state_can_be_carried_over() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with steadystep.watch(model, opt) as first:
        for x in batches(5):
            opt.zero_grad()
            squared(model, x).backward()
            opt.step()
        saved = first.guard.state_dict()
    with steadystep.watch(model, opt) as second:
        second.guard.load_state_dict(saved)
        assert (second.guard.attempts, second.guard.updates) == (5, 5)
        assert second.guard.state_dict() == saved


class Foreign:
    """A scheduler that is not torch's: the loop tells it where it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step_update(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)


class Foreigner(Foreign):
    """As timm's, with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": 1e-2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("kind", [Foreign, Foreigner])
def test_a_scheduler_without_a_place_of_its_own_is_left_alone(kind: type[Foreign]) -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler, rates = kind(opt), []
    with steadystep.watch(model, opt, schedulers=[scheduler]) as watcher:
        for number, x in enumerate(batches(8)):
            scheduler.step_update(number)
            opt.zero_grad()
            squared(model, x * math.nan if number in (0, 4) else x).backward()
            opt.step()
            assert watcher.outcome is not None
            assert watcher.outcome.signals is not None
            rates.append(watcher.outcome.signals.lr)
    assert rates == [1e-2 / (1 + number) for number in range(8)]


class OwnTensor(torch.Tensor):
    """A subclass without anything of its own: torch calls its methods twice, outside and inside."""


def test_a_loss_of_a_subclass_is_heard_once() -> None:
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with steadystep.watch(model, opt) as watcher:
        loss = squared(model, batches(1)[0]).as_subclass(OwnTensor)
        loss.backward()
        opt.step()
        assert watcher.outcome is not None
        assert watcher.outcome.signals is not None
        assert watcher.outcome.signals.losses == (float(loss.detach()),)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_backward_that_somebody_else_has_wrapped(when: str) -> None:
    calls: list[Tensor] = []

    def wrap() -> None:
        plain = torch.Tensor.backward

        @functools.wraps(plain)
        def theirs(self: Tensor, *args: Any, **kwargs: Any) -> None:
            calls.append(self)
            plain(self, *args, **kwargs)

        torch.Tensor.backward = theirs  # type: ignore[method-assign]

    try:
        if when == "before":
            wrap()
        for _ in range(2):  # the second watcher finds theirs in front of ours, or ours gone
            _, outcomes, _ = loop(count=3, optimizer="SGD")
            assert [len(o.signals.losses) for o in outcomes if o.signals] == [1, 1, 1]
            if when == "meanwhile":
                model = small_net()
                with steadystep.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)):
                    wrap()
                when = "over"
        assert calls
    finally:
        torch.Tensor.backward = PLAIN_BACKWARD  # type: ignore[method-assign]
