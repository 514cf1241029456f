"""Starting ranks: join those torchrun started, or start processes of our own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from attnmesh.comm import comm_from

T = TypeVar("T")

TIMEOUT = 300.0
"""Seconds after which ranks give up on one another, unless told otherwise."""


def under_torchrun() -> bool:
    """Whether this process is one of torchrun's ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device: str, fn: Callable[..., T], *args: Any, timeout: float = TIMEOUT) -> T:
    """Call `fn(comm, *args)` as one of torchrun's ranks, and return what it returns."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    dist.init_process_group(_transport(device, ranks_here), timeout=timedelta(seconds=timeout))
    try:
        return fn(comm_from(timeout=timeout), *args)
    finally:
        dist.destroy_process_group()


def start(
    ranks: int,
    device: str,
    fn: Callable[..., None],
    *args: Any,
    threads: int | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Call `fn(comm, *args)` in `ranks` new processes and wait. `fn` and `args` must be picklable.

    A rank that raises or exits with an error ends the others and raises here.
    """
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, device, f"{folder}/store", threads, timeout, fn, args), nprocs=ranks)


def _rank(
    rank: int, ranks: int, device: str, store: str, threads: int, timeout: float, fn: Callable[..., None], args: Any
) -> None:
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        _transport(device, ranks), rank=rank, world_size=ranks, store=FileStore(store, ranks),
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        fn(comm_from(timeout=timeout), *args)
    finally:
        dist.destroy_process_group()


def _transport(device: str, ranks_here: int) -> str:
    """NCCL where every rank has a GPU of its own; gloo otherwise (NCCL refuses two ranks on one GPU)."""
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= ranks_here else "gloo"
