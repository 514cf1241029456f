"""The forward kernel against dense float64 attention, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.dense.triton_forward import forward
from attnmesh.ops.dense.triton_tiles import DenseTiles

CUDA = torch.cuda.is_available()
# The interpreter's bf16 dot is wrong, and each of its tiles takes milliseconds: small tiles, small shapes.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * CUDA
TILES = DenseTiles(rows=16, keys=16, warps=4, stages=1)
HEADS = {"mha": (2, 2), "gqa": (8, 2), "mqa": (3, 1)}


def make_bounds(kind: str, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Monotone intervals: a window, documents, or random ones with rows that see nothing at both ends."""
    rows = torch.arange(q_len)
    if kind == "window":
        first, end = rows - 20, rows + 3
    elif kind == "documents":
        first, end = rows // 13 * 13, rows // 13 * 13 + 13
    else:
        first = torch.randint(0, kv_len // 2, (q_len,)).sort().values
        end = torch.randint(kv_len // 3, kv_len, (q_len,)).sort().values
        end[:3], first[-2:], end[-2:] = 0, kv_len, kv_len
        first[:3] = 0
    end = end.clamp(0, kv_len)
    first = torch.minimum(first.clamp(0, kv_len), end)
    return first.int().to(device), end.int().to(device)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, bounds: tuple[Tensor, Tensor], dtype: torch.dtype) -> State:
    """The definition: all scores, the invisible ones -inf."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    keys = torch.arange(k.shape[2], device=k.device)
    visible = (keys >= bounds[0][:, None]) & (keys < bounds[1][:, None])
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return State(weights @ v, scores.logsumexp(-1))


def relative(x: Tensor, truth: Tensor) -> float:
    """Norm-wise error; both must be -inf in the same places, and finite elsewhere."""
    assert torch.equal(x.isneginf(), truth.isneginf())
    seen = truth.isfinite()
    x, truth = x.double()[seen], truth[seen]
    return float((x - truth).norm() / truth.norm())


def assert_close(result: State, truth: State, plain: State) -> None:
    for mine, exact, theirs in zip(result, truth, plain, strict=True):
        assert relative(mine, exact) <= 2 * relative(theirs, exact) + 1e-6


def visible(visibility: str, q_len: int, kv_len: int, device: torch.device) -> dict:
    """What to tell the kernel, and the same as intervals for the definition."""
    rows = torch.arange(q_len, device=device)
    if visibility == "full":
        return {"told": {"causal": False, "bounds": None}, "bounds": (0 * rows, 0 * rows + kv_len)}
    if visibility == "causal":
        return {"told": {"causal": True, "bounds": None}, "bounds": (0 * rows, rows + 1)}
    bounds = make_bounds(visibility, q_len, kv_len, device)
    return {"told": {"causal": False, "bounds": bounds}, "bounds": bounds}


def inputs(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int] = (2, 2),
    q_len: int = 45,
    kv_len: int = 45,
    head_dim: int = 32,
    batch: int = 1,
) -> list[Tensor]:
    """q, k, v as [B, S, H, D] tensors transposed: strided, as projections give them."""
    sizes = [(q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1])]
    return [torch.randn(batch, s, h, head_dim, device=device).to(dtype).transpose(1, 2) for s, h in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("visibility", ["full", "causal", "random"])
def test_matches_dense(device, visibility, heads, dtype):
    length = 20 if heads == "gqa" else 35
    q, k, v = inputs(device, dtype, HEADS[heads], length, length)
    case = visible(visibility, length, length, device)
    result = forward(q, k, v, scale=0.2, **case["told"], state=None, out_dtype=dtype, tiles=TILES)
    assert result.out.dtype == dtype
    assert result.lse.dtype == torch.float32
    assert_close(result, dense(q, k, v, 0.2, case["bounds"], torch.float64), dense(q, k, v, 0.2, case["bounds"], dtype))


@pytest.mark.parametrize("visibility", ["window", "documents", "random", "full"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 33), (16, 80), (1, 17), (32, 32)])
def test_any_lengths(device, visibility, q_len, kv_len):
    q, k, v = inputs(device, torch.float32, (1, 1), q_len, kv_len)
    case = visible(visibility, q_len, kv_len, device)
    result = forward(q, k, v, scale=0.2, **case["told"], state=None, out_dtype=torch.float32, tiles=TILES)
    truth = dense(q, k, v, 0.2, case["bounds"], torch.float64)
    assert (result.out[truth.lse.isneginf()] == 0).all()
    torch.testing.assert_close(result.lse, truth.lse.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.out, truth.out.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("head_dim", "scale"), [(16, 0.1), (24, -0.1), (72, 0.1), (80, 0.0)])
def test_head_dims_and_scales(device, head_dim, scale):
    q, k, v = inputs(device, torch.float32, q_len=20, kv_len=20, head_dim=head_dim)
    case = visible("causal", 20, 20, device)
    result = forward(q, k, v, scale=scale, **case["told"], state=None, out_dtype=torch.float32, tiles=TILES)
    plain = dense(q, k, v, scale, case["bounds"], torch.float32)
    assert_close(result, dense(q, k, v, scale, case["bounds"], torch.float64), plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [True, False])
def test_continues_from_a_state(device, dtype, in_place):
    """Keys in three parts, the first and last of which some rows do not see, equal all keys at once."""
    q, k, v = inputs(device, dtype, (2, 1), q_len=30, kv_len=60)
    bounds = make_bounds("random", 30, 60, device)
    # The state lies in a wider buffer, strided, and its identity rows hold NaN, which must count for nothing.
    state = State(
        torch.full((1, 30, 2, 32), torch.nan, device=device).transpose(1, 2),
        torch.full((1, 30, 2), -torch.inf, device=device).transpose(1, 2),
    )
    cuts = [(0, 17), (17, 50), (50, 60)]
    for begin, stop in cuts:
        part = tuple((bound.clamp(begin, stop) - begin).int() for bound in bounds)
        last = stop == 60
        out_dtype = torch.float32 if in_place or not last else dtype
        result = forward(
            q, k[:, :, begin:stop], v[:, :, begin:stop],
            scale=0.2, causal=False, bounds=part, state=state, out_dtype=out_dtype, tiles=TILES,
        )  # fmt: skip
        assert (result is state) == (out_dtype == torch.float32)
    assert result.out.dtype == out_dtype
    assert_close(result, dense(q, k, v, 0.2, bounds, torch.float64), dense(q, k, v, 0.2, bounds, dtype))


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
    first, end = torch.full((32,), 16, device=device).int(), torch.full((32,), 32, device=device).int()
    truth = dense(q, k, v, 0.2, (first, end), torch.float64)
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
    with pytest.raises(ValueError, match=r"head_dim must be 16 to 256.* got 8"):
        forward(q[..., :8], k[..., :8], v[..., :8], **options)
    with pytest.raises(ValueError, match=r"k must have stride 1.* got 2"):
        forward(q[..., :16], k[..., ::2], v[..., :16], **options, tiles=TILES)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("visibility", ["full", "causal", "random"])
def test_default_tiles(device, visibility, head_dim, dtype):
    q, k, v = inputs(device, dtype, (8, 2), 1000, 1000, head_dim, batch=2)
    case = visible(visibility, 1000, 1000, device)
    result = forward(q, k, v, scale=head_dim**-0.5, **case["told"], state=None, out_dtype=dtype)
    truth = dense(q, k, v, head_dim**-0.5, case["bounds"], torch.float64)
    assert_close(result, truth, dense(q, k, v, head_dim**-0.5, case["bounds"], dtype))
