"""Barriers in shared memory, by which the groups of warps of a Gluon kernel wait for one another.

A kernel allocates all of them before it initializes the first: memory that is not used any more may be allocated again,
and the memory of a barrier must not be initialized twice.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr):
    """The memory of some barriers."""
    return gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(barriers, ARRIVALS: gl.constexpr):
    """Initializes barriers, each phase of which ends with so many arrivals. A fence must follow the last."""
    NUMBER: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
