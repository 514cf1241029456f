"""Kernels compiled before anything is measured, by many processes at once.

A kernel takes seconds to compile and the benchmark needs dozens. Each process runs its share of the cases once, which
leaves their kernels in Triton's cache on disk, where the measuring process finds them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby

import torch

from benchmarks.decode.cases import Case, kernel_of
from benchmarks.decode.inputs import program

_MOST_PROCESSES = 12  # each holds a context and a cache on the device


def compile_kernels(cases: Iterable[Case], device: str) -> None:
    """Run every case once, in processes. What fails here is left to the measurement, which will say so."""
    shares = grouped(cases)
    workers = min(len(shares), _MOST_PROCESSES, os.cpu_count() or 1)
    if not workers:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as processes:
        for running in [processes.submit(run_once, share, device) for share in shares]:
            running.exception()


def grouped(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that share kernels together: two processes at once would both compile them."""
    return [list(group) for _, group in groupby(sorted(set(cases), key=kernel_of), key=kernel_of)]


def run_once(cases: Sequence[Case], device: str) -> None:
    """One process's work."""
    for case in cases:
        program(case, device)()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
