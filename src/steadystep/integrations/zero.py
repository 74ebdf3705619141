"""What ZeRO keeps where: this rank's part of each weight, gradient and moment, stage by stage."""

from collections.abc import Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from steadystep.errors import UnsupportedError


class Partitions(Protocol):
    """One stage."""

    inner: Optimizer
    """Torch's optimizer inside."""
    groups: dict[str, int]
    """The parameter group of each trained parameter."""
    whole: bool
    """Every rank holds everything: stage 0."""

    @property
    def device(self) -> str:
        """Its type."""
        ...

    def weights(self) -> dict[str, tuple[Tensor, int]]:
        """This rank's part of each fp32 weight, alive, and the size of the whole."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of each averaged gradient, alive; between backward and step."""
        ...

    def drop(self, step: Any) -> None:
        """Let the engine's own `step` discard the gradients, as after an overflow."""
        ...

    def publish(self) -> None:
        """Copy the fp32 weights into what the model computes with; all ranks call it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The moments."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
        ...


def partitions_of(engine: Any) -> Partitions:
    """Return the stage that `engine` runs."""
    optimizer = engine.optimizer
    if hasattr(engine, "train_batch") and type(engine).__name__ == "PipelineEngine":
        raise UnsupportedError("DeepSpeed's PipelineEngine runs backward by itself: not supported")
    if isinstance(optimizer, Optimizer) and not engine.torch_autocast_z0_gradscaler:
        return Replicated(engine)
    kind = type(optimizer).__name__
    stages: dict[str, type[Any]] = {"DeepSpeedZeroOptimizer": Fragments, "DeepSpeedZeroOptimizer_Stage3": Shards}
    if kind not in stages or engine.fp16_enabled() or _offloads(optimizer):
        raise UnsupportedError(
            f"DeepSpeed with {kind}{', fp16' if engine.fp16_enabled() else ''}"
            f"{', offload' if _offloads(optimizer) else ''} is not supported: use ZeRO stage 1, 2 or 3 in fp32 or bf16 "
            "without offload, or stage 0 in fp32"
        )
    found: Partitions = stages[kind](engine)
    return found


def _offloads(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


@final
class Replicated:
    """Stage 0: gradients are where torch keeps them."""

    whole = True

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self.inner: Optimizer = engine.optimizer
        places = {id(p): i for i, group in enumerate(self.inner.param_groups) for p in group["params"]}
        self.groups = {name: places[id(p)] for name, p in engine.module.named_parameters() if id(p) in places}
        self.device = next(iter(engine.module.parameters())).device.type

    def weights(self) -> dict[str, tuple[Tensor, int]]:
        """The model's own."""
        return {}

    def gradients(self) -> dict[str, Tensor]:
        """The model's own."""
        return {}

    def drop(self, step: Any) -> None:
        """The engine counts a step as skipped where its optimizer speaks of an overflow."""
        self._optimizer.overflow = True

    def publish(self) -> None:
        """There is one copy."""

    def state_dict(self) -> dict[str, Any]:
        """Kept with the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept with the optimizer."""


