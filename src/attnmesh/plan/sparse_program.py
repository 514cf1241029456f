"""From the name of a step of the sparse family to the program of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from attnmesh.plan.program import Program, Round
from attnmesh.plan.rounds import sparse
from attnmesh.plan.sparse_shape import SparseGrid, SparseShape, SparseShares

Step = Literal["attention", "distribution", "topk", "loss", "dense loss"]
WITHOUT_BACKWARD: tuple[Step, ...] = ("distribution", "topk")


def sparse_program(
    step: Step,
    shape: SparseShape,
    grid: SparseGrid,
    *,
    backward: bool = False,
    scattered: bool = False,
    check_indices: bool = True,
) -> Program:
    """What `SparseParallel` does for one of its methods, in one direction.

    The losses are those of `indexer_kl_loss` over chosen keys or all, reduced to a number, with the target from the
    attention's queries; `scattered` and `check_indices` are as there. No sinks.
    """
    if step not in get_args(Step):
        raise ValueError(f"step must be one of {', '.join(get_args(Step))}, got {step!r}")
    if backward and step in WITHOUT_BACKWARD:
        raise ValueError(f"backward must be False for step={step!r}, which has none, got {backward!r}")
    shares = SparseShares(shape, grid)
    scattered = scattered and grid.tp > 1

    def rounds() -> Iterator[Round]:
        if check_indices and not backward and step not in ("topk", "dense loss"):
            yield from sparse.same_indices(shares)
        match step:
            case "attention":
                yield from (sparse.attention_backward if backward else sparse.attention_forward)(shares)
            case "distribution":
                yield from sparse.distribution(shares)
            case "topk":
                yield from sparse.indexer_topk(shares)
            case "loss":
                loss = sparse.loss_backward if backward else sparse.loss_forward
                yield from loss(shares, scattered=scattered)
            case "dense loss":
                yield from sparse.dense_loss(shares, scattered=scattered, backward=backward)

    return Program(f"sparse {step}", grid.world, rounds)
