"""Copies of tensors in host memory: from an accelerator in one go, with one wait for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def host_room(
    tensor: Tensor, old: Tensor | None, dtype: torch.dtype | None = None, *, contiguous: bool = False
) -> Tensor:
    """Host memory for a copy of `tensor`: that of `old` where it fits, pinned for a tensor of an accelerator."""
    dtype = dtype or tensor.dtype
    if old is not None and old.shape == tensor.shape and old.dtype == dtype:
        return old
    if tensor.device.type == "cpu" and not contiguous:
        return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.device.type == "cuda")


def copy_to_host_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Fill `targets`, which are in host memory, with the values of `sources` as they are now."""
    if not sources:
        return
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
    for device in {source.device for source in sources if source.device.type != "cpu"}:
        torch.accelerator.synchronize(device)  # sync: once per device and call, not once per tensor
