"""Which ranks a run has: found from the process group and from how the model is wrapped."""

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadystep.dist.ranks import Alone, Ranks
from steadystep.dist.through import Through


def ranks_of(model: nn.Module) -> Ranks:
    """All ranks of the process group, if one with more than one rank was initialised; else none but this one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Alone()
    wrapped = _data_parallel(model)
    group = None if wrapped is None else wrapped.process_group
    if torch.distributed.get_world_size(group) == 1:
        return Alone()
    from steadystep.dist.together import Together  # why: who runs alone need not load it

    return Together(unwrapped(model), wrapped, group)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, where names are as its owner knows them; any other as it is."""
    wrapped = _data_parallel(model)
    if wrapped is None:
        return model
    inner = wrapped.module
    assert isinstance(inner, nn.Module)
    return inner.model if isinstance(inner, Through) else inner


def _data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    inner = getattr(model, "_orig_mod", model)  # torch.compile around it
    return inner if isinstance(inner, DistributedDataParallel) else None
