"""Function calls of Python that a repeated call of an operation takes: what the host does while a GPU waits.

The bounds are what was counted, and a tenth more for other versions of Python and torch. A change may lower them.
"""

import sys
from collections.abc import Callable

import pytest
import torch

import attnmesh as am
from helpers.triton_driver import record_launches, said_by_its_own_process


def function_calls(call: Callable[[], object]) -> int:
    """How many functions, of Python and built in, the third call calls."""
    call()
    call()
    count = 0

    def watch(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 2  # `call` itself, and `setprofile`


def operations() -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    q, pool = torch.randn(2, 8, 1, 64), torch.randn(8, 16, 2, 64)
    k = torch.randn(2, 2, 32, 64)
    table, last = torch.tensor([[5, 0], [3, 1]], dtype=torch.int32), torch.tensor([19, 6], dtype=torch.int32)
    rows, latents = torch.randn(4, 2, 16), torch.randn(32, 16)
    weights, indices = torch.rand(4, 2), torch.randint(0, 32, (4, 8), dtype=torch.int32)
    lse = am.sparse_attention(rows, latents, indices, scale=0.1)[1]
    target = am.sparse.AttentionTarget(rows, latents, lse, 0.1)
    state = am.State(torch.randn(1, 4, 16, 64), torch.randn(1, 4, 16))
    return {
        "paged_decode_attention": lambda: am.paged_decode_attention(q, pool, pool, table, cur_pos=last),
        "decode_attention": lambda: am.decode_attention(q, k, k, cur_pos=last),
        "sparse_attention": lambda: am.sparse_attention(rows, latents, indices, scale=0.1),
        "attention_distribution": lambda: am.attention_distribution(rows, latents, indices, lse, scale=0.1),
        "indexer_topk": lambda: am.indexer_topk(rows, latents, weights, 8),
        "indexer_kl_loss": lambda: am.indexer_kl_loss(rows, latents, weights, indices, target),
        "paged_sparse_decode_attention": lambda: am.sparse.paged_sparse_decode_attention(
            q.transpose(1, 2), pool[:, :, :1], table, indices[:2, None], scale=0.1
        ),
        "merge": lambda: am.merge([state, state]),
    }


MOST = {
    "paged_decode_attention": 410, "decode_attention": 315, "sparse_attention": 125, "attention_distribution": 158,
    "indexer_topk": 240, "indexer_kl_loss": 375, "paged_sparse_decode_attention": 295, "merge": 75,
}  # fmt: skip


@pytest.mark.parametrize("operation", MOST)
def test_calls_on_the_cpu(operation):
    assert function_calls(operations()[operation]) <= MOST[operation]


def test_calls_before_launches():
    """In a process of its own, up to the driver of a GPU that is not there."""
    pytest.importorskip("triton")
    assert said_by_its_own_process(__file__) == "in bounds"


def count_before_launches() -> None:
    """Kernels are given tensors in host memory, as if they were on a GPU: positions are not read by the host."""
    passed, _ = record_launches()
    from attnmesh.ops import merge
    from attnmesh.ops.decode import api, triton
    from attnmesh.ops.sparse import arguments, triton_bounds

    triton.Triton.why_not = lambda self, call: None
    merge._kernel_serves = lambda states: True

    def bounds(mask, s_q, s_kv, topk, device):
        rows = mask.k_start, mask.k_end, mask.q_positions, mask.topk_length
        return arguments.RowBounds(
            *triton_bounds.bounds(
                s_q, *rows, first=mask.k_offset, end=mask.k_offset + s_kv, q_start=mask.q_start, k_stride=mask.k_stride,
                topk=topk, causal=mask.causal, device=device,
            ), mask.k_offset,
        )  # fmt: skip

    arguments.SparseMask.bounds = bounds
    q, pool = torch.randn(4, 32, 1, 128).bfloat16(), torch.randn(64, 16, 8, 128).bfloat16()
    v_pool = pool.clone()
    table, last = torch.arange(64, dtype=torch.int32).view(4, 16), torch.tensor([19, 6, 30, 40], dtype=torch.int32)
    rows, latents = torch.randn(16, 16, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    indices = torch.randint(0, 128, (16, 64), dtype=torch.int32)
    sparse, mask = {"scale": 0.1, "backend": "triton"}, am.SparseMask(topk_length=torch.full((16,), 40))
    state, other = (am.State(torch.randn(1, 4, 16, 64), torch.randn(1, 4, 16)) for _ in range(2))

    def decode():
        for known in api._prepared.values():
            known.on_host = known.reads_positions = False
        am.paged_decode_attention(q, pool, v_pool, table, cur_pos=last, backend="triton")

    cases = {
        "paged_decode_attention": (decode, 6, 108),
        # The bounds of a mask without tensors are those of the first call.
        "sparse_attention": (lambda: am.sparse_attention(rows, latents, indices, **sparse), 4, 56),
        "sparse_attention of some slots": (
            lambda: am.sparse_attention(rows, latents, indices, **sparse, mask=mask), 6, 90,
        ),
        "merge": (lambda: am.merge([state, other]), 3, 75),
    }  # fmt: skip
    for name, (call, launches, most) in cases.items():
        before = len(passed)
        found = function_calls(call)
        assert len(passed) == before + launches, f"{name}: {len(passed) - before} launches in three calls"
        print(f"{name}: {found} function calls, at most {most}")
        assert found <= most, name
    print("in bounds")


if __name__ == "__main__":
    count_before_launches()
