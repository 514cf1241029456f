"""Subgroups of a comm, and ranks of one comm or several that agree, fail and log their calls together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.comm.base import Agreement, CallLog, Comm, Message, Pending, Shape, SharedValues, Signature
from attnmesh.comm.health.group_store import CommError
from attnmesh.trace.timeline import Recorder


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
        self.global_ranks = parent.global_ranks  # agreement is between the ranks of the parent
        self.log = self._parent_log()
        self._shares_log = self.log is parent.log
        self.shares_stream = parent.shares_stream

    @property
    def recorder(self) -> Recorder | None:
        """The parent's recorder: a rank is recorded as a whole."""
        return self._parent.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._parent.recorder = recorder

    @property
    def shares_memory(self) -> bool:
        """As for all ranks of the parent."""
        return self._parent.shares_memory

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A receive buffer of the parent's kind."""
        return self._parent.buffer(shape, dtype=dtype, device=device)

    def fail(self, message: str) -> None:
        """Report a failure to all ranks of the parent."""
        self._parent.fail(message)

    @contextmanager
    def replaying(self, operation: str) -> Iterator[None]:
        """As in the parent, which carries the messages."""
        with self._parent.replaying(operation):
            yield

    def _check_one_thread(self, operation: str) -> None:
        self._parent._check_one_thread(operation)

    def _parent_log(self) -> CallLog:
        return self._parent.log

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self._exchange_with(self.log, op, sends, recvs)

    def _exchange_with(self, log: CallLog, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        parent, members = self._parent, self._members
        parent.traffic.add("exchange", len(sends), sum([tensor.nbytes for tensor, _ in sends]))
        sent = [(tensor, members[peer]) for tensor, peer in sends]
        return parent._exchange_with(log, "exchange", sent, [(tensor, members[peer]) for tensor, peer in recvs])

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return self._parent._compare(signature)


class IndependentSubComm(SubComm):
    """A subgroup whose calls differ from the calls of the other subgroups, so that they cannot be compared.

    The caller must have agreed with all ranks of the parent on everything that the calls depend on. Its members
    have a log of their own.
    """

    def _parent_log(self) -> CallLog:
        return self._parent.log_of(self._members)

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return {self._parent.rank: signature}


T = TypeVar("T")

OBJECT = "object (numbered per class, in the order in which ranks make them)"
"""The name under which ranks compare which object a call is made on: `number` of `CallLog` or of `RankGroups`."""


class RankGroups:
    """A comm over all ranks and this rank's subgroups, which agree and fail together.

    `all_ranks` is None where no comm contains all ranks, as in a grid that is given by its rows and columns.
    """

    def __init__(self, all_ranks: Comm | None, subgroups: Mapping[str, Comm]) -> None:
        self._all_ranks, self._subgroups = all_ranks, dict(subgroups)
        groups = {id(comm): comm for comm in (all_ranks, *subgroups.values()) if comm is not None}
        self._comms = list(groups.values())
        # All agree in the comm of all ranks. But NCCL needs all ranks in its first call, and messages are checked per
        # group: subgroups that are process groups of their own log the calls, too.
        self._logged = [comm for comm in self._comms if all_ranks is None or comm is all_ranks or comm.is_own_group]

    @property
    def all_ranks(self) -> Comm:
        """The comm over all ranks."""
        assert self._all_ranks is not None, "no comm contains all ranks"
        return self._all_ranks

    def agree(
        self,
        operation: str,
        values: Mapping[str, object],
        error: str | None = None,
        *,
        state: CallLog | None = None,
        force: bool = False,
    ) -> None:
        """`Comm.agree` between all ranks."""
        if self._all_ranks is None:
            self._agree_along_each(operation, values, error, state, force)
            return
        self._all_ranks.agree(operation, values, error, state=state, force=force)
        for subgroup in self._logged[1:]:
            subgroup.agree(operation, values, error, state=state)

    def agreement(self, operation: str, values: SharedValues) -> list[Agreement]:
        """A call to be made again and again: `begin` each. There must be a comm over all ranks."""
        assert self._all_ranks is not None
        return [Agreement(comm, operation, values) for comm in self._logged]

    def number(self, *kind: Hashable) -> int:
        """`CallLog.number` of a new object on these groups."""
        comms = self._comms if self._all_ranks is None else [self._all_ranks]
        logs = [comm.log for comm in comms if comm.world > 1]
        return logs[0].number(*kind, *logs[1:]) if logs else 0  # alone, there is nobody to compare with

    @property
    def calls(self) -> int:
        """The number of calls that were logged in each group together."""
        return sum(comm.calls for comm in self._comms)

    def note(self, operation: str, detail: str | int | None = None) -> None:
        """`Comm.note` in every group."""
        for comm in self._logged:
            comm.note(operation, detail)

    def fail(self, message: str) -> None:
        """`Comm.fail` in every group, since a peer may be waiting for this rank in any of them."""
        for comm in self._comms:
            comm.fail(message)

    def _agree_along_each(
        self, operation: str, values: Mapping[str, object], error: str | None, state: CallLog | None, force: bool
    ) -> None:
        """Agree in one subgroup after another.

        A rank that learns of an error in one subgroup reports it in the next, so it reaches every rank of the grid.
        """
        groups = [(name, comm) for name, comm in self._subgroups.items() if comm.world > 1]
        for i, (name, comm) in enumerate(groups or list(self._subgroups.items())[-1:]):
            try:
                comm.agree(operation, values, error, state=state, force=force)
            except ValueError as raised:
                if i + 1 >= len(groups):
                    raise
                error = f"{str(raised).removeprefix(f'{operation}: ')}, along {name}"


def check_on_all_ranks(
    ranks: Comm | RankGroups,
    operation: str,
    check: Callable[[], tuple[T, SharedValues]],
    *,
    state: CallLog | None = None,
    force: bool = False,
) -> T:
    """Run `check` on every rank and return its result once all ranks agree; an error on one is raised on all.

    `check` returns a result and the values that must be equal on all ranks, or raises ValueError. Values that were
    agreed on before are not compared again unless `force` is set on every rank: then ranks that are already exchanging
    messages raise CommError. `state` is as in `Comm.agree`.
    """
    try:
        result, values = check()
    except ValueError as error:
        ranks.agree(operation, {}, str(error))
        raise
    ranks.agree(operation, values, state=state, force=force)
    return result


@contextmanager
def propagate_failure(ranks: Comm | RankGroups) -> Iterator[None]:
    """Report an exception in the body to the other ranks, so that their errors give the reason."""
    try:
        yield
    except Exception as error:
        report_failure(ranks, error)
        raise


def report_failure(ranks: Comm | RankGroups, error: Exception) -> None:
    """Report an exception to the other ranks, except one that they know of."""
    if not isinstance(error, CommError):
        ranks.fail(f"{type(error).__name__}: {error}")
