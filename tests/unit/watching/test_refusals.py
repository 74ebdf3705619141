"""Under `watch` a refused step leaves weights and optimizer state at their bits, whatever the optimizer."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep
from tests.loops import assert_same, batches, full_state, small_net, squared


def evaluated(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class KeepsMoving(Optimizer):
    """Muon as many wrote it: a missing gradient is a zero one, and the momentum goes on."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "k": 0, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                bank = self.state[p]
                if "momentum" not in bank:
                    bank["momentum"] = torch.zeros_like(p)
                bank["momentum"] = bank["momentum"] * group["momentum"] + p.grad
                p.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(bank["momentum"], alpha=group["lr"])
        return loss


class Counting(Optimizer):
    """As schedule-free ones: it counts and averages in its groups, and never asks whether there is a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})
        self.history: list[float] = []
        self.rate = torch.tensor(1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1.0 / group["k"])
        self.rate.mul_(0.99)
        self.history.append(float(self.rate))
        return loss


class Bank:
    """Moments beside the optimizer's own state."""

    def __init__(self) -> None:
        self.moments: dict[int, Tensor] = {}
        self.steps = 0


class Outside(Optimizer):
    """Its moments are in an object of its own, and it draws noise."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.bank = Bank()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        self.bank.steps += 1
        for i, p in enumerate(self.param_groups[0]["params"]):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            moment = self.bank.moments.setdefault(i, torch.zeros_like(p))
            moment.lerp_(grad, 0.1)
            p.add_(moment + 1e-3 * torch.randn_like(p), alpha=-self.param_groups[0]["lr"])
        return loss


class Lookahead(Optimizer):
    """Wraps another one and pulls the weights to slow copies of them."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.inner = torch.optim.Adam(params, lr=lr)
        self.slow = [p.detach().clone() for p in self.inner.param_groups[0]["params"]]
        self.turn = 0
        super().__init__(self.inner.param_groups, {"lr": lr})
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        self.inner.step()
        self.turn += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)
        return loss


class Perturbing(Optimizer):
    """As SAM: it has moved the weights by the time it calls its closure."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["old"] = p.detach().clone()
                    p.data.add_(0.01)
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "old" in self.state[p]:
                    p.copy_(self.state[p]["old"])
                p.sub_(p.grad, alpha=group["lr"])
        return loss


class MyAdam(torch.optim.Adam):
    """A subclass of torch's own that does something more."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.999)
        return loss


OWN = (KeepsMoving, Counting, Outside, Lookahead, Perturbing, MyAdam)
TORCHS: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "AdamW with a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {**TORCHS, **{kind.__name__: kind for kind in OWN}}


