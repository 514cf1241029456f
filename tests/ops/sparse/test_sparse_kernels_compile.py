"""The kernels of the sparse family compile for Hopper, fit its memory and do not spill.

By default what a model of DeepSeek's kind launches: 128 heads, or 16 of them on one device, a latent key of 576 whose
first 512 columns are the value, an indexer of 64 heads of 128.
"""

import pytest
import torch

from helpers.triton_compile import assert_fit, compiled, compiled_for_hopper, count, fits, tolerated_spills

pytest.importorskip("triton")

from attnmesh.ops.launch import GPU
from attnmesh.ops.sparse import (
    decode_kernels,
    dispatch,
    gluon_backward,
    gluon_distribution,
    gluon_forward,
    gluon_topk,
    triton_backward,
    triton_bounds,
    triton_distribution,
    triton_forward,
    triton_paged_topk,
    triton_topk,
)
from attnmesh.ops.sparse.indexer_tiles import pick_topk_tiles
from attnmesh.sparse import (
    TopKIndices,
    paged_indexer_topk,
    paged_sparse_decode_attention,
    unpack_index_keys,
    unpack_latent,
)
from helpers import sparse_kernels

ROWS, KEYS = 64, 2048
NOTHING = torch.zeros(ROWS, dtype=torch.int32)  # bounds, and numbers of slots: no slot is valid
HALF_OF_IT = (228 - 2) * 1024 // 2  # shared memory of one of two programs on a processor, each of which costs 1 KB more


def rows(*of_each: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, *of_each, dtype=dtype)


def forward(what, dtype, heads, d, d_v, separate=False, out_dtype="bfloat16", sinks=False):
    v = torch.empty(KEYS, d_v, dtype=dtype) if separate else None
    given = (None,) * 4 if separate else (NOTHING.long(), NOTHING, NOTHING, NOTHING)
    how = {"first": 0, "end": KEYS, "q_start": 0, "k_stride": 4, "topk": 128}
    triton_bounds.bounds(ROWS, *given, **how, causal=True, device=torch.device("cpu"))
    module = {"forward triton": triton_forward, "forward gluon": gluon_forward}[what]
    sparse_kernels.forward(
        module, rows(heads, d, dtype=dtype), torch.empty(KEYS, d, dtype=dtype), v, rows(128, dtype=torch.int32),
        NOTHING, NOTHING, NOTHING, d_v=d_v, scale=0.1, out_dtype=getattr(torch, out_dtype),
        sinks=torch.empty(heads) if sinks else None, max_logits=bool(sinks),
    )  # fmt: skip


def distribution(what, dtype, heads, d, head_group):
    module = {"distribution triton": triton_distribution, "distribution gluon": gluon_distribution}[what]
    sparse_kernels.distribution(
        module, rows(heads, d, dtype=dtype), torch.empty(KEYS, d, dtype=dtype), rows(256, dtype=torch.int32),
        NOTHING, NOTHING, NOTHING, rows(heads), k_offset=0, scale=0.1, head_group=head_group,
    )  # fmt: skip


def backward(what, dtype, heads, d, d_v=512, separate=False, deterministic=False):
    dout = rows(heads, d_v, dtype=dtype)
    if what == "backward gluon":
        gluon_backwards(rows(heads, d, dtype=dtype), torch.empty(KEYS, d, dtype=dtype), dout, atomic=not deterministic)
        return
    triton_backward.row_delta(dout, dout)
    sparse_kernels.backward(
        rows(heads, d, dtype=dtype), torch.empty(KEYS, d, dtype=dtype),
        torch.empty(KEYS, d_v, dtype=dtype) if separate else None, rows(KEYS, dtype=torch.int32),
        NOTHING, NOTHING, NOTHING, lse=rows(heads), delta=rows(heads), dout=dout,
        scale=0.1, d_v=d_v, deterministic=deterministic,
    )  # fmt: skip


def gluon_backwards(q, k, dout, *, atomic):
    padded_heads = next(n for n in gluon_backward.STAGES if n >= q.shape[1])
    p = rows(padded_heads, 256, dtype=q.dtype)
    call = sparse_kernels.attention_call(
        q, k, None, rows(256, dtype=torch.int32), NOTHING, NOTHING, NOTHING, scale=0.1, d_v=512
    )
    if padded_heads == gluon_backward.QUERY_HEADS:
        gluon_backward.grad_query(call, range(ROWS), p, torch.empty_like(q))
    into = torch.empty(k.shape if atomic else (ROWS * 256, k.shape[1]))
    gluon_backward.grad_key(into, call, range(ROWS), 0.1, p, q, p, dout, atomic=atomic, segments=0)


