"""The backward kernels against float64 autograd, in Triton's interpreter or on the GPU where there is one."""

import pytest
import torch
from torch import Tensor

from attnmesh.ops.dense import triton_backward
from attnmesh.ops.dense.triton_backward import backward, delta, short_gradients
from attnmesh.ops.dense.triton_tiles import DenseTiles
from helpers.cases import first, in_turn, sweep
from helpers.dense_kernels import (
    CUDA,
    DEFAULT_TILES,
    DEFAULT_TILES_WITH_TERMS,
    DTYPES,
    HEADS,
    MASKS,
    dense,
    mask_case,
    score_terms,
)

TILES = {"query_tiles": DenseTiles(16, 16, 4, 1), "key_tiles": DenseTiles(16, 16, 4, 1)}
SCALE = 0.2


class Case:
    """Inputs, upstream gradients of both outputs, and the gradients that autograd gives in some dtype."""

    def __init__(
        self, device, dtype, mask, heads=(2, 2), q_len=45, kv_len=45, head_dim=32, value_dim=None,
        batch=1, softcap=False, alibi=False, scale=SCALE,
    ):  # fmt: skip
        value_dim = value_dim or head_dim
        sizes = [
            (q_len, heads[0], head_dim), (kv_len, heads[1], head_dim), (kv_len, heads[1], value_dim),
            (q_len, heads[0], value_dim),
        ]  # fmt: skip
        tensors = [torch.randn(batch, s, h, d, device=device).to(dtype).transpose(1, 2) for s, h, d in sizes]
        self.q, self.k, self.v, self.grad_out = tensors
        self.scale = scale
        self.grad_lse = torch.randn(batch, heads[0], q_len, device=device)
        self.terms = score_terms(softcap, alibi, heads[0], q_len, kv_len, device)
        self.seen, self.visible = mask_case(mask, q_len, kv_len, batch, device)
        with torch.no_grad():
            self.out, lse = dense(self.q, self.k, self.v, scale, self.visible, torch.float64, self.terms)
        self.lse = lse.float()
        # A loss over lse = -inf may well send NaN back; such rows have no gradient all the same.
        self.grad_lse[self.lse.isneginf()] = torch.nan
        self.delta = delta(self.out.to(dtype), self.grad_out, self.grad_lse)

    def autograd(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = dense(*leaves, self.scale, self.visible, dtype, self.terms)
        upstream = (self.grad_out.to(dtype), self.grad_lse.to(dtype).nan_to_num(0.0))
        return torch.autograd.grad((out, lse), leaves, upstream)

    def buffers(self) -> list[Tensor]:
        """Float32 gradients to add to, strided: full of ones."""
        return [
            torch.ones_like(x, dtype=torch.float32, memory_format=torch.preserve_format)
            for x in (self.q, self.k, self.v)
        ]

    def run(self, grads, **tiles) -> None:
        grad_q, grad_k, grad_v = grads
        backward(
            self.q, self.k, self.v, self.grad_out, self.lse, self.delta,
            scale=self.scale, **self.seen, terms=self.terms, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v, **tiles,
        )  # fmt: skip


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def check(case: Case, grads: list[Tensor], dtype: torch.dtype) -> None:
    for mine, exact, plain in zip(grads, case.autograd(torch.float64), case.autograd(dtype), strict=True):
        # The buffers held ones, whose float32 rounding is the floor.
        assert relative(mine - 1, exact) <= 2 * relative(plain, exact) + 2e-6


@pytest.mark.parametrize(
    ("mask", "heads", "dtype"),
    first(3, [*in_turn(["causal", "union", "sequences"], HEADS, DTYPES), *in_turn(MASKS, HEADS, DTYPES)]),
)
def test_adds_all_gradients(device, mask, heads, dtype):
    length = 20 if heads == "gqa" else 26
    case = Case(device, dtype, mask, HEADS[heads], length, length, batch=2 if mask == "sequences" else 1)
    grads = case.buffers()
    case.run(grads, **TILES)
    check(case, grads, dtype)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (224, 40)])
