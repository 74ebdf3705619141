"""An accelerator for tests, made of host memory: it is not a GPU.

It refuses what CUDA refuses (reading memory from the host, operands on two devices), has random numbers of its own,
answers copies that do not block only when it is waited for, and counts launches, transfers and waits. Nothing can be
learned from it about speed, memory or the kernels of a GPU.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.device import host_memory as memory

NAME = "notgpu"
DEVICE = f"{NAME}:0"


@dataclass
class Counts:
    """What the host asked of the device."""

    launches: int = 0
    to_host: int = 0
    to_device: int = 0
    waits: int = 0


_now = Counts()
_pending: list[tuple[Tensor, Tensor]] = []  # copies to the host that have not arrived
_libraries: list[torch.library.Library] = []
_generator = torch.Generator("cpu")


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what is done inside."""
    global _now
    before, _now = _now, Counts()
    try:
        yield _now
    finally:
        _now = before


def wait() -> None:
    """Until everything asked for so far is done."""
    _now.waits += 1
    _arrive()


def _arrive() -> None:
    for target, values in _pending:
        target.copy_(values)
    _pending.clear()


class _Module:
    """What `torch.notgpu` is."""

    _initialized = True  # torch's activation checkpointing asks

    @staticmethod
    def device(_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "host memory, not a GPU"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        _generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = NAME) -> Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = NAME) -> None:
        _generator.set_state(state)

    def synchronize(self, device: object = None) -> None:
        wait()

    def empty_cache(self) -> None: ...


_MAY_BE_ON_HOST = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # as CUDA: the indices
_WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "is_nonzero"}
_VIEWS = {"view", "as_strided", "alias", "detach", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"}


class _Operator:
    """What has to be known of an operator to run it."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name = op._schema.name.removeprefix("aten::")
        self.waits, self.launches = self.name in _WAITS, self.name not in _VIEWS
        self.takes_numbers = torch.Tag.pointwise in op.tags  # as CUDA: tensors of the host without dimensions
        self.draws = any(argument.name == "generator" for argument in op._schema.arguments)
        self.written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]

    def check(self, position: int | None, tensor: Tensor) -> None:
        written = position is not None and position < len(self.written) and self.written[position]
        if not written and (self.name in _MAY_BE_ON_HOST or (self.takes_numbers and not tensor.dim())):
            return
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and {tensor.device}! ({self.op})"
        )


_operators: dict[Any, _Operator] = {}


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: its kernel for the host on the same memory."""
    known = _operators.get(op) or _operators.setdefault(op, _Operator(op))
    if known.waits:
        wait()
    _now.launches += known.launches
    if known.draws and kwargs.get("generator") is None:
        kwargs["generator"] = _generator
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def host(value: Any, position: int | None = None) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != NAME:
                known.check(position, value)
                return value
            if id(value) not in twins:
                twins[id(value)] = (value, memory.to_host(value))
            return twins[id(value)][1]
        return [host(item, position) for item in value] if isinstance(value, list | tuple) else value

    result = op(*(host(arg, i) for i, arg in enumerate(args)), **{name: host(arg) for name, arg in kwargs.items()})
    owners = {}
    for device, twin in twins.values():
        if device.shape != twin.shape or device.stride() != twin.stride():  # resized
            moved = memory.to_device(twin)
            memory.set_storage(device, moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride())
        owners[twin.untyped_storage().data_ptr()] = device
    same = {id(twin): device for device, twin in twins.values()}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return type(value)(map(back, value)) if isinstance(value, list | tuple) else value
        if id(value) in same:
            return same[id(value)]
        owner = owners.get(value.untyped_storage().data_ptr()) if value.numel() else None
        if owner is not None and owner.dtype == value.dtype:
            return memory.as_strided(owner, value.shape, value.stride(), value.storage_offset())
        return memory.to_device(value)

    return back(result)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return memory.allocate(shape.shape, shape.stride(), dtype or torch.get_default_dtype())


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return memory.allocate(size, stride, dtype or torch.get_default_dtype())


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    here, there = source.device.type == NAME, target.device.type == NAME
    values = memory.to_host(source) if here else source
    if there:
        if here:
            _now.launches += 1
        else:
            _now.to_device += 1
            if not non_blocking:
                wait()
            _arrive()  # in the order of the stream
        memory.to_host(target).copy_(values)
        return target
    _now.to_host += 1
    if non_blocking:
        _pending.append((target, values.clone()))
        return target
    wait()
    target.copy_(values)
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return _copy(source, target.resize_(source.shape))


def _scalar(tensor: Tensor) -> Any:
    _now.to_host += 1
    wait()
    return memory.to_host(tensor).item()


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _resize(tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    fresh = _empty(size, dtype=tensor.dtype, memory_format=memory_format)
    count = min(tensor.numel(), fresh.numel())
    if count:
        memory.to_host(fresh).flatten()[:count] = memory.to_host(tensor).flatten()[:count]
    return memory.set_storage(tensor, fresh.untyped_storage(), 0, fresh.shape, fresh.stride())


_KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "as_strided": lambda x, size, stride, offset=None: memory.as_strided(x, size, stride, offset),
    "view": lambda x, size: memory.view(x, size),
    "_reshape_alias": lambda x, size, stride: memory.reshape_alias(x, size, stride),
    "set_.source_Storage_storage_offset": lambda x, *where: memory.set_storage(x, *where),
    "resize_": lambda x, size, *, memory_format=None: _resize(x, size, memory_format),
    "_copy_from": _copy,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_local_scalar_dense": _scalar,
    "native_dropout": _dropout,
}
_IN_HALF = ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "scaled_dot_product_attention")
_IN_FULL = ("nll_loss", "mse_loss", "softmax.int", "log_softmax.int", "layer_norm", "exp", "log", "pow.Tensor_Scalar")


def _clone_storage(storage: Any) -> Any:
    """For `copy.deepcopy`: torch would ask an allocator in C++, which a device made in Python has not got."""
    if storage.device.type != NAME:
        return _torch_clone_storage(storage)
    copied = memory.allocate((storage.nbytes(),), (1,), torch.uint8)
    memory.to_host(copied).copy_(memory.bytes_of(storage))
    return copied.untyped_storage()


_torch_clone_storage = torch.UntypedStorage.clone


def _autocast(name: str, *, half: bool) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if half else torch.float32
        cast = partial(_cast, dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def register() -> None:
    """Once per process, and for all of it."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    torch.accelerator.synchronize = lambda device=None: wait()  # type: ignore[assignment]  # a guard in C++ has it
    torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in (*_IN_HALF, *_IN_FULL):
        aten.impl(name, _autocast(name, half=name in _IN_HALF), "AutocastPrivateUse1")
    _libraries.extend((everything, aten))
