"""Modules that stay in fp32 under autocast: the norm, the softmax, the head that overflows in fp16."""

from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadystep.errors import ConfigError
from steadystep.names import nearest_names, plain


@final
class Fp32Islands:
    """Runs the matching modules with autocast off and their floating-point inputs in fp32, until removed.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> with Fp32Islands(model, ["1"]), torch.autocast("cpu", dtype=torch.bfloat16):
    ...     model[0](torch.ones(1, 4)).dtype, model(torch.ones(1, 4)).dtype
    (torch.bfloat16, torch.float32)
    """

    def __init__(self, model: nn.Module, patterns: list[str]) -> None:
        names = [plain(name) for name, _ in model.named_modules()]
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
        """Back to plain autocast."""
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
