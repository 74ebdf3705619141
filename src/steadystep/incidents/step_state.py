"""What a step starts from (weights, buffers, modes, optimizer, random state), as a mapping; and back into a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.modules import unwrapped
from steadystep._utils.rng import RngState, random_numbers_kept
from steadystep._utils.tensors import is_sharded
from steadystep._utils.text import nearest_names, plain_name
from steadystep._utils.tree import mapped, tensors_in
from steadystep.errors import ConfigError
from steadystep.optimizers import own_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def step_state(model: nn.Module, optimizer: Optimizer | None, rng: RngState | None) -> dict[str, Any]:
    """Alive, not copied: written at once or not at all. Buffers that are not persistent are there too."""
    model = unwrapped(model)
    return {
        "parameters": {plain_name(n): p.detach() for n, p in model.named_parameters() if not nn.parameter.is_lazy(p)},
        "buffers": {plain_name(n): b.detach() for n, b in model.named_buffers() if not nn.parameter.is_lazy(b)},
        "evaluating": [plain_name(n) for n, m in model.named_modules() if not m.training],
        "optimizer": None if optimizer is None else own_state(optimizer),
        "random": random_state(model, rng),
    }


def gathered(state: Any, *, keep: bool) -> Any:
    """The same with whole tensors in place of parts, on the host; all ranks call it, and one of them keeps them.

    One tensor after another, so that an accelerator holds no more than one of them whole.
    """

    def whole(tensor: Tensor) -> Tensor | None:
        if not is_sharded([tensor]):
            return tensor
        together = cast("DTensor", tensor).full_tensor()
        return together.cpu() if keep else None  # sync: only in trouble

    return mapped(state, whole)


def num_bytes(thing: Any) -> int:
    """What the tensors inside take."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(thing))


def random_state(model: nn.Module, rng: RngState | None) -> dict[str, Any] | None:
    """The random state as tensors: that of `rng`, or none when it was not kept."""
    if rng is None:
        return None
    device = device_of(model)
    with random_numbers_kept(device):
        rng.restore()
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return {"host": torch.get_rng_state(), "device": on_device, "kind": device.type}


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter lives."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def load_step_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Into a model of the same make, strictly.

    Raises:
        ConfigError: something is missing, left over or of another shape; the message names the first that differs.
    """
    model = unwrapped(model)
    for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        _fill(kind, {plain_name(name): tensor for name, tensor in named}, state[kind])
    evaluating = set(state["evaluating"])
    for name, module in model.named_modules():
        module.training = plain_name(name) not in evaluating


@torch.no_grad()
def _fill(kind: str, here: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    one = kind[:-1]
    for name, tensor in kept.items():
        if name not in here:
            raise ConfigError(
                f"{one} {name!r} is in the bundle and not in the factory's model{nearest_names(name, list(here))}"
            )
        mine = here[name]
        if nn.parameter.is_lazy(mine):
            raise ConfigError(f"{one} {name!r} of the factory's model is lazy: run the model once in the factory")
        if mine.shape != tensor.shape:
            kept_shape, shape = list(tensor.shape), list(mine.shape)
            raise ConfigError(f"{one} {name!r} has shape {kept_shape} in the bundle and {shape} in the factory's model")
    for name in here:
        if name not in kept:
            raise ConfigError(f"{one} {name!r} of the factory's model is not in the bundle")
    for name, tensor in kept.items():
        mine = here[name]
        mine.data = tensor.to(mine.device, copy=True) if mine.dtype != tensor.dtype else mine.data.copy_(tensor)


def restore_random_state(kept: Mapping[str, Any] | None, device: torch.device) -> None:
    """Set torch's random state to what a bundle holds, on the host and on a device of the same kind."""
    if kept is None:
        return
    torch.set_rng_state(kept["host"])
    if kept["device"] is not None and kept["kind"] == device.type:
        torch.get_device_module(device).set_rng_state(kept["device"], device)