def test_the_smallest_tiles(device, head_dim, value_dim):
    """Those of wide float32 heads with little shared memory; keys and values in a launch each above a width of 192."""
    case = Case(device, torch.float32, "causal", (1, 1), 9, 9, head_dim=head_dim, value_dim=value_dim)
    grads = case.buffers()
    case.run(grads, query_tiles=DenseTiles(4, 16, 8, 1), key_tiles=DenseTiles(16, 4, 8, 1))
    check(case, grads, torch.float32)


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len"),
    [("random", 70, 33), sweep("union", 70, 33), sweep("union", 16, 80), sweep("slices", 9, 64)],
)
def test_any_lengths(device, mask, q_len, kv_len):
    case = Case(device, torch.float32, mask, (1, 1), q_len, kv_len, head_dim=24)
    grads = case.buffers()
    case.run(grads, query_tiles=DenseTiles(16, 32, 4, 1), key_tiles=DenseTiles(32, 16, 4, 1))
    check(case, grads, torch.float32)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 8), sweep(48, 80), sweep(80, 20), sweep(192, 128)])
def test_widths(device, head_dim, value_dim):
    """Keys and values of any widths, in one block of columns or in two."""
    case = Case(device, torch.float32, "causal", (2, 1), 20, 20, head_dim, value_dim, scale=0.05)
    grads = case.buffers()
    case.run(grads, **TILES)
    check(case, grads, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "union"])
@pytest.mark.parametrize(("softcap", "alibi"), [sweep(True, False), sweep(False, True), (True, True)])
def test_softcap_and_alibi(device, softcap, alibi, mask, dtype):
    case = Case(device, dtype, mask, (2, 1), 26, 26, softcap=softcap, alibi=alibi)
    grads = case.buffers()
    case.run(grads, **TILES)
    check(case, grads, dtype)


@pytest.mark.parametrize("mask", ["union", sweep("slices")])
def test_key_tiles_of_many_rows_are_split(device, mask):
    case = Case(device, torch.float32, mask, (2, 1), 45, 20)
    grads = case.buffers()
    case.run(grads, **TILES, steps_per_split=2)
    check(case, grads, torch.float32)


@pytest.mark.parametrize("mask", ["causal", sweep("union")])
def test_overwrites_gradients_in_any_dtype(device, mask):
    case = Case(device, torch.float16, mask, (2, 1), 26, 26)
    grads = [torch.full_like(x, torch.nan) for x in (case.q, case.k, case.v)]
    case.run(grads, **TILES, overwrite=True)
    for mine, exact, plain in zip(grads, case.autograd(torch.float64), case.autograd(torch.float16), strict=True):
        assert relative(mine, exact) <= 2 * relative(plain, exact)


@pytest.mark.parametrize(
    ("mask", "dtype", "heads", "lengths", "widths", "terms"),
    [
        ("full", torch.float16, "mqa", (33, 70), (32, 32), False),  # several tiles of keys and one of rows
        ("causal", torch.float32, "gqa", (20, 20), (48, 24), False),  # two blocks of columns
        ("random", torch.float32, "mha", (40, 33), (16, 16), False),  # rows that see nothing
        ("sequences", torch.float16, "mqa", (20, 20), (32, 32), False),  # bounds of each sequence
        ("documents", torch.float32, "mha", (30, 30), (16, 16), True),
    ],
)
def test_short_calls_take_one_launch(device, monkeypatch, mask, dtype, heads, lengths, widths, terms):
    """The first launch and a repeat; deltas are computed from out, and nothing is read that was not written."""
    how = {"softcap": terms, "alibi": terms}
    case = Case(device, dtype, mask, HEADS[heads], *lengths, *widths, batch=2, **how)
    case.grad_lse = torch.zeros_like(case.grad_lse)
    monkeypatch.setattr(triton_backward, "_SHORT_TILES", dict.fromkeys((2, 4), DenseTiles(16, 16, 4, 1)))
    exact, plain = case.autograd(torch.float64), case.autograd(dtype)
    out = case.out.to(dtype)
    out[case.lse.isneginf()] = torch.nan  # of rows without keys
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    for _ in range(2):
        grads = short_gradients(
            case.q, case.k, case.v, out, case.lse, case.grad_out, scale=SCALE, **case.seen, terms=case.terms
        )
        for mine, truth, other in zip(grads, exact, plain, strict=True):
            assert relative(mine, truth) <= 2 * relative(other, truth) + 2e-6


