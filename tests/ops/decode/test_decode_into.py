"""Results as they are wanted: in float32, and written where a message has them, with not a byte beside."""

import pytest
import torch

from attnmesh.core.state import State
from attnmesh.ops.decode import triton as triton_backend
from helpers.cases import sweep
from helpers.decode import BACKENDS, assert_decode_close, check_backend, problem_for

EVERYWHERE = pytest.mark.parametrize("backend", [*BACKENDS, "reference"])


@pytest.mark.parametrize(
    ("tokens", "how", "backend"),
    [
        (1, {}, "cpu"),
        sweep(1, {"key_range": "intervals", "sinks": True, "seed": 2}, "reference"),
        sweep(3, {"split_size": 16}, "triton"),
    ],
    ids=str,
)
def test_partial_states_in_a_packed_message(tokens, how, backend, monkeypatch):
    """Heads first, as they are sent; each row is its out and, behind it, its lse."""
    monkeypatch.setattr(triton_backend, "_SEQUENCES_PER_LAUNCH", 2)
    problem = problem_for(backend, [70, -1, 20], tokens=tokens, block_size=16, dims=(32, 24), **how)
    batch, heads = problem.q.shape[:2]
    message = torch.full((heads + 2, batch + 2, tokens, 24 + 1), torch.nan, device=problem.q.device)
    mine = message[1:-1, 1:-1]
    into = State(mine[..., :24].transpose(0, 1), mine[..., 24].transpose(0, 1))

    found = problem.run(backend, into=into)
    assert found.out is into.out
    assert found.lse is into.lse
    assert_decode_close(found, problem.with_options(out_dtype=torch.float32))
    expected = problem.run(backend, out_dtype=torch.float32)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    assert not mine.isnan().any()
    mine.fill_(torch.nan)
    assert message.isnan().all(), "something beside the message was written"


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float16, "cpu"),
        sweep(torch.float16, "triton"),
        (torch.float16, "reference"),
        (torch.float32, "cpu"),
        (torch.float32, "triton"),
        sweep(torch.float32, "reference"),
    ],
)
def test_results_in_the_dtype_of_queries(dtype, backend):
    problem = problem_for(backend, [30, 9], tokens=2, block_size=16, dtype=dtype, kv_heads=2)
    tokens_first = torch.full((2, 2, 4, 32), torch.nan, dtype=dtype, device=problem.q.device)
    into = State(tokens_first.transpose(1, 2), torch.full((2, 4, 2), torch.nan, device=problem.q.device))
    out = problem.attend(backend, into=into, out_dtype=dtype)
    assert out is into.out
    assert_decode_close(into, problem)


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ({"block_size": 16}, "cpu"),
        sweep({"block_size": 16}, "triton"),
        sweep({"block_size": 16}, "reference"),
        sweep({"split_size": 16}, "cpu"),
        sweep({"split_size": 16}, "triton"),
        sweep({"split_size": 16}, "reference"),
    ],
    ids=str,
)
def test_out_in_float32_is_what_is_rounded_by_default(how, backend):
    problem = problem_for(backend, [40, 20, -1], tokens=2, dtype=torch.float16, sinks=True, **how)
    default, wide = problem.run(backend), check_backend(problem, backend, out_dtype=torch.float32)
    assert wide.out.dtype == torch.float32
    assert default.out.dtype == torch.float16
    assert torch.equal(wide.out.half(), default.out)
    assert (wide.out != wide.out.half()).float().mean() > 0.5
    assert problem.run(backend, out_dtype=torch.float16).out.dtype == torch.float16
