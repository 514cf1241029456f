"""attention() on one device: every mask, any positions, every gradient, against float64."""

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh import Causal, Documents, Full, Mask, SlidingWindow, Zigzag, attention, explain_attention
from attnmesh.core import visibility
from attnmesh.core.masks import BlockCausal, Chunked, Global, PerSequence, Prefix
from attnmesh.ops.dense import dispatch
from attnmesh.testing.attention import (
    NAMES,
    assert_attention_close,
    forward_backward,
    random_inputs,
    reference_results,
)
from attnmesh.testing.errors import relative_error
from helpers.cases import HEADS, MASKS, device_of, else_sweep, first, make_mask, sweep
from helpers.masks import checkered_slices, falling_slices
from helpers.memory import peak_bytes

LENGTHS = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 67), (2, 2), (7, 7), (67, 67), (5, 67), (67, 5), (130, 130)]
FUSED_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def attended(inputs: list[Tensor], mask: Mask, *, backend: str = "auto", **how) -> list[Tensor]:
    """out, lse, dq, dk, dv of attention()."""
    return forward_backward(
        lambda q, k, v: attention(q, k, v, mask=mask, return_lse=True, backend=backend, **how), inputs
    )


def check(
    inputs: list[Tensor], mask: Mask, *, backend: str = "auto", scale=None, q_positions=None, k_positions=None
) -> None:
    found = attended(inputs, mask, backend=backend, scale=scale, q_positions=q_positions, k_positions=k_positions)
    assert_attention_close(found, inputs, mask, scale=scale, q_positions=q_positions, k_positions=k_positions)


# The specification itself, against the textbook.


@pytest.mark.parametrize("name", MASKS)
def test_the_reference_is_softmax_over_the_keys_that_the_mask_names(name):
    length = 23
    document = [0] * 4 + [2] * 11 + [3] * 8  # of 4, 0, 11 and 8 positions
    rules = {
        "full": lambda q, k: True,
        "causal": lambda q, k: k <= q,
        "window": lambda q, k: q - 9 <= k <= q + 3,
        "documents": lambda q, k: document[q] == document[k],
        "causal & documents": lambda q, k: k <= q and document[q] == document[k],
        "causal & window": lambda q, k: q - 11 <= k <= q,
        "all three": lambda q, k: q - 6 <= k <= q and document[q] == document[k],
    }
    seen = torch.tensor([[rules[name](q, k) for k in range(length)] for q in range(length)])

    def by_the_book(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT / 4).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    inputs = random_inputs(length, dtype=torch.float64)
    for found, book in zip(
        reference_results(inputs, make_mask(name, length)), forward_backward(by_the_book, inputs), strict=True
    ):
        torch.testing.assert_close(found, book, rtol=1e-12, atol=1e-12)


# Masks, heads, lengths, dtypes.


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("full", torch.float32),
        sweep("causal", torch.float64),
        sweep("window", torch.bfloat16),
        ("documents", torch.float16),
        sweep("causal & documents", torch.float64),
        sweep("all three", torch.float32),
    ],
)
def test_aten_is_exact_for_every_mask_head_count_and_length(name, dtype):
    for seed, ((q_len, k_len), heads) in enumerate(zip(LENGTHS, itertools.cycle(HEADS.values()), strict=False)):
        inputs = random_inputs(q_len, k_len, heads=heads, dtype=dtype, seed=seed)
        check(inputs, make_mask(name, k_len), backend="aten")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("full", "torch"),
        sweep("causal", "reference"),
        sweep("window", "reference"),
        ("documents", "torch"),
        sweep("causal & documents", "reference"),
        sweep("all three", "torch"),
    ],
)
def test_the_torch_and_reference_backends_serve_everything(name, backend):
    for seed, ((q_len, k_len), dtype) in enumerate(zip(LENGTHS, itertools.cycle(FUSED_DTYPES), strict=False)):
        inputs = random_inputs(q_len, k_len, dtype=dtype, seed=seed)
        check(inputs, make_mask(name, k_len), backend=backend)


