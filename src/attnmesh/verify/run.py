"""The list of all modes, and running them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

import torch

from attnmesh.comm import Comm
from attnmesh.verify.attention import attention_modes
from attnmesh.verify.block import block_modes
from attnmesh.verify.decode import cache_modes, decode_modes
from attnmesh.verify.mode import Mode, Outcome
from attnmesh.verify.recurrent import recurrent_modes
from attnmesh.verify.sparse import sparse_decode_modes, sparse_modes, sparse_parallel_modes
from attnmesh.verify.tokens import token_modes


def modes(comm: Comm, device: str) -> list[Mode]:
    """Return every mode of this device, the same list on every rank."""
    return [
        *attention_modes(comm, device),
        *decode_modes(device),
        *cache_modes(),
        *block_modes(comm),
        *token_modes(comm),
        *recurrent_modes(comm, device),
        *sparse_modes(device),
        *sparse_parallel_modes(comm, device),
        *sparse_decode_modes(comm),
    ]


def select(comm: Comm, device: str, only: str | None = None) -> list[tuple[int, Mode]]:
    """Return the modes, or those whose name and shape match the regular expression `only`, with their numbers.

    ValueError if there is no such mode.
    """
    numbered = list(enumerate(modes(comm, device)))
    if only is None:
        return numbered
    found = [(number, mode) for number, mode in numbered if re.search(only, f"{mode.name} {mode.shape}")]
    if not found:
        some = ", ".join(mode.name for _, mode in numbered[:: max(1, len(numbered) // 4)])
        raise ValueError(f"--only must match some of {len(numbered)} modes (such as {some}), got {only!r}")
    return found


def run(
    comm: Comm, device: str, seed: int, chosen: Iterable[tuple[int, Mode]], time_limit: float | None = None
) -> Iterator[Outcome]:
    """Run modes on all ranks. Rank 0 yields each outcome as soon as it is known.

    A mode's number and the seed determine its inputs, whatever else is chosen. After `time_limit` seconds no further
    mode is begun.
    """
    begin = time.monotonic()
    for number, mode in chosen:
        if time_limit is not None and _any_rank(comm, time.monotonic() - begin > time_limit, device):
            return
        if mode.collective or comm.rank == 0:
            comparisons = mode.compare(seed + number, device)
            if comm.rank == 0:
                yield Outcome.of(mode, comparisons)


def _any_rank(comm: Comm, flag: bool, device: str) -> bool:
    """Whether the flag is set on any rank, the same on all of them."""
    own = torch.tensor([flag], dtype=torch.uint8, device=device)
    return any(int(each) for each in comm.all_gather(own, [(1,)] * comm.world))
