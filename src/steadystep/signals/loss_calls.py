"""Which loss functions and activations a loss calls, and with what: recorded during one pass.

A recorder sees every call of torch on the way, in a model and outside of it. It follows the output of an activation
through reshapes, so that a softmax in the model and a cross-entropy in the loop are known to meet.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from steadystep._utils.tree import tensors_in

ACTIVATIONS = frozenset({"softmax", "log_softmax", "sigmoid", "logsigmoid", "tanh", "relu", "softplus"})
LOSSES = frozenset(
    {
        "cross_entropy",
        "nll_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
    }
)
_KEEPS_VALUES = frozenset(
    {
        *("view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "contiguous", "clone"),
        *("float", "double", "to", "type", "__getitem__", "movedim", "t", "swapaxes", "narrow", "select", "view_as"),
        *("reshape_as", "unflatten", "type_as"),
    }
)
_KEEPS_ORDER = frozenset({"clamp", "clamp_min", "log1p"})
_LOGGED = {"softmax": "log_softmax", "sigmoid": "logsigmoid"}
_SQUARES, _ABSOLUTES = frozenset({"square", "pow", "__pow__"}), frozenset({"abs", "__abs__"})
_CUTS = frozenset({"detach", "detach_", "tolist", "numpy", "item"})
_OPTIONS = ("ignore_index", "label_smoothing", "log_target", "reduction")
_OTHER_NAMES = {"sigmoid_": "sigmoid", "tanh_": "tanh", "relu_": "relu", "special_expit": "sigmoid"}


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """The activation whose output a tensor is."""

    name: str
    dim: int | None
    """Of a softmax, from 0."""
    shape: tuple[int, ...]
    before: "Origin | None"
    """The activation directly before it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """One call of a loss function of torch."""

    name: str
    given: Tensor
    target: Tensor | None
    result: Tensor | None
    """One number, detached; None where it was not reduced to one."""
    origin: Origin | None
    options: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    """With weights of samples or classes."""

    @property
    def value(self) -> float | None:
        """The result on the host."""
        return None if self.result is None else float(self.result)  # sync: examined

    def without_outputs(self) -> "LossCall":
        """Only the target is kept."""
        return replace(self, given=self.given.new_empty(0))


