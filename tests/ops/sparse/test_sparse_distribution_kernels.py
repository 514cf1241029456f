"""The kernels of attention's distribution over chosen keys, against its definition in float64.

The general kernel runs in Triton's interpreter or on a GPU; Gluon's kernel on a Hopper GPU, and elsewhere emulated.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from helpers.cases import else_sweep, first, sweep
from helpers.gluon import emulated

pytest.importorskip("triton")

from attnmesh.ops import launch
from attnmesh.ops.sparse import gluon_distribution, triton_distribution
from attnmesh.ops.sparse.triton_distribution import DistributionTiles
from helpers.sparse_kernels import distribution, latent_call

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
# The interpreter's bf16 dot is wrong.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * CUDA


def with_dtypes(*cases: tuple) -> list:
    """All pairs on a GPU; in the interpreter every case with one dtype, in turn."""
    if CUDA:
        return [(dtype, *case) for case in cases for dtype in DTYPES]
    return [(DTYPES[i % 2], *case) for i, case in enumerate(cases)]


OFFSET = 1000


@dataclass
class Problem:
    """A call, without what says how heads are grouped."""

    q: Tensor
    k: Tensor
    indices: Tensor
    lo: Tensor
    hi: Tensor
    slots: Tensor
    lse: Tensor
    k_offset: int
    scale: float

    def valid(self) -> Tensor:
        slots = torch.arange(self.indices.shape[1], device=self.q.device)
        within = (self.indices >= self.lo[:, None]) & (self.indices < self.hi[:, None])
        return within & (slots < self.slots[:, None])

    def scores(self) -> Tensor:
        """[s_q, h, topk] in float64, -inf where not valid."""
        keys = torch.where(self.valid(), self.indices - self.k_offset, 0).long()
        k = self.k.double()[keys].masked_fill(~self.valid()[..., None], 0.0)
        scores = torch.einsum("ihd,ijd->ihj", self.q.double(), k) * self.scale
        return scores.masked_fill(~self.valid()[:, None], -torch.inf)

    def truth(self, head_group: int) -> Tensor:
        has_mass = self.lse.isfinite()[..., None]
        p = torch.exp(self.scores() - torch.where(has_mass, self.lse[..., None], 0.0).double()).where(has_mass, 0.0)
        return torch.stack([group.sum(1) for group in p.split(head_group, 1)])

    def run(self, kernel: ModuleType, head_group: int, **how: object) -> Tensor:
        return distribution(kernel, **vars(self), head_group=head_group, **how)


def drawn(
    s_q: int = 5,
    h: int = 8,
    d: int = 64,
    topk: int = 100,
    s_kv: int = 150,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> Problem:
    """Slots are invalid in every way, rows are empty, keys that no slot names are NaN, and some heads have no mass."""
    q, k = (torch.randn(*shape, d).to(dtype) for shape in ((s_q, h), (s_kv,)))
    indices = torch.stack([torch.randperm(s_kv)[:topk] for _ in range(s_q)]).int() + OFFSET
    kind = torch.randint(0, 30, indices.shape)
    for i, wrong in enumerate((-1, -(2**31), 2**31 - 1, OFFSET - 1, OFFSET + s_kv, 0)):
        indices[kind == i] = wrong
    lo = OFFSET + torch.randint(0, s_kv // 4, (s_q,)).int()
    hi = OFFSET + s_kv - torch.randint(0, s_kv // 4, (s_q,)).int()
    slots = torch.randint(0, topk + 1, (s_q,)).int()
    lo[::2], hi[::3], slots[::2] = OFFSET, OFFSET + s_kv, topk
    slots[1:2] = 0
    hi[3:4] = lo[3:4]
    problem = Problem(q, k, indices, lo, hi, slots, torch.empty(s_q, h), OFFSET, d**-0.5)
    problem.lse = problem.scores().logsumexp(2).float()
    problem.lse[0, ::3], problem.lse[2:3, 1::4] = torch.inf, -torch.inf
    named = torch.zeros(s_kv, dtype=torch.bool)
    named[(indices[problem.valid()] - OFFSET).long()] = True
    k[~named] = torch.nan
    moved = {name: x.to(device) for name, x in vars(problem).items() if isinstance(x, Tensor)}
    return replace(problem, **moved)


def assert_right(out: Tensor, problem: Problem, head_group: int) -> None:
    truth = problem.truth(head_group)
    assert out.shape == truth.shape
    assert out.dtype == torch.float32
    assert (out[:, ~problem.valid()] == 0).all()  # which NaN is not
    assert float((out.double() - truth).norm()) <= 1e-5 * float(truth.norm())


# The general kernel.


def check(problem: Problem, head_group: int, **how: object) -> None:
    assert_right(problem.run(triton_distribution, head_group, **how), problem, head_group)


@pytest.mark.parametrize(("dtype", "h", "topk"), with_dtypes((8, 100), (24, 1), (64, 70), (1, 65)))
def test_heads_and_slots(dtype, h, topk, device):
    check(drawn(s_q=4, h=h, topk=topk, dtype=dtype, device=device), h)


@pytest.mark.parametrize(("dtype", "d"), first(4, with_dtypes((16,), (80,), (128,), (192,), (576,))))
def test_widths(dtype, d, device):
    check(drawn(s_q=3, d=d, topk=40, dtype=dtype, device=device), 8)


@pytest.mark.parametrize(("dtype", "head_group"), first(2, with_dtypes((4,), (5,), (16,), (24,), (100,))))
def test_groups_and_a_last_one_that_is_smaller(dtype, head_group, device):
    problem = drawn(s_q=2, h=24, topk=40, dtype=dtype, device=device)
    check(problem, head_group, tiles=DistributionTiles(32, 16, 4, 1))  # two passes for the larger ones


def test_rows_that_share_one_list_of_keys(device):
    problem = drawn(device=device)
    listed = torch.arange(100, dtype=torch.int32, device=device) + OFFSET
    shared = replace(problem, indices=listed.expand(5, 100), k=problem.k.nan_to_num(0.5))
    check(replace(shared, lse=shared.scores().logsumexp(2).float()), 8)


def test_strided_tensors(device):
    problem = drawn(device=device)
    q = problem.q.transpose(0, 1).contiguous().transpose(0, 1)
    k = torch.cat([problem.k, problem.k], 1)[:, :64]
    indices = torch.cat([problem.indices] * 2, 1)[:, :100]
    lse = problem.lse.T.contiguous().T
    check(replace(problem, q=q, k=k, indices=indices, lse=lse, lo=problem.lo.repeat_interleave(2)[::2]), 8)


def test_many_rows_are_not_cut(device, monkeypatch):
    monkeypatch.setattr(triton_distribution, "PROGRAMS", 1)
    check(drawn(topk=130, device=device), 8)


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_without_rows_or_slots(name, device):
    problem = drawn(device=device)
    kernel = {"triton": triton_distribution, "gluon": gluon_distribution}[name]
    none = replace(problem, q=problem.q[:0], indices=problem.indices[:0], lse=problem.lse[:0])
    assert none.run(kernel, 8).shape == (1, 0, 100)
    assert replace(problem, indices=problem.indices[:, :0]).run(kernel, 8).shape == (1, 5, 0)


@pytest.mark.parametrize("rooms", [(227, 64, 64, 2), (163, 32, 64, 2), (99, 32, 16, 2)], ids=str)
def test_tiles_fit_the_shared_memory(rooms, monkeypatch):
    room, keys, heads, stages = rooms
    monkeypatch.setattr(launch, "WITHOUT_GPU", launch.GPU(90, room * 1024))
    q = torch.empty(1, 128, 576, dtype=torch.bfloat16)
    assert triton_distribution.pick_tiles(q, 128, 576) == DistributionTiles(keys, heads, 8, stages)


# Gluon's kernel, emulated.

# s_q, h, d, topk, head_group, programs
EMULATED = [
    (1, 128, 128, 64, 128, 1), (4, 128, 128, 300, 128, 3), (7, 100, 192, 130, 128, 2), (5, 128, 128, 200, 64, 4),
    (6, 16, 128, 257, 16, 3), (3, 64, 128, 1, 64, 5), (9, 128, 128, 65, 128, 2), (2, 72, 576, 65, 72, 1),
]  # fmt: skip


def emulate(problem: Problem, head_group: int, programs: int, seed: int, planted=None) -> Tensor:
    module = emulated(gluon_distribution, seed, planted)
    module.multiprocessors = lambda *_: programs
    return problem.run(module, head_group)


@pytest.mark.parametrize("case", [*EMULATED[:3], *map(sweep, EMULATED[3:])], ids=str)
@pytest.mark.parametrize("seeds", [range(1), sweep(range(1, 5))], ids=["one", "many"])
def test_the_hopper_kernel_under_hostile_schedules(case, seeds):
    *shape, head_group, programs = case
    for seed in seeds:
        torch.manual_seed(seed)
        problem = drawn(*shape, s_kv=shape[3] + 40)
        assert_right(emulate(problem, head_group, programs, seed), problem, head_group)


PLANTED = {
    "the sums are not waited for": ("mbarrier.wait(barriers.summed.index(buffer), (block // _SUMS) & 1)", "pass"),
    "nobody waits for a free slot": ("mbarrier.wait(barriers.free.index(slot), ((item // _SLOTS) & 1) ^ 1)", "pass"),
    "the keys are not fenced": ("fence_async_shared()", "pass"),
    "the other's queries are not given back": ("_pass_by(barriers, at)", "pass"),
    "the next row's keys are not fetched": ("gl.where(last, next_row, row)", "row"),
    "the scores are read too early": ("warpgroup_mma_wait(0, deps", "warpgroup_mma_wait(1, deps"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_emulation_finds_planted_faults(fault):
    problem = drawn(9, 128, 128, 300, 340)
    assert Path(gluon_distribution.__file__).read_text().count(PLANTED[fault][0]) == 1

    def many_times() -> None:  # a race is lost sooner or later
        for seed in range(20):
            assert_right(emulate(problem, 128, 2, seed, PLANTED[fault]), problem, 128)

    with pytest.raises(AssertionError):
        many_times()


def test_what_the_hopper_kernel_cannot_serve_is_left_to_the_general_one():
    q, k = torch.empty(4, 128, 576, dtype=torch.bfloat16), torch.empty(9, 576, dtype=torch.bfloat16)
    assert not gluon_distribution.supports(latent_call(q, k), 128)  # not on a GPU


# On a GPU.

HOPPER_SIZES = [  # queries, heads, head_dim, topk, head_group
    (300, 128, 576, 2048, 128), (300, 128, 576, 2048, 64), (37, 128, 576, 100, 128), (5, 96, 576, 1000, 96),
    (1, 128, 576, 2048, 128), (200, 64, 576, 512, 64), (150, 16, 576, 320, 16), (140, 24, 192, 1, 24),
    (133, 100, 128, 700, 128), (264, 128, 512, 640, 64),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    else_sweep(  # fp16 changes the type of the products
        product(HOPPER_SIZES, [torch.bfloat16, torch.float16]),
        lambda sizes, dtype: dtype == torch.bfloat16 or sizes == HOPPER_SIZES[0],
    ),
    ids=str,
)
def test_the_hopper_kernel(sizes, dtype):
    s_q, h, d, topk, head_group = sizes
    problem = drawn(s_q, h, d, topk, max(2 * topk, 64), dtype, "cuda")
    assert gluon_distribution.supports(latent_call(problem.q, problem.k), head_group)
    out = problem.run(gluon_distribution, head_group)
    assert_right(out, problem, head_group)
    for _ in range(3):
        assert torch.equal(problem.run(gluon_distribution, head_group), out)


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_when_the_hopper_kernel_suits():
    q, k = (torch.empty(n, 576, dtype=torch.bfloat16, device="cuda") for n in (4 * 128, 9))
    q = q.view(4, 128, 576)
    supports = gluon_distribution.supports
    assert supports(latent_call(q, k), 128)
    assert supports(latent_call(q, k), 64)
    assert not supports(latent_call(q, k), 32)
    assert not supports(latent_call(q.float(), k.float()), 128)
    assert not supports(latent_call(q[..., :100], k[..., :100]), 128)
    assert not supports(latent_call(torch.empty(2, 129, 576, dtype=q.dtype, device="cuda"), k), 129)
    assert not supports(latent_call(q, torch.empty(9 * 577, dtype=q.dtype, device="cuda").view(9, 577)[:, :576]), 128)
