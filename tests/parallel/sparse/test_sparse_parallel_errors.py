"""What does not fit raises ValueError on every rank of the grid, with names and values; nothing hangs."""

import re
from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.parallel.sparse.groups import mask_summary
from attnmesh.testing.sparse import SCALE, GridRank, SparseProblem
from helpers.sparse_grid import random_problem, run_grid

WHOLE = random_problem(10, 12, dtype=torch.float32)
GUILTY = (1, 1)  # tp rank, cp rank


def said(program) -> str:
    """The ValueError that a rank gets, in words, or what else happened."""
    try:
        program()
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"not a ValueError but {type(error).__name__}: {error}"
    return "nothing was raised"


def attend(place: GridRank, wrong: dict, mine: SparseProblem) -> None:
    given = {"q": mine.q, "kv": mine.kv, "indices": mine.indices, "scale": SCALE} | wrong
    how = {
        name: given.pop(name)
        for name in ("length", "key_length", "layout", "schedule", "check_indices")
        if name in given
    }
    parallel = am.SparseParallel(**{"tp": place.tp, "cp": place.cp, "length": 10, "key_length": 12} | how)
    parallel.sparse_attention(given.pop("q"), given.pop("kv"), given.pop("indices"), **given)


def distribute(place: GridRank, wrong: dict, mine: SparseProblem) -> None:
    given = {"k": mine.kv, "indices": mine.indices, "lse": mine.grad_lse, "scale": SCALE} | wrong
    parallel = am.SparseParallel(tp=place.tp, cp=place.cp, length=10, key_length=12)
    parallel.attention_distribution(mine.q, given.pop("k"), given.pop("indices"), given.pop("lse"), **given)


def choose(place: GridRank, wrong: dict, mine: SparseProblem) -> None:
    given = {"w": mine.w, "topk": 3} | wrong
    parallel = am.SparseParallel(tp=place.tp, cp=place.cp, length=10, key_length=12)
    parallel.indexer_topk(mine.iq, mine.ik, given.pop("w"), given.pop("topk"), **given)


def score(place: GridRank, wrong: dict, mine: SparseProblem) -> None:
    given = {"indices": mine.indices} | wrong
    parallel = am.SparseParallel(tp=place.tp, cp=place.cp, length=10, key_length=12)
    parallel.indexer_scores_at(mine.iq, mine.ik, mine.w, given.pop("indices"), **given)


def lose(place: GridRank, wrong: dict, mine: SparseProblem) -> None:
    target = am.sparse.AttentionTarget(mine.q, mine.kv, mine.grad_lse, SCALE)
    given = {"indices": mine.indices, "target": target, "loss_rows": "replicated"} | wrong
    parallel = am.SparseParallel(
        tp=place.tp, cp=place.cp, length=10, key_length=12, loss_rows=given.pop("loss_rows")
    )  # fmt: skip
    parallel.indexer_kl_loss(mine.iq, mine.ik, mine.w, **given)


def moved(indices: torch.Tensor) -> torch.Tensor:
    """Slots in another order."""
    return indices.flip(1)