def indexer(what, dtype, heads, dim, slots):
    iq, ik, w, grad = rows(heads, dim, dtype=dtype), torch.empty(KEYS, dim, dtype=dtype), rows(heads), rows(slots)
    indices = rows(slots, dtype=torch.int32)
    seen, how = (NOTHING, NOTHING, NOTHING), {"scale": 0.1, "relu": True}
    if what == "indexer topk":
        sparse_kernels.topk(triton_topk, iq, ik, w, slots, NOTHING, NOTHING, **how)
    if what == "indexer gluon":
        sparse_kernels.topk(gluon_topk, iq, ik, w, slots, NOTHING, NOTHING, **how)
    if what == "indexer scores":
        sparse_kernels.scores_at(iq, ik, w, indices, *seen, **how)
    if what in ("indexer atomic", "indexer deterministic"):
        deterministic = what == "indexer deterministic"
        sparse_kernels.scores_at_backward(iq, ik, w, indices, *seen, grad, deterministic=deterministic, **how)
    if what == "indexer dense":
        sparse_kernels.dense_scores_backward(iq, ik[:slots], w, 0, NOTHING, NOTHING, grad, **how)


def decode(what, dtype, heads, d, split_size=None):
    """Sparse decode from a pool in blocks of 64: plain, in DeepSeek-V3.2's bytes, or by the prefill's kernel."""
    way = {"decode gathered": "as prefill", "decode gluon": "gluon"}.get(what, "in place")
    decode_kernels.fastest_way = lambda call, _: decode_kernels.Way("as prefill" if dtype == torch.float32 else way)
    pool = torch.empty(32, 64, 1, d, dtype=dtype) if what == "decode plain" else unpack_latent(
        torch.zeros(32, 64, 1, 656, dtype=torch.uint8)
    )  # fmt: skip
    paged_sparse_decode_attention(
        torch.empty(2, 1, heads, d, dtype=dtype), pool, torch.zeros(2, 32, dtype=torch.int32),
        TopKIndices(torch.zeros(2, 1, 2048, dtype=torch.int32), None, torch.zeros(2, 1, dtype=torch.int32)), scale=0.1,
        sinks=torch.zeros(heads), split_size=split_size, backend="triton",
    )  # fmt: skip


def paged(what, dtype, heads, dim, slots, tokens):
    """The top-k of a decode step over 131,072 fp8 keys in blocks of 64."""
    dispatch.choose = lambda *_, **__: "gluon" if what == "paged gluon" else "triton"
    triton_paged_topk.multiprocessors = lambda *_: 132 if tokens < 4 else 1  # or programs for many tokens
    pool = unpack_index_keys(torch.zeros(32, 64 * (dim + 4), dtype=torch.uint8), 64)
    paged_indexer_topk(
        torch.empty(2, tokens, heads, dim, dtype=dtype), pool, torch.zeros(2, 2048, dtype=torch.int32),
        torch.empty(2, tokens, heads), slots, cur_pos=[-1, -1], backend="triton",
    )  # fmt: skip


LAUNCHERS = {
    "paged": paged,
    "decode": decode,
    "forward": forward,
    "distribution": distribution,
    "backward": backward,
    "indexer": indexer,
}


def launch(what: str, dtype: str, heads: int, d: int, *how) -> None:
    """A case, in the process that compiles."""
    LAUNCHERS[what.split()[0]](what, getattr(torch, dtype), heads, d, *how)


def spills(kernel: dict) -> int:
    what = kernel["case"][0]
    if what == "decode gluon":
        return 64  # addresses, besides the sums and half of a tile of keys
    if what == "backward gluon":
        return 64  # addresses of the loader, with Triton 3.6
    if what == "indexer gluon":
        return 64  # by two warps, which select
    if what == "paged gluon":
        return 64  # of four tokens
    if "gluon" in what or "distribution" in what:
        return 0
    if what == "forward triton" or kernel["kernel"] == "_forward_kernel":
        return 48  # six addresses in the widest tile: still the fastest
    if kernel["kernel"] == "_topk_kernel":
        return 256  # the products need all registers, and what is pushed out belongs to the selection, which is short
    if kernel["kernel"] == "_score_kernel" and kernel["case"][-1] == 4:
        return 256  # four tokens of 64 heads: the products need all registers
    if kernel["kernel"] == "_grad_kernel" and kernel["warps"] == 4:
        return 256  # eight warps push nothing out, and take 1.4 times as long
    return tolerated_spills(kernel)


