"""The dense forward kernel for Hopper against float64: emulated, on a Hopper GPU, and compiled."""

from itertools import product
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import attnmesh as am
from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import State
from attnmesh.core.visibility import Patch
from attnmesh.ops.dense import gluon_forward, triton
from attnmesh.ops.dense.call import Call, Scores
from attnmesh.ops.dense.gluon_forward import TILES, GluonTiles
from attnmesh.ops.dense.triton_tiles import EvenPositions, ScoreTerms
from helpers.cases import else_sweep, first, in_turn, sweep
from helpers.dense_kernels import (
    HUGE_EXPONENTS,
    MASKS,
    assert_huge_scores_are_right,
    dense,
    even_terms,
    make_scores_huge,
    mask_case,
    relative,
    score_terms,
)
from helpers.gluon import emulated
from helpers.triton_compile import assert_fit, compiled_for_hopper, count

SMALL = GluonTiles(keys=64, stages=2)


def inputs(
    heads: tuple[int, int], q_len: int, kv_len: int, key_dim: int = 64, value_dim: int | None = None, batch: int = 1,
    device: str = "cpu", dtype: torch.dtype = torch.float16,
) -> list[Tensor]:  # fmt: skip
    """q, k, v as [B, S, H, D] tensors transposed, in the middle of others: NaN lies around them."""
    sizes = [(q_len, heads[0], key_dim), (kv_len, heads[1], key_dim), (kv_len, heads[1], value_dim or key_dim)]
    found = []
    for s, h, d in sizes:
        around = torch.full((batch, s + 5, h, d + 8), torch.nan, dtype=dtype, device=device)
        around[:, 2 : 2 + s, :, :d] = torch.randn(batch, s, h, d, dtype=torch.float32, device=device).to(dtype)
        found.append(around[:, 2 : 2 + s, :, :d].transpose(1, 2))
    return found


def assert_right(
    kernel: ModuleType, q: Tensor, k: Tensor, v: Tensor, mask: str, *, softcap: float | None = None,
    sinks: Tensor | None = None, alibi: bool = False, even: tuple[Ranges, Ranges] | None = None, **how: object,
) -> State:  # fmt: skip
    """Against float64, with at most twice the error of the plain computation in the dtype of q.

    With `alibi` positions have gaps, with `even` rows and keys have those.
    """
    seen, visible = mask_case(mask, q.shape[2], k.shape[2], q.shape[0], q.device)
    given = terms = score_terms(False, alibi, q.shape[1], q.shape[2], k.shape[2], q.device, ascending=True)
    if even is not None:
        terms, given = even_terms(slopes_of(q), *even)
    terms = terms._replace(softcap=softcap)
    how |= {"terms": given._replace(softcap=softcap), "sinks": sinks}
    result = kernel.forward(q, k, v, scale=0.2, **seen, state=None, out_dtype=q.dtype, **how)
    truth, plain = (dense(q, k, v, 0.2, visible, dtype, terms, sinks) for dtype in (torch.float64, q.dtype))
    assert result.out.dtype == q.dtype
    assert result.lse.dtype == torch.float32
    for mine, exact, theirs in zip(result, truth, plain, strict=True):
        assert relative(mine, exact) <= 2 * relative(theirs, exact) + 1e-6
    assert (result.out[truth.lse.isneginf()] == 0).all()
    return result


def slopes_of(q: Tensor) -> Tensor:
    """A slope per head: one below 0, then as in the ALiBi paper."""
    slopes = score_terms(False, True, q.shape[1], 1, 1, q.device, ascending=True).slopes
    assert slopes is not None
    return slopes


WIDTHS = [*TILES, (80, 80), (40, 96), (224, 16), (72, 136)]
CASES = [  # mask, heads, widths, lengths
    (mask, heads, widths, lengths if mask != "causal" else (150, 150))
    for mask, widths, (heads, lengths) in in_turn(
        MASKS, WIDTHS, [((2, 2), (150, 150)), ((4, 1), (77, 200)), ((6, 2), (193, 130))]
    )
]


@pytest.mark.parametrize(("mask", "heads", "widths", "lengths"), first(1, CASES))
def test_masks_widths_and_lengths(mask, heads, widths, lengths):
    batch = 3 if mask == "sequences" else 1
    assert_right(emulated(gluon_forward), *inputs(heads, *lengths, *widths, batch=batch), mask, tiles=SMALL)


def test_two_blocks_of_columns():
    assert_right(emulated(gluon_forward), *inputs((2, 1), 70, 70, 192, 160), "causal", tiles=SMALL)


@pytest.mark.sweep
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_tiles_of_every_width(widths):
    assert_right(emulated(gluon_forward), *inputs((4, 2), 230, 230, *widths), "causal")


