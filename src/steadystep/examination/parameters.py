"""Parameters that nothing can move, and why; the learning rates to come."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep._utils.tensors import graph_nodes, norm_of, rms_of
from steadystep._utils.tree import mapped
from steadystep.examination.workbench import Prepare, Workbench
from steadystep.signals.structure import untrained_heads

_REGISTERED = ("_parameters", "_buffers", "_modules")
_MOST_PARTS = 10_000
_BACKWARDS = 8
_FUTURE = 200
_TINY_LOSS = 1e-4
_LEAST_HALF = 2.0**-25  # rounds to zero in float16


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
    """Tensors that the loss depends on, held by the model in a plain container, and not in the optimizer."""
    untrained_heads: tuple[str, ...] = ()
    """Parameters of a last layer that is in no optimizer."""
    equal: tuple[str, ...] = ()
    """Matrices whose elements are all the same."""
    rounded: float = 0.0
    """The share of elements with a gradient that an update leaves as they are, in weights of 16 bits."""
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
    """Names of the weights in float16."""
    rounds_eps: bool = False
    """The eps of the optimizer is zero in float16."""
    scheduled: bool = False
    """A schedule of torch has been attached to the optimizer."""


def observe_parameters(bench: Workbench) -> Parameters:
    """A backward pass for several batches, and which parameters these, the flags and the optimizer leave out."""
    rates = {id(p): float(group["lr"]) for group in bench.optimizer.param_groups for p in group["params"]}  # sync: once
    named = dict(bench.model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    norms, heads = dict.fromkeys(trained, 0.0), tuple[str, ...]()
    leaves: dict[int, Tensor] = {}
    with bench.set_aside():
        for batch in bench.batches[:_BACKWARDS]:
            bench.optimizer.zero_grad()
            for p in named.values():
                p.grad = None
            with suppress(RuntimeError):  # why: a loss without a graph leaves every gradient out, which is reported
                loss = bench.loss(batch)
                leaves.update((id(leaf), leaf) for leaf in leaves_of(loss))
                heads = heads or untrained_heads(loss, bench.model, rates)
                torch.autograd.backward(loss)
            for name, p in trained.items():
                if p.grad is not None:
                    norms[name] = max(norms[name], norm_of(p.grad))
    outside = (_unregistered(bench.model) & leaves.keys()) - names.keys() - rates.keys()
    return Parameters(
        trainable=sum(p.numel() for p in trained.values()),
        total=sum(p.numel() for p in named.values()),
        frozen=tuple(name for name in named if name not in trained),
        not_in_optimizer=tuple(name for name, p in trained.items() if id(p) not in rates and norms[name] != 0.0),
        outside_model=len(outside),
        untrained_heads=heads,
        equal=tuple(n for n, p in trained.items() if p.dim() > 1 and p.numel() and _is_one_number(p)),
        rounded=_rounded(bench),
        strangers=sum(key not in names and key not in leaves for key in rates),
        held=len(rates),
        rate_zero=tuple(name for name, p in trained.items() if rates.get(id(p)) == 0.0),
        no_gradient=tuple(name for name, p in trained.items() if norms[name] == 0.0 and id(p) in rates),
        norms=norms,
        sizes={name: rms_of(p) for name, p in trained.items()},
        scheduled=any("initial_lr" in group for group in bench.optimizer.param_groups),
        half_precision=tuple(name for name, p in trained.items() if p.dtype == torch.float16),
        rounds_eps=any(0.0 < group.get("eps", 0.0) < _LEAST_HALF for group in bench.optimizer.param_groups),
    )


def _unregistered(model: nn.Module) -> set[int]:
    """Parameters in lists, tuples and dicts of the model's modules, which `model.parameters()` does not find."""
    found: set[int] = set()
    waiting: list[Any] = [
        value for module in model.modules() for name, value in vars(module).items() if name not in _REGISTERED
    ]
    for value in waiting:  # it grows meanwhile
        if isinstance(value, list | tuple | dict) and len(waiting) < _MOST_PARTS:
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, nn.Module):
            found.update(id(p) for p in value.parameters())
        elif isinstance(value, Tensor):
            found.add(id(value))
    return found