# On one rank only: (the method, what that rank gives, what all must hear).
WRONG = {
    "indices of int64": (
        attend,
        lambda p: {"indices": p.indices.long()},
        "indices must be an int32 tensor, got torch.int64",
    ),
    "short indices": (attend, lambda p: {"indices": p.indices[1:]}, r"indices must be \[5, topk\]"),
    "a list": (attend, lambda p: {"q": [1.0]}, r"q must be a tensor \[s_q, heads, d\], got list"),
    "a short q": (
        attend,
        lambda p: {"q": p.q[1:]},
        r"q must have 5 rows on cp rank 1 of 2 for 10 under Contiguous\(\), got 4",
    ),
    "long keys": (attend, lambda p: {"kv": torch.ones(9, 12)}, "kv must have 6 rows on cp rank 1 of 2 for 12 .* got 9"),
    "another length": (attend, lambda p: {"length": 11}, "ranks disagree: length is 10 .* but 11 on"),
    "another layout": (attend, lambda p: {"layout": am.Striped()}, r"layout is Contiguous\(\) .* but Striped\(\) on"),
    "another schedule": (attend, lambda p: {"schedule": "ring"}, "schedule is allgather .* but ring on"),
    "one that does not check": (attend, lambda p: {"check_indices": False}, "check_indices is True .* but False on"),
    "another scale": (attend, lambda p: {"scale": 0.5}, "scale is 0.3 .* but 0.5 on"),
    "another dtype": (
        attend,
        lambda p: {"q": p.q.double(), "kv": p.kv.double()},
        "dtype is torch.float32 .* but torch.float64",
    ),
    "an offset": (attend, lambda p: {"mask": am.SparseMask(k_offset=3)}, "mask.k_offset must be 0 .* got 3"),
    "no mask": (attend, lambda p: {"mask": None}, "mask must be a SparseMask, got NoneType"),
    "a causal one": (
        attend,
        lambda p: {"mask": am.SparseMask(causal=True)},
        "mask is .*causal=False.*but SparseMask.causal=True",
    ),
    "a range": (attend, lambda p: {"mask": am.SparseMask(k_end=torch.arange(5))}, "mask is .* but .*, k_end. on"),
    "positions of all rows": (
        attend,
        lambda p: {"mask": am.SparseMask(causal=True, q_positions=torch.arange(10))},
        r"q_positions must be \[5\]",
    ),
    "sinks of all heads": (
        attend,
        lambda p: {"sinks": torch.ones(7)},
        r"sinks must be \[heads\] = \[5\], got \[7\]",
    ),
    "sinks": (attend, lambda p: {"sinks": p.sinks}, "sinks is False .* but True on"),
    "values": (attend, lambda p: {"v": p.v}, "values is False .* but True on"),
    "a gradient": (attend, lambda p: {"kv": p.kv.clone().requires_grad_()}, r"gradients is \(\) .* but \('kv',\) on"),
    "more slots": (attend, lambda p: {"indices": p.indices[:, :5]}, "topk is 6 .* but 5 on"),
    "another value width": (attend, lambda p: {"d_v": 5}, "d_v is 12 .* but 5 on"),
    "another backend": (attend, lambda p: {"backend": "torch"}, "backend is auto .* but torch on"),
    "no such backend": (
        attend,
        lambda p: {"backend": "numpy"},
        "backend must be one of auto, gluon, triton, torch, got 'numpy'",
    ),
    "other indices": (
        attend,
        lambda p: {"indices": moved(p.indices)},
        r"every tp rank: those of tp rank 1 differ from tp rank 0's \(on cp rank 1\)$",
    ),
    "other indices for the distribution": (
        distribute,
        lambda p: {"indices": moved(p.indices)},
        "indices.* same on every tp rank",
    ),
    "other indices to score": (score, lambda p: {"indices": moved(p.indices)}, "indices.* same on every tp rank"),
    "other indices for the loss": (lose, lambda p: {"indices": moved(p.indices)}, "indices.* same on every tp rank"),
    "groups of heads": (
        distribute,
        lambda p: {"head_group": 3},
        "head_group must be None .* 2 tp ranks, got 3",
    ),
    "an unnamed base": (distribute, lambda p: {"lse_base": "10"}, "lse_base must be 'e' .natural. or '2', got '10'"),
    "another base": (distribute, lambda p: {"lse_base": "2"}, "lse_base is e .* but 2 on"),
    "an lse of all heads": (
        distribute,
        lambda p: {"lse": torch.ones(5, 7)},
        r"lse must be \[s_q, heads\] = \[5, 5\], got \[5, 7\]",
    ),
    "normalizing": (distribute, lambda p: {"normalize": True}, "normalize is False .* but True on"),
    "more keys": (choose, lambda p: {"topk": 4}, "topk is 3 .* but 4 on"),
    "no keys": (choose, lambda p: {"topk": 0}, "topk must be a positive integer, got 0"),
    "slots before there are any": (
        choose,
        lambda p: {"mask": am.SparseMask(topk_length=torch.ones(5).int())},
        "mask.topk_length must be None",
    ),
    "other weights": (choose, lambda p: {"w": p.w[:, :2]}, r"w must be \[s_q, heads\] = \[5, 3\], got \[5, 2\]"),
    "no relu": (choose, lambda p: {"relu": False}, "relu is True .* but False on"),
    "other rows": (lose, lambda p: {"loss_rows": "scattered"}, "loss_rows is replicated .* but scattered on"),
    "no indices": (lose, lambda p: {"indices": None}, "topk is 6 .* but None on"),
    "another reduction": (lose, lambda p: {"reduction": "none"}, "reduction is sum .* but none on"),
    "a row mask of numbers": (
        lose,
        lambda p: {"row_mask": torch.ones(5)},
        r"row_mask must be bool \[5\], got torch.float32 \[5\]",
    ),
    "a row mask": (lose, lambda p: {"row_mask": torch.ones(5, dtype=torch.bool)}, "row_mask is False .* but True on"),
    "no lse": (lose, lambda p: {"target": am.sparse.AttentionTarget(p.q, p.kv, None, SCALE)}, "target.lse must be"),
    "a target that is given": (lose, lambda p: {"target": torch.ones(5, 6)}, "target is .* but None on"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_on_one_rank_is_heard_on_all(what):
    method, wrong, words = WRONG[what]

    def program(place: GridRank) -> tuple[str, str]:
        mine = WHOLE.shard(place)
        guilty = (place.tp.rank, place.cp.rank) == GUILTY
        heard = said(lambda: method(place, wrong(mine) if guilty else {}, mine))
        return heard, said(lambda: method(place, {}, mine))

    for row in run_grid(2, 2, am.Contiguous(), program):
        for heard, after in row:
            assert re.search(words, heard), heard
            assert after == "nothing was raised"


def test_the_checksum_finds_every_rank_that_differs_and_can_be_left_out():
    def program(place: GridRank, check: bool) -> str:
        mine = WHOLE.shard(place)
        indices = mine.indices + (place.tp.rank in (1, 3)) if place.cp.rank == 0 else mine.indices
        return said(lambda: attend(place, {"indices": indices.int(), "check_indices": check}, mine))

    for row in run_grid(4, 2, am.Contiguous(), lambda place: program(place, True)):
        assert all(re.search(r"tp ranks 1, 3 differ from tp rank 0's \(on cp rank 0\)$", heard) for heard in row), row
    for row in run_grid(4, 2, am.Contiguous(), lambda place: program(place, False)):
        assert row == ["nothing was raised"] * 4


def test_a_mask_that_hides_other_slots_is_as_wrong_as_other_indices():
    def program(place: GridRank) -> str:
        mine = WHOLE.shard(place)
        mask = am.SparseMask(topk_length=torch.full((10,), 6 - place.tp.rank))
        return said(lambda: attend(place, {"mask": mask}, mine))

    ((*heard,),) = run_grid(2, 1, am.Contiguous(), program)
    assert all("indices, where they are valid, must be the same" in words for words in heard), heard


def test_lengths_that_are_not_given_must_be_equal():
    def program(place: GridRank) -> str:
        mine = WHOLE.shard(place)
        return said(lambda: attend(place, {"length": None, "key_length": None}, mine))

    assert [row[0] for row in run_grid(1, 2, am.Contiguous(), program)] == ["nothing was raised"] * 2
    for row in run_grid(1, 3, am.Contiguous(), program):
        assert re.search(r"length \(rows per rank .*\) is 12 on rank 0 but 9 on ranks 1, 2", row[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layout": "zigzag"}, r"layout must be a layout \(Contiguous\(\), Zigzag\(\), ...\), got 'zigzag'"),
        ({"schedule": "all"}, "schedule must be one of allgather, ring, got 'all'"),
        ({"length": -1}, "length must be an integer >= 0, got -1"),
        ({"key_length": 2.5}, "key_length must be an integer >= 0, got 2.5"),
        ({"tp": "tp"}, "group must be a Comm, ProcessGroup, DeviceMesh or None, got str"),
    ],
)
def test_what_no_object_can_be_made_of(wrong, words):
    with pytest.raises(ValueError, match=words):
        am.SparseParallel(**wrong)


def test_alone_it_is_the_functions_of_one_device():
    alone = am.SparseParallel()
    assert (alone.tp.world, alone.cp.world) == (1, 1)
    p = replace(WHOLE, mask=am.SparseMask(causal=True))
    for found, true in zip(
        alone.sparse_attention(p.q, p.kv, p.indices, scale=SCALE, mask=p.mask),
        am.sparse_attention(p.q, p.kv, p.indices, scale=SCALE, mask=p.mask),
        strict=True,
    ):
        assert torch.equal(found, true)


def test_sinks_are_those_of_tp_ranks_and_equal_on_cp_ranks():
    def program(place, mine, other):
        value = float(place.tp.rank) + (other if (place.tp.rank, place.cp.rank) == GUILTY else 0)
        return said(lambda: attend(place, {"sinks": torch.full((mine.q.shape[1],), value)}, mine))

    def run(other):
        return run_grid(2, 2, am.Contiguous(), lambda place: program(place, WHOLE.shard(place), other))

    assert run(0.0) == [["nothing was raised"] * 2] * 2
    expected = "sinks must be the same on every cp rank: those of cp rank 1 differ from cp rank 0's (on tp rank 1)"
    assert run(1.0) == [[expected] * 2] * 2


def test_ranks_compare_every_number_of_a_mask_and_which_tensors_it_has():
    rows = torch.zeros(3, dtype=torch.int32)
    changes = [{"causal": True}, {"causal": True, "q_start": 5}, {"causal": True, "k_stride": 4}]
    changes += [{name: rows} for name in ("topk_length", "k_start", "k_end")]
    changes += [{"causal": True, "q_positions": rows}]
    summaries = {mask_summary(am.SparseMask(**change)) for change in ({}, *changes)}
    assert len(summaries) == 1 + len(changes)
