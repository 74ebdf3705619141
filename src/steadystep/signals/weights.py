"""The norm of each weight tensor, every so many steps and whenever something is not finite; and edits by the loop.

Gradients tell what updates will do to the weights, not what else has happened to them: a flipped bit in a row of an
embedding that no batch uses, a layer that somebody's code has zeroed. Weights that the loop itself replaces look like
damage from outside, and are meant: a lottery ticket rewound, a better member of a population copied, an average swapped
in. What is swapped in and out again between two steps changes nothing.
"""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadystep._utils.tensors import Layout, layout_of, local_part, measure, peaks
from steadystep._utils.text import plain_name
from steadystep.layers.limits import BoundedEmbedding, bounded
from steadystep.optimizers import Trained
from steadystep.records import WeightStats
from steadystep.signals.activations import SilentHook, evenly_chosen
from steadystep.signals.gradients import Gradients
from steadystep.signals.samples import is_plain, sample

OFFSET = 7  # not at the round numbers where people save, validate and change things


@final
class WeightNorms:
    """One pass over the weights when it is due; its numbers ride along with the step's host read."""

    def __init__(self, gradients: Gradients, *, wanted: bool = True, infinite: Container[str] = ()) -> None:
        """`infinite` names parameters whose norm is so on purpose: they are left out."""
        self._gradients = gradients
        self._infinite = infinite
        self._wanted = wanted
        self._layout: Layout | None = None
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Of the tensors that were measured last."""
        return self._names

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        """Norms on the device, now."""
        if not self._wanted:
            return []
        names, parameters = self._gradients.named()
        if self._infinite:
            held = [(n, p) for n, p in zip(names, parameters, strict=True) if n not in self._infinite]
            names, parameters = tuple(n for n, _ in held), tuple(p for _, p in held)
        self._names = names
        weights: list[Tensor] = [local_part(parameter).detach() for parameter in parameters]
        if self._layout is None or not self._layout.fits(weights):
            self._layout = layout_of(weights)
        try:
            return measure(weights, self._layout)
        except (RuntimeError, NotImplementedError):  # why: weights that torch cannot measure must not cost the step
            self._wanted = False
            return []

    @torch.no_grad()
    def begin(self) -> list[Tensor]:
        """RMS and standard deviation of each tensor, once, before the first update."""
        norms = self.measure()
        if not norms:
            return []
        held = dict(zip(*self._gradients.named(), strict=True))
        parts = [local_part(held[name]).detach() for name in self._names]
        if not all(is_plain(part) and part.numel() for part in parts):
            return []
        sizes = [norm * part.numel() ** -0.5 for norm, part in zip(norms, parts, strict=True)]
        return [*sizes, *(part.float().std(correction=0).to(norms[0]) for part in parts)]

    def read(self, values: Sequence[float]) -> WeightStats:
        """The record, from the numbers of `begin`."""
        count = len(values) // 2
        return WeightStats(names=self._names, rms=tuple(values[:count]), std=tuple(values[count:]))


_MOST = 64
EmbeddingTable = nn.Embedding | nn.EmbeddingBag


@final
class RowNorms:
    """Looks at the tables of a model that are being trained; one that is shared or tied comes once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: tuple[str, ...] = ()
        """The tables that were measured last."""

    def measure(self) -> list[Tensor]:
        """One flat tensor: the largest row norm of each of `names`; or none. Call it with the gradients in place."""
        found: dict[str, Tensor] = {}
        for name, module in evenly_chosen(self._trained(), _MOST):
            rows = _rows(module.weight)
            if isinstance(module, BoundedEmbedding):  # it bounds what the update has written at the next lookup
                rows = bounded(rows, module.max_norm, module.norm_type)
            if rows.numel():
                exact = torch.promote_types(rows.dtype, torch.float32)
                found[name] = torch.linalg.vector_norm(rows, dim=-1, dtype=exact).amax()
        self.names = tuple(found)
        norms = list(found.values())
        return [torch.stack([norm.to(norms[0].device) for norm in norms])] if norms else []

    def _trained(self) -> list[tuple[str, EmbeddingTable]]:
        found: dict[int, tuple[str, EmbeddingTable]] = {}
        for name, module in self._model.named_modules():
            # why: reading a parametrised weight computes it again, and may change its state
            if isinstance(module, EmbeddingTable) and not parametrize.is_parametrized(module):
                weight: object = getattr(module, "weight", None)
                # why: a subclass is quantised or sharded, and costs too much to look at
                if type(weight) is nn.Parameter and weight.requires_grad and is_plain(weight):
                    found.setdefault(id(weight), (plain_name(name) or type(module).__name__, module))
        return list(found.values())


def _rows(weight: Tensor) -> Tensor:
    """All rows; of a table with a sparse gradient, which may be huge, those that the update has touched."""
    gradient = weight.grad
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return weight.detach()
    return weight.detach()[gradient._indices()[0]]


_KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@final
class StatePeaks:
    """One pass when it is due, with that over the weights; its numbers ride along with the step's host read."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: Optimizer,
        kept: Callable[[], Mapping[str, Tensor]],
        *,
        wanted: bool = True,
    ) -> None:
        """`kept` gives the tensors of kept objects; not `wanted`, nothing is ever measured."""
        self._gradients = gradients
        self._optimizer = optimizer
        self._kept = kept
        self._wanted = wanted
        self.names: tuple[str, ...] = ()
        """Of the tensors that were measured last."""

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        """On the device, now."""
        if not self._wanted:
            return []
        held = self._moments()
        held |= {name: t.detach() for name, t in self._kept().items() if t.dtype in _KINDS and t.numel()}
        self.names = tuple(held)
        try:
            return peaks(list(held.values())) if held else []
        except (RuntimeError, NotImplementedError):  # why: what torch cannot measure must not cost the step
            self._wanted = False
            return []

    def _moments(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in zip(*self._gradients.named(), strict=True):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                held = local_part(value) if isinstance(value, Tensor) else None
                # why: a subclass is quantised, one that is not dense or elsewhere costs too much to look at
                if type(held) is Tensor and held.dtype in _KINDS and held.numel() > 1:
                    found[f"{key} of {name}"] = held.detach()
        return found


_MOST_TENSORS = 32  # of a model with more, evenly chosen ones


@final
class GradientSamples:
    """Due at `every`, and from 10 times `every` on at its multiples; never when `every` is None."""

    def __init__(self, every: int | None) -> None:
        self._every = every

    def due(self, step: int) -> bool:
        """Whether it is time."""
        return self._every is not None and step > 0 and (step == self._every or step % (10 * self._every) == 0)

    @torch.no_grad()
    def take(self, names: Sequence[str], grads: Sequence[Tensor]) -> dict[str, NDArray[np.float32]]:
        """Up to 4,096 elements of each gradient by name, on the host."""
        plain = [(name, grad) for name, grad in zip(names, grads, strict=True) if is_plain(grad) and grad.numel()]
        chosen = plain[:: -(-len(plain) // _MOST_TENSORS) or 1]
        if not chosen:
            return {}
        try:
            parts = [sample(grad).float() for _, grad in chosen]
            home = parts[0].device
            values = torch.cat([part.to(home) for part in parts]).cpu().numpy()  # sync: every 1,000 steps by default
        except RuntimeError:  # why: a tensor that cannot be sampled costs the picture, never the step
            return {}
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return dict(zip((name for name, _ in chosen), np.split(values, ends), strict=True))


_MEASURED_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


@final
class WeightEdits:
    """Compares the norms of all weights before the first `load_state_dict` since the last step with those after it.

    A healthy step costs one look at a flag. On several ranks only what is announced counts: a hook that one of
    them missed would part them.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Trained,
        optimizers: Sequence[Optimizer] = (),
        *,
        hooked: bool = True,
    ) -> None:
        self._trained = trained
        self._before: Tensor | None = None
        self.edition = 0
        """How often they have changed."""
        self.suspected = False
        """They may have since `count` was asked last."""
        self._replaced = False
        """The optimizer's state was."""
        told = weakref.WeakMethod(self.expect)  # why: the model must not keep a guard that was dropped, nor its moments
        hook = SilentHook(lambda *_: (expect := told()) and expect())
        modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)] if hooked else []
        self._handles: list[RemovableHandle] = [
            each.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            for each in modules
        ]
        gone = weakref.WeakMethod(self._replace)
        hook = SilentHook(lambda *_: (replace := gone()) and replace())
        if hooked:
            with suppress(AttributeError):  # why: an optimizer that wraps another one need not have hooks
                self._handles += [each.register_load_state_dict_pre_hook(hook) for each in optimizers]
        weakref.finalize(self, _remove, self._handles)

    def expect(self) -> None:
        """Weights may be about to change."""
        self.suspected = True
        if self._before is None:
            self._before = self._norms()

    def count(self) -> int:
        """How often they have changed so far, to something finite; to be asked where they are `suspected` to."""
        self.suspected = False
        if self._before is not None:
            before, self._before = self._before, None
            now = self._norms()
            same = now.shape == before.shape and torch.equal(now, before)  # sync: only after a `load_state_dict`
            self._replaced = self._replaced or (not same and bool(now.isfinite().all()))
        self.edition += self._replaced
        self._replaced = False
        return self.edition

    def remove(self) -> None:
        """The model is as it was."""
        _remove(self._handles)

    def forget(self) -> None:
        """What was loaded belongs to a state that the guard is given too."""
        self._before, self._replaced, self.suspected = None, False, False

    def _replace(self) -> None:
        self._replaced = self.suspected = True

    def _norms(self) -> Tensor:
        weights = [local_part(weight).detach() for weight in self._trained.parameters if weight.dtype in _MEASURED_IN]
        norms = [torch.linalg.vector_norm(weight, dtype=_MEASURED_IN[weight.dtype]) for weight in weights]
        device = norms[0].device if norms else None
        return torch.cat([norm.reshape(1).to(device) for norm in norms]) if norms else torch.zeros(0)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
