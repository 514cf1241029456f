"""indexer_topk: the exact best keys of every row, the same bits however the keys come."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh import SparseMask, indexer_topk
from attnmesh.ops.sparse import reference
from attnmesh.ops.sparse.arguments import merge_topk
from attnmesh.sparse import TopKIndices, indexer_scores_at
from helpers.cases import sweep
from helpers.memory import peak_bytes
from helpers.sparse import (
    BACKENDS,
    KEY_MASKS,
    IndexerCase,
    device_of,
    embedded,
    mask_on,
    random_indexer,
    with_dtypes,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def chosen(case: IndexerCase, topk: int, backend: str, **how: object) -> TopKIndices:
    """What is chosen where keys that no row may see, and rows that see nothing, are NaN."""
    device = device_of(backend)
    ik = case.ik.masked_fill(~case.visible.any(0)[:, None], torch.nan)
    iq = case.iq.masked_fill(case.empty_rows[:, None, None], torch.nan)
    iq, ik, w = (embedded(x.to(device)) for x in (iq, ik, case.w))
    slots = indexer_topk(iq, ik, w, topk, mask=mask_on(case.mask, device), backend=backend, **case.how, **how)
    return TopKIndices(*(x.cpu() for x in slots))


def counted(case: IndexerCase, seed: int = 0) -> IndexerCase:
    """The same sizes in small integers: every dtype computes them exactly, and ties are everywhere."""
    generator = torch.Generator().manual_seed(seed)
    iq, ik, w = (torch.randint(-2, 3, x.shape, generator=generator).to(x.dtype) for x in (case.iq, case.ik, case.w))
    return replace(case, iq=iq, ik=ik, w=w, scale=0.5)


def check(case: IndexerCase, topk: int, backend: str, **how: object) -> TopKIndices:
    """The best keys in float64, ascending, -1 last; their scores; how many there are."""
    slots, every, first = chosen(case, topk, backend, **how), case.scores(), case.mask.k_offset
    best = reference.topk_keys(every, case.visible, topk)
    assert slots.indices.dtype == slots.lengths.dtype == torch.int32
    assert slots.scores.dtype == torch.promote_types(case.iq.dtype, torch.float32)
    assert slots.indices.tolist() == [[j + first for j in row] + [-1] * (topk - len(row)) for row in best]
    assert slots.lengths.tolist() == [len(row) for row in best]
    for row, (keys, scores) in enumerate(zip(best, slots.scores, strict=True)):
        torch.testing.assert_close(scores[: len(keys)].double(), every[row, keys], rtol=1e-5, atol=1e-5)
        assert scores[len(keys) :].isneginf().all()
    return slots


def same(a: TopKIndices, b: TopKIndices) -> bool:
    """To the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# The best keys.


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(KEY_MASKS))
def test_every_mask_in_every_dtype_with_ties_everywhere(name, backend, dtype):
    for relu in (True, False):
        case = counted(random_indexer(mask=name, dtype=dtype, relu=relu))
        check(case, 5, backend)


@each_backend
@pytest.mark.parametrize(
    ("s_q", "s_kv", "topk"),
    [(0, 5, 3), (3, 0, 2), (5, 7, 6), (5, 7, 7), (3, 7, 20), (2, 700, 512)],
)
def test_every_length(s_q, s_kv, topk, backend):
    check(counted(random_indexer(s_q, s_kv, heads=2)), topk, backend)
    check(counted(random_indexer(s_q, s_kv, heads=5, mask="later strided"), seed=1), topk, backend)


@each_backend
@pytest.mark.parametrize(("heads", "d"), [(1, 1), (1, 128), (64, 128), (7, 40)])
def test_every_number_of_heads_and_width(heads, d, backend):
    check(counted(random_indexer(5, 150, heads=heads, d=d, mask="causal")), 9, backend)


