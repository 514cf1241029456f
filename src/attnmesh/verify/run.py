"""The list of all modes, and running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnmesh.comm import Comm
from attnmesh.verify.attention import attention_modes
from attnmesh.verify.decode import cache_modes, decode_modes
from attnmesh.verify.generation import generation_modes
from attnmesh.verify.mode import Mode, Outcome
from attnmesh.verify.sparse import sparse_modes, sparse_parallel_modes


def modes(comm: Comm, device: str) -> list[Mode]:
    """Return every mode of this device, the same list on every rank."""
    return [
        *attention_modes(comm, device),
        *decode_modes(device),
        *cache_modes(),
        *generation_modes(comm),
        *sparse_modes(),
        *sparse_parallel_modes(comm),
    ]


def run(comm: Comm, device: str, seed: int, chosen: Sequence[Mode] | None = None) -> Iterator[Outcome]:
    """Run all modes, or those chosen, on all ranks. Rank 0 yields each outcome as soon as it is known."""
    for number, mode in enumerate(modes(comm, device) if chosen is None else chosen):
        if mode.collective or comm.rank == 0:
            comparisons = mode.compare(seed + number, device)
            if comm.rank == 0:
                yield Outcome.of(mode, comparisons)
