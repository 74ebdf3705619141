"""Learning-rate range test: a short sweep on a snapshot that is restored afterwards.

The test of Smith (2015, "Cyclical Learning Rates for Training Neural Networks"): one training step per learning rate,
rising geometrically from `min_lr` to `max_lr`: lr_k = min_lr * (max_lr / min_lr) ^ (k / (num_steps - 1)).
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.modules import TensorCopy, left_as_found
from steadystep._utils.tensors import device_of
from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.lr_finder.curve import LRCurve, SweepShape, judge_sweep
from steadystep.optimizers import needs_closure

__all__ = ["LRCurve", "SweepShape", "find_lr"]


LossFn = Callable[[Any, Any], Tensor]
LossSource = Callable[[], Tensor] | Iterable[Any]


def losses_from(source: LossSource, model: nn.Module, loss_fn: LossFn | None) -> Iterator[Tensor]:
    """An endless supply of losses, one per step."""
    if isinstance(source, Iterable):
        if loss_fn is None:
            raise MisuseError("with a loader find_lr needs loss_fn=, called as loss_fn(model(x), y); or pass a closure")
        return _from_batches(source, model, loss_fn)
    if not callable(source):
        raise MisuseError(f"expected a closure or an iterable of (x, y) batches, got {type(source).__name__}")
    if loss_fn is not None:
        raise MisuseError("loss_fn is for a loader: a closure returns the loss itself")
    return _from_closure(source)


def _from_closure(closure: Callable[[], Tensor]) -> Iterator[Tensor]:
    while True:
        yield _checked(closure())


def _from_batches(batches: Iterable[Any], model: nn.Module, loss_fn: LossFn) -> Iterator[Tensor]:
    device = device_of(model.parameters())
    seen = 0
    while True:
        before = seen
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise MisuseError(f"a batch must be a pair (x, y), got {type(batch).__name__}: pass a closure instead")
            x, y = (item.to(device) if isinstance(item, Tensor) else item for item in batch)
            seen += 1
            yield _checked(loss_fn(model(x), y))
        if seen == before:
            raise MisuseError(
                f"the batches ended after {seen} and cannot be restarted: pass the loader itself, not an iterator "
                "over it, or lower num_steps"
            )


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise MisuseError(f"the loss must be a tensor of one real number, got {type(loss).__name__}: take its mean")
    if not loss.requires_grad:
        raise MisuseError("the loss has no graph to differentiate: was it detached or converted to a number?")
    return loss


_WARM = 5  # losses before a jump can count as running away
_NOISE = 4.0  # times the usual jump between batches: a single odd batch is no divergence
_SHARE = 0.1  # of the fall so far: a loss near zero may grow by a large factor and still be small


def find_lr(
    model: nn.Module,
    optimizer: Optimizer,
    closure_or_loader: LossSource,
    *,
    loss_fn: LossFn | None = None,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    num_steps: int = 100,
    smoothing: float = 0.8,
    stop_factor: float = 4.0,
) -> LRCurve:
    """Sweep the learning rate for a few steps and suggest one to train with; everything is restored afterwards.

    Costs `num_steps` training steps and, meanwhile, a copy of the weights and of the optimizer state. Runs in training
    mode.

    Args:
        model: the model that the optimizer trains.
        optimizer: the optimizer to train with; groups with rates of their own keep their ratios.
        closure_or_loader: a function that returns the loss of a new batch each time, or an iterable of (x, y) batches
            that can be restarted.
        loss_fn: with a loader, called as `loss_fn(model(x), y)`.
        min_lr: the first rate, too small to change anything.
        max_lr: the last rate, unless the loss diverges before.
        num_steps: number of rates.
        smoothing: weight of the neighboring step when losses are averaged, from 0 (none) to below 1.
        stop_factor: stop when the running mean of the loss exceeds its lowest value by this factor, and its noise.

    Returns:
        The curve, with `suggested` and `largest_stable`.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 4)
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> curve = find_lr(model, optimizer, lambda: (model(x) - x.sum(1, keepdim=True)).square().mean())
    >>> curve.verdict.value, 0.01 < curve.suggested < curve.largest_stable < 2.0
    ('found', True)
    """
    _check(min_lr, max_lr, num_steps, smoothing, stop_factor)
    if needs_closure(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} calls the closure itself and chooses its own step "
            "sizes, so there is no learning rate to sweep"
        )
    losses = losses_from(closure_or_loader, model, loss_fn)
    watch = _Watch(smoothing, stop_factor)
    tried: list[float] = []
    seen: list[float] = []
    with restored(model, optimizer, generators_of(closure_or_loader)), torch.enable_grad():
        if not model.training:
            model.train()
        rates = _Rates(optimizer)
        for k in range(num_steps):
            tried.append(min_lr * (max_lr / min_lr) ** (k / (num_steps - 1)))
            rates.place(tried[-1])
            optimizer.zero_grad()
            loss = next(losses)
            seen.append(loss.item())  # sync: one per step, to stop in time
            if watch.ran_away(seen[-1]):
                break
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return judge_sweep(tried, seen, smoothing=smoothing, diverged=watch.over)


@final
class _Watch:
    """Ends the sweep: a loss that is not finite, or whose running mean is far above its lowest and above its noise."""

    def __init__(self, smoothing: float, stop_factor: float) -> None:
        self.over = False
        self._beta, self._factor = smoothing, stop_factor
        self._sum = self._weight = 0.0
        self._first = self._lowest = math.inf
        self._jumps: list[float] = []
        self._last = math.nan

    def ran_away(self, loss: float) -> bool:
        """Whether to stop here."""
        self._sum = self._beta * self._sum + loss
        self._weight = self._beta * self._weight + 1.0
        mean = self._sum / self._weight
        if math.isnan(self._last):
            self._first = mean
        else:
            self._jumps.append(abs(loss - self._last))
        self._last = loss
        self._lowest = min(self._lowest, mean)
        self.over = not math.isfinite(mean) or (len(self._jumps) >= _WARM and mean - self._lowest > self._allowed())
        return self.over

    def _allowed(self) -> float:
        by_factor = (self._factor - 1) * max(abs(self._lowest), _SHARE * (self._first - self._lowest))
        return max(by_factor, _NOISE * median(self._jumps))


@final
class _Rates:
    """Sets the rate of the group that has the optimizer's default rate; the others keep their ratio to it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        own = [float(group["lr"]) for group in self._groups]  # sync: once per probe
        default = float(optimizer.defaults.get("lr", own[0]))  # sync: once per probe
        base = default if default in own else max(own)
        self._ratios = [rate / base if base else 1.0 for rate in own]

    def place(self, lr: float) -> None:
        """`lr` for the next step."""
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            _set(group, lr * ratio)


