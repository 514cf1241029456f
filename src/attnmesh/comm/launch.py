"""Runs a function on ranks: those that torchrun started, new processes, or virtual ranks in this process."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from attnmesh.comm import CommError, comm_from, run_virtual
from attnmesh.core.validation import MAX_TIMEOUT

T = TypeVar("T")

TIMEOUT = 300.0
"""Default seconds after which a rank gives up waiting for its peers."""

DEFAULT_RANKS = 4

# Virtual ranks cannot die one by one and a deadlock is detected at once, so only very long runs would time out.
_VIRTUAL_TIMEOUT = MAX_TIMEOUT


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(ranks: int | None = None, *, virtual: bool = False) -> int:
    """The number of ranks that `run` uses: torchrun's world size, else `ranks`, else 4.

    Raises ValueError if `ranks` or `virtual` is given under torchrun, which has already started its ranks.
    """
    if not under_torchrun():
        return DEFAULT_RANKS if ranks is None else ranks
    if virtual or ranks is not None:
        given = "virtual=True" if ranks is None else f"ranks={ranks}"
        raise ValueError(f"torchrun sets the number of ranks ({os.environ['WORLD_SIZE']}); got {given}")
    return int(os.environ["WORLD_SIZE"])


def run(
    fn: Callable[..., T],
    ranks: int | None = None,
    *,
    device: str = "cpu",
    virtual: bool = False,
    threads: int | None = None,
    timeout: float = TIMEOUT,
    **options: Any,
) -> list[T]:
    """Call `fn(comm, **options)` on every rank and return the results of the ranks that this call ran.

    Under torchrun this process is one rank, and the list holds its result only. Otherwise `ranks` new processes are
    started, or `ranks` virtual ranks on threads of this process, and the list has all results in rank order. With
    new processes, `fn`, its options and its results must be picklable.

    Args:
        fn: called with a `Comm` and the options. Bind an option that has the name of an argument of `run`
            (such as `device`) with `functools.partial`.
        ranks: number of ranks; 4 by default. Must not be given under torchrun.
        device: "cpu" or "cuda". NCCL is used if every rank has a GPU of its own, gloo otherwise.
        virtual: whether to use virtual ranks.
        threads: torch threads per new process; by default the cores divided by the ranks.
        timeout: seconds after which a rank gives up waiting for its peers. Ignored for virtual ranks.

    An exception on any rank stops the others and is raised here, with the rank's traceback as a note. A rank that is
    killed raises CommError.
    """
    world = world_size(ranks, virtual=virtual)
    if under_torchrun():
        return [_join(fn, device, timeout, options)]
    if virtual:
        return run_virtual(world, lambda comm: fn(comm, **options), timeout=_VIRTUAL_TIMEOUT)
    return _start(fn, world, device, threads, timeout, options)


def _join(fn: Callable[..., T], device: str, timeout: float, options: dict[str, Any]) -> T:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    dist.init_process_group(_backend(device, local_ranks), timeout=timedelta(seconds=timeout))
    try:
        return fn(comm_from(timeout=timeout), **options)
    finally:
        dist.destroy_process_group()


def _start(
    fn: Callable[..., T], ranks: int, device: str, threads: int | None, timeout: float, options: dict[str, Any]
) -> list[T]:
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of every rank that it stops
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_process, (ranks, device, folder, threads, timeout, fn, options), nprocs=ranks)
        except ProcessExitedException as error:
            raise _rank_error(error, ranks, Path(folder)) from None
        return [pickle.loads(_result(Path(folder), rank).read_bytes()) for rank in range(ranks)]


def _process(
    rank: int,
    ranks: int,
    device: str,
    folder: str,
    threads: int,
    timeout: float,
    fn: Callable[..., T],
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            _backend(device, ranks),
            rank=rank,
            world_size=ranks,
            store=FileStore(f"{folder}/store", ranks),
            timeout=timedelta(seconds=timeout),
        )
        try:
            result = fn(comm_from(timeout=timeout), **options)
        finally:
            dist.destroy_process_group()
        _save(_result(Path(folder), rank), result)
    except Exception as error:
        error.add_note(f"raised on rank {rank} of {ranks}:\n{traceback.format_exc()}")
        _save(_error(Path(folder), rank), _picklable(error))
        raise SystemExit(1) from None


def _rank_error(exited: ProcessExitedException, ranks: int, folder: Path) -> Exception:
    """The error that ended the run. A rank that lost its peers is not to blame if another rank raised."""
    errors = {rank: pickle.loads(path.read_bytes()) for rank in range(ranks) if (path := _error(folder, rank)).exists()}
    causes = [error for error in errors.values() if not isinstance(error, CommError)]
    if causes:
        return causes[0]  # type: ignore[no-any-return]
    rank = exited.error_index
    if rank in errors:
        reason = f"failed: {errors[rank]}"
    elif exited.signal_name:
        reason = f"was killed ({exited.signal_name})"
    else:
        reason = f"exited with code {exited.exit_code}"
    return CommError(f"rank {rank} of {ranks} {reason}; the other ranks were stopped")


def _picklable(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its message if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return plain
    return error


def _save(path: Path, value: object) -> None:
    """Write a file that is complete as soon as it exists: a rank may be stopped at any time."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(path)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _error(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}"


def _backend(device: str, local_ranks: int) -> str:
    """NCCL refuses two ranks on one GPU."""
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= local_ranks else "gloo"
