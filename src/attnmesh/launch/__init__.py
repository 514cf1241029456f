"""Runs a function on ranks: processes that torchrun started, new processes, or virtual ranks in this process."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from attnmesh.comm import CommError, comm_from, run_virtual
from attnmesh.utils.log import show_if_asked
from attnmesh.utils.validation import MAX_TIMEOUT, check_count, check_timeout

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = 300.0
"""Default seconds that a rank waits for its peers."""

DEFAULT_RANKS = 4
MAX_RANKS = 1024
"""The most ranks that are started on one machine."""

_GRACE = 2.0  # seconds in which other ranks may report why they failed too
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

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
        return DEFAULT_RANKS if ranks is None else check_count("ranks", ranks, least=1, most=MAX_RANKS)
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
    share_gpu: bool = False,
    threads: int | None = None,
    timeout: float = TIMEOUT,
    on_failure: Callable[[], float] | None = None,
    **options: Any,
) -> list[T]:
    """Call `fn(comm, **options)` on every rank and return the results of the ranks that this call ran.

    Under torchrun this process is one rank, and the list holds its result only. Otherwise `ranks` new processes are
    started, or `ranks` virtual ranks on threads of this process, and the list has all results in rank order. With
    new processes, `fn`, its options and its results must be picklable.

    Args:
        fn: called with a `Comm` and the options. Bind an option that has the name of an argument of `run`
            (such as `device`) with `functools.partial`.
        ranks: number of ranks, at most 1024; 4 by default. Must not be given under torchrun.
        device: "cpu" or "cuda". NCCL is used if every rank has a GPU of its own, gloo otherwise.
        virtual: whether to use virtual ranks.
        share_gpu: whether all ranks of a machine use its first GPU, with NCCL between them: to test, since messages go
            through sockets. Requires device "cuda".
        threads: torch threads per new process; by default the cores divided by the ranks.
        timeout: seconds that a rank waits for its peers. Ignored for virtual ranks.
        on_failure: called if a rank fails or is killed; returns the seconds that the others have to end before they
            are stopped. For new processes only.

    An exception on any rank stops the others and is raised here, with the rank's traceback as a note. A rank that is
    killed, or that does not join the others within the timeout, raises CommError. An exception here, such as
    KeyboardInterrupt, stops all processes that were started; virtual ranks end with the process.
    """
    timeout = check_timeout(timeout)
    check_share_gpu(share_gpu, device, virtual)
    world = world_size(ranks, virtual=virtual)
    if under_torchrun():
        return [_join(fn, device, share_gpu, timeout, options)]
    if virtual:
        return run_virtual(world, lambda comm: fn(comm, **options), timeout=_VIRTUAL_TIMEOUT)
    return _start(fn, world, device, share_gpu, threads, timeout, on_failure, options)


def check_share_gpu(share_gpu: bool, device: str, virtual: bool = False) -> None:
    """Raise ValueError unless ranks can share a GPU as asked."""
    if share_gpu and (device != "cuda" or virtual):
        given = "virtual ranks, which share it anyway" if virtual else f"device {device!r}"
        raise ValueError(f"share_gpu requires processes with device 'cuda', got {given}")


def share_gpu_environment(rank: int, nodes: int = 1) -> dict[str, str]:
    """Environment variables with which NCCL accepts several ranks on one GPU, before its first use.

    NCCL refuses two ranks of a host on one GPU, so each rank claims to be a host of its own. Messages then go through
    sockets, on the loopback interface unless the ranks are on several `nodes`.
    """
    loopback = {} if nodes > 1 else {"NCCL_SOCKET_IFNAME": "lo"}
    return {"NCCL_HOSTID": f"attnmesh-rank-{rank}", "NCCL_IB_DISABLE": "1", **loopback}


def _join(fn: Callable[..., T], device: str, share_gpu: bool, timeout: float, options: dict[str, Any]) -> T:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if share_gpu:
        os.environ.update(share_gpu_environment(rank, nodes=-(-world // local_ranks)))
    if device == "cuda":
        torch.cuda.set_device(0 if share_gpu else int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        _rendezvous(_backend(device, local_ranks, share_gpu), timeout)
        return fn(comm_from(timeout=timeout), **options)
    except Exception as error:
        error.add_note(f"raised on rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
        raise
    finally:
        _destroy_group()


def _destroy_group() -> None:
    """Destroy the default group, if there is one. What torch raises after an error of NCCL would hide that error."""
    if dist.is_initialized():
        with suppress(dist.DistBackendError):
            dist.destroy_process_group()


_END_SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""After an error of NCCL, torch would keep a process from ending: one that has noticed it for four times the first
setting, 60 s by default, and all of them to write what they have recorded, for up to 8 minutes. Then its watchdog
aborts the process: not before the comm has raised, which notices the end of another process 5 s later."""


class RendezvousError(CommError):
    """Not all ranks joined the process group."""


def _rendezvous(backend: str, timeout: float, **group: Any) -> None:
    for name, value in _END_SOON.items():
        os.environ.setdefault(name, value)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **group)
    except RuntimeError as error:  # of the store or of the backend: a timeout, or a connection that is refused
        reason = str(error).partition("\n")[0]
        _LOG.warning("not all ranks joined the process group within %g s: %s", timeout, reason)
        raise RendezvousError(f"not all ranks joined the process group within {timeout:g} s: {reason}") from error


