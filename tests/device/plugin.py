"""For pytest, `-p tests.device.plugin`: tensors that a test or its model makes are on the device.

What the library makes is where the library puts it.
torch's own default device would not do: it would hide tensors that the library makes on the wrong one.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.device import notgpu

_TESTS = str(Path(__file__).parents[1])


class MadeByTests(TorchFunctionMode):
    """Factory functions called for a test, directly or by torch's modules, make device tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _device_constructors() and kwargs.get("device") is None and _by_a_test():
            kwargs["device"] = notgpu.DEVICE
        return function(*args, **kwargs)


def _by_a_test() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TESTS) or "/steadystep/lab/" in name:
            return "/tests/device/" not in name
        if "/steadystep/" in name:
            return False
        frame = frame.f_back  # torch's modules, contextlib
    return False


@pytest.fixture(autouse=True)
def _on_the_device() -> Any:
    notgpu.register()
    torch.manual_seed(0)
    with MadeByTests():
        yield
