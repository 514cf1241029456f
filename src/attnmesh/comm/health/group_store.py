"""The key-value store of a process group, and what ranks report in it about failures."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from attnmesh.utils.text import alternatives, format_ranks, with_link, without_link

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_LOG = logging.getLogger(__name__)


class CommError(RuntimeError):
    """A peer died, raised, or did not arrive in time. The comm cannot be used any more.

    Examples:
        >>> def rank(comm):
        ...     if comm.rank == 0:
        ...         comm.barrier()  # rank 1 has returned and never arrives
        >>> try:
        ...     am.run_virtual(2, rank)
        ... except am.comm.CommError as error:
        ...     print(str(error).partition(";")[0])
        rank 0 was waiting for rank 1 to receive uint8[1] (barrier) and rank 1 to send uint8[1] (barrier)
    """

    def __init__(self, message: str, causes: Sequence[str] = ()) -> None:
        super().__init__(with_link(message, "debugging.md#commerror"))
        self.causes = tuple(causes) or (without_link(message),)
        """What happened first, in words that hold on every rank and in every group."""


class StoreLostError(CommError):
    """The store cannot be reached, or does not answer."""


class WaitStatus(NamedTuple):
    """What a process waits for: ranks by their global numbers, in which calls, and whether in this group."""

    ranks: Collection[int]
    call: str
    in_group: bool = True


class GroupStore:
    """The part of a group's store that attnmesh uses: keys of its own, and every failure as a CommError.

    `global_ranks` are the ranks of the group as the default group numbers them.
    """

    def __init__(self, store: Store, rank: int, world: int, global_ranks: Sequence[int] | None = None) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._global_ranks = list(range(world)) if global_ranks is None else list(global_ranks)
        self._prefix: str | None = None
        self._lost: str | None = None

    def names(self, ranks: Iterable[int]) -> str:
        """`rank 3`, `ranks 0, 2`; `global rank 7` where ranks have other numbers in the default group."""
        return format_ranks(sorted(ranks), self._global_ranks)

    @property
    def _has_global_numbers(self) -> bool:
        return self._global_ranks == list(range(self._world))

    @property
    def own_name(self) -> str:
        """The name of this rank."""
        return self.names([self._rank])

    def globally(self, ranks: Iterable[int]) -> set[int]:
        """The numbers of ranks in the default group."""
        return {self._global_ranks[rank] for rank in ranks}

    def error(self, causes: Sequence[str], doing: str) -> CommError:
        """What happened, then what this rank was doing, and in which group unless it has all ranks."""
        group = "" if self._has_global_numbers else f", in the group of {self.names(range(self._world))}"
        error = CommError(f"{'; '.join(causes)} [{self.own_name} {doing}{group}]", causes)
        _LOG.warning("%s", error)
        return error

    def _key(self, name: str) -> str:
        if self._prefix is None:
            # A group that is created again after its destruction may get its old store with all keys. How often this
            # rank has joined distinguishes the generations, also if the new group is smaller.
            self._prefix = f"attnmesh/{self._store.add(f'attnmesh/joined/{self._rank}', 1)}"
        return f"{self._prefix}/{name}"

    def _set(self, name: str, value: str) -> None:
        with self._store_errors():
            self._store.set(self._key(name), value)

    def _get(self, name: str) -> str:
        with self._store_errors():
            return str(self._store.get(self._key(name)), "utf-8")

    def _check(self, name: str) -> bool:
        with self._store_errors():
            return bool(self._store.check([self._key(name)]))

    def _delete(self, name: str) -> None:
        with self._store_errors():
            self._store.delete_key(self._key(name))

    def _values(self, name: str, ranks: Iterable[int]) -> dict[int, str]:
        """What ranks have published under a name."""
        return {rank: self._get(f"{name}/{rank}") for rank in ranks if self._check(f"{name}/{rank}")}

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        if self._lost is not None:  # torch writes a stack of C++ frames to stderr every time
            raise StoreLostError(self._lost)
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].partition(". ")[0]
            self._lost = f"the group's store is lost: its process, usually that of rank 0, has ended ({reason})"
            raise StoreLostError(self._lost) from error


class FailureNotices(GroupStore):
    """What ranks report about themselves and others: failures, processes that have ended, and ranks they wait for."""

    def report_failure(self, message: str) -> None:
        """Publish that this rank has failed by itself."""
        self.report_causes([f"{self.own_name} failed: {message}"])

    def report_causes(self, causes: Sequence[str]) -> None:
        """Publish why this rank fails. Best effort: the store may have died with the rank that serves it."""
        with suppress(CommError):
            self._set(f"failure/{self._rank}", json.dumps(causes))
            self._set("failure", "yes")  # the one key that every rank polls

    def causes(self) -> list[str]:
        """Why other ranks have failed, each cause once."""
        if not self._check("failure"):
            return []
        return _each_once(self._values("failure", self._others))

    def report_elsewhere(self, causes: Sequence[str]) -> None:
        """Publish why this rank has failed in another of its groups. Others may wait for it in this one, or not."""
        self._set(f"elsewhere/{self._rank}", json.dumps(causes))

    def report_end(self, rank: int, how: str) -> None:
        """Publish that the process of another rank has ended."""
        self._set(f"ended/{rank}", how)
        self._set("failure", "yes")

    def ended(self) -> dict[int, str]:
        """The ranks whose processes have ended, and how. No rank need wait for them: they may have done their part."""
        return self._values("ended", range(self._world)) if self._check("failure") else {}

    def causes_of_end(self, ranks: Collection[int]) -> list[str]:
        """Why ranks do not arrive whose processes have ended."""
        return _each_once(self._values("elsewhere", sorted(ranks))) + self._ends(ranks)

    def _ends(self, ranks: Iterable[int]) -> list[str]:
        ended = self.ended()
        return [f"{self.names([rank])} is dead: {ended[rank]}" for rank in sorted(ranks)]

    # Ranks that wait for one another in a chain time out together. The rank that did not arrive is the one that others
    # wait for and that does not report that it waits. Ranks are global here: a rank may wait in another group.

    def report_waiting(self, status: WaitStatus) -> None:
        """Publish what this rank waits for, in a search for a cause."""
        self._set(f"waiting/{self._rank}", json.dumps([sorted(status.ranks), status.call, status.in_group]))

    def begin_search(self, status: WaitStatus) -> None:
        """`report_waiting` of a rank that fails and does not know the cause: all ranks that wait report it too."""
        self.report_waiting(status)
        self._set("search", "yes")
        self._set("failure", "yes")

    def is_searching(self) -> bool:
        """Whether a rank searches for the cause of its failure."""
        return self._check("failure") and self._check("search")

    def end_search(self) -> None:
        """Delete what ranks have reported in a search: what this rank waited for has arrived after all."""
        for name in ("search", *(f"waiting/{rank}" for rank in range(self._world))):
            self._delete(name)

    def causes_of_absence(self, how: str) -> list[str]:
        """Why ranks did not arrive, or `how`, by what the waiting ranks have reported."""
        texts = self._values("waiting", range(self._world))
        waiting = {rank: WaitStatus(*json.loads(text)) for rank, text in sorted(texts.items())}
        awaited = {rank for status in waiting.values() for rank in status.ranks}
        members = {rank: member for member, rank in enumerate(self._global_ranks) if rank in awaited}
        failed_elsewhere = self._values("elsewhere", sorted(members.values()))
        absent = {rank for rank in awaited if members.get(rank) in failed_elsewhere} or awaited - self.globally(waiting)
        if awaited and not absent:
            # Who waits for a dead rank may not be known: NCCL's error about it ends messages of other ranks, too.
            return self._ends(self.ended()) or self._circle(waiting, how)
        ended = self.ended().keys() & {member for rank, member in members.items() if rank in absent}
        late = sorted(rank for rank in absent if members.get(rank) not in ended)
        causes = _each_once(failed_elsewhere) + self._ends(ended)
        if late:
            causes.append(f"{'' if self._has_global_numbers else 'global '}{format_ranks(late)} {how}")
        return causes

    def _circle(self, waiting: Mapping[int, WaitStatus], how: str) -> list[str]:
        """What is wrong if all ranks wait for one another: some wait in another group, or their calls differ."""
        away = {rank: status.call for rank, status in waiting.items() if not status.in_group}
        if away:
            return [f"{self.names(away)} {how}, waiting in another group: {', '.join(dict.fromkeys(away.values()))}"]
        calls = {rank: status.call for rank, status in waiting.items()}
        if len(set(calls.values())) == 1:
            return [f"all ranks wait in {next(iter(calls.values()))}, for messages that no other rank has sent"]
        return [f"ranks wait for one another: {alternatives(calls, self._global_ranks)}"]


_OUT_OF_STEP = "ranks are out of step"  # each rank compares itself with others


def _each_once(causes: Mapping[int, str]) -> list[str]:
    """The causes that ranks have published."""
    published = dict.fromkeys(cause for text in causes.values() for cause in json.loads(text))
    first = next((cause for cause in published if cause.startswith(_OUT_OF_STEP)), None)
    return [cause for cause in published if cause == first or not cause.startswith(_OUT_OF_STEP)]
