"""Which loss functions and activations a loss calls, and with what: recorded during one pass.

A recorder sees every call of torch on the way, in a model and outside of it. It follows the output of an activation
through reshapes, so that a softmax in the model and a cross-entropy in the loop are known to meet.
"""

from collections.abc import Callable, Iterable, Mapping
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
    value: float | None
    """None where it was not reduced to one number."""
    origin: Origin | None
    options: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    """With weights of samples or classes."""

    def without_outputs(self) -> "LossCall":
        """Only the target is kept."""
        return replace(self, given=self.given.new_empty(0))


@final
class LossRecorder(TorchFunctionMode):
    """Records the calls inside its `with` block; what it keeps is detached."""

    def __init__(self, data: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._data = {id(tensor): tensor for tensor in data}
        self._steps: dict[int, tuple[Tensor, Tensor, Tensor, str]] = {}
        self.calls: list[LossCall] = []
        self.differences: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shapes of subtractions whose result is larger than both sides."""
        self._origins: dict[int, tuple[Tensor, Origin]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        name = _OTHER_NAMES.get(name, name)
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor):
            if name in LOSSES:
                self._loss(name, given, args, kwargs, result)
            elif isinstance(result, Tensor):
                self._follow(name, given, args, kwargs, result)
        return result

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """The activation that made it, if one did."""
        found = self._origins.get(id(tensor))
        return None if found is None else found[1]

    def _loss(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        target = args[1] if len(args) > 1 else kwargs.get("target")
        value = float(result.detach()) if isinstance(result, Tensor) and result.numel() == 1 else None  # sync: examined
        self.calls.append(
            LossCall(
                name=name,
                given=given.detach(),
                target=target.detach() if isinstance(target, Tensor) else None,
                value=value,
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
            if result.numel() > max(given.numel(), other.numel()):
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
