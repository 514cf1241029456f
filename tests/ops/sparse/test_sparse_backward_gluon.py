"""The Gluon kernels of the backward of sparse attention against float64: emulated here, on a Hopper GPU as they are.

Their host function, with workspaces as `backward` fills them: 0 for heads that do not exist and invalid slots,
NaN where nothing is written.
"""

import pytest
import torch
from torch import Tensor

from helpers.gluon import emulated

pytest.importorskip("triton")

from attnmesh.ops.sparse import gluon_backward
from attnmesh.ops.sparse.arguments import RowBounds, SparseCall
from helpers.cases import first

SCALE = 0.3
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if HOPPER else "cpu"


class Case:
    """Rows with `counts` slots, some of them invalid, whose keys carry the numbers from `offset`."""

    def __init__(self, heads: int, counts: list[int], width: int = 576, topk: int = 150, device: str = DEVICE):
        self.device, self.topk = device, topk
        self.offset = offset = 5
        keys = 90
        rows, padded_slots = len(counts), -(-topk // 128) * 128
        padded_heads = next(n for n in (16, 32, 64, 128) if n >= heads)
        self.q, self.k = self.random(rows, heads, width), self.random(keys, width)
        self.dout = self.random(rows, heads, 512)
        self.indices = torch.randint(offset - 3, offset + keys + 3, (rows, topk), device=self.device).int()
        self.lo = torch.full((rows,), offset + 1, dtype=torch.int32, device=self.device)
        self.hi = torch.full((rows,), offset + keys - 4, dtype=torch.int32, device=self.device)
        self.slots = torch.tensor(counts, dtype=torch.int32, device=self.device)
        self.padded_slots, self.rows = padded_slots, range(rows)
        self.p, self.ds = self.workspace(padded_heads), self.workspace(padded_heads)
        used = torch.zeros(keys, dtype=torch.bool, device=self.device)
        used[self.keys[self.valid]] = True
        assert not used.all()
        self.k[~used] = torch.nan

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).half()

    @property
    def bounds(self) -> RowBounds:
        return RowBounds(self.lo, self.hi, self.slots, self.offset)

    @property
    def valid(self) -> Tensor:
        return self.bounds.valid(self.indices)

    @property
    def keys(self) -> Tensor:
        return torch.where(self.valid, self.indices - self.offset, 0).long()

    @property
    def call(self) -> SparseCall:
        return SparseCall(self.q, self.k, None, self.indices, self.bounds, SCALE, 512, False, "gluon")

    def workspace(self, padded_heads: int) -> Tensor:
        rows, heads, _ = self.q.shape
        x = torch.full((rows, padded_heads, self.padded_slots), torch.nan, dtype=torch.float16, device=self.device)
        for row, count in enumerate(self.slots.tolist()):
            x[row, :, : -(-count // 64) * 64] = 0
            x[row, :heads, :count] = self.random(heads, count) * self.valid[row, :count]
        return x

    def sums(self) -> Tensor:
        """What each slot adds to its key, float64 [rows, topk, width]."""
        heads = self.q.shape[1]
        p, ds = (x[:, :heads, : self.topk].double().nan_to_num(0.0) for x in (self.p, self.ds))
        result = SCALE * torch.einsum("rhs,rhd->rsd", ds, self.q.double())
        result[..., :512] += torch.einsum("rhs,rhd->rsd", p, self.dout.double())
        return torch.where(self.valid[..., None], result, 0.0)

    def grad_query(self) -> Tensor:
        ds = self.ds[:, : self.q.shape[1], : self.topk].double().nan_to_num(0.0)
        k = torch.where(self.valid[..., None], self.k.double()[self.keys], 0.0)
        return SCALE * torch.einsum("rhs,rsd->rhd", ds, k)

    def run_grad_query(self, module, dtype: torch.dtype = torch.float32) -> Tensor:
        dq = torch.full_like(self.q, torch.nan, dtype=dtype)
        module.grad_query(self.call, self.rows, self.ds, dq)
        return dq

    def run_grad_key(self, module, *, atomic: bool = True, segments: int = 0) -> Tensor:
        width = self.q.shape[2]
        shape = self.k.shape if atomic else (len(self.rows) * self.topk, width)
        target = torch.zeros(shape, device=self.device)
        of = self.ds, self.q, self.p, self.dout
        module.grad_key(target, self.call, self.rows, SCALE, *of, atomic=atomic, segments=segments)
        return target

    def assert_sums(self, target: Tensor) -> None:
        expected = torch.zeros(self.k.shape, dtype=torch.float64, device=self.device)
        expected.index_add_(0, self.keys.flatten(), self.sums().flatten(0, 1))
        assert (target.double() - expected).norm() < 1e-6 * expected.norm()


def kernels(seed: int):
    return gluon_backward if HOPPER else emulated(gluon_backward, seed)


COUNTS = [150, 0, 129, 1]


@pytest.mark.parametrize(("heads", "width", "seed"), first(1, [(70, 576, 0), (128, 512, 1)]))
def test_gradients_of_queries(heads, width, seed):
    case = Case(heads, COUNTS, width)
    found = case.run_grad_query(kernels(seed)).double()
    assert (found[1] == 0).all()
    assert (found - case.grad_query()).norm() < 1e-6 * case.grad_query().norm()


@pytest.mark.parametrize(
    ("heads", "width", "segments", "seed"),
    first(1, [(70, 576, 0, 0), (16, 576, 2, 1), (3, 512, 1, 2), (128, 512, 2, 4)]),
)
def test_gradients_of_keys(heads, width, segments, seed):
    case = Case(heads, COUNTS, width)
    case.assert_sums(case.run_grad_key(kernels(seed), segments=segments))


@pytest.mark.parametrize(("heads", "seed"), first(1, [(9, 0), (100, 1)]))
def test_sums_of_slots_are_stored_for_a_deterministic_sum(heads, seed):
    case = Case(heads, COUNTS)
    found = case.run_grad_key(kernels(seed), atomic=False).view(len(COUNTS), case.topk, -1).double()
    assert (found - case.sums()).norm() < 1e-6 * case.sums().norm()


def test_slots_are_sorted_by_key():
    case = Case(16, COUNTS)
    indices, slots = gluon_backward.sort_by_key(case.indices, case.bounds)
    assert slots.dtype == indices.dtype == torch.int32
    for before, valid, after, count in zip(case.indices, case.valid, indices, slots, strict=True):
        assert torch.equal(after[:count], before[valid].sort().values)
        assert (after[count:] >= case.hi[0]).all()


def test_sorted_slots_are_contiguous_whatever_the_strides_of_the_indices(monkeypatch):
    """Windows as a view have two strides of 1; kernels read slots one after another."""
    monkeypatch.setattr(gluon_backward, "_SORTED_SLOTS", 200)  # a few rows at a time
    windows = torch.arange(400, dtype=torch.int32).unfold(0, 64, 1)[100:111]
    bounds = RowBounds(*(torch.full((11,), n, dtype=torch.int32) for n in (110, 165, 60)), 0)
    indices, slots = gluon_backward.sort_by_key(windows, bounds)
    assert indices.is_contiguous()
    for i in range(11):
        valid = [key for key in range(100 + i, 160 + i) if 110 <= key < 165]
        assert indices[i, : slots[i]].tolist() == valid


def test_segments_grow_with_the_keys():
    def of(keys: int, heads: int, width: int = 576) -> int:
        return gluon_backward.segments(torch.empty(keys, width, device="meta"), heads)

    assert [of(n << 10, 128) for n in (1, 8, 32, 128)] == [0, 0, 2, 8]
    assert [of(n << 10, 16) for n in (8, 32, 128)] == [0, 1, 4]
    assert of(1 << 17, 128, 512) == 6


PLANTED = {
    "no fence before the products of a tile of keys": (
        "        fence_async_shared()  # copies and tensor cores access shared memory through different proxies\n"
        "        left = ring.ds.index(stage).permute([1, 0])",
        "        left = ring.ds.index(stage).permute([1, 0])",
    ),
    "a tile of keys is not waited for": (
        "mbarrier.wait(ring.ready.index(stage), (tile // SHAPE.stages) & 1)\n        mbarrier.arrive(ring.turns",
        "mbarrier.arrive(ring.turns",
    ),
    "a tile is freed before it is read": (
        "mbarrier.arrive(ring.free.index((tile + SHAPE.stages - 1) % SHAPE.stages), count=1, pred=tile > 0)",
        "mbarrier.arrive(ring.free.index(stage), count=1)",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PLANTED)
def test_the_emulation_finds_planted_faults(fault):
    case = Case(70, [500, 500], topk=500, device="cpu")

    def many_times():  # a race is lost sooner or later
        for seed in range(20):
            planted = emulated(gluon_backward, seed, PLANTED[fault])
            case.assert_sums(case.run_grad_key(planted))
            assert (case.run_grad_query(planted).double() - case.grad_query()).norm() < 1e-6 * case.grad_query().norm()

    with pytest.raises(AssertionError):
        many_times()