@final
class LossRecorder(TorchFunctionMode):
    """Records the calls inside its `with` block; what it keeps is detached."""

    def __init__(self, data: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._data = {id(tensor): tensor for tensor in data}
        self._stored = {tensor.untyped_storage().data_ptr() for tensor in self._data.values()}
        self._steps: dict[int, tuple[Tensor, Tensor, Tensor, str]] = {}
        self.calls: list[LossCall] = []
        self.differences: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shapes of subtractions whose result is larger than both sides."""
        self.results: list[Tensor] = []
        """What the loss functions returned, with its graph."""
        self.cuts: list[str] = []
        """Functions that took a result out of the graph, where it had several elements and a gradient."""
        self.loss: Tensor | None = None
        """The last single number with a gradient."""
        self._origins: dict[int, tuple[Tensor, Origin]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with suppress(Exception):  # why all: whatever is odd about this call, it was made
            self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        name = _OTHER_NAMES.get(name, name)
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor):
            return
        if name in LOSSES:
            self._loss(name, given, args, kwargs, result)
        elif isinstance(result, Tensor):
            self._follow(name, given, args, kwargs, result)
        is_cut = name in _CUTS or getattr(func, "__self__", None) is torch.Tensor.data
        if is_cut and given.grad_fn is not None and given.numel() > 1 and not self.calls and not _is_ours(3):
            self.cuts.append("data" if name == "__get__" else name)
        if isinstance(result, Tensor) and result.grad_fn is not None and result.numel() == 1:
            self.loss = result

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """The activation that made it, if one did."""
        found = self._origins.get(id(tensor))
        return None if found is None else found[1]

    def _loss(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        target = args[1] if len(args) > 1 else kwargs.get("target")
        one = isinstance(result, Tensor) and result.numel() == 1
        if one:
            self.results.append(result)
        self.calls.append(
            LossCall(
                name=name,
                given=given.detach(),
                target=target.detach() if isinstance(target, Tensor) else None,
                result=result.detach().reshape(()) if one else None,
                origin=self.origin_of(given),
                options={key: kwargs[key] for key in _OPTIONS if key in kwargs},
                weighted=any(kwargs.get(key) is not None for key in ("weight", "pos_weight"))
                or isinstance(args[2] if len(args) > 2 else None, Tensor),
            )
        )

    def _follow(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        origin = self.origin_of(given)
        if name in ACTIVATIONS:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None) if "softmax" in name else None
            place = dim % given.dim() if isinstance(dim, int) and given.dim() else None
            self._origins[id(result)] = (result, Origin(name, place, tuple(given.shape), origin))
        elif name in _KEEPS_VALUES or name in _KEEPS_ORDER:
            if origin is not None:
                self._origins[id(result)] = (result, origin)
        elif name == "log" and origin is not None and origin.name in _LOGGED:
            logged = Origin(_LOGGED[origin.name], origin.dim, origin.shape, None)
            self._origins[id(result)] = (result, logged)
        self._distance(name, given, args, result)

    def _distance(self, name: str, given: Tensor, args: tuple[Any, ...], result: Tensor) -> None:
        """Follow a mean of squared or absolute differences that is written by hand."""
        other = args[1] if len(args) > 1 else None
        if name in ("sub", "__sub__", "rsub", "__rsub__") and isinstance(other, Tensor):
            # why data: differences of all pairs of outputs are meant, those of outputs and targets are not
            ours = given.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
            if result.numel() > max(given.numel(), other.numel()) and not self._stored.isdisjoint(ours):
                self.differences.append((tuple(given.shape), tuple(other.shape)))
            self._steps[id(result)] = (result, given, other, "")
        elif id(given) in self._steps:
            _, left, right, kind = self._steps[id(given)]
            if name in _SQUARES and (other == 2 if "pow" in name else True):
                self._steps[id(result)] = (result, left, right, "mse_loss")
            elif name in _ABSOLUTES:
                self._steps[id(result)] = (result, left, right, "l1_loss")
            elif name == "mean" and kind and result.numel() == 1:
                left, right = (right, left) if id(left) in self._data else (left, right)
                self._loss(kind, left, (left, right), {}, result)


def _is_ours(depth: int) -> bool:
    """Whether a hook of this package made the call."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("steadystep.")


def record_losses(loss: Callable[[Any], Tensor], batch: Any) -> tuple[LossRecorder, Tensor]:
    """Run the loss of a batch once, and return what it called, and the loss with its graph."""
    recorder = LossRecorder(tensor for _, tensor in tensors_in(batch))
    with recorder:
        value = loss(batch)
    return recorder, value


def is_distribution(values: Tensor, dim: int) -> bool:
    """Whether the numbers along a dimension are shares that add up to one."""
    if not values.is_floating_point() or values.dim() <= dim or values.shape[dim] < 2:
        return False
    near = torch.isclose(values.sum(dim), torch.ones((), dtype=values.dtype, device=values.device), atol=1e-3)
    return bool((values >= 0).all() and near.all())  # sync: examined


def class_dim(given: Tensor) -> int:
    """Where `cross_entropy`, `nll_loss` expect the classes."""
    return 1 if given.dim() > 1 else 0


def is_log_distribution(values: Tensor, dim: int) -> bool:
    """Whether they are logarithms of such shares."""
    return values.is_floating_point() and is_distribution(values.exp(), dim)


_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_BOUNDED = ("sigmoid", "softmax")
_UNFIT = (*_BOUNDED, "relu", "tanh")
WRONG_LOSS, SOFTMAX_AXIS = "wrong-loss", "softmax-axis"


def mistakes(
    calls: Sequence[LossCall], differences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[tuple[str, str]]:
    """What shapes and the functions called show to be wrong, as fault and evidence: no number is read."""
    for call in calls:
        over = _wrong_axis(call)
        if over:
            yield SOFTMAX_AXIS, over
        twice = _activation_twice(call)
        if twice:
            yield WRONG_LOSS, twice
    pairs = [
        (tuple(c.given.shape), tuple(c.target.shape)) for c in calls if c.name in _DISTANCES and c.target is not None
    ]
    for left, right in (*pairs, *differences):
        if _spreads(left, right):
            yield (
                WRONG_LOSS,
                f"outputs and targets of shapes {left} and {right}: broadcasting compares every output with every "
                "target, and the best answer is their mean",
            )


def _spreads(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """(N, 1) against (N,), or the same with more dimensions in front."""
    short, long = sorted((left, right), key=len)
    if len(long) != len(short) + 1 or not short or short[0] < 2:
        return False
    return long == (*short, 1) or long == (short[0], 1, *short[1:])


def _wrong_axis(call: LossCall) -> str:
    """A softmax over one unit, over the samples, or over positions instead of classes."""
    made = call.origin
    while made is not None and "softmax" not in made.name:
        made = made.before
    if made is None or made.dim is None:
        return ""
    shape, dims = made.shape, len(made.shape)
    if shape[made.dim] == 1:
        return f"a {made.name} over a single unit is constant (shape {shape}, dim {made.dim})"
    over_batch = made.dim == 0 and dims > 1
    if over_batch and dims == 2 and shape[0] == shape[1] and call.target is not None and call.target.dim() == 1:
        over_batch = False  # similarities of a batch with itself may be normalized either way
    over_other = call.name in ("cross_entropy", "nll_loss") and made.dim not in (dims - 1, 1)
    if over_batch or over_other:
        return f"a {made.name} over dimension {made.dim} of shape {shape}: over samples instead of classes"
    return ""


def _activation_twice(call: LossCall) -> str:
    """Loss functions that apply an activation themselves, or need another one."""
    made = call.origin
    if made is None:
        return ""
    if call.name == "cross_entropy" and made.name in _BOUNDED:
        return f"cross_entropy applies a softmax to what a {made.name} has made"
    if call.name == "binary_cross_entropy_with_logits" and made.name in (*_BOUNDED, "logsigmoid", "log_softmax"):
        return f"binary_cross_entropy_with_logits applies a sigmoid to what a {made.name} has made"
    if call.name == "binary_cross_entropy" and made.before is not None and made.before.name in _UNFIT:
        return f"binary_cross_entropy gets the {made.name} of a {made.before.name}"
    if call.name in ("nll_loss", "kl_div") and made.name in (*_UNFIT, "softplus"):
        return f"{call.name} wants log-probabilities and gets what a {made.name} has made"
    return ""
