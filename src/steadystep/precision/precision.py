"""One setting for number formats, over torch.amp; the order of calls is the one torch's AMP examples prescribe."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep import bare_calls
from steadystep.errors import ConfigError
from steadystep.notices import warn

Format = Literal["fp32", "bf16", "fp16"]
_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerReport:
    """What the loss scaler has been through."""

    scale: float
    steps: int
    """Updates taken."""
    overflows: int
    """Updates refused because gradients overflowed under a finite loss: the scaler's routine."""
    bad_losses: int
    """Updates refused for another reason, which no scale can cure."""


@final
class Precision:
    """Autocast and, for fp16 only, loss scaling.

    Usable alone. Order inside one update: `autocast` around the forward pass, `backward`, `unscale_`, clip,
    then `step` or `refuse`.

    >>> precision = Precision("bf16", device_type="cpu")
    >>> model = torch.nn.Linear(2, 1)
    >>> with precision.autocast():
    ...     loss = model(torch.ones(4, 2)).mean()
    >>> loss.dtype
    torch.bfloat16
    """

    def __init__(self, setting: Format = "fp32", *, device_type: str = "cpu", autocast: bool = True) -> None:
        if setting not in _DTYPES:
            raise ConfigError(f"precision {setting!r} is unknown: use one of {', '.join(_DTYPES)}")
        if setting != "fp32" and not torch.amp.is_autocast_available(device_type):
            raise ConfigError(f"precision {setting!r}: torch.amp has no autocast for device type {device_type!r}")
        self.setting = setting
        self._device_type = device_type
        self._dtype = _DTYPES[setting] if autocast else None
        # A disabled GradScaler is torch's own null object: scale, unscale_ and update do nothing.
        self._scaler = torch.amp.GradScaler(device_type, enabled=setting == "fp16")
        self._unscaled = False
        self._one: Tensor | None = None
        self._steps = self._overflows = self._bad_losses = 0

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Refuse or warn about weights that this setting cannot train."""
        dtypes = {p.dtype for p in parameters}
        if self.scales and torch.float16 in dtypes:
            raise ConfigError(
                "mixed_precision fp16: keep the weights in fp32 (no model.half()), autocast does the rest"
            )
        if self.scales and any(dtype.is_complex for dtype in dtypes):
            raise ConfigError("mixed_precision fp16: torch cannot unscale complex gradients, use bf16 or fp32")
        if torch.float16 in dtypes:
            warn(
                "these weights are fp16: squared gradients beyond 255 overflow in Adam's moments. Keep the weights in "
                "fp32 with mixed_precision: fp16, or use bf16."
            )

    @property
    def scales(self) -> bool:
        """True when a loss scaler is at work."""
        return self._scaler.is_enabled()

    @property
    def casts(self) -> bool:
        """True when `autocast` does something."""
        return self._dtype is not None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for the forward pass."""
        return torch.autocast(self._device_type, dtype=self._dtype) if self._dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backward through the (scaled) loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once per update, before anything looks at them."""
        self._scaler.unscale_(optimizer)
        self._unscaled = self.scales

    def scale(self, device: torch.device) -> Tensor | None:
        """The current loss scale as a tensor (no host read), or None without a scaler."""
        if not self.scales:
            return None
        if self._one is None or self._one.device != device:
            self._one = torch.ones((), device=device)
        return self._scaler.scale(self._one)

    def step(self, optimizer: Optimizer) -> None:
        """Take the update. With a scaler torch checks once more for overflow and skips by itself."""
        if not self.scales:
            bare_calls.step(optimizer)
            return
        self._scaler.step(optimizer)
        self._scaler.update()
        self._unscaled = False
        self._steps += 1

    def refuse(self, *, overflow: bool) -> None:
        """No update this time. `overflow` says that the scale is to blame, so that it backs off.

        After a non-finite *loss* the scale stays: no scale cures a forward pass that overflowed. Does nothing when no
        update is open.
        """
        if not self._unscaled:
            return
        self._unscaled = False
        self._overflows += overflow
        self._bad_losses += not overflow
        if overflow:
            self._scaler.update()
        else:
            # Setting the scale to itself closes the update and leaves scale and growth count as they were.
            self._scaler.update(self._scaler.get_scale())  # sync: only on a refused step

    def report(self) -> ScalerReport | None:
        """The scaler's telemetry since it was made; None without one."""
        if not self.scales:
            return None
        scale = self._scaler.get_scale()  # sync: when asked
        return ScalerReport(scale=scale, steps=self._steps, overflows=self._overflows, bad_losses=self._bad_losses)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state as plain numbers; empty without one."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if bool(state) != self.scales:
            had, has = ("a", "no") if state else ("no", "a")
            raise ConfigError(
                f"the saved run had {had} loss scaler, this one has {has} loss scaler: use the same mixed_precision"
            )
        if state:
            self._scaler.load_state_dict(state)
