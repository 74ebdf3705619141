"""Random numbers, put back to an earlier moment."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch


@final
class RngState:
    """Random state of torch on the host and on one device, as it is now; optionally of Python and NumPy.

    Args:
        device: the device whose generator is included.
        python: include Python's `random`.
        numpy: include NumPy's global generator.
    """

    __slots__ = ("_cpu", "_device", "_numpy", "_on_device", "_python")

    def __init__(self, device: torch.device, *, python: bool = False, numpy: bool = False) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._on_device = _on_device(device)
        self._python: Any = random.getstate() if python else None
        self._numpy: Any = np.random.get_state(legacy=False) if numpy else None  # 0.3 ms

    def restore(self) -> None:
        """Restore this random state."""
        _set_torch(self._cpu, self._on_device, self._device)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)

    def as_dict(self) -> dict[str, Any]:
        """Torch's part of it, for a file; `restore_torch` takes it."""
        return {"host": self._cpu, "device": self._on_device, "kind": self._device.type}

    def moved(self) -> tuple[bool, bool, bool]:
        """Return whether numbers were drawn since from torch, Python, NumPy; False where the state is not known."""
        now = RngState(self._device, python=self._python is not None, numpy=self._numpy is not None)
        drawn = not torch.equal(self._cpu, now._cpu)
        if self._on_device is not None and now._on_device is not None:
            drawn = drawn or not torch.equal(self._on_device, now._on_device)
        return drawn, self._python != now._python, not _is_same(self._numpy, now._numpy)


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


@final
class RngHold:
    """The hold that `random_numbers_kept` has on them."""

    __slots__ = ("state",)

    def __init__(self, device: torch.device) -> None:
        self.state: RngState | None = RngState(device, python=True, numpy=True)

    def let_go(self) -> None:
        """What is run inside is what should have come before: they stay where it leaves them."""
        self.state = None


@contextmanager
def host_random_kept() -> Iterator[None]:
    """Python's and NumPy's random numbers are afterwards what they were: an import may draw from them."""
    numbers = HostRandom()
    try:
        yield
    finally:
        numbers.restore()


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[RngHold]:
    """What is run inside must not shift the random numbers that come after."""
    kept = RngHold(device)
    try:
        yield kept
    finally:
        if kept.state is not None:
            kept.state.restore()


def all_random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, NumPy and torch, on the host and on one device: plain values, arrays and tensors."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "device": _on_device(device),
    }


def restore_all(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `all_random_state` gave. A device that was not there then keeps its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    on_device = state["device"] if device.type != "cpu" else None
    _set_torch(state["torch"].to("cpu"), None if on_device is None else on_device.to("cpu"), device)


def restore_torch(kept: Mapping[str, Any] | None, device: torch.device) -> None:
    """Set torch's random state to what `RngState.as_dict` gave, on the host and on a device of the same kind."""
    if kept is not None:
        _set_torch(kept["host"], kept["device"] if kept["kind"] == device.type else None, device)


def _on_device(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_torch(host: torch.Tensor, on_device: torch.Tensor | None, device: torch.device) -> None:
    torch.set_rng_state(host)
    if on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device, device)


GENERATORS = (random.Random, torch.Generator, np.random.Generator)


def generator_back(value: Any) -> Callable[[], Any] | None:
    """What puts a generator of Python, torch or NumPy back to where it is now; None for anything else."""
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, torch.Generator):
        seed = value.get_state().clone()
        return lambda: value.set_state(seed)
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", numbers)
    return None


def _is_same(left: Any, right: Any) -> bool:
    """Of NumPy's states: dictionaries of numbers and arrays."""
    if isinstance(left, dict):
        return all(_is_same(value, right[key]) for key, value in left.items())
    return bool(np.array_equal(left, right))