@pytest.mark.parametrize(("pack", "mask"), first(1, [(2, "causal"), (4, "window"), (8, "union")]))
def test_heads_of_a_group_share_a_tile(pack, mask):
    assert_right(emulated(gluon_forward), *inputs((8, 1), 45, 45), mask, tiles=SMALL, pack=pack)


def test_sections_need_not_divide_the_heads():
    tiles = SMALL._replace(section=2)
    assert_right(emulated(gluon_forward), *inputs((6, 3), 150, 150), "causal", tiles=tiles)


def test_few_rows_are_packed():
    assert gluon_forward._packed_heads(8, 1) == 8
    assert gluon_forward._packed_heads(12, 1) == 4
    assert gluon_forward._packed_heads(8, 40) == 2
    assert gluon_forward._packed_heads(8, 4096) == 1
    assert_right(emulated(gluon_forward), *inputs((8, 1), 5, 300, batch=2), "full")


@pytest.mark.parametrize("mask", ["causal", sweep("random"), sweep("union")])
def test_softcap(mask):
    assert_right(emulated(gluon_forward), *inputs((2, 1), 130, 130), mask, softcap=2.0, tiles=SMALL)


@pytest.mark.parametrize(
    ("mask", "heads", "lengths", "how"),
    [
        ("causal", (2, 1), (260, 260), {}),  # tiles before all rows of a work tile, and on the diagonal
        sweep("union", (4, 1), (77, 200), {"softcap": 2.0}),
        sweep("window", (8, 1), (45, 45), {"pack": 4}),  # rows of several heads in a tile
        sweep("full", (2, 2), (70, 300), {}),  # keys after rows
        sweep("slices", (2, 1), (150, 150), {"sinks": torch.tensor([0.5, -3.0])}),
    ],
)
def test_slopes(mask, heads, lengths, how):
    assert_right(emulated(gluon_forward), *inputs(heads, *lengths), mask, alibi=True, tiles=SMALL, **how)


EVEN = [  # mask, heads, positions of rows and keys
    ("causal", (2, 1), (range(260),), (range(260),), {}),
    # Two pieces of a zigzag layout: rows that attend to their own keys, and to those of another rank.
    ("causal", (3, 1), (range(128), range(640, 768)), (range(128), range(640, 768)), {}),
    ("full", (2, 2), (range(512, 600),), (range(128), range(896, 1000)), {}),  # keys after rows
    ("window", (8, 1), (range(3, 180, 4),), (range(1, 178, 4),), {"pack": 4}),  # striped
    ("union", (4, 1), (range(77),), (range(70, 270),), {"softcap": 2.0}),
    sweep("random", (2, 1), (range(5), range(9, 18)), (range(64), range(100, 236)), {"sinks": torch.ones(2)}),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "heads", "q_runs", "k_runs", "how"), EVEN)
def test_slopes_of_even_positions(mask, heads, q_runs, k_runs, how):
    q, k, v = inputs(heads, ranges.size(q_runs), ranges.size(k_runs))
    assert_right(emulated(gluon_forward), q, k, v, mask, even=(q_runs, k_runs), tiles=SMALL, **how)


def test_a_jump_within_a_tile_takes_the_positions():
    q, k, v = inputs((2, 1), 70, 200)
    q_runs, k_runs = (range(150, 220),), (range(100), range(120, 220))
    assert EvenPositions.of(q_runs, k_runs).k_split % SMALL.keys != 0
    with pytest.raises(AssertionError):  # which are not there
        assert_right(emulated(gluon_forward), q, k, v, "random", even=(q_runs, k_runs), tiles=SMALL)
    terms, _ = even_terms(slopes_of(q), q_runs, k_runs)
    seen, visible = mask_case("random", 70, 200, 1, q.device)
    how = {"scale": 0.2, "state": None, "out_dtype": q.dtype, "tiles": SMALL}
    result = emulated(gluon_forward).forward(q, k, v, **seen, terms=terms, **how)
    truth = dense(q, k, v, 0.2, visible, torch.float64, terms)
    assert relative(result.out, truth.out) < 1e-3
    assert relative(result.lse, truth.lse) < 1e-6


@pytest.mark.parametrize(
    ("q_runs", "k_runs", "even"),
    [
        ((range(8, 40),), (range(3, 50),), (1, 5, 0, 0, 0, 0)),
        ((range(1, 9, 4), range(13, 30, 4)), (range(0, 32, 4),), (4, 1, 2, 4, 0, 0)),
        ((range(9, 10),), (range(0, 6, 2), range(20, 30, 2)), (2, 9, 0, 0, 3, 14)),  # one row has no step
        ((range(9),), (range(0, 18, 2),), None),
        ((range(9),), (range(3), range(5, 7), range(20, 30)), None),
        ((range(9),), (), None),
    ],
)
def test_even_positions(q_runs, k_runs, even):
    assert EvenPositions.of(q_runs, k_runs) == even


