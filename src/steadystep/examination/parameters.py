"""Parameters that nothing can move, and why; the learning rates to come."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep._utils.tree import tensors_in
from steadystep.examination.workbench import Prepare, Workbench

_BACKWARDS = 8
_FUTURE = 200


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters that cannot learn, by the reason."""

    trainable: int
    """Numbers that may be trained, of all that the model has."""
    total: int
    frozen: tuple[str, ...] = ()
    not_in_optimizer: tuple[str, ...] = ()
    """Of the model, trainable, with a gradient, and in no group."""
    outside_model: int = 0
    """Tensors that the loss depends on and that are neither in the model nor in the optimizer."""
    strangers: int = 0
    """Tensors of the optimizer that the loss does not depend on and that are not in the model."""
    held: int = 0
    """Tensors in the optimizer."""
    rate_zero: tuple[str, ...] = ()
    no_gradient: tuple[str, ...] = ()
    """In the optimizer, trainable, and without a gradient, or with one that is zero, in every batch."""
    norms: dict[str, float]
    """Largest gradient norm of each over the batches."""
    sizes: dict[str, float]
    """Root mean square of each weight."""
    half_precision: tuple[str, ...] = ()
    scheduled: bool = False
    """A schedule of torch has been attached to the optimizer."""


def observe_parameters(bench: Workbench) -> Parameters:
    """A backward pass for several batches, and which parameters these, the flags and the optimizer leave out."""
    rates = {id(p): float(group["lr"]) for group in bench.optimizer.param_groups for p in group["params"]}  # sync: once
    named = dict(bench.model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    batches = bench.batches[:_BACKWARDS]
    trained = {name: p for name, p in named.items() if p.requires_grad}
    norms = dict.fromkeys(trained, 0.0)
    missing = set(trained)
    leaves: dict[int, Tensor] = {}
    with bench.set_aside():
        for batch in batches:
            bench.optimizer.zero_grad()
            for p in named.values():
                p.grad = None
            with suppress(RuntimeError):  # why: a loss without a graph leaves every gradient out, which is reported
                loss = bench.loss(batch)
                leaves.update((id(leaf), leaf) for leaf in leaves_of(loss))
                torch.autograd.backward(loss)
            for name, p in trained.items():
                if p.grad is not None:
                    missing.discard(name)
                    norms[name] = max(norms[name], _norm(p.grad))
    given = {id(t) for batch in batches for _, t in tensors_in(batch)}
    outside = [leaf for key, leaf in leaves.items() if key not in names and key not in rates and key not in given]
    return Parameters(
        trainable=sum(p.numel() for p in trained.values()),
        total=sum(p.numel() for p in named.values()),
        frozen=tuple(name for name in named if name not in trained),
        not_in_optimizer=tuple(name for name, p in trained.items() if id(p) not in rates and norms[name] != 0.0),
        outside_model=len(outside),
        strangers=sum(key not in names and key not in leaves for key in rates),
        held=len(rates),
        rate_zero=tuple(name for name, p in trained.items() if rates.get(id(p)) == 0.0),
        no_gradient=tuple(name for name, p in trained.items() if norms[name] == 0.0 and id(p) in rates),
        norms=norms,
        sizes={name: _rms(p) for name, p in trained.items()},
        scheduled=any("initial_lr" in group for group in bench.optimizer.param_groups),
        half_precision=tuple(name for name, p in trained.items() if p.dtype == torch.float16),
    )


def reached(bench: Workbench, prepare: Prepare) -> frozenset[str]:
    """Parameters that get a gradient which is not zero, after `prepare`."""
    with bench.set_aside():
        prepare(bench.model, bench.optimizer)
        with suppress(RuntimeError):  # why: a loss without a graph
            torch.autograd.backward(bench.loss(bench.batches[0]))
        named = bench.model.named_parameters()
        return frozenset(name for name, p in named if p.grad is not None and _norm(p.grad) != 0.0)


def next_rates(bench: Workbench, scheduler: LRScheduler | None) -> list[float] | None:
    """The learning rates of the next steps of a schedule, which is put back; None without one that goes by steps."""
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return None
    state = copy.deepcopy(scheduler.state_dict())
    rates = []
    with bench.set_aside(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps without an optimizer's step between them are what is meant here
        try:
            for _ in range(_FUTURE):
                rates.append(max(float(group["lr"]) for group in scheduler.optimizer.param_groups))  # sync: examined
                scheduler.step()
        except Exception:  # why all: a schedule that ends raises what it likes
            pass
        finally:
            scheduler.load_state_dict(state)
    return rates


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Every leaf of the graph that gets a gradient: the weights a loss depends on, wherever they are kept."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(parent for parent, _ in node.next_functions)


def _norm(gradient: Tensor) -> float:
    value = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(value.detach().float().norm())  # sync: examined


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().float().square().mean().sqrt())  # sync: examined