def assert_sound(kernels: list[dict]) -> None:
    assert_fit(kernels, spills)
    for kernel in kernels:
        what, dtype, heads, d, *_ = kernel["case"]
        # Hopper's own matrix instructions, wherever a kernel counts on them.
        of_gluon = "gluon" in what and kernel["kernel"] not in (
            "_bounds_kernel",
            "_locate_kernel",
            "_merge_kernel",
            "_select_kernel",
            "select_kernel",
            "gather_kernel",
        )
        if of_gluon or (kernel["kernel"] in ("scores_kernel", "grad_query_kernel") and heads >= 64):
            assert kernel["wgmma"] or dtype == "float32", kernel
        if what == "forward gluon" and of_gluon:  # waits where the source waits: others would be the compiler's
            assert count(kernel, "WARPGROUP.DEPBAR") == 9
        if what == "distribution gluon" and of_gluon:
            # Its products are all under way at once (a wait for each would be the compiler's way out).
            consumers = 1 if heads <= 64 else 2
            assert count(kernel, "HGMMA") == consumers * d // 16
            assert count(kernel, "WARPGROUP.DEPBAR") == consumers
            assert count(kernel, r"LDGSTS\..*128") == count(kernel, "LDGSTS") == 64 * d * 2 // 16 // 128


INDEXER = [f"indexer {what}" for what in ("topk", "scores", "atomic", "deterministic", "dense")]


@pytest.mark.sweep
def test_the_usual_kernels_compile():
    kernels = compiled_for_hopper(__file__, [
        ("forward gluon", "bfloat16", 128, 576, 512), ("distribution gluon", "bfloat16", 128, 576, 128),
        ("backward", "bfloat16", 128, 576, 512, False, True), ("indexer topk", "bfloat16", 64, 128, 2048),
        ("backward gluon", "bfloat16", 128, 576),
    ], processes=1)  # fmt: skip
    assert_sound(kernels)
    adds = next(x for x in kernels if x["case"][0] == "backward gluon" and x["kernel"] == "grad_key_kernel")
    # Two groups, each 64 keys of 192 columns, four at a time.
    assert count(adds, r"REDG\..*F32x4") == count(adds, "REDG") == 2 * 64 * 192 // 4 // 128
    assert {kernel["kernel"] for kernel in kernels if kernel["case"][0] == "backward"} == {
        "_delta_kernel", "scores_kernel", "grad_query_kernel", "grad_key_kernel", "sum_kernel",
    }  # fmt: skip
    # The top-k needs two programs per multiprocessor: while one sums over heads, the other multiplies.
    best = next(kernel for kernel in kernels if kernel["kernel"] == "_topk_kernel")
    assert best["wgmma"]
    assert best["shared"] <= HALF_OF_IT
    assert best["warps"] == 4
    assert best["spilled"] <= 16  # 8 bytes with Triton 3.6


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", [80, 89, 100])
def test_the_usual_kernels_compile_for_other_gpus(target):
    cases = [
        ("forward triton", "bfloat16", 128, 576, 512), ("distribution triton", "bfloat16", 128, 576, 128),
        ("backward", "bfloat16", 128, 576, 512, False, True), ("indexer topk", "bfloat16", 64, 128, 2048),
        ("indexer atomic", "bfloat16", 64, 256, 2048), ("indexer dense", "bfloat16", 64, 256, 2048),
        ("forward triton", "bfloat16", 128, 512, 512), ("decode plain", "bfloat16", 128, 576),
        *([("decode fp8", "bfloat16", 16, 576)] if target >= 89 else []),
    ]  # fmt: skip
    kernels = compiled(__file__, {target: cases})
    assert all(fits(kernel) for kernel in kernels), kernels


@pytest.mark.parametrize(("head_dim", "room", "rows", "stages"), [
    (128, 227, 4, 3), (128, 163, 4, 3), (128, 99, 4, 2), (256, 227, 2, 3), (256, 99, 2, 2), (128, 64, 2, 2),
])  # fmt: skip
def test_tiles_of_the_topk_fit_the_shared_memory(head_dim, room, rows, stages, monkeypatch):
    monkeypatch.setattr("attnmesh.ops.launch.WITHOUT_GPU", GPU(80, room * 1024))
    tiles = pick_topk_tiles(torch.empty(1, 64, head_dim, dtype=torch.bfloat16), KEYS)
    assert (tiles.rows, tiles.stages) == (rows, stages)


