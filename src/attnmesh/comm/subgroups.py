"""Subgroups of a comm, and argument checks over all ranks before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.comm.agreement import CommError, Signature
from attnmesh.comm.base import Comm, Message, Pending, Shape
from attnmesh.comm.process_group import GroupComm
from attnmesh.trace.recorder import Recorder

T = TypeVar("T")

SharedValues = dict[str, object]
"""Arguments, by name, that must be equal on all ranks."""


class SubComm(Comm):
    """The ranks `members` of `parent`, numbered from 0 in that order; this rank must be one of them.

    Messages go through the parent and count in its traffic too. Agreement is between all ranks of the parent, because
    all its subgroups make the same calls.
    """

    def __init__(self, parent: Comm, members: Sequence[int]) -> None:
        if parent.rank not in members:
            raise ValueError(f"members must include this rank ({parent.rank}), got {list(members)}")
        super().__init__(members.index(parent.rank), len(members), parent.timeout)
        self._parent, self._members = parent, tuple(members)
        self.shares_stream = parent.shares_stream

    @property
    def recorder(self) -> Recorder | None:
        """The parent's recorder: a rank is recorded as a whole."""
        return self._parent.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._parent.recorder = recorder

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A receive buffer of the parent's kind."""
        return self._parent.buffer(shape, dtype=dtype, device=device)

    def fail(self, message: str) -> None:
        """Report a failure to all ranks of the parent."""
        self._parent.fail(message)

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        def to_parent(messages: Sequence[Message]) -> list[Message]:
            return [(tensor, self._members[peer]) for tensor, peer in messages]

        return self._parent.exchange(to_parent(sends), to_parent(recvs))

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return self._parent._compare(signature)


class IndependentSubComm(SubComm):
    """A subgroup whose calls differ from those of the other subgroups, so that they cannot be compared.

    The caller must have agreed with all ranks of the parent on everything that the calls depend on.
    """

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return {self.rank: signature}


class RankGroups:
    """A comm over all ranks and this rank's subgroups, which agree and fail together.

    `all_ranks` is None where no comm contains all ranks, as in a grid that is given by its rows and columns.
    """

    def __init__(self, all_ranks: Comm | None, subgroups: Mapping[str, Comm]) -> None:
        self._all_ranks, self._subgroups = all_ranks, dict(subgroups)

    @property
    def all_ranks(self) -> Comm:
        """The comm over all ranks."""
        assert self._all_ranks is not None, "no comm contains all ranks"
        return self._all_ranks

    def agree(
        self, operation: str, values: Mapping[str, object], error: str | None = None, *, force: bool = False
    ) -> None:
        """`Comm.agree` between all ranks."""
        if self._all_ranks is None:
            self._agree_along_each(operation, values, error, force)
            return
        self._all_ranks.agree(operation, values, error, force=force)
        for subgroup in self._subgroups.values():
            if isinstance(subgroup, GroupComm) and subgroup is not self._all_ranks:
                subgroup.agree(operation, values, error)  # all agree already; NCCL needs all ranks in its first call

    def fail(self, message: str) -> None:
        """`Comm.fail` in every group, since a peer may be waiting for this rank in any of them."""
        comms = (self._all_ranks, *self._subgroups.values())
        for comm in {id(comm): comm for comm in comms if comm is not None}.values():
            comm.fail(message)

    def _agree_along_each(self, operation: str, values: Mapping[str, object], error: str | None, force: bool) -> None:
        """Agree in one subgroup after another.

        A rank that learns of an error in one subgroup reports it in the next, so it reaches every rank of the grid.
        """
        groups = [(name, comm) for name, comm in self._subgroups.items() if comm.world > 1]
        for i, (name, comm) in enumerate(groups or list(self._subgroups.items())[-1:]):
            try:
                comm.agree(operation, values, error, force=force)
            except ValueError as raised:
                if i + 1 >= len(groups):
                    raise
                error = f"{str(raised).removeprefix(f'{operation}: ')}, along {name}"


def check_on_all_ranks(
    ranks: Comm | RankGroups, operation: str, check: Callable[[], tuple[T, SharedValues]], *, force: bool = False
) -> T:
    """Run `check` on every rank and return its result once all ranks agree; an error on one is raised on all.

    `check` returns a result and the values that must be equal on all ranks, or raises ValueError. Values that were
    agreed on before are not compared again unless `force` is set on every rank; other ranks then learn of an error on
    this rank only when their operation times out.
    """
    try:
        result, values = check()
    except ValueError as error:
        ranks.agree(operation, {}, str(error))
        raise
    ranks.agree(operation, values, force=force)
    return result


@contextmanager
def propagate_failure(ranks: Comm | RankGroups) -> Iterator[None]:
    """Report an exception in the body to the other ranks, so that their errors give the reason."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        ranks.fail(f"{type(error).__name__}: {error}")
        raise
