"""After a rollback the updates of a watched loop are made again, from what was seen of it, where it was seen whole."""

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad, clip_grad_norm_

import steadystep
from steadystep.watching.listeners import _scaled

COUNT, AT = 200, 120


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


class OwnLoss(nn.Module):
    """Returns its loss, as nanoGPT and the models of transformers do; and draws noise where no module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x + 0.1 * torch.randn_like(x))
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


def by_function(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    wanted = torch.zeros_like(out)
    wanted[torch.arange(len(y)), y] = 1.0
    right = (out.argmax(-1) == y).float().mean().item()
    loss: Tensor = (out.softmax(-1) - wanted).square().sum(-1).mean() * (1.0 if right >= 0 else 0.0)
    return loss


def by_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(x, labels=y)["loss"]
    return loss


def in_bf16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model(x), y)


def teacher_of(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), *(nn.Tanh() for _ in range(70)), nn.Dropout(), nn.Linear(16, 3)).eval()


TEACHER, FOLLOWER = teacher_of(1), teacher_of(2)


def by_teacher(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A frozen network with weights that would take gradients, and more layers than a loss has functions."""
    out = model(x)
    with torch.no_grad():
        wanted = (5.0 * TEACHER(x)).softmax(-1)
    return functional.kl_div(out.log_softmax(-1), wanted, reduction="batchmean") + functional.cross_entropy(out, y)


