"""The tensors of a model that can be filled, each once under its plain name, and how one of them is filled.

xavier    U(-a, a) with std sqrt(2 / (fan_in + fan_out)), Glorot and Bengio 2010
kaiming   N(0, 2 / fan_in), He et al. 2015
small     N(0, 0.02^2), Radford et al. 2019
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from steadystep._utils.modules import unwrapped
from steadystep._utils.text import plain_name

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@final
@dataclass(slots=True, kw_only=True)
class Slot:
    """A place for weights: a parameter, or the value that a parametrization computes from its originals."""

    path: str
    """The plain name of the module."""
    module: nn.Module
    key: str
    value: Tensor
    originals: tuple[Tensor, ...] = ()
    """What a parametrization keeps instead; empty for a plain parameter."""
    also: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The plain name of the tensor."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def frozen(self) -> bool:
        """True when nothing here is trained."""
        return not any(t.requires_grad for t in self.originals or (self.value,))


def is_projection(module: nn.Module) -> bool:
    """A linear map, by any of its common classes."""
    # why: GPT-2 in transformers uses a class of its own, Conv1D, which is a Linear stored the other way round
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def slots(model: nn.Module) -> list[Slot]:
    """Every tensor once, in the order of the modules. A tied one belongs to the embedding among its owners."""
    found: dict[int, Slot] = {}
    for slot in _all_slots(unwrapped(model)):
        key = id(slot.originals[0] if slot.originals else slot.value)
        first = found.get(key)
        if first is None:
            found[key] = slot
        elif isinstance(slot.module, _LOOKUPS) and not isinstance(first.module, _LOOKUPS):
            slot.also = [first.name, *first.also]
            found[key] = slot
        else:
            first.also.append(slot.name)
    return list(found.values())


def _all_slots(model: nn.Module) -> Iterator[Slot]:
    for name, module in model.named_modules():
        if "parametrizations" in name.split("."):
            continue
        path = plain_name(name)
        for key, value in module._parameters.items():
            if value is not None:
                yield Slot(path=path, module=module, key=key, value=value)
        if isinstance(module, nn.Module) and parametrize.is_parametrized(module):
            lists = module.get_submodule("parametrizations")
            for key, held in lists.named_children():
                with torch.no_grad():
                    value = getattr(module, key)
                yield Slot(path=path, module=module, key=key, value=value, originals=tuple(held.parameters()))


SMALL_STD = 0.02

InitMethod = Literal["xavier", "kaiming", "small"]
METHODS: tuple[InitMethod, ...] = ("xavier", "kaiming", "small")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitRule:
    """Words for the table, and the act."""

    label: str
    std: float
    fill: Callable[[Tensor, Generator | None], object]


def constant_rule(value: float, label: str = "") -> InitRule:
    """The same number everywhere."""
    return InitRule(label=label or f"{value:g}", std=0.0, fill=lambda t, _: t.fill_(value))


def normal(std: float, label: str = "N(0, std)") -> InitRule:
    """A normal distribution around 0."""
    return InitRule(label=label, std=std, fill=lambda t, g: t.normal_(0.0, std, generator=g))


def embedding(padding_idx: int | None) -> InitRule:
    """N(0, 0.02), and zeros for padding."""
    if padding_idx is None:
        return normal(SMALL_STD)

    def fill(weight: Tensor, generator: Generator | None) -> None:
        weight.normal_(0.0, SMALL_STD, generator=generator)
        weight[padding_idx].zero_()

    return InitRule(label=f"N(0, std), row {padding_idx} 0", std=SMALL_STD, fill=fill)


def weight(method: InitMethod, shape: Sequence[int], *, transposed: bool = False, parts: int = 1) -> InitRule:
    """A matrix or convolution kernel.

    `transposed` says that the input dimension comes first (transposed convolutions). `parts` is how many matrices are
    stacked in this one (3 for a fused query-key-value): each has its own fan-out.

    >>> weight("xavier", (30, 10), parts=3).std == math.sqrt(2 / (10 + 10))
    True
    """
    if method == "small":
        return normal(SMALL_STD)
    fan_in, fan_out = fans(shape, transposed=transposed)
    if method == "kaiming":
        return normal(math.sqrt(2.0 / max(1, fan_in)), "kaiming N(0, std)")
    std = math.sqrt(2.0 / max(1.0, fan_in + fan_out / parts))
    bound = math.sqrt(3.0) * std
    label = f"xavier U, {parts} parts" if parts > 1 else "xavier U"
    return InitRule(label=label, std=std, fill=lambda t, g: t.uniform_(-bound, bound, generator=g))


def orthogonal(shape: Sequence[int], *, parts: int) -> InitRule:
    """Each of the stacked matrices orthogonal: what a recurrence multiplies by keeps its length."""

    def fill(weight: Tensor, generator: Generator | None) -> None:
        for part in weight.chunk(parts):
            # why: the QR behind it has no half-precision kernel
            part.copy_(nn.init.orthogonal_(torch.empty_like(part, dtype=torch.float32), generator=generator))

    return InitRule(label="orthogonal", std=1.0 / math.sqrt(max(shape[0] / parts, shape[1])), fill=fill)


def forget_gate(parts: int) -> InitRule:
    """Zeros, and ones for an LSTM's forget gate, which comes second (Jozefowicz et al. 2015)."""

    def fill(bias: Tensor, _: Generator | None) -> None:
        bias.zero_()
        bias.chunk(parts)[1].fill_(1.0)

    return InitRule(label="0, forget gate 1", std=0.0, fill=fill)