@pytest.mark.parametrize(
    ("q_runs", "k_runs", "causal", "later"),
    [
        ((range(9),), (range(9),), True, False),
        ((range(5, 14),), (range(9),), True, False),
        ((range(4), range(9, 12)), (range(4), range(9, 12)), True, False),
        ((range(4), range(9, 12)), (range(3), range(9, 12)), True, True),
        ((range(9),), (range(1, 10),), True, True),
        ((range(9),), (range(9),), False, True),
    ],
)
def test_even_positions_know_of_later_keys(q_runs, k_runs, causal, later):
    assert EvenPositions.of(q_runs, k_runs).has_later_keys(causal) == later


@pytest.mark.parametrize(
    ("mask", "q_runs", "k_runs", "even"),
    [
        (am.Causal(), (range(10),), (range(10),), (1, 0, 0, 0, 0, 0)),
        (am.Causal(), (range(1, 41, 4),), (range(2, 42, 4),), (4, 3, 0, 0, 0, 0)),  # no key of the first row
        # A zigzag layout: the keys of a later rank, which only the late rows see; documents; three pieces.
        (am.Causal(), (range(8), range(40, 48)), (range(8, 16), range(32, 40)), (1, 32, 0, 0, 8, 16)),
        (am.Causal() & am.Documents([5, 43]), (range(8), range(40, 48)), (range(48),), (1, 0, 8, 32, 0, 0)),
        (am.Causal(), (range(12),), (range(4), range(5, 8), range(9, 12)), None),
    ],
)
def test_calls_know_even_positions(mask, q_runs, k_runs, even):
    q, k = (torch.zeros(1, 2, ranges.size(runs), 16) for runs in (q_runs, k_runs))
    call = Call(q, k, k, Patch(mask, q_runs, k_runs), Scores(1.0, alibi_slopes=torch.ones(2)))
    for launch in triton._launches(call, zero_rows=False):
        terms = launch.how(call.scores)["terms"]
        assert terms.even == even
        if even is not None:
            step, q_first, q_split, q_jump, k_split, k_jump = even
            rows, keys = (torch.arange(x.numel()) for x in (terms.q_positions, terms.k_positions))
            q_positions = q_first + step * rows + q_jump * (rows >= q_split)
            k_positions = step * keys + k_jump * (keys >= k_split)
            distances = terms.q_positions[:, None] - terms.k_positions
            assert torch.equal(distances, (q_positions[:, None] - k_positions).int())


@pytest.mark.parametrize("exponent", [60, sweep(124)])
def test_huge_scores_with_even_slopes(exponent):
    """Where slopes are less than the last bit of the scores, the largest ones share the weight."""
    q, k, v = inputs((2, 1), 140, 300, dtype=torch.bfloat16)
    make_scores_huge(q, k, exponent, 0.2)
    terms, given = even_terms(torch.tensor([2.0**-8, -(2.0**-10)]), (range(140),), (range(300),))
    result = emulated(gluon_forward).forward(
        q, k, v, scale=0.2, causal=False, bounds=None, state=None, out_dtype=torch.bfloat16, terms=given, tiles=SMALL
    )
    seen = torch.ones(1, 1, 140, 300, dtype=torch.bool)
    with_slopes, without = (dense(q, k, v, 0.2, seen, torch.float64, *how) for how in ((terms,), ()))
    near_one = torch.arange(140) % 4 == 0
    out = torch.where(near_one[:, None], with_slopes.out, without.out)
    assert_huge_scores_are_right(result, State(out, torch.where(near_one, with_slopes.lse, without.lse)))


@pytest.mark.sweep
@pytest.mark.parametrize("seeds", [range(4)])
def test_slopes_under_hostile_schedules(seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        assert_right(emulated(gluon_forward, seed), *inputs((2, 1), 260, 260), "causal", alibi=True, tiles=SMALL)


def test_the_emulation_finds_distances_that_are_overwritten():
    """With as many tiles of distances as of keys, the producer overwrites those of a softmax that is not over."""
    planted = ("distances.index(step % (SHAPE.stages + 1))", "distances.index(step % SHAPE.stages)")
    with pytest.raises(AssertionError):
        assert_right(
            emulated(gluon_forward, 0, planted), *inputs((2, 1), 260, 260), "causal", alibi=True, tiles=SMALL
        )  # fmt: skip


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale):
    q, k, v = inputs((2, 1), 100, 90)
    result = emulated(gluon_forward).forward(
        q, k, v, scale=scale, causal=False, bounds=None, state=None, out_dtype=torch.float32, tiles=SMALL
    )
    truth = dense(q, k, v, scale, torch.ones(1, 1, 100, 90, dtype=torch.bool), torch.float64)
    assert relative(result.out, truth.out) < 1e-3
    assert relative(result.lse, truth.lse) < 1e-6