@pytest.mark.sweep
def test_keys_in_parts_add_up(device):
    """With the lse and delta of the whole softmax, parts of the keys give the same as all of them."""
    case = Case(device, torch.float32, "union", (2, 1), 33, 48)
    grads = case.buffers()
    for begin, stop in [(20, 48), (0, 20)]:
        rows = slice(begin, stop)
        bounds = tuple((bound.clamp(begin, stop) - begin).int() for bound in case.seen["bounds"])
        backward(
            case.q, case.k[:, :, rows], case.v[:, :, rows], case.grad_out, case.lse, case.delta,
            scale=SCALE, causal=False, bounds=bounds,
            grad_q=grads[0], grad_k=grads[1][:, :, rows], grad_v=grads[2][:, :, rows], **TILES,
        )  # fmt: skip
    check(case, grads, torch.float32)


@pytest.mark.parametrize("wanted", [(1, 0, 0), sweep((0, 1, 0)), (0, 0, 1), sweep((0, 0, 0))])
def test_computes_only_what_is_asked(device, wanted):
    case = Case(device, torch.float32, "causal", (1, 1), 20, 20)
    all_grads, some_grads = case.buffers(), case.buffers()
    case.run(all_grads, **TILES)
    case.run([grad if want else None for grad, want in zip(some_grads, wanted, strict=True)], **TILES)
    for some, every, want in zip(some_grads, all_grads, wanted, strict=True):
        assert torch.equal(some, every if want else torch.ones_like(some))


def test_no_keys_and_no_rows(device):
    for q_len, kv_len in [(0, 5), (5, 0)]:
        q = torch.zeros(1, 1, q_len, 32, device=device)
        k = torch.zeros(1, 1, kv_len, 32, device=device)
        rows = torch.zeros(1, 1, q_len, device=device)
        grads = [torch.ones_like(q), torch.ones_like(k), torch.ones_like(k)]
        backward(
            q, k, k, q, rows, rows, scale=SCALE, causal=False, bounds=None,
            grad_q=grads[0], grad_k=grads[1], grad_v=grads[2],
        )  # fmt: skip
        assert all((grad == 1).all() for grad in grads)


@pytest.mark.parametrize("with_lse", [True, False])
def test_delta(device, with_lse):
    out = torch.randn(2, 33, 3, 24, device=device).half().transpose(1, 2)
    grad_out = torch.randn(2, 3, 33, 24, device=device)
    grad_lse = torch.randn(2, 33, 3, device=device).transpose(1, 2) if with_lse else None
    expected = (out.double() * grad_out.double()).sum(-1) - (grad_lse.double() if with_lse else 0)
    torch.testing.assert_close(delta(out, grad_out, grad_lse).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("mask", "widths", "dtype"), DEFAULT_TILES)
def test_default_tiles(device, mask, widths, dtype):
    case = Case(device, dtype, mask, (8, 2), 1000, 1000, *widths, batch=2, scale=widths[0] ** -0.5)
    grads = case.buffers()
    case.run(grads)
    check(case, grads, dtype)
    again = case.buffers()
    case.run(again)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))  # deterministic


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("softcap", "alibi", "dtype"), DEFAULT_TILES_WITH_TERMS)
def test_default_tiles_with_softcap_and_alibi(device, softcap, alibi, dtype):
    case = Case(device, dtype, "union", (8, 2), 1000, 1000, 128, softcap=softcap, alibi=alibi, scale=0.1)
    grads = case.buffers()
    case.run(grads)
    check(case, grads, dtype)
