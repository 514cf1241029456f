"""The backward kernels of sparse attention against float64 autograd; in Triton's interpreter, or on the GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnmesh.ops.sparse import gluon_backward
from attnmesh.ops.sparse.triton_backward import SlotsByKey, add_by_key, row_delta
from helpers.cases import first, sweep
from helpers.sparse_kernels import attention_call, backward

CUDA = torch.cuda.is_available()
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter's bf16 dot is wrong
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 2e-6}
WRONG_KEYS = [-1, -(2**31), 2**31 - 1, 900]  # 900: past every row's `hi`, though a key might well be there


@dataclass
class Case:
    """One call's inputs. Keys carry the numbers [offset, offset + len(k)), and rows see some interval of them."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    d_v: int
    indices: Tensor
    lo: Tensor
    hi: Tensor
    slots: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor
    offset: int
    scale: float

    @property
    def valid(self) -> Tensor:
        slot = torch.arange(self.indices.shape[1], device=self.q.device)
        named = self.indices
        return (slot < self.slots[:, None]) & (named >= self.lo[:, None]) & (named < self.hi[:, None])

    @property
    def keys(self) -> Tensor:
        return torch.where(self.valid, self.indices - self.offset, 0).long()

    def poison(self) -> None:
        """Keys that no valid slot names hold NaN, and so do queries of rows that see nothing."""
        self.q[~self.valid.any(1)] = torch.nan
        unused = torch.ones(len(self.k), dtype=torch.bool, device=self.k.device)
        unused[self.keys[self.valid]] = False
        assert unused.any()
        for x in (self.k, self.v):
            if x is not None:
                x[unused] = torch.nan

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, differentiable. The sinks are a key that every head sees, without value: more mass than keys."""
        valid = self.valid[:, None, :]
        some = valid.any(-1, keepdim=True)
        scores = torch.einsum("shd,sjd->shj", q, k[self.keys]) * self.scale
        scores = scores.masked_fill(~valid & some, -torch.inf)
        lse = torch.logaddexp(scores.logsumexp(-1), self.sinks.to(q.dtype))
        weights = torch.where(some, (scores - lse[..., None]).exp(), 0.0)
        out = torch.einsum("shj,sjd->shd", weights, v[self.keys])
        return out, torch.where(some[..., 0], lse, -torch.inf)

    def expected(self) -> list[Tensor | None]:
        """What float64 autograd gives."""
        q, k = (x.double().nan_to_num(0.0).requires_grad_() for x in (self.q, self.k))
        v = None if self.v is None else self.v.double().nan_to_num(0.0).requires_grad_()
        out, lse = self.definition(q, k, k[:, : self.d_v] if v is None else v)
        leaves = [q, k] if v is None else [q, k, v]
        upstream = (self.dout.double(), torch.where(lse.isneginf(), 0.0, self.dlse.double()))
        grads = torch.autograd.grad((out, lse), leaves, upstream)
        return [*grads, None][:3]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """lse and delta, as a forward would leave them; NaN comes back from rows that saw nothing."""
        with torch.no_grad():
            k = self.k.double().nan_to_num(0.0)
            v = k[:, : self.d_v] if self.v is None else self.v.double().nan_to_num(0.0)
            out, lse = self.definition(self.q.double(), k, v)
        delta = row_delta(out.to(self.q.dtype), self.dout) - self.dlse
        return lse.float(), torch.where(lse.isneginf(), torch.nan, delta)

    def run(self, *, deterministic: bool = False, lse: Tensor | None = None, **how) -> tuple[Tensor, ...]:
        own_lse, delta = self.inputs()
        given = self.q, self.k, self.v, self.indices, self.lo, self.hi, self.slots
        gluon = CUDA and gluon_backward.supports(
            attention_call(*given, scale=self.scale, d_v=self.d_v), self.dout
        )  # fmt: skip
        return backward(
            *given, lse=own_lse if lse is None else lse, delta=delta, dout=self.dout, k_offset=self.offset,
            scale=self.scale, d_v=self.d_v, deterministic=deterministic, gluon=gluon, **how,
        )  # fmt: skip


def drawn(
    device, dtype, *, heads=8, width=64, d_v=None, topk=40, rows=4, keys=60, offset=0, separate=False, spoilt=True
) -> Case:
    """A case with invalid slots of every kind, keys named twice in a row, and two rows that see nothing."""
    d_v = d_v or width

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    indices = torch.randint(0, keys, (rows, topk), device=device) + offset  # more slots than keys: duplicates
    lo = torch.full((rows,), offset + 1, device=device)
    hi = torch.full((rows,), offset + keys - 5, device=device)
    slots = torch.full((rows,), topk, device=device)
    if spoilt:
        wrong = torch.tensor(WRONG_KEYS, device=device)[torch.randint(len(WRONG_KEYS), indices.shape, device=device)]
        indices = torch.where(torch.rand(indices.shape, device=device) < 0.2, wrong, indices)
        slots[1], slots[2], indices[3] = 0, max(1, topk - 3), -1
    return Case(
        random(rows, heads, width), random(keys, width), random(keys, d_v) if separate else None, d_v,
        indices.int(), lo.int(), hi.int(), slots.int(), random(rows, heads, d_v),
        torch.randn(rows, heads, device=device), torch.randn(rows, heads, device=device), offset, width**-0.5,
    )  # fmt: skip


def assert_close(found: tuple, expected: list, dtype: torch.dtype) -> None:
    assert len(found) == 3
    for name, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.isfinite().all(), name
            assert y.norm() > 0, name
            error = (x.double() - y).norm() / y.norm()
            assert error < TOLERANCES[dtype], (name, error.item())


SHAPES = {
    "one slot": {"topk": 1, "keys": 12, "rows": 9},
    "100 slots": {"heads": 20, "width": 48, "d_v": 40, "topk": 100},
    "128 slots": {"heads": 16, "topk": 128, "d_v": 48},
    "the width of MLA": {"width": 576, "d_v": 512, "topk": 17},
    "value as wide as the odd key": {"heads": 3, "width": 200, "d_v": 200, "topk": 20},
    "value of its own": {"heads": 24, "width": 96, "d_v": 64, "separate": True},
    "value wider than the key": {"width": 16, "d_v": 64, "topk": 20, "separate": True},
    "more heads than a tile": {"heads": 130, "width": 32, "d_v": 16, "topk": 20},
    "an offset": {"offset": 300},
    "one head, one row": {"heads": 1, "rows": 1, "spoilt": False},
}


# Padded columns, slots and heads of several tiles, and separate values; the other shapes in half precision.
IN_FLOAT32 = ("one slot", "100 slots", "value of its own", "value as wide as the odd key")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    first(2, [(torch.float32 if shape in IN_FLOAT32 else HALF, shape) for shape in SHAPES]),
    ids=str,
)
def test_gradients_are_those_of_autograd(device, dtype, shape):
    case = drawn(device, dtype, **SHAPES[shape])
    case.poison()
    assert_close(case.run(), case.expected(), dtype)


@pytest.mark.parametrize(
    ("dtype", "separate"),
    [(HALF, True), sweep(torch.float32, False)],
    ids=str,
)
def test_the_deterministic_sum_is_the_same_to_the_bit_in_any_chunks(device, dtype, separate):
    case = drawn(device, dtype, width=48, d_v=32, topk=20, keys=12, separate=separate)
    case.poison()
    whole = case.run(deterministic=True)
    assert_close(whole, case.expected(), dtype)
    again = case.run(deterministic=True, chunk_rows=3)  # and then one
    assert all(x is y or torch.equal(x, y) for x, y in zip(whole, again, strict=True))


def test_many_slots_of_one_key_are_summed_row_by_row(device):
    """The error is that of a chain of rows and of one of slots, not of all in a chain."""
    rows, slots = (130, 2048) if torch.cuda.is_available() else (12, 32)  # so few tell chains apart on no device
    grads = torch.rand(rows, slots, 16, device=device)
    order = torch.arange(rows * slots, device=device)
    total = torch.zeros(1, 16, device=device)
    add_by_key(total, grads, SlotsByKey(order, torch.tensor([0, rows * slots], device=device), slots))
    truth = grads.double().sum((0, 1))
    error = ((total[0] - truth).norm() / truth.norm()).item()
    assert error < torch.finfo(torch.float32).eps / 2 * (rows**0.5 + slots**0.5)


def test_chunks_of_rows_add_up(device):
    case = drawn(device, torch.float32, topk=20)
    assert_close(case.run(chunk_rows=2), case.expected(), torch.float32)


def test_memory_that_nobody_wrote_is_not_read(device, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
    case = drawn(device, torch.float16, heads=8, width=48, d_v=16, topk=70, keys=12)
    for deterministic in (False, True):
        assert_close(case.run(deterministic=deterministic), case.expected(), torch.float16)


def test_rows_that_see_nothing_get_zeros(device):
    case = drawn(device, torch.float16)
    case.q[1], case.dout[3] = torch.nan, torch.nan  # rows 1 and 3: no slots, no valid ones
    dq, dk, _ = case.run()
    assert (dq[[1, 3]] == 0).all()
    assert dk.isfinite().all()
    case.slots.zero_()
    assert all((x == 0).all() for x in case.run()[:2])


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_a_row_of_infinite_lse_has_no_weights(device, infinity):
    case = drawn(device, torch.float16, spoilt=False)
    lse, _ = case.inputs()
    lse[2] = infinity
    found = case.run(lse=lse)
    case.slots[2] = 0
    assert (found[0][2] == 0).all()
    assert_close(found, case.expected(), torch.float16)


def test_rows_may_share_one_list_of_keys(device):
    case = drawn(device, torch.float16, topk=20, keys=22, spoilt=False)
    case.indices = torch.arange(20, dtype=torch.int32, device=device).expand(4, 20)
    assert case.indices.stride(0) == 0
    for deterministic in (False, True):
        assert_close(case.run(deterministic=deterministic), case.expected(), torch.float16)


def test_rows_of_the_tensors_may_lie_apart(device):
    case = drawn(device, torch.float16, topk=20, separate=True)
    expected = case.expected()
    case.q, case.dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.q, case.dout))
    case.k, case.v = (torch.cat([x, x], 1)[:, : x.shape[1]] for x in (case.k, case.v))
    assert_close(case.run(), expected, torch.float16)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_of_zero_or_below(device, scale):
    case = drawn(device, torch.float16, topk=20)
    case.scale = scale
    dq, dk, dv = case.run()
    expected = case.expected()
    if scale == 0.0:
        assert (dq == 0).all()
        dq = expected[0] = torch.ones_like(dq)
    assert_close((dq, dk, dv), expected, torch.float16)


def test_no_slots_give_zeros(device):
    case = drawn(device, torch.float16, topk=20)
    rows = torch.zeros(4, 8, device=device)
    dq, dk, dv = backward(
        case.q, case.k, None, case.indices[:, :0], case.lo, case.hi, case.slots, lse=rows, delta=rows, dout=case.dout,
        scale=0.2, d_v=64,
    )  # fmt: skip
    assert dv is None
    assert (dq == 0).all()
    assert (dk == 0).all()


@pytest.mark.parametrize("width", [16, 80, 512])
def test_the_row_term_of_the_gradient(device, width):
    out, dout = (torch.randn(7, width, 5, device=device).half().transpose(1, 2).contiguous() for _ in range(2))
    found = row_delta(out, dout)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (out.float() * dout.float()).sum(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
@pytest.mark.parametrize(("heads", "keys"), [(16, 8192), (64, 8192), (128, 8192), (128, 40000)])
def test_real_sizes_on_a_gpu(heads, keys, deterministic):
    case = drawn(torch.device("cuda"), torch.bfloat16, heads=heads, width=576, d_v=512, topk=2048, rows=150, keys=keys)
    case.indices[5:] = torch.rand(145, keys, device="cuda").argsort(1)[:, :2048].int()
    case.scale = 0.05
    case.poison()
    assert_close(case.run(deterministic=deterministic), case.expected(), torch.bfloat16)
