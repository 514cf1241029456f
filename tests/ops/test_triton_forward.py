"""The forward kernel against dense float64 attention, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.dense.triton_forward import forward
from attnmesh.ops.dense.triton_tiles import DenseTiles, blocks_of
from helpers.cases import first, sweep
from helpers.dense_kernels import (
    CUDA,
    DEFAULT_TILES,
    DEFAULT_TILES_WITH_TERMS,
    DTYPES,
    HEADS,
    HUGE_EXPONENTS,
    assert_huge_scores_are_right,
    dense,
    make_scores_huge,
    mask_case,
    relative,
    score_terms,
)

TILES = DenseTiles(rows=16, keys=16, warps=4, stages=1)


def assert_close(result: State, truth: State, plain: State) -> None:
    for mine, exact, theirs in zip(result, truth, plain, strict=True):
        assert relative(mine, exact) <= 2 * relative(theirs, exact) + 1e-6


def inputs(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int] = (2, 2),
    q_len: int = 45,
    kv_len: int = 45,
    head_dim: int = 32,
    value_dim: int | None = None,
    batch: int = 1,
) -> list[Tensor]:
    """q, k, v as [B, S, H, D] tensors transposed: strided, as projections give them."""
    sizes = [(q_len, heads[0], head_dim), (kv_len, heads[1], head_dim), (kv_len, heads[1], value_dim or head_dim)]
    return [torch.randn(batch, s, h, d, device=device).to(dtype).transpose(1, 2) for s, h, d in sizes]


@pytest.mark.parametrize(
    ("mask", "heads", "dtype"),
    [
        ("full", "mha", torch.float16),
        sweep("causal", "gqa", torch.float32),
        sweep("window", "mqa", torch.float16),
        sweep("documents", "mha", torch.float32),
        sweep("random", "gqa", torch.float16),
        sweep("union", "mqa", torch.float32),
        sweep("slices", "mha", torch.float16),
        sweep("sequences", "gqa", torch.float32),
    ],
)
def test_matches_dense(device, mask, heads, dtype):
    length, batch = 20 if heads == "gqa" else 26, 2 if mask == "sequences" else 1
    q, k, v = inputs(device, dtype, HEADS[heads], length, length, batch=batch)
    seen, visible = mask_case(mask, length, length, batch, device)
    result = forward(q, k, v, scale=0.2, **seen, state=None, out_dtype=dtype, tiles=TILES)
    assert result.out.dtype == dtype
    assert result.lse.dtype == torch.float32
    assert_close(result, dense(q, k, v, 0.2, visible, torch.float64), dense(q, k, v, 0.2, visible, dtype))


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len"),
    [
        ("window", 70, 33),
        ("union", 70, 33),
        ("documents", 16, 80),
        sweep("slices", 16, 80),
        sweep("random", 1, 17),
        sweep("full", 32, 32),
    ],
)
def test_any_lengths(device, mask, q_len, kv_len):
    q, k, v = inputs(device, torch.float32, (1, 1), q_len, kv_len)
    seen, visible = mask_case(mask, q_len, kv_len, 1, device)
    result = forward(q, k, v, scale=0.2, **seen, state=None, out_dtype=torch.float32, tiles=TILES)
    truth = dense(q, k, v, 0.2, visible, torch.float64)
    assert (result.out[truth.lse.isneginf()] == 0).all()
    torch.testing.assert_close(result.lse, truth.lse.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.out, truth.out.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "scale"),
    [(16, 16, 0.1), (24, 8, -0.1), sweep(72, 96, 0.1), sweep(80, 20, 0.0), sweep(48, 80, 0.1), sweep(192, 128, 0.05)],
)
def test_widths_and_scales(device, head_dim, value_dim, scale):
    """Keys and values of any widths, in one block of columns or in two."""
    q, k, v = inputs(device, torch.float32, q_len=20, kv_len=20, head_dim=head_dim, value_dim=value_dim)
    seen, visible = mask_case("causal", 20, 20, 1, device)
    state = State(torch.zeros(1, 2, 20, value_dim, device=device), torch.full((1, 2, 20), -torch.inf, device=device))
    result = forward(q, k, v, scale=scale, **seen, state=state, out_dtype=torch.float32, tiles=TILES)
    plain = dense(q, k, v, scale, visible, torch.float32)
    assert_close(result, dense(q, k, v, scale, visible, torch.float64), plain)


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    first(
        8,
        [
            (dtype, exponent)
            for dtype in DTYPES
            for exponent in HUGE_EXPONENTS.get(dtype, HUGE_EXPONENTS[torch.bfloat16])
        ],
    ),
)
def test_huge_scores(device, dtype, exponent):
    """On a GPU multiply-adds are fused: then it is an error to subtract the rounded maximum from exact products."""
    q, k, v = inputs(device, dtype, (1, 1), 16, 40)
    make_scores_huge(q, k, exponent, 0.2)
    for mask in ("full", "window"):  # tiles without a mask, and with one
        seen, visible = mask_case(mask, 16, 40, 1, device)
        result = forward(q, k, v, scale=0.2, **seen, state=None, out_dtype=dtype, tiles=TILES)
        assert_huge_scores_are_right(result, dense(q, k, v, 0.2, visible, torch.float64))


def test_blocks_hold_the_width_with_few_columns_to_spare():
    assert {width: blocks_of(width) for width in (8, 16, 24, 64, 80, 96, 112, 128, 192, 200, 256, 576)} == {
        8: (16, 0), 16: (16, 0), 24: (32, 0), 64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0), 128: (128, 0),
        192: (128, 64), 200: (256, 0), 256: (256, 0), 576: (512, 64),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("softcap", "alibi", "mask", "dtype"),
    [
        (True, False, "causal", torch.float16),
        (True, False, "union", torch.float32),
        sweep(False, True, "causal", torch.float16),
        sweep(False, True, "union", torch.float32),
        sweep(True, True, "causal", torch.float32),
        sweep(True, True, "union", torch.float16),
    ],
)
def test_softcap_and_alibi(device, softcap, alibi, mask, dtype):
    q, k, v = inputs(device, dtype, (2, 1), 26, 26)
    q[:, :, :5] *= 30  # the cap is reached
    terms = score_terms(softcap, alibi, 2, 26, 26, device)
    seen, visible = mask_case(mask, 26, 26, 1, device)
    result = forward(q, k, v, scale=0.3, **seen, state=None, out_dtype=dtype, terms=terms, tiles=TILES)
    truth = dense(q, k, v, 0.3, visible, torch.float64, terms)
    assert_close(result, truth, dense(q, k, v, 0.3, visible, dtype, terms))


@pytest.mark.parametrize(
    ("dtype", "in_place"),
    [(torch.float16, True), sweep(torch.float32, True), sweep(torch.float16, False), sweep(torch.float32, False)],
)
def test_continues_from_a_state(device, dtype, in_place):
    """Keys in three parts, the first and last of which some rows do not see, equal all keys at once."""
    q, k, v = inputs(device, dtype, (2, 1), q_len=30, kv_len=60)
    seen, visible = mask_case("union", 30, 60, 1, device)
    # The state lies in a wider buffer, strided, and its identity rows hold NaN, which must count for nothing.
    state = State(
        torch.full((1, 30, 2, 32), torch.nan, device=device).transpose(1, 2),
        torch.full((1, 30, 2), -torch.inf, device=device).transpose(1, 2),
    )
    cuts = [(0, 17), (17, 50), (50, 60)]
    for begin, stop in cuts:
        part = tuple((bound.clamp(begin, stop) - begin).int() for bound in seen["bounds"])
        last = stop == 60
        out_dtype = torch.float32 if in_place or not last else dtype
        result = forward(
            q, k[:, :, begin:stop], v[:, :, begin:stop],
            scale=0.2, causal=False, bounds=part, state=state, out_dtype=out_dtype, tiles=TILES,
        )  # fmt: skip
        assert (result is state) == (out_dtype == torch.float32)
    assert result.out.dtype == out_dtype
    assert_close(result, dense(q, k, v, 0.2, visible, torch.float64), dense(q, k, v, 0.2, visible, dtype))


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("causal", torch.float16),
        sweep("causal", torch.float32),
        sweep("slices", torch.float16),
        sweep("slices", torch.float32),
    ],
)
def test_sinks_join_the_last_keys(device, mask, dtype):
    """From no state and from one, also where a row sees nothing, and for sinks far above and below the scores."""
    q, k, v = inputs(device, dtype, (4, 2), 26, 26)
    seen, visible = mask_case(mask, 26, 26, 1, device)
    sinks = torch.tensor([0.5, -torch.inf, 40.0, -3.0], device=device)
    how = {"scale": 0.2, "tiles": TILES, "out_dtype": dtype}
    truth, plain = (dense(q, k, v, 0.2, visible, x, sinks=sinks) for x in (torch.float64, dtype))
    assert_close(forward(q, k, v, **seen, state=None, sinks=sinks.to(dtype), **how), truth, plain)
    before = forward(q, k, v, **seen, state=None, **how | {"out_dtype": torch.float32})
    none = torch.zeros(1, 1, 26, dtype=torch.int32, device=device)
    assert_close(forward(q, k, v, causal=False, bounds=(none, none), state=before, sinks=sinks, **how), truth, plain)


def test_an_infinite_sink_has_all_the_weight(device):
    q, k, v = inputs(device, torch.float32, (2, 1), 5, 5)
    for bounds in (None, (torch.zeros(1, 1, 5, dtype=torch.int32, device=device),) * 2):
        sinks = torch.full((2,), torch.inf, device=device)
        how = {"scale": 0.2, "causal": False, "state": None, "out_dtype": torch.float32, "tiles": TILES}
        out, lse = forward(q, k, v, **how, bounds=bounds, sinks=sinks)
        assert (out == 0).all()
        assert (lse == torch.inf).all()


def test_no_keys_and_no_rows(device):
    q, k, v = inputs(device, torch.float32, q_len=5, kv_len=0)
    empty = forward(q, k, v, scale=1.0, causal=False, bounds=None, state=None, out_dtype=torch.float32, tiles=TILES)
    assert (empty.out == 0).all()
    assert empty.lse.isneginf().all()

    state = State(torch.randn(1, 2, 5, 32, device=device), torch.randn(1, 2, 5, device=device))
    passed = forward(q, k, v, scale=1.0, causal=False, bounds=None, state=state, out_dtype=torch.float16, tiles=TILES)
    torch.testing.assert_close(passed.out, state.out.half())
    torch.testing.assert_close(passed.lse, state.lse)

    none = forward(
        q[:, :, :0],
        k,
        v,
        scale=1.0,
        causal=True,
        bounds=None,
        state=None,
        out_dtype=torch.float32,
        tiles=TILES,
    )
    assert none.out.shape == (1, 2, 0, 32)


def test_unvisited_keys_are_never_read(device):
    """Whole tiles outside every interval may hold NaN."""
    q, k, v = inputs(device, torch.float32, q_len=32, kv_len=64)
    first, end = (torch.full((1, 1, 32), at, device=device).int() for at in (16, 32))
    first[..., :3], end[..., :3], first[..., -2:] = 0, 0, 32  # rows that see nothing, far from the others
    keys = torch.arange(64, device=device)
    truth = dense(q, k, v, 0.2, ((keys >= first[..., None]) & (keys < end[..., None])), torch.float64)
    for x in (k, v):
        x[:, :, :16], x[:, :, 32:] = torch.nan, torch.nan
    result = forward(
        q,
        k,
        v,
        scale=0.2,
        causal=False,
        bounds=(first, end),
        state=None,
        out_dtype=torch.float32,
        tiles=TILES,
    )
    torch.testing.assert_close(result.out, truth.out.float())


def test_rejects_what_it_cannot_do(device):
    q, k, v = inputs(device, torch.float32, head_dim=32)
    options = {"scale": 1.0, "causal": False, "bounds": None, "state": None, "out_dtype": torch.float32}
    wide = torch.empty(1, 2, 4, 580, device=device)
    with pytest.raises(ValueError, match=r"head_dim must be at most 576.* got 580 \(keys\) and 32 \(values\)"):
        forward(wide, wide, v, **options)
    with pytest.raises(ValueError, match=r"k must have stride 1.* got 2"):
        forward(q[..., :16], k[..., ::2], v[..., :16], **options, tiles=TILES)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("mask", "widths", "dtype"), DEFAULT_TILES)
def test_default_tiles(device, mask, widths, dtype):
    q, k, v = inputs(device, dtype, (8, 2), 1000, 1000, *widths, batch=2)
    seen, visible = mask_case(mask, 1000, 1000, 2, device)
    scale = widths[0] ** -0.5
    result = forward(q, k, v, scale=scale, **seen, state=None, out_dtype=dtype)
    truth = dense(q, k, v, scale, visible, torch.float64)
    assert_close(result, truth, dense(q, k, v, scale, visible, dtype))


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("softcap", "alibi", "dtype"), DEFAULT_TILES_WITH_TERMS)
def test_default_tiles_with_softcap_and_alibi(device, softcap, alibi, dtype):
    q, k, v = inputs(device, dtype, (8, 2), 1000, 1000, 128, batch=2)
    seen, visible = mask_case("union", 1000, 1000, 2, device)
    terms = score_terms(softcap, alibi, 8, 1000, 1000, device)
    result = forward(q, k, v, scale=0.1, **seen, state=None, out_dtype=dtype, terms=terms)
    truth = dense(q, k, v, 0.1, visible, torch.float64, terms)
    assert_close(result, truth, dense(q, k, v, 0.1, visible, dtype, terms))
