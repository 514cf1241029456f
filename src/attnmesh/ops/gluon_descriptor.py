"""Descriptors of tensors for Hopper's copy engine (TMA), which kernels take as arguments.

Triton encodes them at launch with a call of the driver, which requires a current context. torch makes one current in a
thread with the first call of the runtime that needs it, and a tensor that another thread made may not have needed any.
"""

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as TileDescriptor


class _Contexts(threading.local):
    """The devices whose context this thread has made current; -1 is the host, where tests emulate kernels."""

    def __init__(self) -> None:
        self.devices = {-1}


_contexts = _Contexts()


def descriptor(x: Tensor, block: list[int], begin: int = 0) -> Any:
    """The copy engine's view of the columns of `x` from column `begin` on, in blocks of this shape.

    To be passed to a kernel by the same thread.
    """
    if begin:
        whole, x = x, x[..., begin:]
        x.columns_of = whole  # type: ignore[attr-defined]  # for `launch.prepare`: others may share the memory
    ensure_context(x.get_device())
    return TensorDescriptor(x, list(x.shape), _strides(x), block, _layout(x.element_size(), block[-1], x.ndim))


def tile_descriptor(x: Tensor, block: list[int]) -> Any:
    """The copy engine's view of `x` in blocks of this shape, for a kernel in Triton's own language.

    To be passed to a kernel by the same thread.
    """
    ensure_context(x.get_device())
    return TileDescriptor(x, list(x.shape), _strides(x), block)


def _strides(x: Tensor) -> list[int]:
    """Strides as the copy engine takes them: a dimension of size 1 is never stepped along, but must be aligned."""
    return [*(64 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)), 1]


def ensure_context(device: int) -> None:
    """Make the context of a device current, once in a thread.

    Recording an event requires a context, does not synchronize, and is allowed while a CUDA graph is captured.
    (`torch.cuda.set_device` calls nothing if the device is the current one, as device 0 is in a new thread.)
    """
    if device not in _contexts.devices:
        torch.cuda.current_stream(device).record_event()
        _contexts.devices.add(device)


@cache
def _layout(size: int, width: int, rank: int) -> Any:
    """How a block lies in shared memory: swizzled as far as a row of `width` elements of `size` bytes allows."""
    swizzle = min(128, size * width) if size * width >= 32 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=rank)