def _set(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _check(min_lr: float, max_lr: float, num_steps: int, smoothing: float, stop_factor: float) -> None:
    if not 0 < min_lr < max_lr < math.inf:
        raise ConfigError(f"min_lr = {min_lr!r}, max_lr = {max_lr!r}: must be 0 < min_lr < max_lr, both finite")
    if num_steps < 10:
        raise ConfigError(f"num_steps = {num_steps!r}: must be at least 10")
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing = {smoothing!r}: must be at least 0 and below 1")
    if not stop_factor > 1:
        raise ConfigError(f"stop_factor = {stop_factor!r}: must be greater than 1")


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Leave no trace of what happens inside the block, also when an exception or Ctrl-C ends it.

    The model is left as it was found. The optimizer's state and its groups are set aside untouched, the steps work on
    fresh ones, and the very same objects return.

    >>> model = nn.Linear(1, 1)
    >>> before = model.weight.item()
    >>> with restored(model, torch.optim.SGD(model.parameters(), lr=1.0)):
    ...     _ = nn.init.zeros_(model.weight)
    >>> model.weight.item() == before
    True
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with left_as_found(model, held, generators):
        parts = _OptimizerParts(optimizer)
        try:
            yield
        finally:
            parts.put_back()


@final
class _OptimizerParts:
    """State, groups and whatever else the optimizer keeps (a torch scheduler leaves a flag there, say)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = dict(optimizer.state)
        fresh = copy.deepcopy(list(self._state.values()))
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        tensors = [t for _, values in self._groups for t in values.values() if isinstance(t, Tensor)]
        self._copies = [TensorCopy(t) for t in tensors]
        self._attributes = dict(vars(optimizer))
        optimizer.state.clear()
        optimizer.state.update(zip(self._state, fresh, strict=True))

    def put_back(self) -> None:
        _refill(vars(self._optimizer), self._attributes)
        _refill(self._optimizer.state, self._state)
        for group, values in self._groups:
            _refill(group, values)
        for kept in self._copies:  # a learning rate may be a tensor
            kept.put_back()


def generators_of(source: object) -> list[torch.Generator]:
    """Those a DataLoader draws from, itself and through its sampler."""
    if not isinstance(source, torch.utils.data.DataLoader):
        return []
    held: Iterable[Any] = (source.generator, getattr(source.sampler, "generator", None))
    return list({id(g): g for g in held if isinstance(g, torch.Generator)}.values())


def _refill(mapping: dict[Any, Any], values: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(values)
