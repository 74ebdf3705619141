"""Bounded samples of many tensors, laid side by side so that a few kernels serve them all."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.tensors import is_sharded, local_part

WHOLE = 4096
"""Tensors of up to this many elements are taken whole."""
_SPREAD = 1024  # elements of a larger one: an RMS is then off by 2 %
_WIDTH = 64
_HALVES = (torch.bfloat16, torch.float16)


@final
class Strips:
    """Where each tensor's sample lies in one flat tensor: in rows of 64 that belong to one tensor each.

    The last row of a small tensor is filled up with zeros. A NaN stays with its tensor.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        small = [i for i, size in enumerate(sizes) if size <= WHOLE]
        self._large = [i for i, size in enumerate(sizes) if size > WHOLE]
        self._small = [(i, torch.zeros(-sizes[i] % _WIDTH, device=device)) for i in small]
        lengths = [min(size, _SPREAD) if size > WHOLE else size for size in sizes]
        owners = [i for i in (*small, *self._large) for _ in range(-(-lengths[i] // _WIDTH))]
        self.lengths = torch.tensor(lengths, dtype=torch.float32).to(device, non_blocking=True)
        self._owners = torch.tensor(owners).to(device, non_blocking=True)

    def lay(self, tensors: Sequence[Tensor]) -> Tensor:
        """The samples as [rows, 64], at least in single precision."""
        parts = []
        for i, fill in self._small:
            tensor = tensors[i]
            parts.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
            if len(fill):
                parts.append(fill)
        if self._large:
            # why: one strided part would send the whole cat down its slow path
            parts.append(torch.cat([_spread(tensors[i]) for i in self._large]))
        rows = torch.cat(parts).view(-1, _WIDTH)
        return rows.float() if rows.dtype in _HALVES else rows

    def sums(self, quantities: Sequence[Tensor]) -> Tensor:
        """[quantities, tensors]: each [rows, 64] added up per tensor."""
        rows = torch.stack([quantity.sum(1) for quantity in quantities])
        return rows.new_zeros(len(quantities), len(self.lengths)).index_add_(1, self._owners, rows)

    def per_row(self, each: Tensor) -> Tensor:
        """One number per tensor, as a column that broadcasts over its rows."""
        return each[self._owners].unsqueeze(1)


def sample(tensor: Tensor) -> Tensor:
    """A small tensor whole, evenly spread elements of a large one; flat."""
    return tensor.reshape(-1) if tensor.numel() <= WHOLE else _spread(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Dense and real."""
    return tensor.layout is torch.strided and tensor.is_floating_point()


def _spread(tensor: Tensor) -> Tensor:
    size = tensor.numel()
    stride = _stride(size)
    if tensor.is_contiguous():
        return tensor.as_strided((_SPREAD,), (stride,))
    where = torch.arange(0, _SPREAD * stride, stride, device=tensor.device)
    return tensor[torch.unravel_index(where, tensor.shape)]


@lru_cache(maxsize=4096)
def _stride(size: int) -> int:
    """Shares no factor with the size, so the sample visits all rows and columns and not the same few."""
    stride = size // _SPREAD
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride


@final
@dataclass(frozen=True, slots=True)
class SecondMoments:
    """Aligned with the parameters."""

    tensors: list[Tensor | None]
    """v as the optimizer keeps it; None where there is none of the parameter's own shape."""
    corrections: Tensor
    """1 - beta2^t: v divided by it is free of the bias of its start."""
    floors: Tensor
    """eps², times the correction: what v is at least counted as."""


@final
class Moments:
    """Reads the state of Adam and its kin (`exp_avg_sq`); other optimizers have nothing to show."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Parameter]) -> None:
        self._optimizer = optimizer
        self._params = params
        self._device = params[0].device
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._groups = [groups[id(p)] for p in params]
        self._settings: dict[tuple[Any, ...], Tensor] = {}

    def now(self) -> SecondMoments | None:
        """What the optimizer holds; None when no parameter has a second moment."""
        states = [self._optimizer.state.get(p, {}) for p in self._params]
        held = [s.get("exp_avg_sq") for s in states]
        if is_sharded(self._params):
            tensors = [_usable_moment(_part(v), local_part(p)) for v, p in zip(held, self._params, strict=True)]
        else:
            tensors = [_usable_moment(v, p) for v, p in zip(held, self._params, strict=True)]
        if not any(tensor is not None for tensor in tensors):
            return None
        # An optimizer that does not count its steps is taken to correct nothing.
        steps = _vector([s.get("step", math.inf) for s in states], self._device)
        corrections = torch.expm1(steps * self._per_param(_log_decay)).neg_()
        return SecondMoments(tensors, corrections, corrections * self._per_param(_epsilon).square())

    def _per_param(self, setting: Any) -> Tensor:
        values = [setting(group) for group in self._optimizer.param_groups]
        if any(isinstance(value, Tensor) for value in values):
            return _vector([values[i] for i in self._groups], self._device)
        key = (setting, *values)
        if key not in self._settings:
            self._settings[key] = _vector([values[i] for i in self._groups], self._device)
        return self._settings[key]


def _part(moment: Any) -> Any:
    return local_part(moment) if isinstance(moment, Tensor) else None


def _usable_moment(moment: Any, parameter: Tensor) -> Tensor | None:
    # why: a subclass is quantised or sharded, and one on another device is offloaded: both cost too much to look at
    if type(moment) is Tensor and moment.shape == parameter.shape and moment.device == parameter.device:
        return moment if moment.is_floating_point() else None
    return None


def _log_decay(group: dict[str, Any]) -> float | Tensor:
    beta = group.get("betas", (0.0, 0.0))[1]
    if isinstance(beta, Tensor):
        return beta.log()
    return math.log(beta) if beta > 0 else -math.inf


def _epsilon(group: dict[str, Any]) -> float | Tensor:
    epsilon: float | Tensor = group.get("eps", 0.0)
    return epsilon


def _vector(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """On the device, whether the optimizer keeps numbers, host tensors or device tensors."""
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
    try:
        together = torch.stack(values)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # of several kinds or devices
        together = torch.stack([torch.as_tensor(v).to(device, torch.float32, non_blocking=True) for v in values])
    # why: Adam counts its steps on the host; a copy from there must not wait for all the device has to do
    return together.to(device=device, dtype=torch.float32, non_blocking=True)


_TINY = 1e-30  # in place of an eps² of zero: 0 / 0 must not be


@final
class Lot:
    """Parameters of one device: `remember` before the update, `measure` after it, `read` once on the host."""

    def __init__(self, names: Sequence[str], params: Sequence[Parameter], moments: Moments) -> None:
        self.names = tuple(names)
        self._params = params
        self._moments = moments
        self._strips = Strips([local_part(p).numel() for p in params], params[0].device)
        self._before: Tensor | None = None
        self._has_gradient: list[bool] = []
        self._has_moment: list[bool] = []

    def remember(self) -> None:
        """Sample the weights."""
        self._before = self._strips.lay(self._parts())

    def forget(self) -> None:
        """Let go of the sample."""
        self._before = None

    def measure(self) -> Tensor:
        """After the update: all numbers in one flat tensor, on the device."""
        assert self._before is not None, "measure() needs remember()"
        strips, params = self._strips, self._parts()
        weights = strips.lay(params)
        changes = self._before.sub_(weights)
        grads = [_usable_gradient(p.grad) for p in self._params]
        g = strips.lay([p if grad is None else grad for p, grad in zip(params, grads, strict=True)])
        quantities = [weights.square_(), changes.square_(), g.sign().square_()]
        second = self._moments.now()
        if second is not None:
            v = strips.lay([p if v is None else v for p, v in zip(params, second.tensors, strict=True)])
            quantities += [g.square_() / v.clamp(min=strips.per_row(second.floors.clamp_(min=_TINY))), v]
        self._before = None
        self._has_gradient = [grad is not None for grad in grads]
        self._has_moment = [v is not None for v in second.tensors] if second else []
        sums = strips.sums(quantities)
        counted = sums[2].clone()
        sums /= strips.lengths
        if second is not None:
            sums[4] /= second.corrections  # so that the first probes are worth something: v fills up from zero
            sums[3] *= second.corrections * strips.lengths / counted  # no gradient at all: NaN, unknown
        return sums.flatten()

    def _parts(self) -> list[Tensor]:
        """What this rank holds of the parameters."""
        return [local_part(p) for p in self._params]

    def read(self, host: Iterator[float]) -> tuple[list[float], ...]:
        """Weight RMS, update RMS, second moments, surprises and zero shares, from the numbers of `measure`."""
        count = len(self.names)
        weights, updates, present = (list(islice(host, count)) for _ in range(3))
        zeros = _known([1.0 - share for share in present], self._has_gradient)
        surprises, moments = [math.nan] * count, [math.nan] * count
        if self._has_moment:
            surprises = _known([_root(x) for x in islice(host, count)], self._has_gradient)
            surprises = _known(surprises, self._has_moment)
            moments = _known(list(islice(host, count)), self._has_moment)
        return [_root(x) for x in weights], [_root(x) for x in updates], moments, surprises, zeros


def _usable_gradient(grad: Tensor | None) -> Tensor | None:
    return local_part(grad) if grad is not None and is_plain(grad) else None


def _known(values: list[float], flags: list[bool]) -> list[float]:
    if all(flags):
        return values
    return [value if flag else math.nan for value, flag in zip(values, flags, strict=True)]


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0.0 else math.nan