@pytest.mark.parametrize(("queries", "s_kv", "rows"), [(1, 65536, 4), (1, 65537, 1), (64, 131072, 4)])
def test_few_long_rows_are_scored_one_by_one(queries, s_kv, rows, monkeypatch):
    monkeypatch.setattr("attnmesh.ops.launch.WITHOUT_GPU", GPU(90, 227 * 1024))
    assert pick_topk_tiles(torch.empty(queries, 64, 128, dtype=torch.bfloat16), s_kv).rows == rows


SWEEPS = {
    "usual": [
        *((f"distribution {kind}", "bfloat16", h, 576, h) for kind in ("gluon", "triton") for h in (128, 16)),
        *(("forward triton", "bfloat16", h, 576, 512) for h in (128, 16)),
        ("backward", "bfloat16", 128, 576, 512, False, False), ("backward", "bfloat16", 16, 576, 512, False, True),
        *((what, "bfloat16", 64, 128, 2048) for what in INDEXER),
    ],
    "decode": [
        ("decode plain", "bfloat16", 16, 576), ("decode plain", "float16", 128, 576),
        ("decode fp8", "float16", 32, 576),
        ("decode fp8", "bfloat16", 128, 576, 4096), ("decode fp8", "float32", 16, 576),
        ("decode plain", "bfloat16", 5, 96), ("decode gathered", "bfloat16", 128, 576),
        *(("decode gluon", "bfloat16", 128, 576, split) for split in (128, 2048)),
        ("paged topk", "bfloat16", 64, 128, 2048, 4), ("paged topk", "float32", 64, 128, 2048, 1),
    ],
    "indexer on Hopper": [
        *(("indexer gluon", dtype, heads, dim, k) for dtype, heads, dim, k in (
            ("bfloat16", 64, 128, 2048), ("float16", 128, 64, 512), ("float16", 40, 96, 1),
        )),
        *(("paged gluon", dtype, heads, 128, 2048, tokens) for dtype, heads, tokens in (
            ("bfloat16", 64, 1), ("float16", 64, 2), ("bfloat16", 64, 4), ("bfloat16", 64, 5), ("bfloat16", 128, 1),
        )),
    ],
    "forward": [
        ("forward gluon", "bfloat16", 64, 576, 512, False, "float32", 1),
        ("forward gluon", "float16", 64, 512, 512, False, "float16", 0),
        ("forward triton", "bfloat16", 128, 576, 512, False, "bfloat16", 1),
        *(("forward triton", dtype, heads, d, d_v, separate, dtype)
          for dtype, heads, d, d_v, separate in (
              ("bfloat16", 16, 64, 64, True), ("bfloat16", 32, 192, 128, False), ("bfloat16", 128, 320, 256, False),
              ("float32", 16, 256, 256, False), ("float32", 16, 576, 512, True))),
    ],
    "distribution": [
        *(case for d in gluon_distribution.WIDTHS
          for case in (("distribution gluon", "float16", 100, d, 64), ("distribution triton", "bfloat16", 16, d, 16))),
        ("distribution triton", "float32", 16, 128, 16),
    ],
    "backward": [
        ("backward", "bfloat16", 200, 576, 512, False, False), ("backward", "bfloat16", 32, 96, 80, True, True),
        ("backward", "float32", 128, 576, 512, False, False), ("backward", "float16", 24, 192, 128, True, False),
        *(("backward gluon", dtype, heads, d, 512, False, deterministic)
          for dtype, heads, d, deterministic in (
              ("bfloat16", 128, 576, True), ("bfloat16", 64, 576, False), ("float16", 32, 512, True))),
    ],
    "indexer": [
        (what, *shape) for what in INDEXER for shape in [
            ("float16", 64, 256, 2048), ("bfloat16", 300, 80, 100), ("float32", 1, 16, 1),
        ]
    ],
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", SWEEPS)
def test_all_kernels_compile(family):
    kernels = compiled_for_hopper(__file__, SWEEPS[family])
    assert_sound(kernels)
    if family == "usual":  # the shapes of a model use Hopper's matrix instructions
        of_indexer = [kernel for kernel in kernels if kernel["case"][0] in INDEXER]
        assert all(kernel["wgmma"] for kernel in of_indexer if kernel["kernel"] != "sum_kernel")
        wide = [kernel for kernel in kernels if kernel["case"][:3] == ("distribution triton", "bfloat16", 128)]
        assert all(kernel["wgmma"] for kernel in wide)
