"""FSDP2 of Accelerate on CPUs: it refuses FSDP where it finds no accelerator, so it is told that gloo has several."""

import os
from typing import Any

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor, Replicate

_OWN = PartialState._prepare_backend


def _gloo(self: PartialState, *_: Any, **__: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def fresh(*, shimmed: bool) -> None:
    """Forget the last Accelerator; the next one finds its own backend, or the shim."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._prepare_backend = _gloo if shimmed else _OWN


class _Replicated:
    """A module whose parameters are whole on every rank of a mesh."""

    def prepare_module_tp(self, module: torch.nn.Module, mesh: Any) -> None:
        if not module._forward_pre_hooks:  # called once for each parameter
            module.register_forward_pre_hook(
                lambda _, args: tuple(DTensor.from_local(arg, mesh, [Replicate()]) for arg in args)
            )
            module.register_forward_hook(lambda _, __, out: out.to_local())


def replicate_parallel() -> None:
    """Give transformers 5 the class that Accelerate 1.15 imports from it for FSDP2 with tensor parallelism."""
    from transformers.integrations import tensor_parallel

    tensor_parallel.ReplicateParallel = _Replicated