def everything(model: nn.Module, opt: Optimizer) -> dict[str, Any]:
    """Weights, buffers, state, groups and what else the optimizer has."""
    own = {k: v for k, v in vars(opt).items() if k not in ("param_groups", "state") and "_hooks" not in k}
    held = vars(own["bank"]) if "bank" in own else {}
    inner = own["inner"].state_dict() if "inner" in own else {}
    kept = {k: v for k, v in own.items() if isinstance(v, int | float | list | Tensor) and k[0] != "_"}
    return copy.deepcopy(
        {"tensors": full_state(model, opt), "state": opt.state_dict(), "own": kept, "bank": held, "inner": inner}
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def run(make: Callable[[Any], Optimizer], bad: set[int], *, closure: bool, watched: bool = True) -> dict[str, Any]:
    """Ten steps; a refused one must change nothing, random numbers included."""
    model = small_net(dropout=0.0)
    opt = make(model.parameters())
    watcher = steadystep.watch(model, opt) if watched else None
    torch.manual_seed(1)
    for i, x in enumerate(batches(10)):

        def evaluate(i: int = i, x: Tensor = x) -> Tensor:
            opt.zero_grad()
            loss = squared(model, x * (math.nan if i in bad else 1.0))
            loss.backward()
            return loss

        before, random = everything(model, opt), torch.get_rng_state()
        if closure:
            opt.step(evaluate)
        else:
            evaluate()
            opt.step()
        if i in bad:
            assert watcher is not None
            assert watcher.outcome is not None
            assert not watcher.outcome.stepped
            assert same(before, everything(model, opt))
            assert closure or torch.equal(random, torch.get_rng_state())
            assert all(p.grad is None for group in opt.param_groups for p in group["params"])
    state = everything(model, opt)
    if watcher is not None:
        watcher.remove()
    return state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_refused_step_changes_nothing(name: str) -> None:
    run(OPTIMIZERS[name], {0, 4, 5, 9}, closure=False)


@pytest.mark.parametrize("kind", OWN)
def test_nor_does_one_with_a_closure(kind: Callable[[Any], Optimizer]) -> None:
    run(kind, {0, 4, 5, 9}, closure=True)
    assert same(run(kind, set(), closure=True), run(kind, set(), closure=True, watched=False))


@given(st.sampled_from(list(OPTIMIZERS)), st.sets(st.integers(0, 9), max_size=4), st.booleans())
@settings(max_examples=8, deadline=None)
def test_wherever_it_is_refused(name: str, bad: set[int], closure: bool) -> None:
    run(OPTIMIZERS[name], bad, closure=closure)


def test_sparse_gradients_stay_sparse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"))

    class OwnSparse(torch.optim.SparseAdam):
        """Refuses dense gradients, zeros too."""

    for kind in (torch.optim.SparseAdam, OwnSparse):
        opt = kind(model.parameters(), lr=1e-2)
        with steadystep.watch(model, opt) as watcher:
            for factor in (1.0, math.nan, 1.0):
                before = full_state(model, opt)
                opt.zero_grad()
                (model(torch.arange(6).reshape(2, 3)).square().mean() * factor).backward()
                opt.step()
                assert watcher.outcome is not None
                assert watcher.outcome.stepped == math.isfinite(factor)
                if not watcher.outcome.stepped:
                    assert_same(before, full_state(model, opt))


def test_after_a_rollback_the_optimizer_does_not_move_on() -> None:
    """The step in which the weights went back is one without an update too."""
    model = small_net(dropout=0.0)
    opt = KeepsMoving(model.parameters())
    with steadystep.watch(model, opt) as watcher:
        states: dict[int, dict[str, Tensor]] = {}
        for i, x in enumerate(batches(100)):
            if i == 90:
                with torch.no_grad():
                    next(model.parameters()).fill_(math.inf)
            opt.zero_grad()
            squared(model, x).backward()
            opt.step()
            assert watcher.outcome is not None
            states[watcher.guard.updates] = full_state(model, opt)
            if watcher.outcome.restored is not None:
                break
        back = watcher.outcome.restored
        assert back is not None
        assert watcher.outcome.replayed is not None
        if not watcher.outcome.replayed:
            assert_same(states[back], full_state(model, opt))


class Turning(Optimizer):
    """Calls its closure once for a long time, and then twice."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for _ in range(1 + (self.calls > 5)):
            with torch.enable_grad():
                loss = closure()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1e-2)
        self.calls += 1
        return loss


@pytest.mark.parametrize("when", [7, 8])
def test_what_cannot_be_undone_is_an_error(when: int) -> None:
    model = small_net(dropout=0.0)
    opt = Turning(model.parameters())
    with steadystep.watch(model, opt):
        for i, x in enumerate(batches(8), start=1):
            evaluations = 0

            def evaluate(i: int = i, x: Tensor = x) -> Tensor:
                nonlocal evaluations
                evaluations += 1
                opt.zero_grad()
                loss = squared(model, x) * (math.nan if i == when and evaluations == 2 else 1.0)
                loss.backward()
                return loss

            before = full_state(model, opt)
            if i == when == 7:
                with pytest.raises(steadystep.UnsupportedError, match="cannot be undone"):
                    opt.step(evaluate)
                return
            opt.step(evaluate)
            if i == when:
                assert_same(before, full_state(model, opt))


def test_a_refused_step_that_raises_leaves_no_trace_either() -> None:
    class Failing(KeepsMoving):
        def step(self, closure: Any = None) -> Any:
            super().step()
            if all(not bool(p.grad.any()) for group in self.param_groups for p in group["params"]):
                raise RuntimeError("no gradient")

    model = small_net(dropout=0.0)
    opt = Failing(model.parameters())
    watcher = steadystep.watch(model, opt)
    for x in batches(3):
        opt.zero_grad()
        squared(model, x).backward()
        opt.step()
    before = full_state(model, opt)
    opt.zero_grad()
    (squared(model, batches(1)[0]) * math.nan).backward()
    with pytest.raises(RuntimeError, match="no gradient"):
        opt.step()
    watcher.remove()
    assert_same(before, full_state(model, opt))