@pytest.mark.parametrize(
    ("name", "q_len", "k_len", "head_dim", "dtype"),
    [
        ("causal", 19, 19, 16, torch.float32),
        sweep("window", 18, 21, 24, torch.float16),
        sweep("documents", 5, 20, 256, torch.float32),
    ],
)
def test_triton_is_exact_on_what_the_interpreter_can_do(name, q_len, k_len, head_dim, dtype):
    inputs = random_inputs(q_len, k_len, dtype=dtype, batch=1, head_dim=head_dim, device=device_of("triton"))
    check(inputs, make_mask(name, k_len), backend="triton")


@pytest.mark.parametrize(
    ("mask", "backend"),
    first(
        1,
        else_sweep(  # each mask and each backend with chains; the tiles of a checkered mask take torch a second
            itertools.product(["falling", "checkered"], ["aten", "torch", "reference"]),
            lambda mask, backend: (mask, backend) in (("falling", "torch"), ("checkered", "aten")),
        ),
    ),
)
def test_masks_of_more_chains_than_a_launch_takes(mask, backend):
    mask = falling_slices(70) if mask == "falling" else checkered_slices(34, 2)
    check(random_inputs(mask.length, batch=1, heads=(2, 1)), mask, backend=backend)


@pytest.mark.parametrize("backend", ["aten", "triton", "torch"])
def test_a_mask_in_several_launches(monkeypatch, backend):
    for module in (visibility, dispatch):
        monkeypatch.setattr(module, "MAX_INTERVALS", 4)  # of 10 chains below
    inputs, sinks = random_inputs(11, batch=2, heads=(2, 1), device=device_of(backend)), torch.randn(2)
    sinks, shuffled = sinks.to(inputs[0].device), torch.randperm(11)
    masks = [
        (PerSequence([falling_slices(10), Causal()]), torch.arange(11)),
        (falling_slices(10), torch.arange(11)),
        (falling_slices(10), shuffled),
    ]
    for mask, at in masks[:1] if backend == "triton" else masks:  # interpreted kernels take long
        how = {"q_positions": at, "k_positions": at}
        found = forward_backward(
            lambda q, k, v, sinks, mask=mask, how=how: attention(
                q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend, **how
            ),
            inputs, sinks,
        )  # fmt: skip
        assert_attention_close(found, inputs, mask, sinks=sinks, **how)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_masks_of_more_chains_than_a_launch_takes_on_a_gpu(backend):
    if backend == "gluon" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for mask in (checkered_slices(40, 16), falling_slices(200)):
        check(random_inputs(mask.length, head_dim=64, dtype=torch.bfloat16, device="cuda"), mask, backend=backend)


@pytest.mark.parametrize("head_dim", [1, 3, sweep(33), 80, sweep(128), sweep(256), 576])
def test_any_head_dim(head_dim):
    for dtype, backend in (
        (torch.float32, "aten"), (torch.bfloat16, "aten"), (torch.float16, "aten"), (torch.float16, "torch"),
    ):  # fmt: skip
        check(random_inputs(35, head_dim=head_dim, dtype=dtype, batch=1, heads=(2, 1)), Causal(), backend=backend)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        (SlidingWindow(600, 20), torch.float32),
        sweep(SlidingWindow(600, 20), torch.float16),
        sweep(Causal() & Documents([3, 800, 497]), torch.float64),
    ],
    ids=str,
)
def test_rows_that_see_nothing_of_a_whole_tile_of_the_kernel(mask, dtype):
    check(random_inputs(1300, heads=(2, 1), batch=1, dtype=dtype), mask, backend="aten")


