"""Barriers in shared memory, by which the groups of warps of a Gluon kernel wait for one another.

A barrier's memory is its own from its initialization to its invalidation, used or not: a GPU that interrupts a program
for another process writes the words of all valid barriers again when it resumes the program, over whatever else lies
there by then. Triton allocates memory again after its last use. So a kernel makes all barriers at its beginning, and
invalidates all of them at its end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers whose phases end with ARRIVALS arrivals. A fence must follow the last initialization."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


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
