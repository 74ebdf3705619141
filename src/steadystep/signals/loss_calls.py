"""Which loss functions and activations a loss calls, and with what: recorded during one pass.

A recorder sees every call of torch on the way, in a model and outside of it. It follows the output of an activation
through reshapes, so that a softmax in the model and a cross-entropy in the loop are known to meet.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from steadystep.signals.activations import is_ours, take_off

ACTIVATIONS = frozenset({"softmax", "log_softmax", "sigmoid", "logsigmoid", "tanh", "relu", "softplus"})
LOSSES = frozenset(
    {
        *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("soft_margin_loss", "hinge_embedding_loss", "poisson_nll_loss"),
        *("cosine_embedding_loss", "margin_ranking_loss"),
    }
)
_OF_PAIRS, _ZEROS = ("cosine_embedding_loss", "margin_ranking_loss"), ("zeros", "zeros_like", "new_zeros")
_FEWEST_SHARES = 4  # elements of a softmax whose sharpness means something
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
_KEEPS_KIND = frozenset({"mean", "sum", "mul", "__mul__", "__rmul__", "div", "__truediv__"})
_MASKS = frozenset({"masked_fill", "masked_fill_", "where", "tril", "triu"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_CUTS = frozenset({"detach", "detach_", "tolist", "numpy", "item"})
_SIZES = ("norm", "linalg_norm", "linalg_vector_norm", *_SQUARES, *_ABSOLUTES)
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_OPTIONS = ("ignore_index", "label_smoothing", "log_target", "reduction")
_OTHER_NAMES = {"sigmoid_": "sigmoid", "tanh_": "tanh", "relu_": "relu", "special_expit": "sigmoid"}


@final
@dataclass(frozen=True, slots=True)
class ActivationOrigin:
    """The activation whose output a tensor is."""

    name: str
    dim: int | None
    """Of a softmax, from 0."""
    shape: tuple[int, ...]
    before: "ActivationOrigin | None"
    """The activation directly before it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """One call of a loss function of torch."""

    name: str
    given: Tensor
    target: Tensor | None
    result: Tensor | None
    """The mean over what it compares, detached, also where the call takes the sum or nothing of the kind."""
    origin: ActivationOrigin | None
    options: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    """With weights of samples or classes."""
    returned: Tensor | None = None
    """What the call returned, detached, where that is one number."""

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

    at_work: ClassVar[int] = 0
    """How many are on torch's stack."""

    def __init__(self, data: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._data = {id(tensor): tensor for tensor in data}
        self._stored = {t.untyped_storage().data_ptr() for t in self._data.values() if t.layout is torch.strided}
        self._steps: dict[int, tuple[Tensor, Tensor, Tensor, str]] = {}
        self.calls: list[LossCall] = []
        self.differences: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shapes of subtractions whose result is larger than both sides."""
        self.results: list[Tensor] = []
        """What the loss functions returned, with its graph."""
        self.cuts: list[str] = []
        """Functions that took a result out of the graph, where it had several elements and a gradient."""
        self._ahead, self._causal, self._masked = "", False, False
        self._zeros: dict[int, Tensor] = {}
        self.penalized = 0
        """Parameters whose size was computed."""
        self.softmaxes: list[ActivationOrigin] = []
        """Every softmax, wherever it is."""
        self._used: dict[bool, dict[int, nn.Parameter]] = {False: {}, True: {}}
        self.picks = False
        """Log-probabilities of some of the outcomes were picked out by number."""
        self.sharpness: list[Tensor] = []
        """The mean largest share of each softmax inside of the model."""
        self.loss: Tensor | None = None
        """The last single number with a gradient."""
        self._origins: dict[int, tuple[Tensor, ActivationOrigin]] = {}

    def __enter__(self) -> Self:
        LossRecorder.at_work += 1
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *_: object) -> None:
        LossRecorder.at_work -= 1
        take_off(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with suppress(Exception):  # why all: whatever is odd about this call, it was made
            self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = _OTHER_NAMES.get(name := getattr(func, "__name__", ""), name)
        given = args[0] if args else kwargs.get("input")
        if name in _ZEROS and isinstance(result, Tensor):
            self._zeros[id(result)] = result
        self.penalized += name in _SIZES and isinstance(given, nn.Parameter)
        if isinstance(result, Tensor | tuple):
            self._use((*args, *kwargs.values()), result)
            self._look_ahead(name, args, kwargs)
        if not isinstance(given, Tensor):
            return
        if name in LOSSES:
            self._loss(name, given, args, kwargs, result)
        elif isinstance(result, Tensor):
            self._follow(name, given, args, kwargs, result)
        is_cut = name in _CUTS or getattr(func, "__self__", None) is torch.Tensor.data
        if is_cut and given.grad_fn is not None and given.numel() > 1 and not self.calls and not is_ours(3):
            self.cuts.append("data" if name == "__get__" else name)
        if isinstance(result, Tensor) and result.grad_fn is not None and result.numel() == 1:
            self.loss = result

    def _use(self, given: tuple[Any, ...], result: Any) -> None:
        """Which parameters were computed with, and whether that can be differentiated."""
        first = result if isinstance(result, Tensor) else next((r for r in result if isinstance(r, Tensor)), None)
        for each in given:
            for p in each if isinstance(each, list | tuple) else (each,):
                if isinstance(p, nn.Parameter) and p.requires_grad and first is not None and first.is_floating_point():
                    self._used[first.requires_grad][id(p)] = p

    def _look_ahead(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Attention over whole sequences without a mask, and recurrences in both directions."""
        given = args[0] if args else None
        square = isinstance(given, Tensor) and given.dim() > 1 and given.shape[-1] == given.shape[-2] > 3
        masks = name in _MASKS or (name in ("add", "__add__", "__iadd__") and isinstance(args[1], Tensor))
        self._masked = self._masked or (masks and square)
        mask = kwargs.get("attn_mask", args[3] if name == "scaled_dot_product_attention" and len(args) > 3 else None)
        is_open = mask is None and not kwargs.get("is_causal")
        self._causal = self._causal or (name in _ATTENTION and not is_open)
        if (is_open and name in _ATTENTION) or (name == "softmax" and square and not self._masked):
            self._ahead = name
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) > 7 and args[7] is True:
            self._ahead = f"bidirectional {name}"

    @property
    def ahead(self) -> str:
        """The call by which a position of a sequence sees later ones, if there is one and no attention has a mask."""
        return "" if self._causal else self._ahead

    @property
    def used(self) -> set[int]:
        """Parameters that were computed with outside of `no_grad`."""
        return set(self._used[True])

    @property
    def unlinked(self) -> list[nn.Parameter]:
        """Parameters that require a gradient and were computed with under `no_grad` only."""
        return [p for key, p in self._used[False].items() if key not in self._used[True]]

    def origin_of(self, tensor: Tensor) -> ActivationOrigin | None:
        """The activation that made it, if one did."""
        found = self._origins.get(id(tensor))
        return None if found is None else found[1]

    def _loss(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        place = 2 if name in _OF_PAIRS else 1
        target = args[place] if len(args) > place else kwargs.get("target")
        if name in DISTANCES and id(target) in self._zeros:  # why: a residual is to vanish, and is no label
            _, left, right, _ = self._steps.get(id(given), (None, given, None, ""))
            turned = right is not None and right.requires_grad and not left.requires_grad
            given, target = (right, left) if right is not None and turned else (left, right)
        one = isinstance(result, Tensor) and result.numel() == 1
        returned = result.detach().reshape(()) if one else None
        self.results += [result] if one else []
        self.calls.append(
            LossCall(
                name=name,
                given=given.detach(),
                target=target.detach() if isinstance(target, Tensor) else None,
                result=_mean_of(result, target, kwargs),
                returned=returned,
                origin=self.origin_of(given),
                options={key: kwargs[key] for key in _OPTIONS if key in kwargs},
                weighted=any(kwargs.get(key) is not None for key in ("weight", "pos_weight"))
                or isinstance(args[place + 1] if len(args) > place + 1 else None, Tensor),
            )
        )

    def _follow(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        origin = self.origin_of(given)
        if name in ACTIVATIONS:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None) if "softmax" in name else None
            place = dim % given.dim() if isinstance(dim, int) and given.dim() else None
            made = ActivationOrigin(name, place, tuple(given.shape), origin)
            self._origins[id(result)] = (result, made)
            self.softmaxes += [made] if place is not None and not isinstance(given, nn.Parameter) else []
            wide = name == "softmax" and place is not None and given.shape[place] >= _FEWEST_SHARES
            if place is not None and wide and result.requires_grad:
                self.sharpness.append(result.detach().amax(place).mean())
        elif name in _KEEPS_VALUES or name in _KEEPS_ORDER:
            if origin is not None:
                self._origins[id(result)] = (result, origin)
        elif name in ("gather", "take_along_dim") and origin is not None and origin.name == "log_softmax":
            self.picks = True
        elif name == "log" and origin is not None and origin.name in _LOGGED:
            logged = ActivationOrigin(_LOGGED[origin.name], origin.dim, origin.shape, None)
            self._origins[id(result)] = (result, logged)
        self._distance(name, given, args, result)

    def _distance(self, name: str, given: Tensor, args: tuple[Any, ...], result: Tensor) -> None:
        """Follow a mean of squared or absolute differences that is written by hand."""
        other = args[1] if len(args) > 1 else None
        if nn.Parameter in (type(given), type(other)):  # a penalty on weights compares no outputs
            return
        if name in ("sub", "__sub__", "rsub", "__rsub__") and isinstance(other, Tensor):
            # why data: differences of all pairs of outputs are meant, those of outputs and targets are not
            if result.numel() > max(given.numel(), other.numel()) and self._is_data(given, other):
                self.differences.append((tuple(given.shape), tuple(other.shape)))
            if sides := self._whole(given, other):
                self._steps[id(result)] = (result, *sides, "")
        elif id(given) in self._steps:
            _, left, right, kind = self._steps[id(given)]
            if name in _SQUARES and (other == 2 if "pow" in name else True):
                self._steps[id(result)] = (result, left, right, "mse_loss")
            elif name in _ABSOLUTES:
                self._steps[id(result)] = (result, left, right, "l1_loss")
            elif kind and name in _KEEPS_KIND and not isinstance(other, Tensor):
                if result.numel() > 1:
                    self._steps[id(result)] = (result, left, right, kind)
                elif name in ("mean", "sum"):
                    self._by_hand(kind, left, right, result)

    def _whole(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
        """Both sides of a difference; of (output - a) - b those are the output and a + b. None where it is unknown."""
        _, first, other, kind = self._steps.get(id(left), (None, left, None, ""))
        if other is None or kind or right.requires_grad:
            return left, right
        if not torch.is_grad_enabled():  # which of the three is the output
            return None
        return (first, (other + right).detach()) if first.requires_grad > other.requires_grad else (left, right)

    def _is_data(self, one: Tensor, other: Tensor) -> bool:
        """Whether one of the two comes with the batch; where that is unknown: is no output."""
        if not self._stored:
            return one.requires_grad != other.requires_grad
        return not self._stored.isdisjoint((one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()))

    def _by_hand(self, kind: str, left: Tensor, right: Tensor, result: Tensor) -> None:
        turned = id(left) in self._data or (not self._data and right.requires_grad and not left.requires_grad)
        left, right = (right, left) if turned else (left, right)
        apart = (left - right).detach()
        mean = apart.square().mean() if kind == "mse_loss" else apart.abs().mean()
        self._loss(kind, left, (left, right), {}, result)
        self.calls[-1] = replace(self.calls[-1], result=mean)


def _mean_of(result: Any, target: Any, options: Mapping[str, Any]) -> Tensor | None:
    if not isinstance(result, Tensor):
        return None
    if options.get("reduction") == "sum" and isinstance(target, Tensor) and result.numel() == 1:
        return result.detach().reshape(()) / max(target.numel(), 1)
    return result.detach().reshape(()) if result.numel() == 1 else result.detach().mean()