@pytest.mark.parametrize("backend", ["aten", "triton", "torch", "reference"])
def test_large_scores_do_not_overflow(backend):
    inputs = random_inputs(17, batch=1, heads=(2, 1), device=device_of(backend))
    large = [60 * inputs[0], 60 * inputs[1], *inputs[2:]]
    if not inputs[0].is_cuda:
        check(large, Causal(), backend=backend)
        return
    # A fused multiply-add rounds scores of thousands otherwise than the lse was rounded: that is most of the error.
    for name, found, exact in zip(
        NAMES, attended(large, Causal(), backend=backend), reference_results(large, Causal()), strict=True
    ):
        assert relative_error(found, exact) < 1e-3, name


def test_empty_batch():
    found = attended(random_inputs(5, batch=0), Causal())
    assert [tuple(x.shape) for x in found] == [(0, 4, 5, 16), (0, 4, 5), (0, 4, 5, 16), (0, 2, 5, 16), (0, 2, 5, 16)]


@pytest.mark.parametrize(("backend", "scale"), [("aten", 0.0), ("triton", 1), ("torch", 1.7), ("reference", -0.3)])
def test_scale(backend, scale):
    for mask in (Full(), Causal(), SlidingWindow(3)):
        inputs = random_inputs(17, batch=1, heads=(2, 1), device=device_of(backend))
        check(inputs, mask, backend=backend, scale=scale)


# Positions.


def positions_named(name: str, length: int) -> Tensor:
    at = torch.arange(length)
    generator = torch.Generator().manual_seed(length)
    return {
        "offset": at + 40,
        "strided": 3 * at + 1,
        "zigzag": Zigzag().positions(4 * length, 4, 1),
        "backwards": at.flip(0),
        "shuffled": torch.randperm(length, generator=generator),
        "with gaps": torch.randperm(2 * length, generator=generator)[:length].sort().values,
        "all the same": torch.full((length,), 7),
        "before the beginning": at - 5,
    }[name]


@pytest.mark.parametrize(
    ("places", "name"),
    [
        ("offset", "full"),
        ("strided", "causal"),
        sweep("zigzag", "window"),
        ("backwards", "documents"),
        sweep("shuffled", "causal & documents"),
        sweep("with gaps", "causal & window"),
        ("all the same", "all three"),
        sweep("before the beginning", "full"),
    ],
)
def test_positions_in_any_order(places, name):
    q_positions, k_positions = positions_named(places, 37), positions_named(places, 26)
    mask = make_mask(name, 60)
    check(random_inputs(37, 26), mask, backend="aten", q_positions=q_positions, k_positions=k_positions)
    check(random_inputs(37, 60, dtype=torch.bfloat16), mask, backend="aten", q_positions=q_positions)
    check(random_inputs(60, 26), mask, backend="torch", k_positions=k_positions)
    check(random_inputs(37, 26), mask, backend="reference", q_positions=q_positions, k_positions=k_positions)


@pytest.mark.parametrize("places", ["offset", "shuffled"])
def test_triton_goes_by_positions_too(places):
    q_positions, k_positions = positions_named(places, 17), positions_named(places, 20)
    inputs = random_inputs(17, 20, batch=1, device=device_of("triton"))
    check(inputs, Causal(), backend="triton", q_positions=q_positions, k_positions=k_positions)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_any_positions_under_any_mask(data):
    where = st.integers(0, 24)
    q_positions, k_positions = (
        torch.tensor(data.draw(st.lists(where, max_size=12)), dtype=torch.long) for _ in range(2)
    )
    few = st.integers(1, 6)
    leaves = [
        Full(), Causal(), SlidingWindow(data.draw(where), data.draw(st.integers(0, 3))), Prefix(data.draw(where)),
        Documents(data.draw(st.lists(st.integers(0, 6), max_size=5))), Chunked(data.draw(few)),
        BlockCausal(data.draw(few)), Global(data.draw(few)), Global(data.draw(few), both=True),
    ]  # fmt: skip
    mask = data.draw(st.sampled_from(leaves))
    for _ in range(data.draw(st.integers(0, 3))):
        other = data.draw(st.sampled_from(leaves))
        mask = mask & other if data.draw(st.booleans()) else mask | other
    check(
        random_inputs(len(q_positions), len(k_positions), batch=1),
        mask,
        backend=data.draw(st.sampled_from(["aten", "torch"])),
        q_positions=q_positions,
        k_positions=k_positions,
    )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aten", torch.int32),
        sweep("aten", torch.int16),
        ("aten", torch.uint8),
        sweep("reference", torch.int32),
        sweep("reference", torch.int16),
        sweep("reference", torch.uint8),
    ],
)
def test_positions_may_be_integers_of_any_width(backend, dtype):
    for q_positions, k_positions in (
        (torch.arange(9), None),
        (torch.randperm(9), None),
        (torch.randperm(9), torch.randperm(9)),
    ):
        narrow = [None if at is None else at.to(dtype) for at in (q_positions, k_positions)]
        for mask in (Full(), Causal(), SlidingWindow(2), Causal() & Documents([3, 6])):
            check(random_inputs(9), mask, backend=backend, q_positions=narrow[0], k_positions=narrow[1])