@torch.no_grad()
def _rounded(bench: Workbench) -> float:
    coarse = [p for _, p in bench.parameters if p.dtype in (torch.float16, torch.bfloat16)]
    if not coarse:
        return 0.0
    with bench.set_aside():
        before = [p.clone() for p in coarse]
        with torch.enable_grad(), suppress(RuntimeError):
            torch.autograd.backward(bench.loss(bench.batches[0]))
            bench.optimizer.step()
        pairs = [(p == old)[p.grad != 0] for p, old in zip(coarse, before, strict=True) if p.grad is not None]
        same = torch.cat([pair.flatten() for pair in pairs]) if pairs else torch.zeros(1)
        return float(same.float().mean()) if same.numel() else 0.0  # sync: examined


def reached(bench: Workbench, prepare: Prepare) -> frozenset[str]:
    """Parameters that get a gradient which is not zero, after `prepare`."""
    with bench.set_aside():
        prepare(bench.model, bench.optimizer)
        with suppress(RuntimeError):  # why: a loss without a graph
            torch.autograd.backward(bench.loss(bench.batches[0]))
        named = bench.model.named_parameters()
        return frozenset(name for name, p in named if p.grad is not None and norm_of(p.grad) != 0.0)


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
    return (node.variable for node in graph_nodes([loss], set()) if hasattr(node, "variable"))


def _is_one_number(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())  # sync: once


def thaw(model: nn.Module, optimizer: Optimizer, frozen: Sequence[str]) -> None:
    """Make frozen parameters trainable, in the optimizer too; `set_aside` puts the flags back."""
    named = dict(model.named_parameters())
    for name in frozen:
        named[name].requires_grad_(named[name].is_floating_point())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    hold_too(model, optimizer, [name for name in frozen if id(named[name]) not in held])


def hold_too(model: nn.Module, optimizer: Optimizer, left_out: Sequence[str]) -> None:
    """Give these to the optimizer as well."""
    optimizer.param_groups = list(optimizer.param_groups)  # the list that the user has stays as it is
    named = dict(model.named_parameters())
    if left_out:
        optimizer.add_param_group({"params": [named[name] for name in left_out]})


@torch.no_grad()
def restart(model: nn.Module, optimizer: Optimizer) -> None:
    """Draw every weight again, and forget the optimizer's moments.

    As its module knows how to; a matrix whose module does not, with the mean and the deviation that it has.
    """
    drawn: set[int] = set()
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
            drawn.update(id(p) for p in module.parameters(recurse=False))
    for p in model.parameters():
        if id(p) not in drawn and p.requires_grad and p.dim() > 1 and p.numel() > 1:
            p.copy_(p.mean() + p.std() * torch.randn_like(p))
    optimizer.state.clear()


@torch.no_grad()
def restart_plainly(model: nn.Module, optimizer: Optimizer) -> None:
    """Draw every matrix anew with a deviation of 1 / sqrt(inputs), and set biases to 0 and scales of norms to 1."""
    restart(model, optimizer)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.dim() > 1:
            p.normal_(0.0, 1.0 / math.sqrt(p[0].numel()))
        else:
            p.fill_(1.0 if name.endswith("weight") else 0.0)


def rounding_of(bench: Workbench, batch: Any) -> float | None:
    """By which share the loss of a batch changes in double precision; None where that cannot be told."""
    kept = [(t, t.data) for t in (*bench.model.parameters(), *bench.model.buffers()) if t.is_floating_point()]
    if any(data.dtype is not torch.float32 for _, data in kept):
        return None
    default = torch.get_default_dtype()
    with bench.set_aside():
        bench.model.eval()  # why: dropout draws other numbers in double precision
        plain = bench.losses([batch, batch])
        if plain[0] != plain[1] or not abs(plain[0]) > _TINY_LOSS:  # drawn at random, or next to nothing
            return None
        try:
            for tensor, data in kept:
                tensor.data = data.double()
            torch.set_default_dtype(torch.float64)
            finer = mapped(batch, lambda t: t.double() if t.dtype is torch.float32 else t)
            return abs(bench.losses([finer])[0] - plain[0]) / abs(plain[0])
        except (RuntimeError, ValueError, TypeError):  # a loss that asks for a dtype
            return None
        finally:
            torch.set_default_dtype(default)
            for tensor, data in kept:
                tensor.data = data
