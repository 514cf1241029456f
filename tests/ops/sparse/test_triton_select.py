"""The exact selection from a row of scores, with and without a summary of it: rows that are hard to select from.

That of a decode step in Gluon is emulated, with the sizes that it has on a GPU.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from attnmesh.ops.sparse import gluon_paged_select
from attnmesh.ops.sparse.indexer_tiles import NEIGHBORS, row_elements
from attnmesh.ops.sparse.triton_select import select_row
from helpers.cases import in_turn, sweep
from helpers.gluon import emulated

CUDA = torch.cuda.is_available()
SWEEP_HERE = () if CUDA else (pytest.mark.sweep,)
BLOCK, WIDE, K, BEGIN = 64, 128, 20, 48  # candidates in registers, groups, the top-k, the first key of a row


@triton.jit
def _kernel(
    row, row_keys, row_len, begin, end, n, topk, groups, indices, scores, count,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    select_row(row, row_keys, row_len, begin, end, n, topk, groups, indices, scores, count, BLOCK, WIDE)


def workspace(row: Tensor, at: int, begin: int, end: int, block: int, groups: int) -> tuple[Tensor, int]:
    """Memory in which `row` starts at key `at` of [begin, end), with its summary; and the number of keys."""
    row_len, device = end + 64, row.device
    buffer = torch.full((row_elements(row_len, block, groups),), torch.nan, device=device)
    buffer[begin:end] = -torch.inf
    buffer[at : at + len(row)] = row
    if groups:
        summary = row_len + 3 * block
        keys = torch.arange(len(row), device=device)
        buffer[summary : summary + groups] = torch.full((groups,), -torch.inf, device=device).scatter_reduce(
            0, keys % groups, row, "amax"
        )
        blocks = buffer[begin:end].view(-1, NEIGHBORS).amax(1)
        buffer[summary + groups + begin // NEIGHBORS :][: len(blocks)] = blocks
    return buffer, row_len


def select(row: Tensor, groups: int, k: int) -> tuple[Tensor, Tensor, int]:
    """The selection from `row`, which starts at key BEGIN of a longer one. What must not be read is NaN."""
    n, device = len(row), row.device
    end = BEGIN + -(-n // 16) * 16
    buffer, row_len = workspace(row, BEGIN, BEGIN, end, BLOCK, groups)
    indices, scores = torch.full((k + 3,), 99, device=device).int(), torch.full((k + 3,), 99.0, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    _kernel[(1,)](
        buffer, buffer.view(torch.int32), row_len, BEGIN, end, n, k, groups, indices, scores, count,
        BLOCK=BLOCK, WIDE=WIDE if groups else 0, num_warps=4,
    )  # fmt: skip
    assert (indices[k:] == 99).all()
    assert (scores[k:] == 99.0).all()
    return indices[:k], scores[:k], int(count)


N = 500
AT = torch.arange(N)
ROWS = {
    "random": torch.rand(N, generator=torch.Generator().manual_seed(3)) - 0.5,
    "of all sizes": 2.0 ** (AT * 37 % 121 - 60) * torch.where(AT % 2 == 0, 1.0, -1.0),
    "few that can be selected": torch.where(AT % 31 == 0, AT / 8, -torch.inf),
    "fewer groups than k": torch.where(AT % 64 < 3, AT / 8, -torch.inf),
    "neighbors": torch.where((AT > 200) & (AT < 260), 100.0 + AT, AT % 7),
    "ties at the end of the top-k": torch.where(AT % 30 == 0, 1.0, 0.0),
    "constant": torch.full((N,), 3.25),
    "more candidates than fit": torch.where(AT % 64 < 8, 100.0 + AT, AT % 7),
    "infinite": torch.where(AT % 50 == 0, torch.inf, torch.where(AT % 3 == 0, -torch.inf, AT * 1.0)),
    "shorter than the groups": torch.rand(100, generator=torch.Generator().manual_seed(4)),
    "short": torch.rand(50, generator=torch.Generator().manual_seed(5)),
    "empty": torch.zeros(0),
}
USUAL = {"random", "neighbors", "few that can be selected", "more candidates than fit"}


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        pytest.param(kind, groups, marks=() if kind in USUAL else SWEEP_HERE)
        for kind, groups in in_turn(ROWS, [256, 0, 128, 64, 64, 256, 128, 0, 64, 256, 0, 128])
    ],
)
def test_the_selection(device, kind, groups):
    check(ROWS[kind].to(device), groups, K)


@pytest.mark.parametrize(("k", "groups"), [pytest.param(50, 256, marks=SWEEP_HERE), (100, 0), sweep(1000, 128)])
def test_a_topk_that_does_not_fit_in_the_room_for_candidates(device, k, groups):
    check(ROWS["random"].to(device), groups, k)


def test_a_topk_of_more_keys_than_groups(device):
    """The k-th score is below the largest of every group: no bound of it comes from these."""
    check(torch.where(AT < BLOCK, 100.0 + AT, -AT * 1.0).to(device), 0, BLOCK + 10)


def check(row: Tensor, groups: int, k: int) -> None:
    check_selected(row, k, BEGIN, *select(row, groups, k))


def check_selected(row: Tensor, k: int, first: int, indices: Tensor, scores: Tensor, count: int) -> None:
    order = row.argsort(descending=True, stable=True)[:k]
    expected = order[row[order] > -torch.inf].sort().values
    assert count == len(expected)
    assert (indices[:count] - first).tolist() == expected.tolist()
    assert torch.equal(scores[:count], row[expected])
    assert (indices[count:] == -1).all()
    assert scores[count:].isneginf().all()


MANY = torch.arange(9000)
LONG = {  # of whose top 360 the maxima of 1024 groups tell much or little; 2,048 candidates fit
    "random": torch.rand(9000, generator=torch.Generator().manual_seed(6)) - 0.5,
    "ties among the candidates": (torch.rand(9000, generator=torch.Generator().manual_seed(7)) * 50).round(),
    "more candidates than fit": torch.where(MANY % 1024 < 300, 100.0 + MANY, MANY % 7),
    "fewer candidates than k": torch.where(MANY % 30 == 0, 1.0, 0.0),
    "few that can be selected": torch.where(MANY % 31 == 0, MANY / 8, -torch.inf),
    "infinite": torch.where(MANY % 50 == 0, torch.inf, torch.where(MANY % 3 == 0, -torch.inf, MANY * 1.0)),
    "blocks in two parts": torch.rand(70000, generator=torch.Generator().manual_seed(10)),
    "every score is a group": torch.rand(3000, generator=torch.Generator().manual_seed(8)),
    "short": (torch.rand(1500, generator=torch.Generator().manual_seed(9)) * 50).round(),
    "empty": torch.zeros(0),
}


def select_in_gluon(row: Tensor, k: int, groups: int, parts: int, fault: int = 0) -> None:
    """The selection of a decode step; with `parts` of the row, programs gather their candidates.

    With a `fault`, of the last program that scored, nothing is selected.
    """
    first, block, module = 64 + 5, gluon_paged_select.MIN_BLOCK, emulated(gluon_paged_select)
    end = -(-(first + len(row)) // 64) * 64
    buffer, row_len = workspace(row, first, 64, end, block, groups)
    summary = row_len + 3 * block
    if parts:  # room for candidates instead of the maxima of blocks
        room = 2 * parts * block + 16
        buffer = torch.cat((buffer[:row_len], torch.full((room,), torch.nan), buffer[summary : summary + groups]))
        summary = row_len + room
    else:
        buffer[row_len : row_len + block] = torch.inf  # candidates of the row before
    indices, scores = torch.full((k + 3,), 99, dtype=torch.int32), torch.full((k + 3,), 99.0)
    count, errors = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    lo, hi, bits = torch.tensor([first]), torch.tensor([first + len(row)]), buffer.view(torch.int32)
    sizes = (row_len, len(buffer), summary, groups, 0)
    if parts:
        shape = module.selection(1, block, 4096, parts, gluon_paged_select.PART_WARPS)
        module.gather_kernel[(parts,)](
            lo, hi, buffer, bits, row_len, k, *sizes, SHAPE=shape, num_warps=shape.warps, launch_pdl=True
        )
    shape = module.selection(1, block, 4096, parts)
    module.select_kernel[(1,)](
        lo, hi, indices, scores.view(torch.int32), count, buffer, bits, errors, torch.tensor([0] * 599 + [fault]).int(),
        1, row_len, k, *sizes, 600, SHAPE=shape, num_warps=shape.warps, launch_pdl=True,
    )  # fmt: skip
    assert (indices[k:] == 99).all()
    assert (scores[k:] == 99.0).all()
    check_selected(row[: 0 if fault else None], k, first, indices[:k], scores[:k], int(count))
    assert not errors.any()


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("ties among the candidates", "more candidates than fit", "short") else sweep(kind)
        for kind in LONG
    ],
)
@pytest.mark.parametrize("parts", [0, 16])
def test_the_selection_of_a_decode_step_in_gluon(kind, parts):
    select_in_gluon(LONG[kind], 360, 1024, parts)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("short", 16), ("random", 16), *(sweep(*x) for x in (("more candidates than fit", 16), ("random", 0)))],
)
def test_nothing_is_selected_in_gluon_after_a_fault(kind, parts):
    select_in_gluon(LONG[kind], 360, 1024, parts, fault=1)