HUGE = [(dtype, exponent) for dtype, exponents in HUGE_EXPONENTS.items() for exponent in exponents[::3]]


def check_huge_scores(
    kernel: ModuleType, dtype: torch.dtype, exponent: int, *, scale: float = 0.2, widths: tuple[int, int] = (64, 64),
    states: bool = False, device: str = "cpu", **how: object,
) -> None:  # fmt: skip
    q, k, v = inputs((2, 1), 140, 300, *widths, device=device, dtype=dtype)
    make_scores_huge(q, k, exponent, scale)
    seen = torch.ones(1, 1, 140, 300, dtype=torch.bool, device=device)
    state, out_dtype = None, dtype
    if states:  # of other keys, whose scores are near 0 or far below
        out_dtype = torch.float32
        state = State(torch.randn(1, 2, 140, widths[1], device=device), torch.full((1, 2, 140), -1e4, device=device))
    truth = dense(q, k, v, scale, seen, torch.float64)
    if states:
        lse = truth.lse.logaddexp(state.lse.double())
        weights = [(each - lse).exp()[..., None] for each in (truth.lse, state.lse.double())]
        truth = State(weights[0] * truth.out + weights[1] * state.out, lse)
    result = kernel.forward(q, k, v, scale=scale, causal=False, bounds=None, state=state, out_dtype=out_dtype, **how)
    assert_huge_scores_are_right(result, truth)


@pytest.mark.parametrize(("dtype", "exponent"), first(1, HUGE))
def test_huge_scores(dtype, exponent):
    check_huge_scores(emulated(gluon_forward), dtype, exponent, tiles=SMALL)


@pytest.mark.parametrize(
    ("exponent", "scale", "widths"), [(32, 0.2, (64, 64)), sweep(60, 1.0, (64, 192)), sweep(32, 3.0, (64, 64))]
)
def test_huge_scores_with_states_and_scales(exponent, scale, widths):
    how = {"scale": scale, "widths": widths, "tiles": SMALL}
    check_huge_scores(emulated(gluon_forward), torch.bfloat16, exponent, states=True, **how)
    check_huge_scores(emulated(gluon_forward), torch.bfloat16, exponent, **how)


@pytest.mark.sweep
def test_the_emulation_fuses_multiply_adds():
    """Without another factor for huge rows, what the shift loses would be the exponent of the largest score."""
    planted = ("gl.abs(new_raw_max) >= _HUGE / factor", "gl.abs(new_raw_max) < 0.0")
    for dtype, exponent in ((torch.float16, 30), (torch.bfloat16, 32)):
        with pytest.raises(AssertionError):
            check_huge_scores(emulated(gluon_forward, planted=planted), dtype, exponent, tiles=SMALL)


def test_scores_that_differ_by_little_of_what_is_huge():
    """2**20 and a few units: the exponents are right to the last bit of the scores, unlike those of rounded scores."""
    q, k, v = inputs((1, 1), 70, 200, dtype=torch.bfloat16)
    q.zero_()
    k.zero_()
    q[..., 0], k[..., 0] = 2.0**12, 2.0**10
    q[..., 1], k[..., 1] = 0.5, torch.randint(-8, 8, k.shape[:-1]).to(k.dtype)
    seen = torch.ones(1, 1, 70, 200, dtype=torch.bool)
    result = emulated(gluon_forward).forward(
        q, k, v, scale=0.2, causal=False, bounds=None, state=None, out_dtype=torch.float32, tiles=SMALL
    )
    truth, plain = (dense(q, k, v, 0.2, seen, dtype) for dtype in (torch.float64, torch.float32))
    assert relative(result.out, truth.out) <= 2 * relative(plain.out, truth.out)
    assert relative(result.out, truth.out) < 4e-3


def test_infinite_scores_are_nan_as_in_the_plain_computation():
    q, k, v = inputs((1, 1), 70, 100, dtype=torch.bfloat16)
    q[..., 5, :], k[..., 7, :] = 1e38, 1e38
    result = emulated(gluon_forward).forward(
        q, k, v, scale=0.2, causal=False, bounds=None, state=None, out_dtype=torch.bfloat16, tiles=SMALL
    )
    plain = dense(q, k, v, 0.2, torch.ones(1, 1, 70, 100, dtype=torch.bool), torch.float32)
    assert plain.out[0, 0, 5].isnan().all()
    assert torch.equal(result.out.isnan(), plain.out.isnan())


# Far below and above the scores; -inf is no key.
SINKS = [0.5, -torch.inf, 40.0, -3.0, -50.0, 3.0, 1.0, 0.0]