@pytest.mark.parametrize("name", MASKS)
def test_chunks_of_a_prompt_give_the_rows_of_the_whole(name):
    inputs, mask = random_inputs(61), make_mask(name, 61)

    def in_chunks(q, k, v):
        chunks = [torch.arange(a, b) for a, b in itertools.pairwise((0, 1, 20, 50, 61))]
        parts = [attention(q[:, :, at], k, v, mask=mask, q_positions=at, return_lse=True) for at in chunks]
        return [torch.cat(side, 2) for side in zip(*parts, strict=True)]

    assert_attention_close(forward_backward(in_chunks, inputs), inputs, mask)


def test_a_causal_chunk_needs_only_the_keys_up_to_its_end():
    inputs = random_inputs(40)
    out = attention(*inputs[:3], mask=Causal())
    q, k, v = (x[:, :, :30] for x in inputs[:3])
    chunk = attention(q[:, :, 20:], k, v, mask=Causal(), q_positions=torch.arange(20, 30))
    torch.testing.assert_close(chunk, out[:, :, 20:30])


def test_sorted_positions_with_gaps_cost_no_more_than_shuffled_ones():
    """As the tokens kept of a longer prompt have: hundreds of short runs must not become thousands of kernels."""
    inputs = random_inputs(500, batch=1, heads=(1, 1))
    generator = torch.Generator().manual_seed(1)
    q_positions, k_positions = (torch.randperm(1000, generator=generator)[:500] for _ in range(2))
    seconds = []
    for at in ((q_positions, k_positions), (q_positions.sort().values, k_positions.sort().values)):
        began = time.monotonic()
        check(inputs, Causal(), q_positions=at[0], k_positions=at[1])
        seconds.append(time.monotonic() - began)
    assert seconds[1] < 5 * seconds[0] + 0.5


# Rows that see nothing.


@pytest.mark.parametrize(
    ("dtype", "mask", "q_positions", "k_positions", "blind", "backend"),
    [
        (torch.float32, Causal(), [0, 3, 5], [4, 6], [0, 1], "aten"),
        (torch.float32, Causal() & Documents([2, 3]), [4, 1, 7], [3, 0], [2], "reference"),
        (torch.float32, Full(), [0, 1], [], [0, 1], "triton"),
        (torch.float16, Causal(), [0, 3, 5], [4, 6], [0, 1], "reference"),
        (torch.float16, SlidingWindow(2), [0, 9, 20], [8, 9], [0, 2], "triton"),
        (torch.float16, Documents([2, 3]), [1, 5, 90], [0, 1, 4, 5], [1, 2], "torch"),
    ],
    ids=str,
)
def test_a_row_without_keys_is_zero_with_lse_minus_infinity_and_no_gradient(
    dtype, mask, q_positions, k_positions, blind, backend
):
    q_positions, k_positions = torch.tensor(q_positions), torch.tensor(k_positions, dtype=torch.long)
    inputs = random_inputs(
        len(q_positions), len(k_positions), dtype=dtype, batch=1, heads=(2, 1), device=device_of(backend)
    )
    out, lse, dq, dk, dv = attended(inputs, mask, backend=backend, q_positions=q_positions, k_positions=k_positions)
    assert (lse[:, :, blind] == -torch.inf).all()
    assert not out[:, :, blind].any()
    assert not dq[:, :, blind].any()
    assert lse.isneginf().sum() == 2 * len(blind)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert_attention_close([out, lse, dq, dk, dv], inputs, mask, q_positions=q_positions, k_positions=k_positions)


