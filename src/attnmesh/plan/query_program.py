"""What all ranks do for query-distributed attention, and the checks of its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from attnmesh.core import ranges
from attnmesh.core.layouts import Zigzag
from attnmesh.plan.program import Program, Round
from attnmesh.plan.rounds.collectives import all_ranks
from attnmesh.plan.rounds.queries import Answered, queries_backward, queries_forward
from attnmesh.plan.rounds.sizes import Sizes
from attnmesh.plan.workload import Shape


def queries_program(
    shape: Shape,
    length: int,
    world: int,
    *,
    pairs: int | tuple[int, ...] = 1,
    backward: bool,
    gather: bool = False,
    node: int | None = None,
) -> Program:
    """`ring_distributed_attention` of `length` positions by `world` ranks, `node` a node (all of them unless said).

    `pairs` is as there. `gather`: with `gather_ring_outputs` after it, forward and backward.
    """
    for name, value, least in (
        ("length", length, 0),
        ("world", world, 1),
        ("node", world if node is None else node, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    chunks = [Zigzag(pairs).ranges(length, world, rank) for rank in range(world)]
    answered, groups = Answered.of(chunks), all_ranks(world, node)
    sizes = Sizes.of([shape] * world, [ranges.size(mine) for mine in chunks])

    def rounds() -> Iterator[Round]:
        if backward:
            return queries_backward(answered, sizes, groups, length, gather=gather)
        return queries_forward(answered, sizes, groups, gather=gather)

    return Program("queries", world, rounds)
