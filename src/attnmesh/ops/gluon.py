"""Barriers in shared memory, by which the groups of warps of a Gluon kernel wait for one another.

A barrier's memory is its own from its initialization to its invalidation, used or not: a GPU that interrupts a program
for another process writes the words of all valid barriers again when it resumes the program, over whatever else lies
there by then. Triton allocates memory again after its last use. So a kernel allocates all barriers before it
initializes the first, and invalidates all of them at its end.

The exponents of a row of an online softmax in Gluon, however large its scores.

A weight is `exp2(score * factor - shift)`, in one multiply-add per score. The shift is the product of the row's largest
score and the factor, rounded: the exponent of that score is not 0 but what the rounding lost. All weights and their sum
have this error in common, and it cancels. Below 2**28 it is at most 8, for which weights of every dtype have room; at
2**32 it would be up to 128.

From 2**28 on, two scores that differ do so by 16 or more in the exponent: but for 2**-16, the largest has all the
weight. There the factor is the power of two below it, whose products are exact. So rows need no branch, and scores no
further instruction. (A score next to the largest has a weight of up to 2**-8 then, instead of 2**-16. Computed in
float32 without this, score by score, it may have that of the largest.)

The carry of a row is `raw_max`, its largest score before the factor; `row_max` is the same in base 2. Before its first
key `raw_max` is `lowest_of` the factor, which is finite: no exponent is the difference of two infinities.

Descriptors of tensors for Hopper's copy engine (TMA), which Gluon kernels take as arguments.

Triton encodes them at launch with a call of the driver, which requires a current context. torch makes one current in a
thread with the first call of the runtime that needs it, and a tensor that another thread made may not have needed any.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False, disable-error-code="assignment"
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnmesh.ops.exponents import EXPONENT_BITS, HUGE, LOWEST


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr):
    """The memory of some barriers."""
    return gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(barriers, ARRIVALS: gl.constexpr):
    """Initializes barriers, whose phases end with ARRIVALS arrivals. A fence must follow the last initialization."""
    NUMBER: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)


@gluon.jit
def invalidate_barriers(barriers):
    """Invalidates every barrier of a tuple of their memories, when no group of warps uses any of them again."""
    for memory in gl.static_range(len(barriers)):
        _invalidate(barriers[memory])


@gluon.jit
def _invalidate(barriers):
    NUMBER: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.invalidate(barriers.index(i))


# The exponents of a row of an online softmax in Gluon, however large its scores.


_HUGE, _LOWEST, _EXPONENT_BITS = gl.constexpr(HUGE), gl.constexpr(LOWEST), gl.constexpr(EXPONENT_BITS)
# Never fused with the subtraction that follows: the largest score minus itself must be 0, however large it is.
TIMES = gl.constexpr("mul.rn.f32 $0, $1, $2;")


@gluon.jit
def lowest_of(factor):
    """Less than any score: the `raw_max` of a row without a key. Its product with the factor is finite."""
    return _LOWEST / gl.maximum(factor, 1.0)


@gluon.jit
def row_max_of(raw_max, factor):
    """The largest scores of rows in base 2; -inf without a key."""
    return gl.where(raw_max > lowest_of(factor), raw_max * factor, float("-inf"))


@gluon.jit
def row_exponents(raw_max, new_raw_max, factor):
    """The factor and the shift of rows, and the exponents by which their sums so far are rescaled."""
    # The largest power of two that is not greater than the factor, which is positive.
    power = gl.cast(gl.cast(factor, gl.int32, bitcast=True) & _EXPONENT_BITS, gl.float32, bitcast=True)
    factors = gl.where(gl.abs(new_raw_max) >= _HUGE / factor, power, factor)
    shift = _times(new_raw_max, factors)
    return factors, shift, _times(raw_max, factors) - shift


@gluon.jit
def _times(a, b):
    return gl.inline_asm_elementwise(TIMES, "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


# Descriptors of tensors for Hopper's copy engine (TMA), which Gluon kernels take as arguments.


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
    # A dimension of size 1 is never stepped along, but its stride would have to be aligned.
    strides = [64 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, _layout(x.element_size(), block[-1], x.ndim))


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
