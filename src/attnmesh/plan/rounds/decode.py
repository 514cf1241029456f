"""Rounds of one layer in a step of token generation: AttentionBlock's stages, and the MLP that follows.

Exchanges have nothing to compute behind them: a layer is a chain.

    project q, k, v | queries to whoever holds the keys (KVDP, then CP) | attend | states merged (CP)
    | results back (KVDP) | project out, summed over all ranks | MLP, summed over all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.combine import pick_combine
from attnmesh.plan.decode_load import DecodeShape, bytes_sent
from attnmesh.plan.hardware import Floats, Link
from attnmesh.plan.program import Kernels, Messages, Program, Round
from attnmesh.plan.sharding import DecodeSharding


@dataclass(frozen=True)
class Linear:
    """The parameters of a layer's products, by how ranks divide them, and how large one is."""

    divided: int = 0  # over all ranks: W_q, and what belongs to query heads only
    by_kv_head: int = 0  # with the kv heads: W_k and W_v; ranks that share a kv head hold them alike
    out: int = 0  # W_out, over all ranks
    mlp: int = 0  # over all ranks; of experts, those that somebody chose
    mlp_used: float = 0.0  # parameters of the MLP that a token is multiplied with
    nbytes: float = 2.0  # of a parameter of attention
    mlp_nbytes: float = 2.0


@dataclass(frozen=True)
class DecodeLayer:
    """One layer: its attention, what is cached, and its linear layers."""

    shape: DecodeShape
    cached: float  # bytes of keys and values of one position and kv head
    context: int  # positions that a query sees: the context, or the layer's window
    linear: Linear = Linear()


def decode_program(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Program:
    """One layer's step on all ranks. `link` is what CP ranks choose their way of merging by."""
    sharding.check_heads(layer.shape.q_heads, layer.shape.kv_heads)
    return Program(f"decode {sharding}", sharding.ranks, lambda: _rounds(sharding, layer, link))


def _rounds(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Iterator[Round]:
    ranks, shape = sharding.ranks, layer.shape
    combine = pick_combine(sharding, shape, link)
    sent = [bytes_sent(sharding, shape, rank, combine=combine) for rank in range(ranks)]

    def among(peers: Callable[[int], list[int]], name: str) -> Messages:
        """What a rank sends in a collective, an equal part to each of its peers."""
        moves = []
        for rank in range(ranks):
            others = [peer for peer in peers(rank) if peer != rank]
            moves += [(rank, peer, sent[rank][name] // len(others)) for peer in others]
        return Messages.of(moves)

    def trade(name: str, messages: Messages) -> Iterator[Round]:
        if len(messages):
            yield Round(name, {name: messages}, (), (name,))

    linear, rows = layer.linear, shape.batch * shape.tokens
    kv_share = np.array([len(sharding.kv_heads(rank, shape.kv_heads)) for rank in range(ranks)]) / shape.kv_heads
    into = linear.divided / ranks + linear.by_kv_head * kv_share
    yield Round("project", work=(_product(into, into, rows, linear.nbytes),))
    yield from trade("kvdp in", among(sharding.kvdp_peers, "kvdp in"))
    yield from trade("cp in", among(sharding.cp_peers, "cp in"))
    yield Round("attend", work=(Kernels("decode", _cached(sharding, layer), np.ones(ranks)),))
    yield from trade("cp lse", among(sharding.cp_peers, "cp lse"))
    yield from trade("cp out", among(sharding.cp_peers, "cp out"))
    yield from trade("kvdp out", among(sharding.kvdp_peers, "kvdp out"))
    out = np.full(ranks, linear.out / ranks)
    yield Round("project out", work=(_product(out, out, rows, linear.nbytes),))
    yield from _summed("sum of projections", shape, ranks)
    if linear.mlp:
        used, read = np.full(ranks, linear.mlp_used / ranks), np.full(ranks, linear.mlp / ranks)
        yield Round("mlp", work=(_product(used, read, rows, linear.mlp_nbytes, calls=2),))
        yield from _summed("sum of MLPs", shape, ranks)


def _cached(sharding: DecodeSharding, layer: DecodeLayer) -> Floats:
    """Bytes of keys and values that every rank reads."""

    def read(rank: int) -> float:
        heads = len(sharding.kv_heads(rank, layer.shape.kv_heads))
        sequences = len(sharding.sequences(rank, layer.shape.batch))
        return heads * sequences * sharding.share(rank).length(layer.context) * layer.cached

    return np.array([read(rank) for rank in range(sharding.ranks)])


def _product(used: Floats, read: Floats, rows: int, nbytes: float, calls: int = 1) -> Kernels:
    """Rows times parameters: two operations each, and every parameter is read once."""
    return Kernels("matmul", 2.0 * rows * used, np.full(len(used), float(calls)), reads=read * nbytes)


def _summed(name: str, shape: DecodeShape, ranks: int) -> Iterator[Round]:
    """An all-reduce: everybody's slice to the rank that sums it, and the sums to everybody."""
    if ranks == 1:
        return
    part = -(-shape.batch * shape.tokens * shape.hidden * shape.itemsize // ranks)
    source = np.repeat(np.arange(ranks, dtype=np.int64), ranks)
    target = np.tile(np.arange(ranks, dtype=np.int64), ranks)
    others = source != target
    messages = Messages(source[others], target[others], np.full(ranks * (ranks - 1), part, dtype=np.int64))
    for half in ("scatter", "gather"):
        yield Round(f"{name}, {half}", {f"{name}, {half}": messages}, (), (f"{name}, {half}",))
