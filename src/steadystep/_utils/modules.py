"""A model without what others have wrapped around it, and a model while it is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_forward_module")
"""The child that torch.compile, FSDP1 and Lightning Fabric keep the model in."""


def unwrapped(model: nn.Module, *, by_form: bool = False) -> nn.Module:
    """The model inside DDP, DataParallel, torch.compile, FSDP1 and Fabric, in any order; any other as it is.

    Args:
        model: wrapped or not.
        by_form: also go into a wrapper of an unknown class: a module without parameters of its own whose only child
            is called `module`. A model may look like this too, so not where its names are kept in a file.
    """
    while (inner := _inside(model, by_form=by_form)) is not None:
        model = inner
    return model


def data_parallel_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a model, with torch.compile around it or not."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, running statistics; training mode is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _inside(model: nn.Module, *, by_form: bool) -> nn.Module | None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        held: nn.Module = model.module
        return held
    for name in _INNER:
        if model._modules.get(name) is not None:
            return model._modules[name]
    if by_form and [name for name, _ in model.named_children()] == ["module"]:
        return None if any(True for _ in model.parameters(recurse=False)) else next(model.children())
    return None
