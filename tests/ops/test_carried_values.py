"""What Triton drops of the values that loops carry: found in kernels that have the fault, and in no others.

Every kernel that a test compiles is searched for it (`helpers.triton_compile`).
"""

import pytest
import torch

from helpers.triton_compile import compiled_for_hopper

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def carried_bound(counts, out, items):
    count = tl.load(counts + tl.program_id(0))
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        now = count
        count = tl.load(counts + item + tl.num_programs(0))
        for i in range(now):
            tl.store(out + item, i)


@gluon.jit
def carried_bound_in_gluon(counts, out, items):
    count = gl.load(counts + gl.program_id(0))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        now = count
        count = gl.load(counts + item + gl.num_programs(0))
        total = 0
        for i in range(now):
            total += i
        gl.store(out + item, total)


@triton.jit
def value_before(counts, out, items):
    count = tl.load(counts + tl.program_id(0))
    before = count
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tl.store(out + item, count - before)
        before = count
        count = tl.load(counts + item + tl.num_programs(0))


@triton.jit
def bound_with_another_use(counts, out, items):
    count = tl.load(counts + tl.program_id(0))
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        now = count
        count = tl.load(counts + item + tl.num_programs(0))
        for i in range(now):
            tl.store(out + item, i)
        tl.store(out + item, now)


@gluon.jit
def loaded_bound(counts, out, items):
    steps = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for i in range(gl.load(counts + item)):
            gl.store(out + steps, i)
            steps += 1


@triton.jit
def bound_in_a_while_loop(counts, out, items):
    count = tl.load(counts + tl.program_id(0))
    item = tl.program_id(0)
    while item < items:
        now = count
        item += tl.num_programs(0)
        count = tl.load(counts + item)
        for i in range(now):
            tl.store(out + item, i)


@triton.jit
def other_value_before(counts, out, items):
    count = tl.load(counts + tl.program_id(0))
    before = count - 1
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tl.store(out + item, count - before)
        before = count
        count = tl.load(counts + item + tl.num_programs(0))


KERNELS = {
    kernel.fn.__name__: kernel
    for kernel in (
        carried_bound, carried_bound_in_gluon, value_before,
        bound_with_another_use, loaded_bound, bound_in_a_while_loop, other_value_before,
    )
}  # fmt: skip
FAULTY = list(KERNELS)[:3]


def launch(name: str) -> None:
    numbers = torch.zeros(8, dtype=torch.int32)
    KERNELS[name][(2,)](numbers, numbers, 8)


def test_faulty_kernels_are_found_by_name_and_no_others():
    with pytest.raises(AssertionError, match="values that Triton drops") as error:
        compiled_for_hopper(__file__, [(name,) for name in KERNELS], processes=1)
    assert {name for name in KERNELS if f"('{name}'" in str(error.value)} == {*FAULTY}
