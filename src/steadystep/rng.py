"""Random numbers, put back to an earlier moment."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch


@final
class RngState:
    """torch's random state on the host and on one device, as it is now."""

    __slots__ = ("_cpu", "_device", "_on_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._cpu)
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)


@final
class HostRandom:
    """Python's and NumPy's random state, as it is now."""

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """What is run inside must not shift the random numbers that come after."""
    rng = RngState(device)
    try:
        yield
    finally:
        rng.restore()


def all_random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, NumPy and torch, on the host and on one device: plain values, arrays and tensors."""
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "device": on_device,
    }


def restore_all(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `all_random_state` gave. A device that was not there then keeps its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].to("cpu"))
    if state["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].to("cpu"), device)
