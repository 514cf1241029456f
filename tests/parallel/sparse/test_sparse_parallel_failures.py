"""A rank that fails inside a sparse function tells the others why, in the forward and in the backward."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import attnmesh as am
from attnmesh.comm import VirtualComm
from attnmesh.ops.sparse import torch_backend
from helpers.cases import first, in_turn
from helpers.processes import run_processes

GUILTY, WHY = 1, "RuntimeError: no memory is left"


def _rows(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def _indices() -> torch.Tensor:
    return torch.tensor([[0, 5, -1]] * 4, dtype=torch.int32)


def _attend(parallel: am.SparseParallel) -> torch.Tensor:
    q, kv = _rows(4, 2, 8).requires_grad_(), _rows(4, 8).requires_grad_()
    return parallel.sparse_attention(q, kv, _indices(), scale=0.5)[0]


def _distribute(parallel: am.SparseParallel) -> torch.Tensor:
    return parallel.attention_distribution(_rows(4, 2, 8), _rows(4, 8), _indices(), _rows(4, 2), scale=0.5)


def _score(parallel: am.SparseParallel) -> torch.Tensor:
    iq, ik = _rows(4, 2, 8).requires_grad_(), _rows(4, 8).requires_grad_()
    return parallel.indexer_scores_at(iq, ik, _rows(4, 2), _indices()).nan_to_num(neginf=0.0)


def _select(parallel: am.SparseParallel) -> torch.Tensor:
    return parallel.indexer_topk(_rows(4, 2, 8), _rows(4, 8), _rows(4, 2), 2).lengths


def _lose(parallel: am.SparseParallel) -> torch.Tensor:
    iq, ik = _rows(4, 2, 8).requires_grad_(), _rows(4, 8).requires_grad_()
    target = am.sparse.AttentionTarget(_rows(4, 2, 8), _rows(4, 8), _rows(4, 2), 0.5)
    return parallel.indexer_kl_loss(iq, ik, _rows(4, 2), None, target)


# The operation of the backend that fails, and the call that reaches it.
CALLS: dict[str, Callable[[am.SparseParallel], torch.Tensor]] = {
    "forward": _attend,
    "backward": _attend,
    "distribution": _distribute,
    "scores_at": _score,
    "scores_at_backward": _score,
    "topk": _select,
    "dense_scores_backward": _lose,
}


@contextmanager
def failing(operation: str, is_guilty: Callable[[], bool]) -> Iterator[None]:
    """Let an operation of the torch backend raise where `is_guilty` holds."""
    works = getattr(torch_backend, operation)

    def fails(*given: object, **named: object) -> object:
        if is_guilty():
            raise RuntimeError("no memory is left")
        return works(*given, **named)

    setattr(torch_backend, operation, fails)
    try:
        yield
    finally:
        setattr(torch_backend, operation, works)


def call(operation: str, parallel: am.SparseParallel) -> None:
    """Make the call and, if it is what fails, its backward."""
    result = CALLS[operation](parallel)
    if operation.endswith("backward"):
        result.sum().backward()


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
@pytest.mark.parametrize("operation", CALLS)
def test_a_failure_is_reported_to_both_groups(operation, schedule, monkeypatch):
    reported: list[tuple[int, str]] = []
    monkeypatch.setattr(VirtualComm, "fail", lambda comm, message: reported.append((comm.rank, message)))
    name = f"virtual rank {GUILTY}"

    def program(comm: am.comm.Comm) -> None:
        call(operation, am.SparseParallel(cp=comm, schedule=schedule))

    with (
        failing(operation, lambda: threading.current_thread().name == name),
        pytest.raises(RuntimeError, match="no memory is left"),
    ):
        am.run_virtual(2, program, timeout=30)
    assert (GUILTY, WHY) in reported


def _process(comm: am.comm.Comm, operation: str, schedule: str) -> str:
    comm.timeout = 20
    with failing(operation, lambda: comm.rank == GUILTY):
        try:
            call(operation, am.SparseParallel(cp=comm, schedule=schedule))
            comm.barrier()  # after an all-gather, a forward needs nothing more from other ranks
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("operation", "schedule"),
    first(1, [("backward", "ring"), *in_turn(CALLS, ("allgather", "ring"))]),
)
def test_the_other_process_hears_why(operation, schedule):
    heard = run_processes(2, _process, operation, schedule)
    assert heard[GUILTY] == WHY
    assert heard[1 - GUILTY].startswith("CommError: ")
    assert f"rank {GUILTY} failed: {WHY}" in heard[1 - GUILTY]
