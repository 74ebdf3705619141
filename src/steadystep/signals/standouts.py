"""Steps that stand out of those lately: they are worth computing again, and most of them are healthy."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadystep.records import Signals
from steadystep.signals.activations import SilentHook, numbers_may_leave, open_modules

_SINCE = 64  # steps: what stands out is compared with as many to twice as many before it
_CREDIT = 4.0  # steps that can be called in a row
_MORE_NORM, _MORE_PEAK, _MORE_ROUNDING = 1.5, 1.2, 2.0  # times the largest: of each gradient, buffer, linear layer

_TURNS = 10  # with every 20th step computed again, every second layer is checked at each step


@final
class ProductSums:
    """By how much the outputs of linear layers are off their sums.

    The sum of a row of `x W^T + b` is `x` times the sum of the rows of `W`, plus the sum of `b` (Huang and Abraham,
    1984), up to rounding. A product that came out wrong is further off than rounding was in the steps before.

    Cost: one pass over inputs, outputs and weights of a layer; of all layers, of width 128, a tenth of a step.
    Layers take turns, so that it is about as much as computing every `every`-th step again.
    Only modules are seen, forward, and none if one is compiled.
    """

    def __init__(self, every: int) -> None:
        self._turns = max(every // _TURNS, 1)
        self._layers: list[tuple[str, nn.Linear]] = []
        self._handles: list[RemovableHandle] = []
        self._off: dict[str, Tensor] = {}

    def look_around(self, model: nn.Module) -> None:
        """Find the layers."""
        every = open_modules(model)
        self._layers = [(n, m) for n, m in every if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]

    def listen(self, step: int) -> None:
        """To the forward passes from here on, of the layers whose turn it is."""
        self.stop()
        chosen = self._layers[step % self._turns :: self._turns]
        self._handles = [m.register_forward_hook(SilentHook(partial(self._passed, n))) for n, m in chosen]

    def stop(self) -> dict[str, Tensor]:
        """What was heard: the largest distance in each layer, on its device."""
        for handle in self._handles:
            handle.remove()
        self._handles, off, self._off = [], self._off, {}
        return off

    @torch.no_grad()
    def _passed(self, name: str, layer: nn.Linear, inputs: Any, output: Tensor) -> None:
        if not numbers_may_leave():
            return
        expected = inputs[0].detach() @ layer.weight.sum(0)
        if layer.bias is not None:
            expected += layer.bias.sum()
        off = output.detach().sum(-1).sub_(expected).abs_().amax().float().nan_to_num_(math.inf)
        self._off[name] = torch.maximum(off, self._off[name]) if name in self._off else off


@final
class Standouts:
    """Calls steps worth computing again: larger than anything lately, and no more than one in `every` of them.

    A fault that harms a run shows in the loss, in a gradient, in a running statistic or in the sums of a product at the
    step it happens in. Most steps that stand out are healthy ones; those cost a second computation and nothing else.
    """

    def __init__(self, every: int) -> None:
        self._income, self._credit, self._count = 1.0 / every, 0.0, 0
        self._largest: list[dict[str, float]] = [{}, {}]
        """Of the last whole 64 steps, and of those since: limits by name."""

    def call(self, signals: Signals, products: Sequence[tuple[str, float]] = ()) -> bool:
        """Whether this step stands out, and may be computed again."""
        self._credit = min(self._credit + self._income, _CREDIT)
        if self._count < _SINCE or self._credit < 1.0:
            return False
        before, lately = self._largest
        odd = not signals.all_finite or any(
            value > max(before[name], lately.get(name, -math.inf))
            for name, value, _ in _values(signals, products)
            if name in before
        )
        self._credit -= odd
        return odd

    def learn(self, signals: Signals, products: Sequence[tuple[str, float]] = ()) -> None:
        """What the step came to, once it is known to be right."""
        if not signals.all_finite:
            return
        if self._count % _SINCE == 0:
            self._largest = [self._largest[1], {}]
        self._count += 1
        lately = self._largest[1]
        for name, value, more in _values(signals, products):
            limit = value * more
            if limit < math.inf:
                lately[name] = max(lately.get(name, limit), limit)


def _values(signals: Signals, products: Sequence[tuple[str, float]]) -> Iterator[tuple[str, float, float]]:
    """Name, value, and how many times the largest one stands out."""
    yield "the loss", signals.loss, 1.0
    yield "the gradient norm", signals.grad_norm, 1.0
    yield from ((name, norm, _MORE_NORM) for name, norm in zip(signals.names, signals.norms, strict=True))
    yield from ((name, peak, _MORE_PEAK) for name, peak in zip(signals.buffers, signals.buffer_peaks, strict=True))
    yield from ((f"products of {name}", off, _MORE_ROUNDING) for name, off in products)
