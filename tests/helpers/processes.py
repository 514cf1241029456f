"""Ranks as processes over gloo, started, monitored and ended by the test."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from attnmesh.comm import comm_from
from attnmesh.launch import share_gpu_environment

# A fork server imports torch once for all tests of a session; its forks start in milliseconds, not seconds.
_context = mp.get_context("forkserver")
# With what ranks of most tests import as soon as they make a mesh or shard a tensor: three quarters of a second each.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "attnmesh", "pytest"])


@dataclass(frozen=True)
class Raised:
    """An exception of a rank, as text, because not every exception can be pickled."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Died:
    """The exit code of a rank that ended without a result."""

    exitcode: int | None


def run_processes(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 200,
    strict: bool = True,
    backend: str = "gloo",
    ends: bool = False,
) -> list[Any]:
    """Run `fn(comm, *args)` on `world` gloo processes of one thread and return the results in rank order.

    With backend="nccl" the default group has gloo and NCCL, and all ranks share one GPU.

    `fn` lives at the top of a module. With `strict`, a rank that raises or dies fails the test at once, with
    the rank's own traceback; without it, its result is `Raised` or `Died`. After `timeout` seconds the stacks of
    the others are printed, all processes are killed and TimeoutError is raised. With `ends`, processes destroy their
    groups and end by themselves when all have a result; TimeoutError is raised if one does not.
    """
    # The test serves the store: it takes a free port for sure, and outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(theirs, rank, world, store.port, fn, args, backend, ends), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout  # from here: the first start waits for what the fork server imports
        while len(results) < world:
            waiting = {pipes[rank]: rank for rank in range(world) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                _print_stacks([processes[rank].pid for rank in sorted(waiting.values())])
                raise TimeoutError(f"ranks {sorted(waiting.values())} had no result after {timeout} s")
            for pipe in ready:
                rank = waiting[pipe]
                results[rank] = _result(pipe, processes[rank])
                if strict and isinstance(results[rank], Raised):
                    raise AssertionError(f"rank {rank} raised:\n{results[rank].traceback}")
                if strict and isinstance(results[rank], Died):
                    raise AssertionError(f"rank {rank} died with exit code {results[rank].exitcode}")
        if ends:
            store.set("all have a result", "yes")
            for rank, process in enumerate(processes):
                process.join(10)
                if process.exitcode is None:
                    raise TimeoutError(f"the process of rank {rank} does not end")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world)]


def _print_stacks(pids: list[int]) -> None:
    """Let processes print what their threads do, to the test's captured stderr."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)  # one after the other


def _result(pipe: Connection, process: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        process.join(10)
        return Died(process.exitcode)


def _rank_main(
    pipe: Connection,
    rank: int,
    world: int,
    port: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    ends: bool = False,
    limit: float = 30,
) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    gc.freeze()  # what was imported before the fork is no garbage: trainers look for it again and again
    if backend == "nccl":
        os.environ.update(share_gpu_environment(rank))
        # After an error, torch would keep the process from ending, once for each operation that has failed.
        os.environ |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
        # Nor does torch abort it, so that it can go on: in no group, that of all ranks and those of a mesh included.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        backend = "cpu:gloo,cuda:nccl"
    try:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        patience = timedelta(seconds=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
        if store.add("connected", 1) == world:
            store.set("all are connected", "")
        store.wait(["all are connected"], patience)  # who still connects fails when a peer closes its connection
        result = fn(comm_from(None), *args)
    except BaseException as error:
        pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
        os._exit(1)  # at once, as a program with an uncaught exception would
    pipe.send(result)
    if ends:
        store.wait(["all have a result"], timedelta(hours=1))
        dist.destroy_process_group()
        return
    time.sleep(3600)  # a peer may still read what this rank sent: the test ends it when all are done