# Views, and who wants gradients.


def view_named(name: str, x: Tensor) -> Tensor:
    """The same values in another memory layout."""
    if name == "sequence before heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if name == "every other element":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if name == "head_dim first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    return torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1, 2)[:, ::2]  # every other head


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("sequence before heads", "aten"),
        ("every other element", "torch"),
        ("head_dim first", "reference"),
        ("every other head", "aten"),
    ],
)
def test_views_are_as_good_as_contiguous_tensors(name, backend):
    inputs = random_inputs(17, batch=2, heads=(2, 2))
    views = [view_named(name, x) for x in inputs[:4]]
    assert not any(view.is_contiguous() for view in views)
    found = forward_backward(
        lambda *qkv: attention(*qkv, mask=Causal(), return_lse=True, backend=backend), [*views, inputs[4]]
    )
    assert_attention_close(found, inputs, Causal())


def test_triton_reads_views_too():
    inputs = random_inputs(17, batch=1, heads=(2, 1), device=device_of("triton"))
    views = [view_named("every other element", x) for x in inputs[:2]]
    views += [view_named("sequence before heads", x) for x in inputs[2:4]]
    found = forward_backward(
        lambda *qkv: attention(*qkv, mask=Causal(), return_lse=True, backend="triton"), [*views, inputs[4]]
    )
    assert_attention_close(found, inputs, Causal())


def test_expanded_heads_get_the_sum_of_their_gradients():
    inputs = random_inputs(19, heads=(4, 1))
    found = forward_backward(
        lambda q, k, v: attention(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), return_lse=True), inputs
    )
    assert_attention_close(found, inputs, Full())


def test_a_head_dim_of_one_may_have_any_stride():
    inputs = random_inputs(9, head_dim=1)
    views = [torch.stack([x, x + 1], -1)[..., 0] for x in inputs[:4]]
    found = forward_backward(lambda *qkv: attention(*qkv, return_lse=True), [*views, inputs[4]])
    assert_attention_close(found, inputs, Full())


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        *itertools.product(("aten", "torch", "reference"), itertools.product([False, True], repeat=3)),
        *itertools.product(["triton"], [(True, False, False), (False, True, False), (False, False, True)]),
    ],
)
def test_gradients_go_to_those_who_want_them(wanted, backend):
    inputs = random_inputs(17, batch=1, heads=(2, 1), device=device_of(backend))
    all_grads = attended(inputs, Causal(), backend=backend)[2:]
    leaves = [x.clone().requires_grad_(want) for x, want in zip(inputs[:3], wanted, strict=True)]
    out, lse = attention(*leaves, mask=Causal(), return_lse=True, backend=backend)
    assert out.requires_grad == any(wanted)
    heard = [(result, grad) for result, grad in zip((out, lse), inputs[3:], strict=True) if result.requires_grad]
    if heard:
        torch.autograd.backward(*zip(*heard, strict=True))
    for leaf, want, grad in zip(leaves, wanted, all_grads, strict=True):
        assert (leaf.grad is None) is not want
        if want:
            torch.testing.assert_close(leaf.grad, grad)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aten", torch.float32), ("aten", torch.bfloat16), ("torch", torch.bfloat16), ("reference", torch.float16)],
)
def test_a_loss_of_lse_alone_or_of_out_alone(backend, dtype):
    inputs = random_inputs(33, dtype=dtype)
    for silent in (3, 4):
        quiet = [torch.zeros_like(x) if i == silent else x for i, x in enumerate(inputs)]
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        results = list(attention(*leaves, mask=SlidingWindow(8), return_lse=True, backend=backend))
        heard = 7 - silent
        grads = torch.autograd.grad(results[heard - 3], leaves, inputs[heard], allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
        assert_attention_close([*(x.detach() for x in results), *grads], quiet, SlidingWindow(8))


def test_a_loss_of_a_triton_lse_alone():
    inputs = random_inputs(17, batch=1, heads=(2, 1), device=device_of("triton"))
    inputs[3].zero_()
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, mask=Causal(), return_lse=True, backend="triton")
    dq, dk, dv = torch.autograd.grad(lse, leaves, inputs[4])
    assert not dv.any()
    assert_attention_close([out.detach(), lse.detach(), dq, dk, dv], inputs, Causal())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("full", "aten"),
        sweep("full", "reference"),
        sweep("causal", "aten"),
        sweep("causal", "reference"),
        sweep("all three", "aten"),
        sweep("all three", "reference"),
    ],
)
def test_gradients_agree_with_finite_differences(name, backend):
    leaves = [x.requires_grad_() for x in random_inputs(6, batch=1, head_dim=3, dtype=torch.float64)[:3]]
    mask = make_mask(name, 6)
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, mask=mask, return_lse=True, backend=backend), leaves)