@pytest.mark.parametrize(("mask", "pack"), first(1, [("slices", 1), ("causal", 2), ("union", 4), ("full", 1)]))
def test_sinks(mask, pack):
    sinks = torch.tensor(SINKS, dtype=torch.float16)
    assert_right(emulated(gluon_forward), *inputs((8, 2), 70, 70), mask, sinks=sinks, tiles=SMALL, pack=pack)


def test_an_infinite_sink_has_all_the_weight():
    q, k, v = inputs((2, 1), 70, 70)
    seen, _ = mask_case("slices", 70, 70, 1, q.device)
    how = {"scale": 0.2, "state": None, "out_dtype": torch.float16, "tiles": SMALL}
    out, lse = emulated(gluon_forward).forward(q, k, v, **seen, **how, sinks=torch.full((2,), torch.inf))
    assert (out == 0).all()
    assert (lse == torch.inf).all()


def continued(
    kernel: ModuleType, q: Tensor, k: Tensor, v: Tensor, mask: str, stages: int, sinks: Tensor | None = None,
    alibi: bool = False, even: tuple[Ranges, Ranges] | None = None, **how: object,
) -> tuple[State, State]:  # fmt: skip
    """A launch per range of keys, from state to state, the last one in the dtype of q with sinks; and the truth."""
    seen, visible = mask_case(mask, q.shape[2], k.shape[2], q.shape[0], q.device)
    first, end = seen["bounds"]
    terms = score_terms(False, alibi, q.shape[1], q.shape[2], k.shape[2], q.device, ascending=True)
    if even is not None:
        terms, _ = even_terms(slopes_of(q), *even)
    state = None
    for stage in range(stages):
        begin, stop = (k.shape[2] * n // stages for n in (stage, stage + 1))
        bounds = tuple(x.clamp(begin, stop) - begin for x in (first, end))
        last = stage == stages - 1
        given = terms._replace(k_positions=terms.k_positions[begin:stop]) if alibi else terms
        if even is not None:
            _, given = even_terms(terms.slopes, even[0], ranges.narrow(even[1], range(begin, stop)))
        state = kernel.forward(
            q, k[:, :, begin:stop], v[:, :, begin:stop], scale=0.2, causal=False, bounds=bounds, state=state,
            out_dtype=q.dtype if last else torch.float32, sinks=sinks if last else None,
            terms=given, **how,
        )  # fmt: skip
        if not last:
            state.out[state.lse.isneginf()] = torch.nan  # what is empty does not count
    return state, dense(q, k, v, 0.2, visible, torch.float64, terms, sinks)


@pytest.mark.parametrize(
    ("mask", "widths", "stages"),
    first(1, [("random", (64, 64), 3), ("window", (192, 128), 2), ("union", (80, 72), 8)]),
)
def test_states_are_continued(mask, widths, stages):
    q, k, v = inputs((4, 2), 140, 200, *widths)
    how = {"sinks": torch.tensor(SINKS[:4]), "tiles": SMALL}
    state, truth = continued(emulated(gluon_forward), q, k, v, mask, stages, **how)
    once = assert_right(emulated(gluon_forward), q, k, v, mask, **how)
    assert state.out.dtype == q.dtype
    # Weights are rounded relative to another maximum: the error moves a little, and does not grow with the stages.
    assert relative(state.out, truth.out) <= 1.1 * relative(once.out, truth.out)
    assert relative(state.lse, truth.lse) <= 1e-6


@pytest.mark.parametrize("widths", [(64, 64), sweep((192, 160))])
def test_states_are_continued_with_slopes(widths):
    """From shared memory and, at the end, or from registers at the beginning."""
    q, k, v = inputs((4, 2), 140, 200, *widths)
    for how in ({"alibi": True}, {"even": ((range(100, 240),), (range(200),))}):
        state, truth = continued(emulated(gluon_forward), q, k, v, "random", 3, tiles=SMALL, **how)
        assert relative(state.out, truth.out) <= 5e-4
        assert relative(state.lse, truth.lse) <= 1e-6


def test_a_float32_state_is_overwritten():
    q, k, v = inputs((2, 1), 70, 64)
    state = State(torch.zeros(1, 2, 70, 64), torch.full((1, 2, 70), -torch.inf))
    again = emulated(gluon_forward).forward(
        q, k, v, scale=0.2, causal=False, bounds=None, state=state, out_dtype=torch.float32, tiles=SMALL
    )
    assert again.out is state.out
    assert again.lse is state.lse
    assert again.out.abs().max() > 0


def test_no_keys_pass_the_state_through():
    q, k, v = inputs((2, 1), 70, 0)
    state = State(torch.randn(1, 2, 70, 64), torch.randn(1, 2, 70))
    after = emulated(gluon_forward).forward(
        q, k, v, scale=0.2, causal=False, bounds=None, state=state, out_dtype=q.dtype, tiles=SMALL
    )
    torch.testing.assert_close(after.out, state.out.half())
    torch.testing.assert_close(after.lse, state.lse, rtol=1e-6, atol=1e-6)
    empty = emulated(gluon_forward).forward(
        q, k, v, scale=0.2, causal=False, bounds=None, state=None, out_dtype=q.dtype, tiles=SMALL
    )
    assert (empty.out == 0).all()
    assert empty.lse.isneginf().all()


def test_rows_that_are_not_aligned_are_copied():
    q, k, v = (x[..., 3:67] for x in inputs((2, 1), 70, 64, 72, 72))
    assert_right(emulated(gluon_forward), q, k, v, "full", tiles=SMALL)
    k, v = (x.expand(1, 2, 64, 64) for x in (k, v))
    assert_right(emulated(gluon_forward), q, k, v, "full", tiles=SMALL)


@pytest.mark.parametrize("tiles", [SMALL, sweep(SMALL._replace(stages=3, section=1))])
@pytest.mark.parametrize("seeds", [range(2), sweep(range(2, 8))], ids=["few", "many"])
def test_under_hostile_schedules(tiles, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        mask = MASKS[seed % len(MASKS)]
        batch = 3 if mask == "sequences" else 1
        assert_right(emulated(gluon_forward, seed), *inputs((2, 1), 260, 260, batch=batch), mask, tiles=tiles)


PLANTED = {
    "the first turn never comes": ("(turns & 1) ^ FIRST", "turns & 1"),
    "a consumer does not wait for the values": (
        "mbarrier.wait(barriers.v_ready.index(stage), phase)\n                    sums", "sums",
    ),
    "the scores are read too early": ("1 if SHAPE.v_rest == 0 else 2, [scores]", "2, [scores]"),
    "queries are given back before they are read": (
        "seen = served + 1\n",
        "seen = served + 1\n                mbarrier.arrive(barriers.q_free.index(INDEX), count=1)\n",
    ),
    "the producer overwrites the queries": ("mbarrier.wait(barriers.q_free.index(consumer), (served & 1) ^ 1)", "pass"),
    "the last values are not loaded": ("if stop > begin:\n                last", "if False:\n                last"),
    "the edge of a mask is off by one": ("key < (row_end - key_begin)", "key <= (row_end - key_begin)"),
    "the carry is not rescaled": ("acc = rescale(acc, acc_scale)\n                    weights", "weights"),
}  # fmt: skip


@pytest.mark.parametrize("fault", first(4, PLANTED))
def test_the_emulation_finds_planted_faults(fault):
    q, k, v = inputs((2, 1), 300, 300)

    def many_times():  # a race is lost sooner or later
        for seed in range(12):
            kernel = emulated(gluon_forward, seed, PLANTED[fault])
            assert_right(kernel, q, k, v, "causal", tiles=SMALL)
            assert_right(kernel, *inputs((2, 1), 600, 100), "slices", tiles=SMALL)  # with rows that see nothing

    with pytest.raises(AssertionError):
        many_times()


PLANTED_IN_STATES = {
    "the state is read before it arrives": ("mbarrier.wait(barriers.state_ready.index(INDEX), count & 1)", "pass"),
    "nobody gives the tile back": ("mbarrier.arrive(barriers.state_free.index(INDEX), count=1)", "pass"),
    "the copy engine does not see the new state": ("fence_async_shared()\n        for i in", "for i in"),
    "the last store is not waited for": ("if SHAPE.staged:\n        tma.store_wait(0)", "pass"),
    "what an empty state holds counts": ("rescale(earlier, weight, True)", "rescale(earlier, weight)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", first(2, PLANTED_IN_STATES))
def test_the_emulation_finds_planted_faults_in_states(fault):
    q, k, v = inputs((2, 1), 500, 200)

    def many_times():
        for seed in range(12):
            state, truth = continued(
                emulated(gluon_forward, seed, PLANTED_IN_STATES[fault]), q, k, v, "random", 3, tiles=SMALL
            )
            assert relative(state.out, truth.out) < 2e-3
            assert relative(state.lse, truth.lse) < 1e-6

    with pytest.raises(AssertionError):
        many_times()


def test_a_state_that_the_copy_engine_cannot_load():
    q, k, v = inputs((2, 1), 100, 90)
    state = State(torch.randn(1, 2, 100, 67)[..., 1:65], torch.randn(1, 2, 100))
    assert not gluon_forward.is_loadable(state.out)
    copy = State(state.out.contiguous(), state.lse.clone())
    how = {"scale": 0.2, "causal": False, "bounds": None, "out_dtype": torch.float32, "tiles": SMALL}
    here = emulated(gluon_forward).forward(q, k, v, **how, state=state)
    there = emulated(gluon_forward).forward(q, k, v, **how, state=copy)
    torch.testing.assert_close(here.out, there.out)
    torch.testing.assert_close(here.lse, there.lse)


def test_what_it_refuses():
    q, v = (torch.empty(1, 1, 4, d, dtype=torch.bfloat16) for d in (192, 128))
    assert gluon_forward.why_not(q, v) is None
    assert "fp16 and bf16" in gluon_forward.why_not(q.float(), v.float())
    assert gluon_forward.why_not(q[..., :8], v[..., :72]) is None
    for q_dim, v_dim in ((4, 8), (64, 60), (576, 512), (64, 264)):
        q, v = (torch.empty(1, 1, 4, d, dtype=torch.bfloat16) for d in (q_dim, v_dim))
        assert f"takes head_dim 8, 16, 24, ..., 256, not {q_dim} (keys)" in gluon_forward.why_not(q, v)


def test_a_width_takes_the_tiles_of_the_next():
    picked = {(64, 64): 128, (72, 40): 128, (40, 72): 128, (160, 128): 128, (160, 136): 64, (8, 256): 64}
    assert {widths: gluon_forward.pick_tiles(*widths).keys for widths in picked} == picked


NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9


def is_of_its_own(widths: tuple[int, int], mask: str, dtype: torch.dtype) -> bool:
    """Whether a case is the only one of its kernel, which no bounds, causal, or the number of bounds choose.

    Masks with as many bounds as others run with two widths. fp16 has other products and results, with all tiles.
    """
    if dtype == torch.float16:
        return widths in TILES and mask in ("causal", "random")
    if mask in ("full", "causal", "random", "union"):
        return widths in TILES or mask != "full"
    return widths in ((128, 128), (192, 128))


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("widths", "mask", "dtype"), else_sweep(product(WIDTHS, MASKS, [torch.float16, torch.bfloat16]), is_of_its_own)
)
def test_on_hopper(widths, mask, dtype):
    """Few shapes and terms: each kernel takes seconds to compile."""
    batch = 3 if mask == "sequences" else 1
    for heads, length, with_sinks in (((8, 2), 777, False), ((3, 3), 128, False), ((4, 1), 13, True)):
        q, k, v = inputs(heads, length, length, *widths, batch=batch, device="cuda", dtype=dtype)
        sinks = torch.tensor(SINKS[: heads[0]], dtype=dtype, device="cuda") if with_sinks else None
        assert_right(gluon_forward, q, k, v, mask, sinks=sinks)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
def test_softcap_and_sinks_on_hopper():
    q, k, v = inputs((8, 2), 777, 777, 128, device="cuda", dtype=torch.bfloat16)
    assert_right(gluon_forward, q, k, v, "slices", softcap=3.0, sinks=torch.tensor(SINKS, device="cuda"))


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("widths", "mask", "softcap"),
    [((128, 128), "causal", None), ((256, 256), "union", 3.0), sweep((64, 64), "causal", None),
     sweep((192, 128), "union", 3.0)],
)  # fmt: skip
def test_slopes_on_hopper(widths, mask, softcap):
    q, k, v = inputs((8, 2), 777, 777, *widths, device="cuda", dtype=torch.bfloat16)
    assert_right(gluon_forward, q, k, v, mask, softcap=softcap, alibi=True)
    runs = (range(256), range(1000, 1521))
    assert_right(gluon_forward, q, k, v, mask, softcap=softcap, even=(runs, runs))


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("widths", [(128, 128), sweep((64, 64)), sweep((192, 128))])
def test_slopes_of_even_positions_on_hopper(widths):
    """Full tiles, rows of several heads, keys after rows, and states."""
    dtype = torch.bfloat16
    for mask, heads, q_runs, k_runs, how in (
        ("causal", (4, 2), (range(3000),), (range(3000),), {}),
        ("full", (8, 1), (range(1000, 1030),), (range(512), range(900, 1200)), {}),
        ("full", (3, 1), (range(2, 1600, 8),), (range(5, 2405, 8),), {}),
    ):
        q, k, v = inputs(heads, ranges.size(q_runs), ranges.size(k_runs), *widths, device="cuda", dtype=dtype)
        assert_right(gluon_forward, q, k, v, mask, even=(q_runs, k_runs), **how)
    q, k, v = inputs((4, 2), 500, 900, *widths, device="cuda", dtype=dtype)
    state, truth = continued(gluon_forward, q, k, v, "random", 3, even=((range(600, 1100),), (range(900),)))
    assert relative(state.out, truth.out) <= 5e-3
    assert relative(state.lse, truth.lse) <= 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("widths", "stages"),
    else_sweep(  # with five there is a first launch, some in between and the last
        [(widths, n) for widths in WIDTHS for n in ((2, 3, 4, 5, 6, 7, 8) if widths == (128, 128) else (2, 5))],
        lambda widths, stages: stages == 5 or (widths == (128, 128) and stages in (2, 8)),
    ),
)
def test_states_are_continued_on_hopper(widths, stages):
    q, k, v = inputs((8, 2), 1000, 1000, *widths, device="cuda", dtype=torch.bfloat16)
    sinks = torch.tensor(SINKS, device="cuda")
    state, truth = continued(gluon_forward, q, k, v, "random", stages, sinks)
    once, _ = continued(gluon_forward, q, k, v, "random", 1, sinks)
    assert relative(state.out, truth.out) <= 1.02 * relative(once.out, truth.out)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
