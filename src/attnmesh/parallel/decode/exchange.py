"""`Exchange`: the collectives of an `AttentionBlock`. `HeadExchange`: query heads for sequences, among KVDP ranks.

KVDP ranks store the same kv heads, each for its own sequences. Each has projected q query heads of all B sequences.
Shapes, with T tokens per sequence, B_d sequences and q_d heads of rank d, and H heads in all:

    in,  all_to_all            [d][q, B_d, T, D]  ->  [H, B_own, T, D]
    in,  all_gather + slice    [q, B, T, D]       ->  [H, B, T, D]  ->  [H, B_own, T, D]
    out, all_to_all            [d][B_own, T, q_d, D]  ->  [B, T, q, D]
    out, all_gather + slice    [B_own, H, T, D]       ->  [B, H, T, D]  ->  [B, T, q, D]

Heads come first on the way in and sequences on the way out, so that the received parts are in order. With one head per
rank nothing is transposed: [1, B, T, D] is [B, T, D]. The all_gather sends kvdp times the bytes of the all_to_all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.comm.base import split_buffer
from attnmesh.plan.decode import Combine, DecodeShape, DecodeSharding, KvdpExchange
from attnmesh.utils.log import log_choice, wants_choices
from attnmesh.utils.validation import check_bool, check_choice, check_device, check_type

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exchange:
    """The collectives of KVDP ranks (`kvdp`) and of CP ranks (`cp`), and whether CP ranks replicate the queries.

    `cp="auto"` picks the cheapest by message size. With `replicate_q` all CP ranks project the same queries, as in
    Helix: W_q is stored `cp` times, and no queries are gathered.

    Examples:
        >>> am.decode.Exchange(cp="reduce_scatter")
        Exchange(kvdp='all_to_all', cp='reduce_scatter', replicate_q=False)
        >>> am.decode.Exchange(cp="ring")
        Traceback (most recent call last):
            ...
        ValueError: cp must be one of auto, all_to_all, reduce_scatter, all_reduce, got 'ring'
    """

    kvdp: KvdpExchange = "all_to_all"
    cp: Literal["auto"] | Combine = "auto"
    replicate_q: bool = False

    def __post_init__(self) -> None:
        check_choice("kvdp", self.kvdp, get_args(KvdpExchange))
        check_choice("cp", self.cp, ("auto", *get_args(Combine)))
        check_bool(replicate_q=self.replicate_q)

    def combine(self, sharding: DecodeSharding, shape: DecodeShape, device: torch.device | str) -> Combine:
        """The collective that CP ranks combine their states with, the same on every rank."""
        check_type("sharding", sharding, DecodeSharding)
        check_type("shape", shape, DecodeShape)
        check_device("device", device)
        if self.cp != "auto":
            return self.cp
        from attnmesh.planner.auto import pick_combine
        from attnmesh.planner.catalog import default_cluster

        combine = pick_combine(sharding, shape, default_cluster(torch.device(device).type).intra_node)
        if wants_choices(_LOG):
            log_choice(_LOG, "CP ranks of %s combine %s by %s, the fastest by estimate", sharding, shape, combine)
        return combine


@dataclass(frozen=True)
class HeadExchange:
    """Query heads for sequences among the ranks of `comm`: `rows[d]` sequences and `heads[d]` query heads of rank d."""

    comm: Comm
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    collective: KvdpExchange = "all_to_all"

    @property
    def parts(self) -> int:
        """The number of parts of the send buffer: one per rank for all_to_all, otherwise 1."""
        return len(self.rows) if self.collective == "all_to_all" else 1

    def gather_heads(self, buffer: Tensor, tokens: int, dim: int) -> Tensor:
        """All heads of this rank's sequences, [H, B_own, T, D], from this rank's heads of all, in `parts` parts."""
        me = self.comm.rank
        if len(self.rows) == 1:
            return buffer.view(self.heads[me], self.rows[me], tokens, dim)
        if self.collective == "all_to_all":
            sent = [(self.heads[me], rows, tokens, dim) for rows in self.rows]
            shapes = [(heads, self.rows[me], tokens, dim) for heads in self.heads]
            received = receive_buffer(self.comm, (sum(self.heads), self.rows[me], tokens, dim), buffer)
            self.comm.all_to_all(split_buffer(buffer, sent), shapes, into=received)
            return received
        shapes = [(heads, sum(self.rows), tokens, dim) for heads in self.heads]
        gathered = receive_buffer(self.comm, (sum(self.heads), sum(self.rows), tokens, dim), buffer)
        self.comm.all_gather(buffer.view(shapes[me]), shapes, into=gathered)
        return gathered[:, part_of(self.rows, me)]

    def scatter_heads(self, out: Tensor) -> Tensor:
        """This rank's heads of all sequences, [B, T, q, D], from all heads of its own, [B_own, H, T, D]."""
        me = self.comm.rank
        if len(self.rows) == 1:
            return out.transpose(1, 2)
        _, _, tokens, dim = out.shape
        if self.collective == "all_to_all":
            shapes = [(rows, tokens, self.heads[me], dim) for rows in self.rows]
            received = receive_buffer(self.comm, (sum(self.rows), tokens, self.heads[me], dim), out)
            self.comm.all_to_all(self._split_heads(out), shapes, into=received)
            return received
        shapes = [(rows, sum(self.heads), tokens, dim) for rows in self.rows]
        gathered = receive_buffer(self.comm, (sum(self.rows), sum(self.heads), tokens, dim), out)
        self.comm.all_gather(out, shapes, into=gathered)
        return gathered[:, part_of(self.heads, me)].transpose(1, 2)

    def _split_heads(self, out: Tensor) -> list[Tensor]:
        """A part [B_own, T, q_d, D] for each rank, by a single copy if all have the same size."""
        by_token = out.transpose(1, 2)
        if len(set(self.heads)) > 1:
            return [part.contiguous() for part in by_token.split(self.heads, dim=2)]
        return list(by_token.unflatten(2, (len(self.heads), -1)).movedim(2, 0).contiguous())


def receive_buffer(comm: Comm, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A buffer to receive in, of the dtype and on the device of a tensor."""
    return comm.buffer(shape, dtype=like.dtype, device=like.device)


def part_of(counts: Sequence[int], part: int) -> slice:
    """The range of a part among parts with these numbers of items."""
    end = list(accumulate(counts))[part]
    return slice(end - counts[part], end)
