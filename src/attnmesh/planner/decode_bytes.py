"""Bytes of a sharded decode step: what ranks send in each collective, and what they store."""

from __future__ import annotations

from typing import Literal, NamedTuple

from attnmesh.core.validation import check_choice, check_positive
from attnmesh.plan.decode import COMBINES, KVDP_EXCHANGES, Combine, DecodeShape, DecodeSharding, KvdpExchange

_STATE_ITEMSIZE = 4  # (out, lse) are sent in float32 until they are merged


class Copies(NamedTuple):
    """On how many ranks every part of a weight is replicated."""

    w_q: int
    w_kv: int
    w_out: int


def bytes_sent(
    sharding: DecodeSharding,
    shape: DecodeShape,
    rank: int,
    *,
    kvdp: KvdpExchange = "all_to_all",
    combine: Combine = "all_to_all",
    replicate_q: bool = False,
) -> dict[str, int]:
    """Bytes that a rank sends in each collective of a decode step, per layer.

    With `replicate_q` a rank projects the queries of all its CP peers instead of gathering them.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_choice("kvdp", kvdp, KVDP_EXCHANGES)
    check_choice("combine", combine, COMBINES)
    sent_in, sent_out = _kvdp_bytes(sharding, shape, rank, kvdp, replicate_q)
    lse, out = _cp_bytes(sharding, shape, rank, combine)
    gathered = 0 if replicate_q else (sharding.cp - 1) * _cp_heads(sharding, shape, rank) * _row(sharding, shape, rank)
    projected = shape.batch * shape.tokens * shape.hidden * shape.itemsize
    return {
        "kvdp in": sent_in,
        "cp in": gathered,
        "cp lse": lse,
        "cp out": out,
        "kvdp out": sent_out,
        "projection": _all_reduced(projected, sharding.ranks),
    }


def messages_sent(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, *, combine: Literal["all_to_all", "reduce_scatter"]
) -> dict[str, dict[int, int]]:
    """Bytes of each message between peers, by collective and target, with an all-to-all between KVDP ranks.

    They add up to `bytes_sent`, without the all-reduce of the projection.
    """
    kvdp, cp = ([peer for peer in peers(rank) if peer != rank] for peers in (sharding.kvdp_peers, sharding.cp_peers))
    mine, lse_row = _row(sharding, shape, rank), _lse_row(sharding, shape, rank)
    projected, gathered = len(sharding.q_heads(rank, shape.q_heads)), _cp_heads(sharding, shape, rank)
    result_row = lse_row * (shape.head_dim + 1) if combine == "all_to_all" else lse_row * shape.head_dim
    lse = 0 if combine == "all_to_all" else len(sharding.group_heads(rank, shape.q_heads)) * lse_row
    return {
        "kvdp in": {peer: projected * _row(sharding, shape, peer) for peer in kvdp},
        "cp in": dict.fromkeys(cp, gathered * mine),
        "cp lse": dict.fromkeys(cp, lse),
        "cp out": {peer: _cp_heads(sharding, shape, peer) * result_row for peer in cp},
        "kvdp out": {peer: len(sharding.q_heads(peer, shape.q_heads)) * mine for peer in kvdp},
    }


def cache_bytes(sharding: DecodeSharding, shape: DecodeShape, rank: int, context: int, kv_bytes: int) -> int:
    """KV cache bytes of a rank, with `context` positions per sequence.

    `kv_bytes` is the bytes of K and V per token and kv head: of one layer, or of all layers.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_positive(context=context, kv_bytes=kv_bytes)
    heads, sequences = sharding.kv_heads(rank, shape.kv_heads), sharding.sequences(rank, shape.batch)
    return len(heads) * len(sequences) * sharding.position_shard(rank).length(context) * kv_bytes


def weight_copies(sharding: DecodeSharding, kv_heads: int, *, replicate_q: bool = False) -> Copies:
    """W_q and W_out are sharded over all ranks; W_kv is replicated on all ranks that share its kv heads."""
    shared = sharding.kvdp * sharding.cp * max(1, sharding.tp // kv_heads)
    return Copies(w_q=sharding.cp if replicate_q else 1, w_kv=shared, w_out=1)


def _kvdp_bytes(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, kvdp: KvdpExchange, replicate_q: bool
) -> tuple[int, int]:
    """Bytes between KVDP peers: query heads of all sequences before, results of all query heads after attention."""
    peers, others = sharding.kvdp_peers(rank), sharding.kvdp - 1
    projected = sharding.replicated_q_heads if replicate_q else sharding.q_heads
    heads = len(projected(rank, shape.q_heads))
    if kvdp == "all_gather":
        all_rows = shape.batch * shape.tokens * shape.head_dim * shape.itemsize
        return others * heads * all_rows, others * _cp_heads(sharding, shape, rank) * _row(sharding, shape, rank)
    there = sum(heads * _row(sharding, shape, peer) for peer in peers if peer != rank)
    back = sum(len(sharding.q_heads(peer, shape.q_heads)) for peer in peers if peer != rank)
    return there, back * _row(sharding, shape, rank)


def _cp_bytes(sharding: DecodeSharding, shape: DecodeShape, rank: int, combine: Combine) -> tuple[int, int]:
    """Bytes between CP peers: the lse alone, and out (with the lse, where one message holds both)."""
    lse_row = _lse_row(sharding, shape, rank)
    out_row = lse_row * shape.head_dim
    heads = len(sharding.group_heads(rank, shape.q_heads))
    theirs = heads - _cp_heads(sharding, shape, rank)
    if combine == "all_to_all":
        return 0, theirs * (out_row + lse_row)
    lse = (sharding.cp - 1) * heads * lse_row
    return lse, theirs * out_row if combine == "reduce_scatter" else _all_reduced(heads * out_row, sharding.cp)


def _row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * shape.head_dim * shape.itemsize


def _lse_row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of the lse of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * _STATE_ITEMSIZE


def _cp_heads(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    return len(sharding.cp_heads(rank, shape.q_heads))


def _all_reduced(nbytes: int, ranks: int) -> int:
    """Bytes per rank of an all-reduce: reduce-scatter and all-gather, everything but the own part."""
    return round(2 * (ranks - 1) / ranks * nbytes)
