"""Every tensor a training loop owns, as it is now: parameters, buffers, optimizer state."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.clip.sharded import local_part, spread_like

Key = tuple[str, int | str, str]

# Whoever schedules the learning rate owns it; recursive schedules of torch compute the next value from this one.
_SCHEDULED = ("lr", "initial_lr")


@final
class Holdings:
    """Names the tensors, copies them out and copies them back. Frozen parameters do not change and are left out.

    Parameters are known by themselves and not by their place: groups may be added while a state is kept. What was not
    there yet is left as it is.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, parameters: Callable[[], Sequence[Parameter]]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parameters = parameters

    def tensors(self) -> dict[Key, Tensor]:
        """What is copied: alive, not copies."""
        found: dict[Key, Tensor] = {}
        for parameter in self._parameters():
            found["parameter", id(parameter), ""] = local_part(parameter).detach()
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found["state", id(parameter), name] = local_part(value).detach()
        for path, _, name, buffer in self._buffers():
            if buffer is not None and buffer.layout is torch.strided and not nn.parameter.is_lazy(buffer):
                found["buffer", path, name] = buffer.detach()
        return found

    def numbers(self) -> dict[str, Any]:
        """Optimizer state that is no tensor, what the groups hold, and who the parameters are."""
        state = {}
        for parameter in self._parameters():
            held = self._optimizer.state.get(parameter)
            if held is not None:
                state[id(parameter)] = {n: copy.deepcopy(v) for n, v in held.items() if not isinstance(v, Tensor)}
        groups = [{k: _copied(v) for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        return {"state": state, "groups": groups, "parameters": tuple(self._parameters())}

    @torch.no_grad()
    def put_back(
        self,
        tensors: dict[Key, Tensor],
        numbers: dict[str, Any],
        *,
        moments_only: bool = False,
        learning_rates: bool = False,
    ) -> None:
        """In place, so that whoever holds a reference (a compiled model, an EMA) sees the old values too.

        `learning_rates` puts those of the groups back too: for a scheduler that goes back as well.
        """
        state: dict[int | str, dict[str, Tensor]] = {i: {} for i in numbers["state"]}
        for (kind, i, name), kept in tensors.items():
            if kind == "state":
                state[i][name] = kept
        for parameter in numbers["parameters"]:
            i = id(parameter)
            if not moments_only:
                local_part(parameter).copy_(tensors["parameter", i, ""])
            if i in state:
                _put_state_back(self._optimizer.state[parameter], state[i], numbers["state"][i], parameter)
            else:
                self._optimizer.state.pop(parameter, None)
        if moments_only:
            return
        for group, saved in zip(self._optimizer.param_groups, numbers["groups"], strict=False):
            group.update({k: _copied(v) for k, v in saved.items() if learning_rates or k not in _SCHEDULED})
        for path, owner, name, buffer in self._buffers():
            kept_buffer = tensors.get(("buffer", path, name))
            if kept_buffer is None:
                continue
            if buffer is not None and _alike(buffer, kept_buffer):
                buffer.copy_(kept_buffer)
            else:
                owner[name] = kept_buffer.to(kept_buffer.device if buffer is None else buffer.device, copy=True)

    @contextmanager
    def with_weights(self, tensors: dict[Key, Tensor], numbers: dict[str, Any]) -> Iterator[None]:
        """The weights of a kept state inside, the present ones again afterwards. Costs one copy of them."""
        present = [(p, local_part(p).detach().clone()) for p in numbers["parameters"]]
        try:
            with torch.no_grad():
                for parameter, _ in present:
                    local_part(parameter).copy_(tensors["parameter", id(parameter), ""])
            yield
        finally:
            with torch.no_grad():
                for parameter, value in present:
                    local_part(parameter).copy_(value)

    def _buffers(self) -> Iterator[tuple[str, dict[str, Tensor | None], str, Tensor | None]]:
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                yield path, module._buffers, name, buffer


def _put_state_back(
    held: dict[str, Any], tensors: dict[str, Tensor], numbers: dict[str, Any], parameter: Parameter
) -> None:
    for name in held.keys() - tensors.keys() - numbers.keys():
        del held[name]
    held.update(copy.deepcopy(numbers))
    for name, kept in tensors.items():
        now = held.get(name)
        if isinstance(now, Tensor) and _alike(local_part(now), kept):
            local_part(now).copy_(kept)
        else:
            held[name] = spread_like(kept.to(parameter.device, copy=True), parameter)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
