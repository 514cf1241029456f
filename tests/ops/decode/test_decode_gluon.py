"""The MLA decode kernel for Hopper against float64: emulated, on a Hopper GPU, and compiled."""

from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from attnmesh.core.state import State
from attnmesh.ops.decode import gluon_latent
from attnmesh.testing.decode import DecodeProblem, random_decode
from helpers.decode import assert_decode_close
from helpers.gluon import emulated, mostly_slow
from helpers.triton_compile import assert_fit, compiled_for_hopper, count


def latent(positions: list[int], **how: object) -> DecodeProblem:
    """A call over a latent cache; everything that may not be read is NaN."""
    how = {"group": 16, "kv_heads": 1, "block_size": 64, "dtype": torch.float16, "at": "int32"} | how
    return random_decode(positions, dims=(576, 512), v_in_k=True, **how)


def run(kernel: ModuleType, problem: DecodeProblem) -> State:
    call = problem.call()
    assert kernel.refusal(call) is None
    state = State(*(x.fill_(torch.nan) for x in call.empty_state()))
    kernel.launch(call, state, 0)
    return state


def assert_right(kernel: ModuleType, problem: DecodeProblem) -> State:
    state = run(kernel, problem)
    assert_decode_close(state, problem)
    return state


CASES = [
    ([130, 0, 63, 64, 200], {}),
    ([130, -1, 64], {"group": 128}),
    ([70, 300], {"group": 40, "tokens": 3}),
    ([5, 190], {"group": 16, "tokens": 8, "sinks": True}),
    ([200, 150], {"window": 70, "tokens": 2}),
    ([200, 3, 129], {"window": 7, "sinks": True}),
    ([250, 90, 170], {"key_range": "intervals", "tokens": 4}),
    ([300, 70], {"split_size": 128}),
    ([300, 70], {"split_size": 100, "window": 150, "sinks": True}),
    ([500], {"max_splits": 3}),
    ([500, 20], {"max_splits": 1}),
    ([150, 90], {"block_size": 16}),
    ([150, 300], {"block_size": 32, "tokens": 2}),
    ([150, 300], {"block_size": 128}),
    ([150, 300], {"block_size": 256, "share": "blocks"}),
    ([100, 70], {"kv_heads": 2}),
    ([100, 70], {"kv_heads": 2, "memory": "layer inside", "out_dtype": torch.float32}),
    ([100, 70], {"scale": -0.05}),
    ([-1, -1], {"sinks": True}),
]


@pytest.mark.parametrize(("positions", "how"), mostly_slow(CASES, 5))
def test_against_float64(positions, how):
    assert_right(emulated(gluon_latent), latent(positions, **how))
