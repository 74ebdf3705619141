"""What several programs share: endless batches of three shapes, scores, and small networks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .data import generator


def indices(count: int, size: int, seed: int, *, shuffle: bool = True) -> Iterator[Tensor]:
    """Yield the row numbers of one batch after the other, without end; the last incomplete batch is dropped."""
    g = generator(seed)
    while True:
        order = torch.randperm(count, generator=g) if shuffle else torch.arange(count)
        yield from order[: count - count % size].view(-1, size)


def tuples(*tensors: Tensor, size: int, seed: int, shuffle: bool = True) -> Callable[[], Iterator[tuple[Tensor, ...]]]:
    return lambda: (tuple(t[i] for t in tensors) for i in indices(len(tensors[0]), size, seed, shuffle=shuffle))


def dicts(tensors: Mapping[str, Tensor], *, size: int, seed: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
    count = len(next(iter(tensors.values())))
    return lambda: ({name: t[i] for name, t in tensors.items()} for i in indices(count, size, seed))


def singles(tensor: Tensor, *, size: int, seed: int) -> Callable[[], Iterator[Tensor]]:
    return lambda: (tensor[i] for i in indices(len(tensor), size, seed))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and back to the mode each module was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        yield
    for module, mode in modes:
        module.training = mode


def accuracy(model: nn.Module, x: Any, y: Tensor) -> float:
    """Return the share of rows whose largest output is the label."""
    with evaluating(model):
        return float((model(x).argmax(-1) == y).float().mean())


def binary_accuracy(model: nn.Module, x: Any, y: Tensor) -> float:
    """Return the share of rows whose single logit has the right sign."""
    with evaluating(model):
        return float(((model(x).flatten() > 0) == (y > 0.5)).float().mean())


def explained(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the explained variance of a regression: 1 is perfect, 0 the mean, and -1 the worst that is counted."""
    with evaluating(model):
        error = (model(x).reshape(y.shape) - y).pow(2).mean() / (y - y.mean()).pow(2).mean()
    return max(-1.0, 1 - float(error)) if bool(error.isfinite()) else -1.0


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), act()]
    return nn.Sequential(*layers[:-1])


def energy_distance(a: Tensor, b: Tensor) -> float:
    """Return the energy distance of two clouds of points; 0 if they are alike."""
    if not bool(a.isfinite().all()):
        return 100.0
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())
