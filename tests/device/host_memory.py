"""Device tensors over host memory: an allocation is handed to torch as DLPack memory of an extension device."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_EXTENSION_DEVICE = 12  # kDLExtDev: torch reads it as PrivateUse1
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
# why C's own: a deleter in Python would run inside whatever torch is doing, exceptions on their way included
_free = ctypes.cast(_libc.free, ctypes.c_void_p)
_HEAD = 192  # bytes before the values: what describes them, so that one call frees both


def _data_type(dtype: torch.dtype) -> _DataType:
    name = str(dtype).removeprefix("torch.")
    return _DataType(_CODES[name.rstrip("0123456789")], 8 * dtype.itemsize, 1)


def _kernel(name: str) -> Any:
    """torch's own kernel for the host, which works on the description of a tensor and not on its values."""
    kernel = torch.library.get_kernel(name, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return lambda *args: kernel.call_boxed(keys, *args)


as_strided = _kernel("aten::as_strided")
view = _kernel("aten::view")
reshape_alias = _kernel("aten::_reshape_alias")
set_storage = _kernel("aten::set_.source_Storage_storage_offset")


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A device tensor with memory of its own, uninitialised."""
    count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 1
    address = _libc.malloc(_HEAD + count * dtype.itemsize)
    length = (ctypes.c_int64 * 2).from_address(address + ctypes.sizeof(_Managed))
    length[0], length[1] = count, 1
    shape = ctypes.cast(ctypes.addressof(length), ctypes.POINTER(ctypes.c_int64))
    strides = ctypes.cast(ctypes.addressof(length) + 8, ctypes.POINTER(ctypes.c_int64))
    device = _Device(_EXTENSION_DEVICE, 0)
    managed = _Managed.from_address(address)
    managed.tensor = _Tensor(address + _HEAD, device, 1, _data_type(dtype), shape, strides, 0)
    managed.context, managed.deleter = None, _free.value
    flat = torch._C._from_dlpack(_new_capsule(address, b"dltensor", None))
    return as_strided(flat, size, stride, 0)


def to_device(host: Tensor) -> Tensor:
    """A device tensor with the values of `host`."""
    made = allocate(host.shape, host.stride(), host.dtype)
    to_host(made).copy_(host)
    return made


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """What is in a device's storage, as bytes of the host over the same memory."""
    return torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)


def to_host(tensor: Tensor) -> Tensor:
    """The values of a device tensor as a tensor of the host over the same memory, for as long as that lives.

    Only kernels may ask for it.
    """
    if not tensor.numel():  # why: an operator may resize it, and with it the memory
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    storage = bytes_of(tensor.untyped_storage()).untyped_storage()
    return host.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
