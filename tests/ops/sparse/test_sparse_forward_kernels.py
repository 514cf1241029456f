"""The forward kernels of sparse attention against float64.

The general kernel runs in Triton's interpreter or on a GPU; Gluon's kernel on a Hopper GPU, and elsewhere emulated.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from helpers.gluon import emulated

pytest.importorskip("triton")

from attnmesh.ops.launch import GPU
from attnmesh.ops.sparse import gluon_forward, triton_forward
from helpers.cases import first, sweep
from helpers.sparse_kernels import forward, latent_call

INT_MAX = 2**31 - 1


def problem(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    topk: int,
    d: int,
    d_v: int,
    *,
    rows: int = 4,
    s_kv: int = 150,
    separate: bool = False,
    k_offset: int = 0,
) -> dict:
    """Every slot names a key; tests take slots away."""
    v = torch.randn(s_kv, d_v, device=device).to(dtype) if separate else None
    names = torch.rand(rows, max(topk, s_kv), device=device).argsort(1)[:, :topk] % s_kv
    return {
        "q": torch.randn(rows, heads, d, device=device).to(dtype),
        "k": torch.randn(s_kv, d, device=device).to(dtype),
        "v": v,
        "indices": (names + k_offset).int(),
        "lo": torch.full((rows,), k_offset, dtype=torch.int32, device=device),
        "hi": torch.full((rows,), k_offset + s_kv, dtype=torch.int32, device=device),
        "slots": torch.full((rows,), topk, dtype=torch.int32, device=device),
        "d_v": d_v,
        "k_offset": k_offset,
        "scale": d**-0.5,
        "out_dtype": dtype,
    }


def counted(case: dict) -> Tensor:
    """Which slots count, [s_q, topk]."""
    indices = case["indices"]
    slot = torch.arange(indices.shape[1], device=indices.device)
    lo, hi, slots = (case[name][:, None] for name in ("lo", "hi", "slots"))
    return (slot < slots) & (lo <= indices) & (indices < hi)


def truth(case: dict) -> tuple[Tensor, Tensor]:
    """Out and lse in float64, row by row over the keys that count, and a key without a value for the sink."""
    v = case["k"][:, : case["d_v"]] if case["v"] is None else case["v"]
    outs, lses = [], []
    for q, names, counts in zip(case["q"].double(), case["indices"], counted(case), strict=True):
        keys = names[counts].long() - case["k_offset"]
        scores = case["scale"] * q @ case["k"][keys].double().T
        values = v[keys].double()
        if case.get("sinks") is not None:
            scores = torch.cat([scores, case["sinks"].double()[:, None]], 1)
            values = torch.cat([values, values.new_zeros(1, case["d_v"])])
        lses.append(scores.logsumexp(1))
        outs.append(scores.softmax(1).nan_to_num(0.0) @ values)  # a sink of +inf takes all, one of -inf alone nothing
    return torch.stack(outs), torch.stack(lses)


def largest_scores(case: dict) -> Tensor:
    """The largest score of every row and head in float64, -inf where no slot counts."""
    rows = []
    for q, names, counts in zip(case["q"].double(), case["indices"], counted(case), strict=True):
        scores = case["scale"] * q @ case["k"][names[counts].long() - case["k_offset"]].double().T
        rows.append(torch.cat([scores, scores.new_full((len(scores), 1), -torch.inf)], 1).amax(1))
    return torch.stack(rows)


def poison(case: dict) -> None:
    """Keys and values that no slot names hold NaN, and queries of rows that see no key NaN or inf."""
    empty = ~counted(case).any(1)
    case["q"][empty, ::2], case["q"][empty, 1::2] = torch.nan, torch.inf
    unused = torch.ones(len(case["k"]), dtype=torch.bool, device=case["k"].device)
    unused[case["indices"][counted(case)].long() - case["k_offset"]] = False
    for x in (case["k"], case["v"]):
        if x is not None:
            x[unused] = torch.nan


def assert_right(case: dict, kernel=triton_forward, tolerance: float | None = None) -> None:
    out, lse, *largest = forward(kernel, **case)
    true_out, true_lse = truth(case)
    if largest:
        assert largest[0].dtype == torch.float32
        torch.testing.assert_close(largest[0].double(), largest_scores(case), rtol=1e-5, atol=2e-5)
    assert out.dtype == case["out_dtype"]
    assert out.shape == true_out.shape
    assert lse.dtype == torch.float32
    tolerance = tolerance or {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[case["q"].dtype]
    torch.testing.assert_close(out.double(), true_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=2e-5)
    empty = ~counted(case).any(1)
    assert (out[empty] == 0).all()
    if case.get("sinks") is None:
        assert (lse[empty] == -torch.inf).all()


DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]


SHAPES = [(8, 100, 64, 64), (24, 128, 96, 96), (64, 100, 96, 64), (3, 1, 64, 16), (8, 100, 576, 512), (2, 40, 100, 90)]


@pytest.mark.parametrize(
    ("dtype", "heads", "topk", "d", "d_v"),
    first(3, [(DTYPES[i % len(DTYPES)], *shape) for i, shape in enumerate(SHAPES)]),
)
def test_every_shape(device, dtype, heads, topk, d, d_v):
    case = problem(device, dtype, heads, topk, d, d_v)
    case["slots"][1] = 0
    poison(case)
    assert_right(case | {"max_logits": heads % 3 != 0})


@pytest.mark.parametrize(
    ("dtype", "d", "d_v"),
    [(DTYPES[i % len(DTYPES)], *widths) for i, widths in enumerate([(64, 64), (96, 48), (80, 96), (576, 512)])],
)
def test_values_of_their_own(device, dtype, d, d_v):
    case = problem(device, dtype, 5, 33, d, d_v, rows=2, separate=True)
    poison(case)
    assert_right(case)


def take_slots_away(case: dict) -> None:
    """Each row in another way: names out of range on both sides, slots past the end, bounds, and nothing left."""
    topk, offset = case["indices"].shape[1], case["k_offset"]
    s_kv = len(case["k"])
    case["indices"][0, ::3] = -1
    case["indices"][1, 1::2] = INT_MAX
    case["indices"][2, : topk - 1] = -INT_MAX - 1  # whole tiles name nothing before the one slot that does
    case["slots"][3] = 1
    case["slots"][4] = topk // 2 + 1
    case["slots"][5] = topk + 1000
    case["lo"][6] += s_kv // 2
    case["hi"][7] -= s_kv // 2
    case["slots"][8] = 0
    case["hi"][9] = offset
    case["indices"][10] = offset + s_kv
    case["slots"][11] = -3
    case["indices"][12] = case["indices"][12, 0].clone()  # the same key again and again counts each time


@pytest.mark.parametrize(("dtype", "k_offset"), first(1, [(dtype, 1000 * i) for i, dtype in enumerate(DTYPES)]))
def test_slots_that_do_not_count(device, dtype, k_offset):
    case = problem(device, dtype, 8, 100, 64, 64, rows=13, k_offset=k_offset)
    take_slots_away(case)
    poison(case)
    assert_right(case)


def with_sinks(case: dict) -> dict:
    """Sinks below and above the scores, without any weight, with all of it, and in steps of two in memory."""
    heads = case["q"].shape[1]
    sinks = torch.linspace(-9, 9, 2 * heads, device=case["q"].device)[::2]
    sinks[0], sinks[1 % heads], sinks[2 % heads] = -torch.inf, torch.inf, 70.0
    return case | {"sinks": sinks}


@pytest.mark.parametrize("dtype", first(1, DTYPES))
def test_sinks(device, dtype):
    case = with_sinks(problem(device, dtype, 8, 100, 64, 64, rows=13))
    take_slots_away(case)
    poison(case)
    assert_right(case | {"max_logits": True})


def test_one_row_of_names_for_all_queries(device):
    """Row stride 0: an arange that is expanded makes it dense attention, and bounds make that causal."""
    case = problem(device, torch.float32, 4, 50, 32, 32, rows=20, s_kv=50)
    case["indices"] = torch.arange(50, dtype=torch.int32, device=device).expand(20, 50)
    case["hi"] = torch.arange(31, 51, dtype=torch.int32, device=device)
    assert_right(case)


def test_strided_operands(device):
    case = problem(device, torch.float32, 4, 40, 64, 48, separate=True)
    for name in ("q", "k", "v"):
        x = case[name]
        case[name] = torch.cat([torch.full_like(x, torch.nan), x], -1)[..., x.shape[-1] :]
    case["q"] = case["q"].transpose(0, 1).contiguous().transpose(0, 1)
    case["indices"] = torch.cat([case["indices"], torch.full_like(case["indices"], 1)], 1)[:, :40]
    assert_right(case)


def test_partial_results_stay_in_float32(device):
    case = problem(device, torch.float16, 4, 40, 64, 64) | {"out_dtype": torch.float32}
    assert_right(case)


def test_scores_far_apart_and_a_negative_scale(device):
    case = problem(device, torch.float32, 4, 70, 64, 64) | {"scale": -2.0}
    assert_right(case, tolerance=1e-4)  # a score of 60 is known to 60 * 2**-24


@pytest.mark.parametrize("rows", [0, 2])
def test_no_rows_or_no_heads(device, rows):
    case = problem(device, torch.float32, 0 if rows else 4, 7, 32, 32, rows=rows)
    out, lse = forward(triton_forward, **case)
    assert out.shape == (rows, 0 if rows else 4, 32)
    assert lse.shape == out.shape[:2]


@pytest.mark.parametrize(
    ("width", "tiles"),
    [
        (576, (512, 64)),
        (512, (512, 0)),
        (96, (64, 32)),
        (80, (64, 16)),
        (16, (16, 0)),
        (17, (32, 0)),
        (100, (128, 0)),
        (48, (32, 16)),
        (40, (32, 16)),
        (129, (128, 16)),
        (320, (256, 64)),
        (500, (512, 0)),
    ],
)
def test_columns_are_cut_in_powers_of_two(width, tiles):
    assert triton_forward.blocks_of(width) == tiles


def test_the_hopper_kernel_says_what_it_serves(device):
    q, k = torch.empty(2, 128, 576, dtype=torch.bfloat16), torch.empty(9, 576, dtype=torch.bfloat16)
    assert not gluon_forward.supports(latent_call(q, k))  # not on a GPU
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    q, k = q.to(device), k.to(device)
    assert gluon_forward.supports(latent_call(q, k)) == hopper
    assert gluon_forward.supports(latent_call(q[..., :512], k[:, :512])) == hopper
    assert not gluon_forward.supports(latent_call(q, k, k[:, :512]))
    assert not gluon_forward.supports(latent_call(q, k, d_v=256))
    assert not gluon_forward.supports(latent_call(q.float(), k.float()))
    assert not gluon_forward.supports(latent_call(q[..., 1:513], k[:, 1:513]))  # not at 16 bytes


@pytest.mark.parametrize(("room", "heads"), [(48 * 1024, 1), (227 * 1024, 1), (99 * 1024, 20), (163 * 1024, 128)])
def test_tiles_fit_the_memory_of_a_program(room, heads):
    for dtype, (main, width) in product((torch.bfloat16, torch.float32), ((64, 96), (256, 320), (512, 576))):
        tiles = triton_forward.pick_tiles(heads, main, width, dtype, separate=False, gpu=GPU(80, room))
        bytes_held = (tiles.heads + tiles.stages * tiles.keys) * width * dtype.itemsize
        assert bytes_held < room or tiles[:2] == (16, 16)


def rising(case: dict) -> None:
    """Keys that grow from slot to slot: every tile has a new maximum, far above the last."""
    case["k"] *= torch.linspace(0.2, 4, len(case["k"]), device=case["k"].device).to(case["k"].dtype)[:, None]
    case["indices"] = case["indices"].sort(1).values


@pytest.mark.parametrize(
    ("heads", "topk", "d", "out_dtype"),
    [(70, 66, 512, torch.float32), sweep(64, 140, 576, torch.float16), sweep(16, 1, 576, torch.float16)],
)
@pytest.mark.parametrize("seeds", [range(1), sweep(range(1, 5))], ids=["one", "many"])
def test_the_hopper_kernel_under_hostile_schedules(heads, topk, d, out_dtype, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        case = problem("cpu", torch.float16, heads, topk, d, 512, rows=13, s_kv=400, k_offset=7)
        rising(case)
        take_slots_away(case)
        poison(case)
        turn = seed + topk % 3
        case = (with_sinks(case) if turn % 3 == 0 else case) | {"out_dtype": out_dtype, "max_logits": turn % 2 == 0}
        assert_right(case, emulated(gluon_forward, seed), tolerance=1e-2)


PLANTED = {
    "the first consumer does not wait for weights": ("mbarrier.wait(barriers.weights_ready.index(1), turn)", "pass"),
    "the producer does not wait for room": ("mbarrier.wait(room[half].index(tile), free)", "pass"),
    "a half is free too early": (
        "out = warpgroup_mma_wait(0, [out])\n            mbarrier.arrive(barriers.back_free.index(0), count=1)",
        "mbarrier.arrive(barriers.back_free.index(0), count=1)\n            out = warpgroup_mma_wait(0, [out])",
    ),
    "the weights are not fenced": ("store(narrow)\n    fence_async_shared()", "store(narrow)"),
    "the sums are not rescaled with the other tile": (
        "return out, Sums(row_max, sums.largest, sums.total * rescale)",
        "return out, Sums(row_max, sums.largest, sums.total)",
    ),
    "the values of a row that sees no key stay": ("out = gl.where(out == out, out, 0.0)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("fault", first(1, PLANTED))
def test_the_emulation_finds_planted_faults(fault):
    case = with_sinks(problem("cpu", torch.float16, 16, 200, 512, 512, rows=9, s_kv=400))
    rising(case)
    case["slots"][3:] = 10  # three programs: a long item each, and two short ones that come soon after one another
    case["slots"][[4, 6, 8]] = 0
    case["indices"][0, 128:] = -1
    poison(case)

    def many_times():  # a race is lost sooner or later
        for seed in range(20):
            assert_right(case, emulated(gluon_forward, seed, PLANTED[fault]), tolerance=1e-2)

    with pytest.raises(AssertionError):
        many_times()


NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "topk", "d"),
    [(128, 2048, 576), (128, 200, 512), (64, 128, 576), (16, 333, 576), (96, 64, 576), (1, 1, 576)],
)
def test_the_hopper_kernel(device, dtype, heads, topk, d):
    case = problem(device, dtype, heads, topk, d, 512, rows=13, s_kv=3000, k_offset=7)
    take_slots_away(case)
    poison(case)
    assert gluon_forward.supports(latent_call(case["q"], case["k"]))
    assert_right(case, gluon_forward)
    assert_right(case | {"out_dtype": torch.float32}, gluon_forward)
    assert_right(with_sinks(case) | {"max_logits": True}, gluon_forward)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
def test_the_hopper_kernel_says_the_same_again_and_again(device):
    """A result that moves is a race: more programs than the GPU has processors, many times."""
    case = problem(device, torch.bfloat16, 128, 700, 576, 512, rows=300, s_kv=5000)
    rising(case)
    out, lse = forward(gluon_forward, **case)
    for _ in range(20):
        again = forward(gluon_forward, **case)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