def test_the_same_bits_again_and_again_on_hopper():
    """A result that moves is a race: more work tiles than the GPU has processors, many times."""
    q, k, v = inputs((16, 4), 3000, 3000, 128, device="cuda", dtype=torch.bfloat16)
    how = {"scale": 0.1, "causal": True, "bounds": None, "state": None, "out_dtype": torch.bfloat16}
    first = gluon_forward.forward(q, k, v, **how)
    for _ in range(20):
        again = gluon_forward.forward(q, k, v, **how)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", HUGE_EXPONENTS)
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (192, 192)])
def test_huge_scores_on_hopper(dtype, widths):
    """Exponents share two kernels, which take seconds to compile."""
    for exponent, states in product(HUGE_EXPONENTS[dtype], (False, True)):
        check_huge_scores(gluon_forward, dtype, exponent, widths=widths, states=states, device="cuda")


def launch(
    key_dim: int, value_dim: int, dtype: str, mask: str, stage: str, softcap: float | None, pack: int,
    alibi: str | None = None,
) -> None:  # fmt: skip
    """A case, in the process that compiles. Launches that write the result have sinks, but for the usual one."""
    dtype = getattr(torch, dtype)
    q, k = (torch.empty(1, 300, heads, key_dim, dtype=dtype).transpose(1, 2) for heads in (8, 2))
    v = torch.empty(1, 300, 2, value_dim, dtype=dtype).transpose(1, 2)
    parts = {"bounds": 1, "union": 2}.get(mask)
    bounds = None if parts is None else (torch.zeros(parts, 1, 300, dtype=torch.int32),) * 2
    state = None if stage == "only" else State(torch.empty(1, 8, 300, value_dim), torch.empty(1, 8, 300))
    sinks = None if stage == "middle" or mask == "causal" else torch.empty(8, dtype=dtype)
    positions = torch.zeros(300, dtype=torch.int32)
    even = EvenPositions(1, 0, 0, 0, 0, 0) if alibi == "even" else None
    slopes = (torch.empty(8), positions, positions, even) if alibi else ()
    gluon_forward.forward(
        q, k, v, scale=0.1, causal=mask == "causal", bounds=bounds, state=state,
        out_dtype=torch.float32 if stage == "middle" else dtype, terms=ScoreTerms(softcap, *slopes), sinks=sinks,
        pack=pack,
    )  # fmt: skip


