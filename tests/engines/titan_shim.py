"""What torchtitan needs to run on CPUs with gloo; import it before anything of torchtitan's.

The device is the CPU; the module that needs triton is empty; the monitor of device memory reports
nothing; FSDP2 adds up and divides (gloo has no PREMUL_SUM); timeouts of process groups stay.
"""

import os
import sys
import types
from typing import Any

import torch
import torch.distributed.fsdp as fsdp


class _Nothing(types.ModuleType):
    """A module in which every name is an empty class, or a function that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {"Config": type("Config", (), {})})
        if name[0].islower():
            made = lambda *_, **__: None  # noqa: E731
        setattr(self, name, made)
        return made


for _name in ("torchtitan.distributed.minimal_async_ep", "torchtitan.distributed.minimal_async_ep.api"):
    sys.modules[_name] = _Nothing(_name)

torch.cpu.set_device = lambda *_: None
os.environ.setdefault("LOCAL_RANK", "0")
import torchtitan.tools.utils as utils  # noqa: E402

utils.device_type, utils.device_module = "cpu", torch.cpu
utils.get_local_device = lambda: torch.device("cpu")
import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.utils as dist_utils  # noqa: E402
import torchtitan.models.common.config_utils as config_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

metrics.device_module, metrics.device_type = torch.cpu, "cpu"
dist_utils.device_type, dist_utils.device_module = "cpu", torch.cpu


class _Memory:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None: ...


metrics.build_device_memory_monitor = _Memory
dist_utils.set_pg_timeouts = lambda **_: None
config_utils.get_attention_config = lambda _: ScaledDotProductAttention.Config()


def _adding_up(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    _apply(model, *args, **kwargs)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


from torchtitan.models.llama3 import parallelize  # noqa: E402

_apply = parallelize.apply_fsdp_to_decoder
parallelize.apply_fsdp_to_decoder = _adding_up

from torch.distributed.pipelining import schedules  # noqa: E402


def _of_whole_batches(kind: Any) -> None:
    """Let `step` take micro-batches, as later versions of torch do and torchtitan 0.3.0 expects."""
    own = kind.step

    def step(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, loss_kwargs: Any, **more: Any) -> Any:
        args = [torch.cat(each) for each in zip(*arg_mbs, strict=True)] if arg_mbs else []
        kwargs = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = None if target_mbs is None else torch.cat(target_mbs)
        return own(self, *args, target=target, loss_kwargs=loss_kwargs, **kwargs, **more)

    kind.step = step


for _kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    _of_whole_batches(_kind)