def test_the_loss_may_be_a_plain_sum():
    """Its gradient is one number expanded: strides of zero everywhere."""
    inputs = random_inputs(20)
    inputs[3], inputs[4] = torch.ones_like(inputs[3]), torch.ones_like(inputs[4])
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, mask=Causal(), return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert_attention_close([out.detach(), lse.detach(), *(x.grad for x in leaves)], inputs, Causal())


@pytest.mark.parametrize("backend", ["auto", "aten", "torch", "reference"])
def test_what_comes_back(backend):
    for dtype in FUSED_DTYPES:
        q, k, v = random_inputs(5, 7, dtype=dtype)[:3]
        out = attention(q, k, v, backend=backend)
        assert isinstance(out, Tensor)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        again, lse = attention(q, k, v, return_lse=True, backend=backend)
        assert torch.equal(out, again)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert (lse.shape, lse.dtype) == (q.shape[:3], wide)


def test_inputs_are_left_alone():
    inputs = random_inputs(33)
    before = [x.clone() for x in inputs]
    attended(inputs, Causal(), q_positions=torch.randperm(33))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


# Memory.


@pytest.mark.parametrize(
    ("mask", "shuffled", "backend"),
    [(SlidingWindow(300, 40), False, "torch"), sweep(Causal() & SlidingWindow(2000), True, "aten")],
)
def test_long_masked_attention_on_the_cpu_never_holds_s_by_s(mask, shuffled, backend):
    length = 16384
    generator = torch.Generator().manual_seed(1)
    at = torch.randperm(length, generator=generator) if shuffled else torch.arange(length)
    inputs = random_inputs(length, heads=(1, 1), batch=1)
    where = {"q_positions": at, "k_positions": at} if shuffled else {}
    found = []
    peak = peak_bytes(lambda: found.extend(attended(inputs, mask, backend=backend, **where)))
    assert peak > found[0].nbytes  # it does watch
    assert peak < length * length // 8  # a bit for each score would be as much

    rows = torch.randperm(length, generator=generator)[:40]
    some = [inputs[0][:, :, rows], *inputs[1:3], inputs[3][:, :, rows], inputs[4][:, :, rows]]
    exact = reference_results(some, mask, q_positions=at[rows], k_positions=at)
    for result, truth in zip(found[:3], exact, strict=False):
        torch.testing.assert_close(result[:, :, rows].double(), truth, rtol=1e-4, atol=1e-5)


# The choice of a backend.


