"""The models that the price of a guard is measured on: small and large, few tensors and many."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from steadystep.lab.gpt import GPT, GPTSize

Setup = tuple[nn.Module, Callable[[], Tensor]]
"""A model and its loss on a fixed batch."""


def mlp(width: int, depth: int = 3, batch_size: int = 32) -> Setup:
    """Linear layers and ReLUs."""
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    x = torch.randn(batch_size, width)
    return model, lambda: model(x).square().mean()


def gpt() -> Setup:
    """A byte GPT of 1M parameters."""
    model = GPT(GPTSize(d_model=128, num_layers=5, num_heads=4, context=64))
    text = torch.randint(256, (8, 65))
    return model, lambda: model.loss(text)


def many_tensors(count: int) -> Setup:
    """Vectors of 16 numbers: nothing but the price of a tensor."""
    model = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(count))
    return model, lambda: torch.stack(list(model)).square().mean()


MODELS: dict[str, Callable[[], Setup]] = {
    "MLP, width 64": lambda: mlp(64),
    "MLP, width 256": lambda: mlp(256),
    "MLP, width 1024": lambda: mlp(1024),
    "GPT, 1M parameters": gpt,
    "100 small tensors": lambda: many_tensors(100),
    "1,000 small tensors": lambda: many_tensors(1000),
}
"""By the name shown in the table."""

QUICK = ("MLP, width 64",)


def fresh(name: str) -> Setup:
    """The same weights every time."""
    torch.manual_seed(0)
    return MODELS[name]()
