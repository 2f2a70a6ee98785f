"""Makes a `jax.Array` over memory that JAX did not allocate, by means of DLPack's C structures."""

import atexit
import ctypes
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


class _Tensor(ctypes.Structure):
    """The struct DLManagedTensor of dlpack.h. Its first member, a DLTensor, is replaced by the DLTensor's fields."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# The numbers come from dlpack.h. `_CUDA` and `_CPU` are values of the enum DLDeviceType. `_KINDS` maps the name of a
# dtype to its value of the enum DLDataTypeCode.
_CUDA = 2
_CPU = 1
_KINDS = {"uint8": 1, "float32": 2, "bfloat16": 4}
# `_owned` maps the address of a `_Tensor` to (the tensor, the arrays that it points to, `free` of `array_over`). These
# objects stay alive until JAX deletes the array.
_owned: dict[int, tuple[Any, ...]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address):
    if (owned := _owned.pop(address, None)) is not None:
        owned[-1]()


@atexit.register
def _disown():
    """Replaces the deleters of all tensors by a function that does nothing, when the process ends.

    JAX deletes the remaining arrays when Python can no longer be called. The end of the process frees their memory.
    """
    for tensor, *_ in _owned.values():
        tensor.deleter = _nothing
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


class _Exporter:
    """An object with the methods of the DLPack protocol, as `jax.dlpack.from_dlpack` expects it."""

    def __init__(self, tensor: _Tensor):
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device_id

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


def array_over(
    address: int, shape: tuple[int, ...], dtype: DTypeLike, device: jax.Device, free: Callable[[], None]
) -> Array:
    """Returns an array over memory whose contiguous bytes begin at `address`.

    Like most arrays, it is not committed to its device.

    Args:
      address: address of the first byte.
      shape: shape of the array.
      dtype: uint8, float32 or bfloat16.
      device: the GPU that may read the address; a CPU in tests.
      free: function that frees the memory. It is called once, after the array and all programs that read it are gone;
        never if `array_over` raises.
    """
    dtype = jnp.dtype(dtype)
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*(math.prod(shape[i + 1 :]) for i in range(len(shape))))
    device_type, device_id = (_CUDA, device.local_hardware_id) if device.platform == "gpu" else (_CPU, 0)
    dtype_fields = _KINDS[dtype.name], 8 * dtype.itemsize, 1
    location = address, device_type, device_id
    tensor = _Tensor(*location, len(shape), *dtype_fields, sizes, strides, 0, None, _delete_pointer)
    _owned[ctypes.addressof(tensor)] = tensor, sizes, strides, free
    try:
        array = jax.dlpack.from_dlpack(_Exporter(tensor))
    except BaseException:
        del _owned[ctypes.addressof(tensor)]
        raise
    # A committed argument would make a step's outputs committed. The step would be compiled again when these outputs
    # are the next step's arguments.
    return cast("Any", type(array))(array.aval, array.sharding, [array], committed=False)


# This C function has no effects. It serves as a deleter that frees nothing.
_nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
_delete_pointer = ctypes.cast(_delete, ctypes.c_void_p)
