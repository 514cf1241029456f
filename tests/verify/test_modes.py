"""The table of modes that `attnmesh verify` checks, on virtual ranks: every result against float64."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations, product

import pytest

from attnmesh import run_virtual
from attnmesh.comm import Comm
from attnmesh.testing.decode import random_decode
from attnmesh.verify import run as verify
from attnmesh.verify.attention import attention_modes
from attnmesh.verify.block import block_modes
from attnmesh.verify.decode import cache_modes, decode_modes
from attnmesh.verify.mode import Mode, covering_rows
from attnmesh.verify.recurrent import recurrent_modes
from attnmesh.verify.sparse import sparse_decode_modes, sparse_modes, sparse_parallel_modes
from attnmesh.verify.tokens import token_modes
from helpers.cases import sweep

pytestmark = pytest.mark.usefixtures("one_thread")


FAMILIES = {
    "attention": lambda comm: attention_modes(comm, "cpu"),
    "decode": lambda comm: [*decode_modes("cpu"), *cache_modes()],
    "block": block_modes,
    "tokens": token_modes,
    "recurrent": lambda comm: recurrent_modes(comm, "cpu"),
    "sparse": lambda comm: [*sparse_modes("cpu"), *sparse_parallel_modes(comm, "cpu"), *sparse_decode_modes(comm)],
}


def failures(world: int, list_modes: Callable[[Comm], Iterable[Mode]]) -> list[str]:
    """The modes that are wrong, with their worst result."""

    def rank(comm: Comm) -> list[str]:
        modes = list(list_modes(comm))
        assert modes
        return [
            f"{o.mode.name} {o.mode.shape}: {o.worst} {o.error:.1e} > {o.bound:.1e}"
            for o in verify.run(comm, "cpu", 7 * world, enumerate(modes))
            if not o.passed
        ]

    return run_virtual(world, rank, timeout=900)[0]


# Four ranks have schedules with two levels; five are as many as some inputs have heads, and do not divide lengths.
@pytest.mark.parametrize("world", [4, sweep(5)])
def test_every_value_of_every_axis_of_attention(world):
    assert failures(world, lambda comm: attention_modes(comm, "cpu", pairs=False)) == []


@pytest.mark.parametrize("name", ["out", "lse"])
def test_an_error_of_a_decode_call_is_in_the_result_that_has_it(name):
    problem = random_decode([5, 9])
    right = problem.plain()
    found = problem.compare(right._replace(**{name: getattr(right, name) + 1}))
    assert [each.name for each in found if each.error > each.bound] == [name]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "world"),
    [("decode", 1), ("attention", 3), ("attention", 8), ("block", 6), ("recurrent", 3), ("sparse", 4), ("tokens", 3)],
)
def test_every_mode(family, world):
    assert failures(world, FAMILIES[family]) == []


@pytest.mark.parametrize(("world", "device"), [(4, "cpu"), (1, "cuda"), (6, "cuda"), (1, "cpu"), (3, "cpu")])
def test_every_mode_has_a_name_and_a_shape_of_its_own(world, device):
    """`--only` can choose each of them."""
    modes = run_virtual(world, lambda comm: verify.modes(comm, device))[0]
    names = Counter(f"{mode.name} {mode.shape}" for mode in modes)
    assert [name for name, count in names.items() if count > 1] == []


def values(rows: Iterable[dict], size: int) -> set[frozenset]:
    return {frozenset(some) for row in rows for some in combinations(row.items(), size)}


def test_rows_cover_every_pair_but_those_that_are_forbidden():
    axes = {"a": (1, 2, 3, 4), "b": ("x", "y", "z"), "c": (True, False), "d": (None,)}
    every = [dict(zip(axes, some, strict=True)) for some in product(*axes.values())]
    forbidden = (("a", 2), ("b", "y"))
    rows = covering_rows(axes, [forbidden])
    assert values(rows, 2) == values(every, 2) - {frozenset(forbidden)}
    assert len(rows) < len(every)


def test_rows_cover_every_value_in_as_few_rows_as_the_longest_axis_has_values():
    axes = {"a": (1, 2, 3, 4), "b": ("x", "y", "z"), "c": (True, False)}
    rows = covering_rows(axes, pairs=False)
    assert len(rows) == 4
    assert values(rows, 1) == values([dict(zip(axes, some, strict=True)) for some in product(*axes.values())], 1)
