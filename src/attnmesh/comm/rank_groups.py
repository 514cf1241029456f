"""One comm or several: ranks that agree, fail and log their calls together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from attnmesh.comm.base import Agreement, Comm, SharedValues
from attnmesh.comm.call_log import CallLog
from attnmesh.comm.health.group_store import CommError

T = TypeVar("T")

OBJECT = "object (numbered as ranks make those of its class)"
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
