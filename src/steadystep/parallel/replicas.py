"""Replicas that should hold the same bits: a checksum of all weights, now and then; and how many ranks hold a part.

And what one replica does for the others when its own pass has failed: `StandIn`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steadystep._utils.tensors import copies_in_mesh, is_sharded
from steadystep.errors import UnsupportedError
from steadystep.records import REPLICAS_EVERY

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PRIME = 1_048_573  # below 2^20; no power of two is a multiple of it, so one flipped bit always shows
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class Replicas:
    """The weights of this rank, as a number. Sharded weights have no replica and are left out."""

    def __init__(self, model: nn.Module, *, every: int = REPLICAS_EVERY, own: Container[int] = ()) -> None:
        self._model = model
        self._every = every
        self._own = own
        """Identities of parameters that have no replica."""

    def checksum(self, step: int) -> int:
        """Of all weights at steps where replicas are compared, 0 at others. One pass over the weights."""
        if step % self._every:
            return 0
        return sum(place * number for place, number in enumerate(self.each()[1], start=1)) % _PRIME

    @torch.no_grad()
    def each(self) -> tuple[list[str], list[int]]:
        """Names and checksums, one by one."""
        held = self._model.named_parameters()
        named = {name: p for name, p in held if not is_sharded([p]) and id(p) not in self._own}
        sums = [_bits_added(parameter) for parameter in named.values()]
        together = torch.stack([total.to(sums[0].device) for total in sums]) if sums else torch.empty(0)
        return list(named), together.tolist()  # sync: at a cadence


def odd_ones(names: Sequence[str], every: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Who differs from what most ranks have; of two that differ, nobody knows which one is right."""
    found = []
    for place, name in enumerate(names):
        held = [checksums[place] for checksums in every]
        baseline, count = Counter(held).most_common(1)[0]
        if count == len(held):
            continue
        odd = [rank for rank, checksum in enumerate(held) if checksum != baseline]
        sure = 2 * count > len(held)
        found.append(f"{name} on rank {', '.join(map(str, odd))}" if sure else f"{name} on some rank")
    return tuple(found)


def healthy_rank(every: Sequence[Sequence[int]]) -> int | None:
    """The first rank that holds what most ranks hold, all of it; None where no state has a majority.

    >>> healthy_rank([[1, 7], [1, 2], [1, 2]]), healthy_rank([[1], [2]])
    (1, None)
    """
    rows = [tuple(row) for row in every]
    baseline, count = Counter(rows).most_common(1)[0]
    return rows.index(baseline) if 2 * count > len(rows) else None


@torch.no_grad()
def broadcast(
    model: nn.Module,
    optimizer: Optimizer,
    send: Callable[[Tensor], None],
    device: torch.device,
    *,
    own: Container[int] = (),
) -> None:
    """Send every weight that has copies, and its moments; buffers, and what is in `own`, are each rank's own."""
    held = {id(p): p for p in model.parameters() if id(p) not in own}
    held |= {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) not in own}
    for parameter in held.values():
        slots = optimizer.state.get(parameter, {})
        moments = [slots[name] for name in sorted(slots) if isinstance(slots[name], Tensor)]
        for tensor in (parameter, *moments):
            if not is_sharded([tensor]):
                sent = tensor.detach().contiguous()
                sent = sent.to(device) if sent.device.type == "cpu" else sent
                send(sent)
                tensor.copy_(sent)