def _start(
    fn: Callable[..., T], ranks: int, device: str, share_gpu: bool, threads: int | None, timeout: float,
    on_failure: Callable[[], float] | None, options: dict[str, Any],
) -> list[T]:  # fmt: skip
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save(_call(folder), (fn, options))  # not an argument of a process, which would have to read it before we go on
        processes: list[SpawnProcess] = []
        try:
            with _signals_deferred():
                for rank in range(ranks):
                    arguments = rank, ranks, device, share_gpu, folder, threads, timeout
                    process = multiprocessing.get_context("spawn").Process(target=_process, args=arguments)
                    process.start()
                    processes.append(process)
            failed = _wait(processes)
            if failed and on_failure is not None:
                _wait(processes, on_failure())
            elif failed and all(_error(folder, rank).exists() for rank in failed):
                _wait(processes, _GRACE)
            exit_codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()  # a rank that is stopped, or waits inside torch, does not see another signal
            for process in processes:
                process.join()
        if failed or not all(_result(folder, rank).exists() for rank in range(ranks)):
            raise _rank_error(exit_codes, folder, timeout)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(ranks)]


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle signals after the `with` statement. Processes that are started in it begin with their signals blocked."""
    _start_tracker()  # it unblocks them when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start multiprocessing's tracker, which removes what killed ranks leave, such as semaphores, without a word.

    It has the warning filters of this process.
    """
    before = sys.warnoptions[:]
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions[:] = before


def _wait(processes: Sequence[SpawnProcess], seconds: float | None = None) -> list[int]:
    """Wait until all processes have ended, at most for some seconds; without a limit, until some fail: their ranks."""
    deadline = None if seconds is None else time.monotonic() + seconds
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = connection.wait(list(running), None if deadline is None else deadline - time.monotonic())
        ranks = [running.pop(sentinel) for sentinel in ended if isinstance(sentinel, int)]
        for rank in ranks:
            processes[rank].join()
        failed = [rank for rank in ranks if processes[rank].exitcode != 0]
        if not ended or (failed and deadline is None):
            return failed
    return []


def _process(
    rank: int, ranks: int, device: str, share_gpu: bool, folder: Path, threads: int, timeout: float
) -> None:  # fmt: skip
    _end_with_parent()
    show_if_asked(rank)
    try:
        torch.set_num_threads(threads)
        if share_gpu:
            os.environ.update(share_gpu_environment(rank))
        if device == "cuda":
            torch.cuda.set_device(0 if share_gpu else rank % torch.cuda.device_count())
        fn, options = pickle.loads(_call(folder).read_bytes())
        store = FileStore(f"{folder}/store", ranks)
        _rendezvous(_backend(device, ranks, share_gpu), timeout, rank=rank, world_size=ranks, store=store)
        _save(_result(folder, rank), fn(comm_from(timeout=timeout), **options))
    except Exception as error:
        error.add_note(f"raised on rank {rank} of {ranks}:\n{traceback.format_exc()}")
        _save(_error(folder, rank), _picklable(error))  # before other ranks notice that this one is gone
        raise SystemExit(1) from None
    finally:
        _destroy_group()


def _end_with_parent() -> None:
    """Let signals end this process at once, wherever it waits, and the end of its parent too."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it has ended before
        os._exit(1)


def _rank_error(exit_codes: Sequence[int | None], folder: Path, timeout: float) -> BaseException:
    """The error that ended the run. A rank that lost its peers is not the cause if another one raised or was killed."""
    ranks = len(exit_codes)
    errors = {rank: pickle.loads(path.read_bytes()) for rank in range(ranks) if (path := _error(folder, rank)).exists()}
    causes = [error for error in errors.values() if not isinstance(error, CommError)]
    if causes:
        return causes[0]  # type: ignore[no-any-return]
    killed = {rank: -code for rank, code in enumerate(exit_codes) if code is not None and code < 0}
    if signal.SIGINT in killed.values():
        return KeyboardInterrupt()
    silent = [rank for rank in range(ranks) if rank not in errors and not _result(folder, rank).exists()]
    exited = [rank for rank in silent if exit_codes[rank] is not None]
    if killed:
        rank = min(killed)
        reason = f"was killed ({_signal_name(killed[rank])})"
    elif exited:
        rank = exited[0]
        reason = f"exited with code {exit_codes[rank]}"
    elif silent and all(isinstance(error, RendezvousError) for error in errors.values()):
        rank, reason = silent[0], f"did not join the others within {timeout:g} s"
    else:
        rank = min(errors)
        reason = f"failed: {errors[rank]}"
    return CommError(f"rank {rank} of {ranks} {reason}; the other ranks were stopped")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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


def _call(folder: Path) -> Path:
    return folder / "call"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _error(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}"


def _backend(device: str, local_ranks: int, share_gpu: bool) -> str:
    """NCCL refuses two ranks on one GPU unless they are told to share it."""
    return "nccl" if device == "cuda" and (share_gpu or torch.cuda.device_count() >= local_ranks) else "gloo"