def fans(shape: Sequence[int], *, transposed: bool = False) -> tuple[int, int]:
    """Inputs each output is a sum of, and outputs each input goes to.

    >>> fans((8, 4, 3, 3))
    (36, 72)
    """
    field = math.prod(shape[2:])
    first, second = shape[0] * field, shape[1] * field
    return (first, second) if transposed else (second, first)


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_FUSED = ("qkv", "c_attn", "in_proj", "query_key_value", "Wqkv", "qkv_proj")
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_CELL_GATES: dict[type[nn.RNNCellBase], int] = {nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}


def rule_for(slot: Slot, method: InitMethod) -> InitRule | str:
    """The rule, or the reason why there is none."""
    if slot.frozen:
        return "frozen"
    if not slot.value.is_floating_point():
        return f"not real-valued ({slot.value.dtype})"
    module = slot.module
    if isinstance(module, _NORMS):
        return constant_rule(1.0 if slot.key == "weight" else 0.0)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and slot.key == "weight":
        return embedding(module.padding_idx)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(slot, method)
    if isinstance(module, nn.RNNBase):
        return _recurrent(slot, _GATES.get(module.mode, 1))
    if isinstance(module, nn.RNNCellBase):
        return _recurrent(slot, next((n for kind, n in _CELL_GATES.items() if isinstance(module, kind)), 1))
    if isinstance(module, nn.Bilinear | _ConvNd) or is_projection(module):
        return _linear(slot, method)
    return f"no rule for {type(module).__name__}"


def _linear(slot: Slot, method: InitMethod) -> InitRule | str:
    module, shape = slot.module, slot.value.shape
    if slot.key == "bias":
        return constant_rule(0.0)
    if slot.key != "weight" or len(shape) < 2:  # older torch.nn.utils.weight_norm, or a flattened shard
        return f"no rule for a {len(shape)}-dimensional {slot.key}"
    transposed = isinstance(module, _ConvTransposeNd) or type(module).__name__ == "Conv1D"
    outs, ins = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    fused = slot.path.split(".")[-1] in _FUSED and outs == 3 * ins
    return weight(method, shape, transposed=transposed, parts=3 if fused else 1)


def _attention(slot: Slot, method: InitMethod) -> InitRule | str:
    if slot.key == "in_proj_weight":
        return weight(method, slot.value.shape, parts=3)
    if slot.key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return weight(method, slot.value.shape)
    return constant_rule(0.0) if slot.key == "in_proj_bias" else normal(SMALL_STD)  # bias_k, bias_v


def _recurrent(slot: Slot, gates: int) -> InitRule | str:
    """The same for every recipe: what goes in xavier per gate, what goes round orthogonal."""
    shape = slot.value.shape
    if slot.key.startswith("bias"):
        return forget_gate(gates) if gates == 4 and slot.key.startswith("bias_ih") else constant_rule(0.0)
    if slot.key.startswith("weight_hh"):
        return orthogonal(shape, parts=gates)
    return weight("xavier", shape, parts=gates if slot.key.startswith("weight_ih") else 1)