def test_the_choice_can_be_asked_why():
    q, k, v = random_inputs(5, head_dim=8)[:3]
    choice = explain_attention(q, k, v, mask=Causal())
    assert choice.backend == "aten"
    assert "CPU" in choice.reason
    assert dict(choice.why_not)["triton"] == "its kernels take head_dim 16 to 576, not 8"
    assert str(choice).splitlines() == [
        f"aten: {choice.reason}",
        "  triton cannot: its kernels take head_dim 16 to 576, not 8",
        "  gluon cannot: its kernels need a Hopper GPU (compute capability 9.0)",
    ]
    assert explain_attention(q, k, v, backend="reference").backend == "reference"


def test_auto_never_keeps_every_score():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in random_inputs(5)[:3])
    for ask in (attention, explain_attention):
        with pytest.raises(ValueError, match=r"no backend serves .* aten: .*; triton: .*; torch: .*float8_e4m3fn"):
            ask(q, k, v)


@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "why"),
    [
        ("triton", torch.float64, 16, "not torch.float64"),
        ("triton", torch.float32, 8, "head_dim 16 to 576, not 8"),
        ("triton", torch.float32, 577, "head_dim 16 to 576, not 577"),
        ("aten", torch.float8_e4m3fn, 16, "does not take torch.float8_e4m3fn"),
    ],
)
def test_a_backend_asked_for_by_name_serves_or_says_why_not(backend, dtype, head_dim, why):
    q, k, v = (x.to(dtype) for x in random_inputs(5, head_dim=head_dim, device=device_of(backend))[:3])
    for ask in (attention, explain_attention):
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot serve this call: .*{why}"):
            ask(q, k, v, backend=backend)


# Bad input.

GOOD = dict(zip("qkv", random_inputs(6), strict=False))
BAD = {
    "heads that do not divide": ({"q": torch.zeros(2, 3, 6, 16)}, "got q_heads=3 and kv_heads=2"),
    "more kv heads than heads": ({"q": torch.zeros(2, 1, 6, 16)}, "got q_heads=1 and kv_heads=2"),
    "no heads": ({"q": torch.zeros(2, 0, 6, 16)}, "got q_heads=0 and kv_heads=2"),
    "another dtype": ({"k": GOOD["k"].half()}, "the same dtype, got torch.float32, torch.float16 and torch.float32"),
    "another device": ({"v": GOOD["v"].to("meta")}, "the same device, got cpu, cpu and meta"),
    "k and v of two lengths": ({"v": GOOD["v"][:, :, 1:]}, r"k and v .*\(2, 2, 6, 16\) and \(2, 2, 5, 16\)"),
    "another batch": ({"q": GOOD["q"][:1]}, r"batch size and head_dim, got \(1, 4, 6, 16\)"),
    "another head_dim": ({"q": GOOD["q"][..., 1:]}, r"batch size and head_dim, got \(2, 4, 6, 15\)"),
    "no head_dim": ({name: x[..., :0] for name, x in GOOD.items()}, "head_dim must be at least 1, got 0"),
    "three dimensions": ({"k": GOOD["k"][0]}, r"k must be \[batch, heads, seq, head_dim\], got shape \(2, 6, 16\)"),
    "integers": ({"v": GOOD["v"].long()}, "v must be floating point, got torch.int64"),
    "complex numbers": ({"q": GOOD["q"].to(torch.complex64)}, "q must be floating point, got torch.complex64"),
    "a list": ({"q": [1.0]}, "q must be a tensor, got list"),
    "nothing but shapes": ({name: x.to("meta") for name, x in GOOD.items()}, "torch: tensors on meta have no values"),
    "scale NaN": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
    "scale inf": ({"scale": float("inf")}, "scale must be a finite number, got inf"),
    "scale no number": ({"scale": "a"}, "scale .*'a'"),
    "no mask": ({"mask": None}, "mask must be an attnmesh mask .* got None"),
    "a tensor for a mask": (
        {"mask": torch.ones(6, 6)},
        r"mask must .* got float32 tensor .* positions as .*Slices\(",
    ),
    "a function for a mask": ({"mask": lambda b, h, q, k: q >= k}, r"mask must be .* got <function .* PerSequence\("),
    "a class for a mask": ({"mask": Causal}, "mask must be an attnmesh mask .* got <class"),
    "too few documents": ({"mask": Documents([2, 3])}, r"length 6, but \(2, 3\) add up to 5"),
    "documents in company": ({"mask": Causal() & Documents([9])}, r"length 6, but \(9\) add up to 9"),
    "too many positions": ({"q_positions": torch.arange(7)}, r"q_positions must be \[6\].*\(7,\)"),
    "too few positions": ({"k_positions": torch.arange(5)}, r"k_positions must be \[6\].*\(5,\)"),
    "a batch of positions": ({"q_positions": torch.zeros(2, 6).long()}, r"q_positions must be .* \(2, 6\)"),
    "one position": ({"k_positions": torch.tensor(3)}, r"k_positions must be .* shape \(\)"),
    "half positions": ({"q_positions": torch.arange(6.0)}, "q_positions must be integers, got torch.float32"),
    "yes and no": ({"k_positions": torch.ones(6).bool()}, "k_positions must be integers, got torch.bool"),
    "a list of positions": ({"q_positions": [0, 1, 2, 3, 4, 5]}, "q_positions must be .*list"),
    "positions elsewhere": ({"q_positions": torch.arange(6, device="meta")}, "q_positions .* cpu, got meta"),
    "an unknown backend": ({"backend": "cuda"}, "auto, aten, triton, gluon, torch, reference, got 'cuda'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_an_error_that_names_it(what):
    wrong, words = BAD[what]
    given = {**GOOD, **wrong}
    for ask in (attention, explain_attention):
        with pytest.raises(ValueError, match=words):
            ask(given["q"], given["k"], given["v"], **{n: x for n, x in given.items() if n not in GOOD})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.ones(4, 6, 16), torch.ones(4, 5, 16)])
    with pytest.raises(ValueError, match="q must be a dense tensor, got a nested tensor"):
        attention(x, x, x)


