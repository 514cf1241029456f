"""Faults that kernels find by themselves: interpreted here. (On the CPU a call is looked through before it runs.)"""

from dataclasses import replace

import pytest
import torch

from attnmesh.decode import check_decode_errors
from attnmesh.ops.decode import reference
from attnmesh.ops.decode.triton import Triton
from helpers.decode import device_of, problem_for

pytestmark = pytest.mark.usefixtures("no_fault_left_over")


@pytest.fixture
def no_fault_left_over():
    check_decode_errors()
    yield
    check_decode_errors()


def found_with(call, **wrong):
    return Triton().run(replace(call, **{name: value.to(device_of("triton")) for name, value in wrong.items()}))


def assert_innocent(found, exact, sequences):
    torch.testing.assert_close(found.out[sequences], exact.out[sequences], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse[sequences], exact.lse[sequences], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"split_size": 16}, {"max_splits": 1}], ids=str)
@pytest.mark.parametrize("value", [-1, 10_000, -(2**31)])
def test_an_entry_outside_the_pool(value, how):
    call = problem_for("triton", [20, 40], block_size=16, dtype=torch.float32, **how).call()
    table = call.table.clone()
    table[1, 2] = value
    found = found_with(call, table=table)
    with pytest.raises(ValueError, match=rf"block_table\[1, 2\] is {value}, outside the pool"):
        check_decode_errors()
    assert found.out[1].isnan().all()
    assert found.lse[1].isnan().all()
    assert_innocent(found, reference.run(call), [0])


@pytest.mark.parametrize("length", [100, 400])
def test_a_position_past_a_cache_that_others_share(length):
    call = problem_for(
        "triton", [length, 3, length // 2], dtype=torch.float32, share="cache", capacity=length + 1
    ).call()
    found = found_with(call, cur_pos=torch.tensor([length, 10**6, length // 2]))
    with pytest.raises(ValueError, match=r"cur_pos\[1\] is 1000000, beyond the cache"):
        check_decode_errors()
    assert found.out[1].isnan().all()
    assert found.lse[1].isnan().all()
    assert_innocent(found, reference.run(call), [0, 2])


def test_the_next_call_says_so():
    call = problem_for("triton", [20], block_size=16, dtype=torch.float32).call()
    found_with(call, table=torch.full_like(call.table, -7))
    if call.q.is_cuda:
        torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is -7, .*earlier decode call"):
        Triton().run(call)
    assert_innocent(Triton().run(call), reference.run(call), [0])
