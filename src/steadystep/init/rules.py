"""How one tensor is filled.

xavier    U(-a, a) with std sqrt(2 / (fan_in + fan_out)), Glorot and Bengio 2010
kaiming   N(0, 2 / fan_in), He et al. 2015
small     N(0, 0.02^2), Radford et al. 2019
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor, nn

SMALL_STD = 0.02

InitMethod = Literal["xavier", "kaiming", "small"]
METHODS: tuple[InitMethod, ...] = ("xavier", "kaiming", "small")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Words for the table, and the act."""

    label: str
    std: float
    fill: Callable[[Tensor, Generator | None], object]


def constant(value: float, label: str = "") -> Rule:
    """The same number everywhere."""
    return Rule(label=label or f"{value:g}", std=0.0, fill=lambda t, _: t.fill_(value))


def normal(std: float, label: str = "N(0, std)") -> Rule:
    """A normal distribution around 0."""
    return Rule(label=label, std=std, fill=lambda t, g: t.normal_(0.0, std, generator=g))


def embedding(padding_idx: int | None) -> Rule:
    """N(0, 0.02), and zeros for padding."""
    if padding_idx is None:
        return normal(SMALL_STD)

    def fill(weight: Tensor, generator: Generator | None) -> None:
        weight.normal_(0.0, SMALL_STD, generator=generator)
        weight[padding_idx].zero_()

    return Rule(label=f"N(0, std), row {padding_idx} 0", std=SMALL_STD, fill=fill)


def weight(method: InitMethod, shape: Sequence[int], *, transposed: bool = False, parts: int = 1) -> Rule:
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
    return Rule(label=label, std=std, fill=lambda t, g: t.uniform_(-bound, bound, generator=g))


def orthogonal(shape: Sequence[int], *, parts: int) -> Rule:
    """Each of the stacked matrices orthogonal: what a recurrence multiplies by keeps its length."""

    def fill(weight: Tensor, generator: Generator | None) -> None:
        for part in weight.chunk(parts):
            # why: the QR behind it has no half-precision kernel
            part.copy_(nn.init.orthogonal_(torch.empty_like(part, dtype=torch.float32), generator=generator))

    return Rule(label="orthogonal", std=1.0 / math.sqrt(max(shape[0] / parts, shape[1])), fill=fill)


def forget_gate(parts: int) -> Rule:
    """Zeros, and ones for an LSTM's forget gate, which comes second (Jozefowicz et al. 2015)."""

    def fill(bias: Tensor, _: Generator | None) -> None:
        bias.zero_()
        bias.chunk(parts)[1].fill_(1.0)

    return Rule(label="0, forget gate 1", std=0.0, fill=fill)


def fans(shape: Sequence[int], *, transposed: bool = False) -> tuple[int, int]:
    """Inputs each output is a sum of, and outputs each input goes to.

    >>> fans((8, 4, 3, 3))
    (36, 72)
    """
    field = math.prod(shape[2:])
    first, second = shape[0] * field, shape[1] * field
    return (first, second) if transposed else (second, first)
