"""Mixed precision as one setting: fp32, bf16 or fp16, on any device torch.amp supports, CPU included."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadystep import optimizers
from steadystep._utils.text import nearest_names, plain_name, warn
from steadystep.errors import ConfigError

Format = Literal["fp32", "bf16", "fp16"]
_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerReport:
    """Counts of the loss scaler."""

    scale: float
    """The current loss scale."""
    steps: int
    """Updates applied."""
    overflows: int
    """Updates refused because gradients overflowed under a finite loss: routine for a scaler."""
    bad_losses: int
    """Updates refused for another reason, which no scale can cure."""


@final
class Precision:
    """Autocast and, for fp16 only, loss scaling.

    Order within one update: `autocast` around the forward pass, `backward`, `unscale_`, clip, then `step` or `refuse`.

    Args:
        setting: "fp32", "bf16" or "fp16".
        device_type: device type of the model, such as "cuda" or "cpu".
        autocast: False if your own code does the autocasting.

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
        """Raise or warn about `parameters` that this setting cannot train."""
        dtypes = {p.dtype for p in parameters}
        if self.scales and torch.float16 in dtypes:
            raise ConfigError("mixed_precision fp16: keep the weights in fp32 (no model.half()); autocast casts them")
        if self.scales and any(dtype.is_complex for dtype in dtypes):
            raise ConfigError("mixed_precision fp16: torch cannot unscale complex gradients, use bf16 or fp32")
        if torch.float16 in dtypes:
            warn(
                "these weights are fp16: squared gradients beyond 255 overflow in Adam's moments. Keep the weights in "
                "fp32 with mixed_precision: fp16, or use bf16."
            )

    @property
    def scales(self) -> bool:
        """Whether a loss scaler is active."""
        return self._scaler.is_enabled()

    @property
    def casts(self) -> bool:
        """Whether `autocast` has an effect."""
        return self._dtype is not None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for the forward pass."""
        return torch.autocast(self._device_type, dtype=self._dtype) if self._dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward through the (scaled) loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once per update, before anything reads them."""
        self._scaler.unscale_(optimizer)
        self._unscaled = self.scales

    def scale(self, device: torch.device) -> Tensor | None:
        """Return the current loss scale as a tensor (no host read); None without a scaler."""
        if not self.scales:
            return None
        if self._one is None or self._one.device != device:
            self._one = torch.ones((), device=device)
        return self._scaler.scale(self._one)

    def step(self, optimizer: Optimizer) -> None:
        """Apply the update. With a scaler, torch checks for overflow once more and skips by itself."""
        if not self.scales:
            optimizers.step(optimizer)
            return
        self._scaler.step(optimizer)
        self._scaler.update()
        self._unscaled = False
        self._steps += 1

    def refuse(self, *, overflow: bool) -> None:
        """Close the update without applying it. With `overflow` the scale backs off.

        After a non-finite *loss* the scale stays: no scale cures a forward pass that overflowed. Does nothing if no
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
        """Return counts of the scaler since it was made; None without one."""
        if not self.scales:
            return None
        scale = self._scaler.get_scale()  # sync: when asked
        return ScalerReport(scale=scale, steps=self._steps, overflows=self._overflows, bad_losses=self._bad_losses)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state as plain numbers; empty without one."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if bool(state) != self.scales:
            had, has = ("a", "no") if state else ("no", "a")
            raise ConfigError(
                f"the saved run had {had} loss scaler and this one has {has}: use the same mixed_precision"
            )
        if state:
            self._scaler.load_state_dict(state)


@final
class Fp32Islands:
    """Runs the matching modules with autocast off and their floating-point inputs in fp32, until removed.

    Args:
        model: the model.
        patterns: globs over module names.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> with Fp32Islands(model, ["1"]), torch.autocast("cpu", dtype=torch.bfloat16):
    ...     model[0](torch.ones(1, 4)).dtype, model(torch.ones(1, 4)).dtype
    (torch.bfloat16, torch.float32)
    """

    def __init__(self, model: nn.Module, patterns: list[str]) -> None:
        names = [plain_name(name) for name, _ in model.named_modules()]
        self.names: list[str] = []
        """The modules kept in fp32."""
        self._handles: list[RemovableHandle] = []
        self._open: list[torch.autocast] = []
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"fp32 modules: {pattern!r} matches no module{nearest_names(pattern, names)}")
        for name, module in zip(names, model.modules(), strict=True):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                self.names.append(name)
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                # always_call: an exception inside the module must not leave autocast switched off
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device_type = next((v.device.type for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), "cpu")
        off = torch.autocast(device_type, enabled=False)
        off.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(off)
        return tuple(_widened(v) for v in args), {k: _widened(v) for k, v in kwargs.items()}

    def _leave(self, *_: object) -> None:
        self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks; the modules run under plain autocast again."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


@torch.no_grad()
def underflow_share(grads: Iterable[Tensor]) -> Tensor:
    """Return the share of gradient elements that are exactly zero, on the device.

    Rows without any gradient next to rows that have one (words that are not in the batch, dead units) are left out:
    their zeros are not rounding. A tensor that is zero throughout counts whole. Micikevicius et al. 2018 use the same
    share to show why fp16 gradients need a scale.

    Args:
        grads: gradients of the model.

    >>> round(underflow_share([torch.tensor([[1.0, 0.0], [0.0, 0.0]])]).item(), 2)
    0.5
    """
    zeros, total = [], []
    for grad in grads:
        if grad.is_sparse or not grad.numel():
            continue
        rows = grad.reshape(grad.shape[0], -1) if grad.dim() > 1 else grad.reshape(1, -1)
        used = (rows != 0).any(1, keepdim=True)
        used = used | ~used.any()
        zeros.append(((rows == 0) & used).sum())
        total.append(used.sum() * rows.shape[1])
    if not zeros:
        return torch.zeros(())
    device = zeros[0].device
    return torch.stack([z.to(device) for z in zeros]).sum() / torch.stack([t.to(device) for t in total]).sum().clamp(1)


__all__ = ["Fp32Islands", "Precision", "ScalerReport", "underflow_share"]
