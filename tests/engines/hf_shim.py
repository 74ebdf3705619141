"""FSDP2 of Accelerate on CPUs: it refuses FSDP where it finds no accelerator, so it is told that gloo has several."""

import os
from typing import Any

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

_OWN = PartialState._prepare_backend


def _gloo(self: PartialState, *_: Any, **__: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def fresh(*, shimmed: bool) -> None:
    """Forget the last Accelerator; the next one finds its own backend, or the shim."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._prepare_backend = _gloo if shimmed else _OWN