@pytest.mark.parametrize("name", list(KEY_MASKS)[:6])
def test_numbers_that_are_no_integers(name):
    for relu in (True, False):
        check(random_indexer(19, 300, dtype=torch.float64, mask=name, relu=relu), 30, "torch")


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_sizes(data):
    s_q, s_kv = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 300)))
    mask = SparseMask(
        causal=True,
        q_positions=torch.tensor(
            data.draw(st.lists(st.integers(-1, 400), min_size=s_q, max_size=s_q)), dtype=torch.int64
        ),
        k_stride=data.draw(st.integers(1, 3)),
        k_offset=data.draw(st.integers(0, 5)),
        k_start=torch.tensor(data.draw(st.lists(st.integers(-1, 40), min_size=s_q, max_size=s_q)), dtype=torch.int64),
    )
    case = counted(
        random_indexer(s_q, s_kv, heads=data.draw(st.integers(1, 3)), d=3, mask=mask), data.draw(st.integers(0, 9))
    )
    check(case, data.draw(st.integers(1, 40)), "torch", block_size=data.draw(st.integers(1, 310)))


# Ties.


@each_backend
def test_on_a_plateau_of_zeros_the_lowest_keys_win(backend):
    """ReLU makes many scores exactly 0, and a negative weight makes some of them -0.0: equal all the same."""
    case = random_indexer(4, 200, heads=2, d=4)
    ik = -case.ik.abs()
    ik[[150, 90, 31]] *= -1
    case = replace(case, iq=case.iq.abs(), ik=ik, w=torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -0.0], [-0.0, -0.0]]))
    slots = check(case, 6, backend)
    assert slots.indices[0].tolist() == [0, 1, 2, 31, 90, 150]
    assert slots.indices[1].tolist() == [0, 1, 2, 3, 4, 5]  # the three others are below 0
    assert slots.indices[2].tolist() == [0, 1, 2, 31, 90, 150]
    assert slots.indices[3].tolist() == [0, 1, 2, 3, 4, 5]


def test_zeros_of_either_sign_are_one_tie():
    """Keys whose products come out as 0.0 and -0.0 by turns, with one head: nothing adds the sign away."""
    iq, ik = torch.ones(1, 1, 1), torch.tensor([[0.0], [-0.0]] * 20)
    slots = indexer_topk(iq, ik, torch.ones(1, 1), 5, relu=False, block_size=3, backend="torch")
    assert slots.indices.tolist() == [[0, 1, 2, 3, 4]]


@each_backend
def test_a_key_whose_score_is_nan_is_not_chosen(backend):
    case = counted(random_indexer(3, 20))
    ik = case.ik.clone()
    ik[[2, 11]] = torch.nan
    iq, ik, w = (x.to(device_of(backend)) for x in (case.iq, ik, case.w))
    slots = indexer_topk(iq, ik, w, 20, backend=backend, **case.how)
    assert slots.indices.tolist() == [[j for j in range(20) if j not in (2, 11)] + [-1, -1]] * 3
    assert slots.lengths.tolist() == [18] * 3
    assert slots.scores[:, 18:].isneginf().all()


# The same bits.


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal", torch.float64),
        ("causal", torch.float16),
        sweep("documents", torch.float32),
        sweep("documents", torch.bfloat16),
    ],
)
def test_any_block_gives_the_same_bits(name, dtype):
    case = random_indexer(11, 150, heads=5, d=24, mask=name, dtype=dtype)
    whole = chosen(case, 40, "torch")
    for block in (39, 129, 5000) if dtype != torch.float32 else (1, 7, 128, 129, 5000):
        assert same(chosen(case, 40, "torch", block_size=block), whole), block


@each_backend
@pytest.mark.parametrize(("heads", "d"), [(3, 17), (33, 100), (64, 128)])
def test_a_row_alone_gives_the_same_bits(heads, d, backend):
    case = random_indexer(21, 150, heads=heads, d=d)
    whole = chosen(case, 150, backend)
    for row in (0, 5, 8, 20):
        alone = chosen(replace(case, iq=case.iq[row : row + 1], w=case.w[row : row + 1]), 150, backend)
        assert same(alone, TopKIndices(*(x[row : row + 1] for x in whole))), row