def tolerated(kernel: dict) -> int:
    """Bytes that may be spilled: arguments and addresses of the producer, read once per work tile, not per tile.

    With slopes and a state at head_dim 256 also addresses of the consumers. None of them at head_dim 128 with even
    positions: they would wait for them.
    """
    if kernel["case"][7:] == ("even",) and kernel["case"][0] <= 128:
        return 0
    return 192 if kernel["case"][7:] and kernel["case"][0] == 256 else 136


USUAL = [(128, 128, "bfloat16", "causal", "only", None, 1), (128, 128, "bfloat16", "causal", "only", None, 1, "even")]
EVERY = [
    *((*widths, dtype, mask, stage, None, 1) for widths, dtype, mask, stage in [
        ((64, 64), "float16", "full", "middle"), ((128, 128), "bfloat16", "bounds", "only"),
        ((192, 128), "bfloat16", "causal", "only"), ((256, 256), "float16", "bounds", "middle"),
        ((80, 80), "bfloat16", "union", "last"), ((72, 136), "float16", "bounds", "middle"),
    ]),
    (128, 128, "bfloat16", "causal", "only", 30.0, 1), (128, 128, "bfloat16", "full", "only", None, 8),
    *((*widths, "bfloat16", "bounds", "middle", None, 1, alibi) for widths in ((64, 64), (128, 128), (256, 256))
      for alibi in ("any", "even")),
]  # fmt: skip


@pytest.mark.parametrize("cases", [USUAL, sweep(EVERY)], ids=["usual", "every"])
def test_compiles_for_hopper(cases):
    kernels = compiled_for_hopper(__file__, cases)
    assert_fit(kernels, tolerated)
    for kernel in kernels:
        # All products of a tile are under way at once. Where the compiler cannot allow that, it waits for each.
        assert count(kernel, "WARPGROUP.DEPBAR") == 4 * gluon_forward.CONSUMERS
        assert count(kernel, "UTMALDG") > 0