class _Flat:
    """Stages 1 to 3: fp32 weights in flat tensors, and the moments beside them."""

    whole = False

    def __init__(self, engine: Any, flat: list[Tensor]) -> None:
        self._optimizer = engine.optimizer
        self.inner: Optimizer = engine.optimizer.optimizer
        self._flat = flat
        self._named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.device = flat[0].device.type

    def gradients(self) -> dict[str, Tensor]:
        """Of each stage."""
        raise NotImplementedError

    @torch.no_grad()
    def drop(self, step: Any) -> None:
        """A gradient that is infinite everywhere makes it skip by itself, and clean up."""
        for grad in self.gradients().values():
            grad.fill_(torch.inf)
        checks = getattr(self._optimizer, "check_grad_overflow", None)
        if checks is not None:
            self._optimizer.check_grad_overflow = True
        step()
        if checks is not None:
            self._optimizer.check_grad_overflow = checks
        assert self._optimizer.overflow

    def state_dict(self) -> dict[str, Any]:
        """The moments of each flat tensor."""
        return {str(i): dict(self.inner.state.get(flat, {})) for i, flat in enumerate(self._flat)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place: DeepSpeed holds views of them."""
        for i, flat in enumerate(self._flat):
            held, saved = self.inner.state[flat], state[str(i)]
            for name in held.keys() - saved.keys():
                del held[name]
            for name, value in saved.items():
                if isinstance(held.get(name), Tensor):
                    held[name].copy_(value)
                else:
                    held[name] = value.clone() if isinstance(value, Tensor) else value


@final
class Fragments(_Flat):
    """Stages 1 and 2: one flat tensor per group, cut at any place; a rank may hold nothing of a parameter."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, engine.optimizer.single_partition_of_fp32_groups)
        places = {id(p): i for i, group in enumerate(engine.optimizer.bit16_groups) for p in group}
        self.groups = {name: places[id(p)] for name, p in self._named.items()}

    def weights(self) -> dict[str, tuple[Tensor, int]]:
        """Views of the flat tensors."""
        nothing = self._flat[0].detach()[:0]
        held = {name: p._hp_mapping for name, p in self._named.items()}
        return {
            name: (nothing if held[name] is None else held[name].hp_fragment.detach().view(-1), p.numel())
            for name, p in self._named.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """Those of the parameters of which this rank holds something, and empty ones."""
        nothing = self._flat[0].detach()[:0]
        return {
            name: nothing if p._hp_mapping is None else p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group)
            for name, p in self._named.items()
        }

    def publish(self) -> None:
        """One all-gather."""
        self._optimizer.update_lp_params()


@final
class Shards(_Flat):
    """Stage 3: every rank holds a part of the same size of each parameter, padded at the end."""

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        super().__init__(engine, optimizer.fp32_partitioned_groups_flat)
        subs = {id(p): i for i, group in enumerate(optimizer.fp16_groups) for p in group}
        self.groups = {name: optimizer.sub_group_to_group_id[subs[id(p)]] for name, p in self._named.items()}
        self._places = {
            name: (subs[id(p)], [id(each) for each in optimizer.fp16_groups[subs[id(p)]]].index(id(p)))
            for name, p in self._named.items()
        }

    def weights(self) -> dict[str, tuple[Tensor, int]]:
        """Views of the flat tensors."""
        found = {}
        for name, parameter in self._named.items():
            group, start, size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            found[name] = (self._used(self._flat[group].detach().narrow(0, start, size), name), parameter.ds_numel)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """By sub-group and place."""
        held = self._optimizer.averaged_gradients
        return {name: self._used(held[group][i].view(-1), name) for name, (group, i) in self._places.items()}

    def _used(self, part: Tensor, name: str) -> Tensor:
        """Without the padding, which holds anything."""
        left = self._named[name].ds_numel - torch.distributed.get_rank() * part.numel()
        return part[: max(left, 0)]

    def publish(self) -> None:
        """As at the end of a step; one all-gather of what is kept whole on every rank."""
        optimizer = self._optimizer
        for group in range(len(self._flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()


@final
class ShardedWeights(nn.Module):
    """The fp32 weights that ZeRO trains, by the names of the model's parameters; buffers are the model's."""

    def __init__(self, model: nn.Module, parts: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._forward_module = model
        self._spread = parts

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's part of each."""
        yield from self._spread.items()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model's own."""
        yield from self._forward_module.named_modules(*args, **kwargs)


def spread(parts: Partitions) -> dict[str, nn.Parameter]:
    """This rank's part of each weight as a DTensor over all ranks."""
    mesh = init_device_mesh(parts.device, (torch.distributed.get_world_size(),))
    return {name: nn.Parameter(_dtensor(part, size, mesh)) for name, (part, size) in parts.weights().items()}


def _dtensor(part: Tensor, size: int, mesh: Any) -> DTensor:
    return DTensor.from_local(part.detach(), mesh, [Shard(0)], run_check=False, shape=torch.Size([size]), stride=(1,))


def like(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """A part of a gradient as a DTensor like its parameter."""
    known: Any = parameter
    return _dtensor(grad.reshape(-1).to(parameter.dtype), known.numel(), known.device_mesh)
