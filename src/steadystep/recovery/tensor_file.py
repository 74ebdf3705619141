"""Tensors as one safetensors file.

Written by hand in pieces, so that each piece is hashed while it is in the cache, the interpreter is free during both,
and nothing is copied once more; read by the safetensors library, which refuses headers that do not add up.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steadystep.errors import CheckpointError, UnsupportedError

RESERVED = "__metadata__"
"""The one name that a tensor cannot have."""

STORED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The file, from beginning to end."""
    if sys.byteorder != "little":
        raise UnsupportedError("checkpoints are little-endian and this machine is not")
    # why by size: a wide number must not begin at an odd place
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {} if metadata is None else {RESERVED: dict(metadata)}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.numel():
            host = tensor.detach().to("cpu").resolve_neg().contiguous()  # sync: on writing, none if already on the host
            yield host.view(-1).view(torch.uint8).numpy().data  # sync: none, it is on the host


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Everything in the file, in memory of its own: the file may go away."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from error
