"""Backends of the sparse functions are named after what runs, are chosen in one place, and do not import each other."""

import ast
from pathlib import Path

import pytest
import torch

import attnmesh
from attnmesh import SparseMask, attention_distribution, indexer_topk, sparse_attention
from attnmesh.ops.sparse import attention, dispatch
from attnmesh.ops.sparse.arguments import RowBounds, SparseCall
from attnmesh.sparse import indexer_scores_at

FOLDER = Path(attnmesh.__file__).parent / "ops" / "sparse"
INDICES = torch.zeros(4, 3, dtype=torch.int32)
Q, KV, LSE = torch.zeros(4, 2, 576).bfloat16(), torch.zeros(9, 576).bfloat16(), torch.zeros(4, 2)


def backend_of(module: str) -> str | None:
    """Return the backend that a module of `ops/sparse` belongs to, or None."""
    return next((name for name in ("gluon", "triton", "torch") if module.startswith(name + "_")), None)


def test_backends_do_not_import_each_other():
    found = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnmesh.ops.sparse"):
                names = [node.module.split(".")[-1], *(x.name for x in node.names)]
                found.setdefault(path.stem, set()).update(filter(None, map(backend_of, names)))
    kernels = {name: others for name, others in found.items() if backend_of(name) is not None}
    assert {backend_of(name) for name in kernels} == {"gluon", "triton", "torch"}
    assert {name: others for name, others in kernels.items() if others - {backend_of(name)}} == {}


CALLS = {
    "forward": (lambda **how: sparse_attention(Q, KV, INDICES, scale=1.0, **how), "it takes keys of 512 or 576"),
    "its sum": (
        lambda **how: sparse_attention(Q, KV, INDICES, scale=1.0, return_attn_sum=True, **how), "it takes up to 128",
    ),
    "distribution": (lambda **how: attention_distribution(Q, KV, INDICES, LSE, scale=1.0, **how), "it takes up to 128"),
    "top-k": (lambda **how: indexer_topk(Q[..., :64], KV[:, :64], LSE, 3, **how), "it takes 17 to 128 heads"),
    "scores": (lambda **how: indexer_scores_at(Q[..., :64], KV[:, :64], LSE, INDICES, **how), "it has no kernel for"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_is_asked_for_and_cannot_serve_a_call_says_why(name):
    """Here there is no Hopper GPU; what the kernel takes is named, and "auto" takes another."""
    pytest.importorskip("triton")
    call, reason = CALLS[name]
    with pytest.raises(ValueError, match=f"backend='gluon' cannot serve this call: {reason}"):
        call(backend="gluon")
    call(backend="auto")


def test_triton_is_triton_where_gluon_serves_the_call(monkeypatch):
    gluon_forward = pytest.importorskip("attnmesh.ops.sparse.gluon_forward")
    monkeypatch.setattr(gluon_forward, "is_hopper", lambda device: True)
    rows = torch.zeros(4, dtype=torch.int32)
    call = SparseCall(Q, KV, None, INDICES, RowBounds(rows, rows, rows, 0), 1.0, 512, False, "gluon")
    assert [dispatch.choose("forward", Q, name, call) for name in ("gluon", "triton", "torch")] == [
        "gluon", "triton", "torch",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cannot serve this call"):
        dispatch.check_backend("forward", call._replace(d_v=256))


def test_bounds_are_kept_for_one_mask_and_one_stream(monkeypatch):
    """Another stream could read them before they are written, and a graph that is captured must compute its own."""
    stream, computed = [7], []
    bounds = SparseMask.bounds
    monkeypatch.setattr(attention, "stream_of", lambda x: stream[0])
    monkeypatch.setattr(SparseMask, "bounds", lambda mask, *sizes: computed.append(mask) or bounds(mask, *sizes))
    q, kv = torch.randn(4, 3, 40), torch.randn(9, 40)

    causal, lengths = SparseMask(causal=True), SparseMask(topk_length=torch.tensor([1, 2, 0, 3]))
    steps = [(causal, 7), (causal, 7), (SparseMask(causal=True), 7), (SparseMask(causal=True, q_start=2), 7),
             (causal, 7), (causal, 8), (causal, None), (causal, None), (lengths, 8), (lengths, 8)]  # fmt: skip
    counts = []
    for mask, stream[0] in steps:
        before = len(computed)
        sparse_attention(q, kv, INDICES, scale=0.3, mask=mask, backend="torch")
        counts.append(len(computed) - before)
    assert counts == [1, 0, 0, 1, 1, 1, 1, 1, 1, 1]