@each_backend
@pytest.mark.parametrize(("heads", "d"), [(1, 3), (5, 17), (64, 128)])
def test_keys_of_a_chunk_have_the_same_scores(heads, d, backend):
    case = random_indexer(9, 300, heads=heads, d=d)
    whole = chosen(case, 300, backend)
    for start, stop in ((0, 300), (1, 300), (37, 165), (255, 256)):
        part = replace(case, ik=case.ik[start:stop], mask=SparseMask(k_offset=start))
        slots = chosen(part, stop - start, backend)
        assert torch.equal(slots.scores, whole.scores[:, start:stop])
        assert torch.equal(slots.indices, whole.indices[:, start:stop])
        bounds = {"k_start": torch.full((9,), start), "k_end": torch.full((9,), stop)}
        again = chosen(replace(case, mask=SparseMask(**bounds)), stop - start, backend)
        assert same(again, slots)


@each_backend
def test_merged_topk_of_chunks_is_the_topk_of_all(backend):
    case = random_indexer(9, 300, heads=2, mask="later")
    for topk in (3, 40, 200):
        whole = chosen(case, topk, backend)
        parts = [
            chosen(replace(case, ik=case.ik[start:stop], mask=replace(case.mask, k_offset=start)), topk, backend)
            for start, stop in ((150, 300), (0, 1), (1, 150), (300, 300))  # in no order
        ]
        assert same(merge_topk(parts, topk), whole)


@each_backend
def test_strides_and_repetition_change_no_bit(backend):
    case = random_indexer(11, 140, heads=4, d=20)
    whole = chosen(case, 140, backend)
    device = device_of(backend)
    iq, ik, w = (x.to(device) for x in (case.iq, case.ik, case.w))
    other = indexer_topk(
        iq.transpose(0, 1).contiguous().transpose(0, 1), ik.T.contiguous().T[:, None], w.T.contiguous().T, 140,
        backend=backend, **case.how,
    )  # fmt: skip
    assert same(TopKIndices(*(x.cpu() for x in other)), whole)
    assert same(chosen(case, 140, backend), whole)


@each_backend
def test_autocast_changes_no_bit(backend):
    case = random_indexer(11, 140, heads=4, d=20)
    whole = chosen(case, 30, backend)
    with torch.autocast(device_of(backend).type, dtype=torch.bfloat16):
        assert same(chosen(case, 30, backend), whole)


@each_backend
def test_the_scores_are_those_of_indexer_scores_at(backend):
    case = random_indexer(mask="causal")
    slots = chosen(case, 9, backend)
    iq, ik, w, indices = (x.to(device_of(backend)) for x in (case.iq, case.ik, case.w, slots.indices))
    torch.testing.assert_close(slots.scores, indexer_scores_at(iq, ik, w, indices, backend=backend, **case.how).cpu())


@each_backend
def test_no_gradient_flows(backend):
    case = random_indexer(3, 9)
    leaves = [x.to(device_of(backend)).requires_grad_() for x in (case.iq, case.ik, case.w)]
    slots = indexer_topk(*leaves, 4, backend=backend)
    assert not slots.scores.requires_grad


# Memory.


@pytest.mark.sweep
def test_memory_on_a_cpu_does_not_grow_with_the_keys():
    """[s_q, s_kv] would be 2 MB here."""
    whole = random_indexer(64, 8192, heads=2, d=8)
    few = replace(whole, ik=whole.ik[:2048])

    def peak(case: IndexerCase) -> int:
        leaves: tuple[Tensor, ...] = (case.iq, case.ik, case.w)
        return peak_bytes(lambda: indexer_topk(*leaves, 16, block_size=512, backend="torch"))

    assert peak(whole) < 64 * 8192 * 4 / 8
    assert peak(whole) < 1.1 * peak(few)