@pytest.mark.parametrize("window", [(-1,), (3, -2), (1.5,), (True,)])
def test_a_window_has_no_negative_or_broken_width(window):
    with pytest.raises(ValueError, match=r"SlidingWindow\.(left|right) must be an integer >= 0, got"):
        SlidingWindow(*window)


def test_documents_have_no_negative_length():
    with pytest.raises(ValueError, match=r"Documents.lengths must all be integers >= 0, got \(3, -1\)"):
        Documents([3, -1])


# Tensors in the order of FlashAttention.


def test_more_heads_than_positions_warn_or_raise():
    q, k = torch.ones(1, 64, 8, 16), torch.ones(1, 64, 2, 16)  # [batch, seq, heads, head_dim]
    for keys in (q, k):
        with pytest.warns(UserWarning, match=r"got q \[1, 64, 8, 16\] .* pass x.transpose\(1, 2\)") as caught:
            attention(q, keys, keys)
        assert caught[0].filename == __file__
    long = torch.ones(1, 300, 8, 16)
    with pytest.raises(ValueError, match=r"got q \[1, 300, 8, 16\] .* pass x.transpose\(1, 2\)"):
        attention(long, long, long)


@pytest.mark.filterwarnings("error")
def test_short_prompts_and_decode_steps_do_not_warn():
    few, one, cache = torch.ones(1, 32, 5, 16), torch.ones(1, 512, 1, 16), torch.ones(1, 512, 9, 16)
    attention(few, few[:, :8], few[:, :8], mask=Causal())  # a short prompt of a model with 8 KV heads
    attention(one, cache, cache)  # a decode step
    attention(cache, cache, cache, mask=Causal() & Documents([4, 5]))  # of this length
    attention(few, few, few, q_positions=torch.arange(5))
