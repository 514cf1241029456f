"""The top-k of a decode step over an indexer's keys in a paged cache: exactly the best keys, in poisoned pools."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attnmesh import indexer_topk, quantize
from attnmesh.decode import check_decode_errors
from attnmesh.ops.sparse import reference
from attnmesh.ops.storage import Quantized, Stored, dequantize
from attnmesh.sparse import paged_indexer_topk
from helpers.cases import first
from helpers.sparse import CUDA, device_of

BLOCK = 4
SWEEP = pytest.mark.sweep


@dataclass
class Case:
    """Sequences of these lengths, whose last `tokens` tokens select keys. Scores of whole numbers are exact."""

    iq: Tensor
    pool: Stored
    table: Tensor
    w: Tensor
    lengths: list[int]

    @property
    def cur_pos(self) -> list[int]:
        return [length - 1 for length in self.lengths]

    def keys(self, b: int) -> Tensor:
        """The keys of a sequence in float64."""
        at = torch.arange(self.lengths[b])
        stored = dequantize(self.pool, torch.float64, head_axis=2)
        return stored[self.table[b, at // BLOCK].long(), at % BLOCK, 0]

    def expected(self, topk: int, relu: bool = True, first: int = 0) -> list[list[list[int]]]:
        """The best keys of every token."""
        found = []
        tokens = self.iq.shape[1]
        for b, length in enumerate(self.lengths):
            scores = reference.index_scores(self.iq[b].double(), self.keys(b), self.w[b].double(), 0.5, relu)
            ends = [length - tokens + 1 + t for t in range(tokens)]
            visible = torch.tensor([[first <= j < end for j in range(length)] for end in ends]).view(tokens, length)
            found.append(reference.topk_keys(scores, visible, topk))
        return found

    def run(self, topk: int, backend: str = "torch", **how: object):
        device = device_of(backend)
        pool = self.pool.to(device) if isinstance(self.pool, Tensor) else Quantized(
            self.pool.values.to(device), self.pool.scales.to(device)
        )  # fmt: skip
        where = {"cur_pos": self.cur_pos} if "key_range" not in how else {}
        return paged_indexer_topk(
            self.iq.to(device), pool, self.table.to(device), self.w.to(device), topk, scale=0.5, backend=backend,
            **where, **how,
        )  # fmt: skip


def random_case(
    lengths=(9, 0, 23), tokens: int = 1, heads: int = 3, dim: int = 16, dtype=torch.float32, fp8: bool = True,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Whole numbers, small enough for every sum to be exact, so that many scores are equal; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int, most: int = 3) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)

    batch, width = len(lengths), max(1, -(-max(lengths) // BLOCK))
    blocks = batch * width + 2
    table = torch.randperm(blocks, generator=generator)[: batch * width].view(batch, width).int()
    x = whole(blocks, BLOCK, 1, dim)
    live = torch.zeros(blocks, BLOCK, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for p in range(length):
            live[table[b, p // BLOCK], p % BLOCK] = True
        table[b, -(-length // BLOCK) :] = -1
    if fp8:
        pool = quantize(x * 2.0 ** torch.randint(-1, 2, x.shape[:3], generator=generator)[..., None], "fp8_token")
        pool.values.view(torch.int8)[~live] = 127
        pool.scales[~live] = torch.nan
    else:
        pool = x.masked_fill(~live[..., None, None], torch.nan)
    return Case(whole(batch, tokens, heads, dim), pool, table, whole(batch, tokens, heads, most=2), list(lengths))


def check(found, expected: list[list[list[int]]], topk: int) -> None:
    for b, rows in enumerate(expected):
        for t, keys in enumerate(rows):
            assert found.indices[b, t].tolist() == keys + [-1] * (topk - len(keys)), (b, t)
            assert int(found.lengths[b, t]) == len(keys)
            assert (found.scores[b, t, len(keys) :] == -torch.inf).all()
            assert found.scores[b, t, : len(keys)].isfinite().all()


RUNS = [
    ("torch", torch.float32), ("torch", torch.float64), ("torch", torch.bfloat16), ("triton", torch.float32),
    ("triton", torch.float16), *([("triton", torch.bfloat16)] if CUDA else []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "dtype", "fp8"),
    first(
        5,
        [
            pytest.param(*run, fp8, marks=() if CUDA or run[0] == "torch" or (i == 4 and fp8) else SWEEP)
            for i, run in enumerate(RUNS)
            for fp8 in (True, False)
        ],
    ),
)
def test_the_best_keys(backend, dtype, fp8):
    for seed, tokens in enumerate((1, 2) if backend == "triton" and not CUDA else (1, 2, 3, 4)):
        case = random_case((9, 0, 23, 70), tokens, dtype=dtype, fp8=fp8, seed=seed)
        check(case.run(7, backend), case.expected(7), 7)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=() if CUDA else SWEEP)])
def test_options(backend):
    case = random_case((30, 5), tokens=2, heads=5, dim=20, seed=3)
    check(case.run(4, backend, relu=False), case.expected(4, relu=False), 4)
    check(case.run(40, backend), case.expected(40), 40)
    end = torch.tensor([[29, 30], [4, 5]], device=device_of(backend))
    found = case.run(6, backend, key_range=(torch.full_like(end, 3), end))
    check(found, case.expected(6, first=3), 6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bounds_with_strides(backend):
    case = random_case((30, 5), heads=2, seed=4)
    end = torch.tensor([[30, -1], [5, -1]], device=device_of(backend))[:, :1]
    found = case.run(6, backend, key_range=(torch.tensor([[3]], device=end.device).expand(2, 1), end))
    check(found, case.expected(6, first=3), 6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_range_that_begins_at_the_largest_number_is_empty(backend):
    case = random_case((30, 5), heads=2, seed=4)
    first = torch.tensor([[0], [2**31 - 1]], dtype=torch.int32, device=device_of(backend))
    found = case.run(6, backend, key_range=(first, torch.tensor([[30], [5]], device=first.device)))
    check(found, [case.expected(6)[0], [[]]], 6)


@pytest.mark.parametrize(
    ("rows", "tokens", "keys", "span", "workspace", "fp8"),
    [
        (1, 1, 64, 128, 1 << 20, True),
        *(
            pytest.param(*how, marks=() if CUDA else SWEEP)
            for how in ((2, 2, 32, 64, 1 << 20, True), (1, 2, 16, 200, 1, False), (2, 4, 64, 1, 1, True))
        ),
    ],
)
def test_rows_that_are_selected_from_with_a_summary(rows, tokens, keys, span, workspace, fp8):
    """Few candidates in registers make them long; in several turns, where the workspace is small."""
    pytest.importorskip("triton")
    from attnmesh.ops.sparse.indexer_tiles import IndexerTiles
    from attnmesh.ops.sparse.paged import PagedKeys
    from helpers.sparse_kernels import paged_topk

    case = random_case((300, 3, 100)[: 3 - tokens % 2], tokens, heads=2, fp8=fp8, seed=tokens)
    device = device_of("triton")
    pool = case.pool.to(device) if isinstance(case.pool, Tensor) else Quantized(
        case.pool.values.to(device), case.pool.scales.to(device)
    )  # fmt: skip
    end = torch.tensor(case.lengths, device=device)[:, None] + torch.arange(1 - tokens, 1, device=device)
    found = paged_topk(
        case.iq.to(device), PagedKeys(pool, case.table.to(device)), case.w.to(device), 15, torch.full_like(end, 5), end,
        scale=0.5, relu=True, tiles=IndexerTiles(keys, rows, 4, 1), span=span, block=64, workspace=workspace,
    )  # fmt: skip
    check(found, case.expected(15, first=5), 15)


def test_the_same_bits_as_over_one_tensor():
    """Keys that no order of summation makes exact: scores of the same bits as those of `indexer_topk`."""
    case = random_case((61, 40), tokens=2, dim=32)
    case.iq, case.w = torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3)
    found = case.run(9)
    for b, length in enumerate(case.lengths):
        for t in range(2):
            flat = indexer_topk(
                case.iq[b, t : t + 1], case.keys(b)[: length - 1 + t].float(), case.w[b, t : t + 1], 9, scale=0.5
            )
            assert torch.equal(found.indices[b, t], flat.indices[0])
            assert torch.equal(found.scores[b, t], flat.scores[0])


@pytest.fixture
def no_fault_left_over():
    check_decode_errors()
    yield
    check_decode_errors()


@pytest.mark.usefixtures("no_fault_left_over")
@pytest.mark.parametrize(
    ("backend", "value"),
    [("torch", -1), ("torch", 10**6), ("triton", 10**6), pytest.param("triton", -1, marks=() if CUDA else SWEEP)],
)
def test_an_entry_outside_the_pool(backend, value):
    case = random_case((9, 23, 12), tokens=2)
    case.table[1, 3] = value
    if backend == "torch":
        with pytest.raises(ValueError, match=rf"block_table\[1, 3\] is {value}, but the pool has blocks"):
            case.run(4)
        return
    found = case.run(4, "triton")
    with pytest.raises(ValueError, match=rf"block_table\[1, 3\] is {value}, outside the pool"):
        check_decode_errors()
    assert (found.indices[1] == -1).all()
    assert (found.lengths[1] == 0).all()
    case.table[1] = 0  # for the expectation only
    expected = case.expected(4)
    for b in (0, 2):
        assert [found.indices[b, t].tolist() for t in range(2)] == expected[b]


@pytest.mark.usefixtures("no_fault_left_over")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_position_beyond_the_table(backend):
    case = random_case((9, 12))
    case.lengths[0] = 1000
    if backend == "torch":
        with pytest.raises(ValueError, match="sequence 0 needs position 999, but the block table has space for 12"):
            case.run(4)
        return
    found = case.run(4, "triton")
    with pytest.raises(ValueError, match=r"indices\[0\] contain 999, beyond the cache"):
        check_decode_errors()
    assert (found.indices[0] == -1).all()
    assert (found.lengths[1] == 4).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"iq": torch.ones(3, 2, 16)}, r"iq must be \[batch, tokens, heads, head_dim\]"),
        ({"pool": quantize(torch.ones(2, 4, 1, 144), "fp8_ds_mla")}, "pool must be one of .*fp8_token, got fp8_ds_mla"),
        ({"pool": torch.ones(2, 4, 1, 16).half()}, "pool must be torch.float32 like q, or fp8_token"),
        ({"w": torch.ones(3, 1, 2)}, r"w must be floating point \[3, 1, 3\]"),
        ({"topk": 0}, "topk must be a positive integer"),
        ({"cur_pos": None}, "exactly one of cur_pos and key_range"),
        ({"cur_pos": [1, 2]}, "cur_pos must be 3 integers"),
        ({"cur_pos": [1, 2, -5]}, "cur_pos must be positions below"),
        ({"key_range": (torch.zeros(3, 1).int(), torch.zeros(3, 1).int())}, "exactly one of cur_pos and key_range"),
        ({"cur_pos": None, "key_range": torch.zeros(2)}, "key_range must be a tuple of two tensors"),
        ({"backend": "cpu"}, "backend must be"),
    ],
)
def test_what_is_refused(change, said):
    case = random_case()
    given = {"iq": case.iq, "pool": case.pool, "block_table": case.table, "w": case.w, "topk": 3, "cur_pos": [3, -1, 5]}
    with pytest.raises(ValueError, match=said):
        paged_indexer_topk(**{**given, **change})


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_shapes_of_a_model_on_a_gpu(dtype):
    for lengths, tokens in (((5000, 70, 0, 3000), 2), ((9000,), 1)):
        case = random_case(lengths, tokens, heads=64, dim=128, dtype=dtype)
        check(case.run(512, "triton"), case.expected(512), 512)