def by_follower(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A target network: what it said of a batch, it would not say again."""
    out = model(x)
    with torch.no_grad():
        wanted = FOLLOWER(x).softmax(-1)
        for parameter in FOLLOWER.parameters():
            parameter.mul_(0.999)
    return functional.kl_div(out.log_softmax(-1), wanted, reduction="batchmean") + functional.cross_entropy(out, y)


def flip(model: nn.Module) -> None:
    weight = next(p for p in model.parameters() if p.ndim == 2)
    with torch.no_grad():
        weight.view(torch.int32)[3, 2] ^= 1 << 30


def zero(model: nn.Module) -> None:
    with torch.no_grad():
        [p for p in model.parameters() if p.ndim == 2][-1].zero_()


def run(
    fault: Callable[[nn.Module], None] | None,
    *,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = by_function,
    watched: bool = True,
    clip: float | None = None,
    micro_batches: int = 1,
    late_clear: bool = False,
    overwritten: bool = False,
    count: int = COUNT,
) -> tuple[dict[str, Tensor], list[steadystep.Outcome], Any]:
    """A loop, its weights at the end, what was done about it, and its scheduler."""
    model: nn.Module = OwnLoss() if loss_of is by_model else net()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, COUNT)
    watcher = steadystep.watch(model, opt) if watched else None
    rng = torch.Generator().manual_seed(3)
    weight, acts = torch.randn(6, 3, generator=rng), []
    torch.manual_seed(5)
    buffer = torch.zeros(32, 6)
    for i in range(count):
        if i == AT and fault is not None:
            fault(model)
        if not late_clear:
            opt.zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(32, 6, generator=rng)
            y = (x @ weight).argmax(-1)
            x = buffer.copy_(x) if overwritten else x
            loss = loss_of(model, x, y)
            loss = loss / micro_batches if micro_batches > 1 else loss
            if late_clear:
                opt.zero_grad()
            loss.backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        opt.step()
        scheduler.step()
        if watcher is not None:
            assert watcher.outcome is not None
            if watcher.outcome.plan.actions:
                acts.append(watcher.outcome)
    if watcher is not None:
        assert watcher.guard.updates == scheduler.last_epoch
        watcher.remove()
    assert torch._C._len_torch_function_stack() == 0
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, acts, scheduler


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("fault", "way"),
    [
        (flip, {}),
        (zero, {"clip": 0.3}),
        pytest.param(flip, {"loss_of": by_model}, marks=pytest.mark.slow),
        pytest.param(flip, {"loss_of": by_hand, "late_clear": True}, marks=pytest.mark.slow),
        (zero, {"micro_batches": 2, "loss_of": in_bf16}),
        (flip, {"loss_of": by_teacher}),
    ],
)
def test_damage_to_the_weights_costs_nothing(fault: Callable[[nn.Module], None], way: dict[str, Any]) -> None:
    clean, _, _ = run(None, watched=False, **way)
    state, acts, _ = run(fault, **way)
    assert [act.plan.actions for act in acts] == [("rollback", "replay")]
    assert acts[0].replayed > 0
    assert same(clean, state)


def test_a_healthy_loop_is_bit_identical() -> None:
    for way in ({"clip": 0.3}, {"loss_of": by_model}, {"loss_of": by_hand, "late_clear": True}):
        plain, _, _ = run(None, watched=False, count=40, **way)  # type: ignore[arg-type]
        state, acts, _ = run(None, count=40, **way)  # type: ignore[arg-type]
        assert same(plain, state)
        assert not acts


def test_inputs_that_were_written_over_are_not_run_again() -> None:
    """The loop fills one buffer again and again: there is nothing left to learn from."""
    state, acts, _ = run(flip, overwritten=True)
    assert acts[0].restored is not None
    assert acts[0].replayed == 0
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_what_a_network_said_that_has_changed_since_is_not_run_again() -> None:
    _, acts, _ = run(flip, loss_of=by_follower)
    assert acts[0].restored is not None
    assert acts[0].replayed == 0


def test_a_nan_between_backward_and_clipping_reaches_no_weight() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with steadystep.watch(model, opt) as watcher:
        for i in range(6):
            opt.zero_grad()
            by_function(model, torch.randn(8, 6), torch.zeros(8, dtype=torch.long)).backward()
            if i == 4:
                model[4].weight.grad[0, 0] = math.nan  # type: ignore[index]
            clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            assert watcher.outcome is not None
            assert watcher.outcome.stepped == (i != 4)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def micro_batches(loop: Callable[[nn.Module, torch.optim.Optimizer], None], model: nn.Module | None = None) -> int:
    """How many updates of a loop could be made again."""
    model = net() if model is None else model
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with steadystep.watch(model, opt) as watcher:
        for _ in range(4):
            opt.zero_grad()
            loop(model, opt)
            opt.step()
        return len(watcher.guard._parts.recovery.missed(0))


def test_what_hooks_do_not_see_whole_is_not_made_again() -> None:
    critic, x, y = nn.Linear(3, 1), torch.randn(8, 6), torch.zeros(8, dtype=torch.long)

    def whole(model: nn.Module, _: Any) -> None:
        by_function(model, x, y).backward()

    def two_passes(model: nn.Module, _: Any) -> None:
        (by_function(model, x, y) + by_function(model, -x, y)).backward()

    def against_a_critic(model: nn.Module, _: Any) -> None:
        critic(model(x)).mean().backward()

    def two_backwards(model: nn.Module, _: Any) -> None:
        loss = by_function(model, x, y)
        loss.backward(retain_graph=True)
        loss.backward()

    def with_a_penalty(model: nn.Module, _: Any) -> None:
        inputs = x.clone().requires_grad_()
        out = model(inputs).mean()
        (grad,) = torch.autograd.grad(out, inputs, create_graph=True)
        (out + grad.square().mean()).backward()

    def changed_by_hand(model: nn.Module, _: Any) -> None:
        whole(model, None)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)

    def far_too_long(model: nn.Module, _: Any) -> None:
        out = model(x)
        for _i in range(100):
            out = out * 1.0
        out.mean().backward()

    assert micro_batches(whole) == 4
    for loop in (two_passes, against_a_critic, two_backwards, with_a_penalty, changed_by_hand, far_too_long):
        assert micro_batches(loop) == 0, loop.__name__


def test_neither_outputs_nor_graphs_are_kept() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[weakref.ref[Tensor]] = []
    with steadystep.watch(model, opt) as watcher:
        for _ in range(3):
            x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)
            out = model(x)
            loss = functional.cross_entropy(out.view(-1, 3), y)
            seen += [weakref.ref(out), weakref.ref(loss)]
            opt.zero_grad()
            loss.backward()
            del out
            opt.step()
            del loss
        gc.collect()
        assert not [reference for reference in seen if reference() is not None]
        assert len(watcher.guard._parts.recovery.missed(0)) == 3


def test_memory_is_bounded() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with steadystep.watch(model, opt, config={"recovery": {"replay_memory_mb": 0.001}}) as watcher:
        for _ in range(8):
            opt.zero_grad()
            by_function(model, torch.randn(8, 6), torch.zeros(8, dtype=torch.long)).backward()
            opt.step()
        assert not watcher.guard._parts.recovery.remembers
        assert not watcher.guard._parts.recovery.missed(0)


def test_a_watched_model_can_be_copied_and_saved() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with steadystep.watch(model, opt):
        by_function(model, torch.randn(8, 6), torch.zeros(8, dtype=torch.long)).backward()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.randn(8, 6)).mean().backward()
            assert torch._C._len_torch_function_stack() == 0
        opt.step()


def test_a_mode_of_the_loops_own_stays_its_own() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)
    with steadystep.watch(model, opt) as watcher:
        for _ in range(2):
            opt.zero_grad()
            out = model(x)
            with torch.device("cpu"):
                functional.cross_entropy(out, y).backward()
                assert torch._C._len_torch_function_stack() == 1
            assert torch._C._len_torch_function_stack() == 0
            opt.step()
        assert len(watcher.guard._parts.recovery.missed(0)) == 2
        with torch.device("cpu"):
            opt.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            opt.step()
    assert torch._C._len_torch_function_stack() == 0


def test_torchs_clipping_is_left_as_it_was() -> None:
    before = dict(vars(clip_grad))
    model = net()
    with steadystep.watch(model, torch.optim.SGD(model.parameters(), lr=1e-3)):
        assert vars(clip_grad)["_clip_grads_with_norm_"] is _scaled
    assert dict(vars(clip_grad)) == before


def test_trouble_of_the_updates_is_made_again_up_to_its_first_sign() -> None:
    """A learning rate that has led astray: the scheduler stands where the weights are."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 - step / 1000)
    rng = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 3, generator=rng)
    torch.manual_seed(5)
    with steadystep.watch(model, opt) as watcher:
        for i in range(260):
            x = torch.randn(32, 6, generator=rng)
            y = (x @ weight).argmax(-1)
            y = (y + 1) % 3 if 120 <= i < 160 else y
            opt.zero_grad()
            by_function(model, x, y).backward()
            opt.step()
            scheduler.step()
            assert watcher.guard.updates == scheduler.last_epoch