def _bits_added(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    whole = flat.reshape(-1).view(_AS_INTEGERS[flat.element_size()])
    return whole.sum(dtype=torch.int64).remainder(_PRIME)


def copies_of_all(
    parameters: Sequence[Tensor],
    size: int,
    summed: Callable[[list[float]], list[float]],
    *,
    own: Container[int] = (),
) -> list[float]:
    """How many of `size` ranks hold the same part of each; asks the others where a mesh is smaller than the world.

    Of those whose identity is in `own` each rank has another.
    """
    if all(mesh_size(parameter) in (1, size) for parameter in parameters):
        holders = [float(size)] * len(parameters)
    else:
        holders = summed([float(is_here(parameter)) for parameter in parameters])
    counted = zip(parameters, holders, strict=True)
    return [1.0 if id(parameter) in own else copies(parameter, holders=count) for parameter, count in counted]


def mesh_size(parameter: Tensor) -> int:
    """How many ranks share it: those of its mesh, or this one alone for a plain tensor."""
    return cast("DTensor", parameter).device_mesh.size() if is_sharded([parameter]) else 1


def is_here(parameter: Tensor) -> bool:
    """Whether this rank holds a part of it: it may be outside of its mesh."""
    return not is_sharded([parameter]) or cast("DTensor", parameter).device_mesh.get_coordinate() is not None


def copies(parameter: Tensor, *, holders: float) -> float:
    """How many ranks hold the same part, where `holders` ranks hold a part of it.

    Inside its mesh that is the size of the dimensions it is replicated over. Ranks outside hold it on a mesh of the
    same shape, one for each replica: data parallelism around a mesh for tensor parallelism.
    """
    if not is_sharded([parameter]):
        return holders
    return copies_in_mesh(parameter) * holders / mesh_size(parameter)


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that a forward pass of FSDP2 without a backward pass has left behind."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has used it has imported it
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def refuse_join(wrapped: Any) -> None:
    """Raise inside DDP's join(): a rank without batches answers DDP's messages there, and would not answer ours."""
    config = getattr(wrapped, "_join_config", None)
    if config is not None and config.enable:
        raise UnsupportedError(
            "DistributedDataParallel.join() lets ranks continue after others ran out of batches, and then they "
            "cannot agree: remove join() and use guard.batches(loader), which ends on all ranks with the "
            "shortest, or drop_last"
        )


_MARKED = "mark a variable ready only once"  # as torch says it


@final
class StandIn:
    """Sends zeros for a pass of DistributedDataParallel that failed on this rank alone: the others wait for it.

    What they wait for: buffers that are broadcast on entering the model, buckets that are laid out anew in the second
    pass, and gradients. It depends on how far the pass came, which is noted around it (`watching`).

    Args:
        wrapped: the wrapper of the model; None without one.
        own: identities of the parameters that it ignores.
    """

    def __init__(self, wrapped: DistributedDataParallel | None, own: Container[int] = ()) -> None:
        self._wrapped, self._own = wrapped, own
        self._calls = 0
        self._usual = 1
        """Calls of the model in one pass."""
        self._reduces = True
        self._before: dict[int, int] = {}
        """Versions of the gradients that were there before the pass."""

    @property
    def is_possible(self) -> bool:
        """Whether all that a pass sends is known: no messages of a module's own, no graph that was fixed."""
        wrapped: Any = self._wrapped
        if wrapped is None or wrapped.static_graph or wrapped.mixed_precision is not None or not self._usual:
            return False
        if hasattr(wrapped, "buffer_hook") or wrapped._use_python_reducer or wrapped._delay_all_reduce_all_params:
            return False
        modules = wrapped.module.modules()
        return not any(isinstance(m, nn.SyncBatchNorm) or getattr(m, "sparse", False) for m in modules)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one pass, forward and backward."""
        wrapped = self._wrapped
        if wrapped is None:
            yield
            return
        self._calls, self._reduces = 0, wrapped.require_backward_grad_sync
        self._before = {id(p): p.grad._version for p in self._parameters() if p.grad is not None}
        handle = wrapped.register_forward_pre_hook(self._count)
        try:
            yield
            self._usual = self._calls  # 0 where the model is compiled with its wrapper: then nothing is known
        finally:
            handle.remove()

    def complete(self, *, reduced: bool) -> None:
        """Send what is left of the pass, and of the one with which the others end where `reduced`."""
        wrapped = self._wrapped
        assert wrapped is not None
        if self._reduces and any(self._is_touched(p) for p in self._parameters()):
            self._rest_of_backward()
            return
        if self._calls:  # as the call that failed would have left it
            wrapped.require_forward_param_sync = self._reduces
        missing = self._usual - self._calls
        if not self._reduces:
            with wrapped.no_sync():
                for _ in range(missing):
                    self._forward()
            if not reduced:
                return
            missing = self._usual
        for _ in range(missing - 1):
            self._forward()
        if missing < 1:  # buffers were sent, and only the gradients are left
            wrapped.require_forward_param_sync = False
        self._forward().backward()  # type: ignore[no-untyped-call]

    def _count(self, *_: object) -> None:
        self._calls += 1

    def _parameters(self) -> list[Parameter]:
        assert self._wrapped is not None
        return [p for p in self._wrapped.module.parameters() if p.requires_grad and id(p) not in self._own]

    def _is_touched(self, parameter: Parameter) -> bool:
        """The pass has added to its gradient, which was then handed over."""
        grad = parameter.grad
        return grad is not None and grad._version != self._before.get(id(parameter))

    def _rest_of_backward(self) -> None:
        wrapped: Any = self._wrapped
        for parameter in self._parameters():
            if not self._is_touched(parameter):
                try:
                    _zero([parameter]).backward()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    if _MARKED not in str(error):  # it was found to be unused, and counts as handed over
                        raise
        if wrapped.find_unused_parameters:  # what no rank has used has no gradient on the others
            users = wrapped.reducer._get_local_used_map().tolist()  # sync: only in trouble
            for parameter, count in zip(self._parameters(), users, strict=True):
                if not count and id(parameter) not in self._before:
                    parameter.grad = None

    def _forward(self) -> Tensor:
        """A call of the wrapper whose model is the sum of nothing; without hooks."""
        wrapped: Any = self._wrapped
        vars(wrapped)["_run_ddp_forward"] = lambda *_, **__: _zero(self._parameters())
        try:
            loss: Tensor = DistributedDataParallel.forward(wrapped)  # type: ignore[no-untyped-call]
        finally:
            del vars(wrapped)["_run_ddp_forward"]
        return loss


def _zero(parameters: Sequence[Parameter]) -> Tensor:
    """Zero, whose gradient is zero for each of them."""
    sums = [(p.real if p.is_complex() else p).sum().float() * 0.0 for p in parameters]
    return torch.stack([each.to(sums[0].device) for each in sums]).sum()
