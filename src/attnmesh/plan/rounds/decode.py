"""Rounds of one layer in a step of token generation: AttentionBlock's stages, and the MLP that follows.

Exchanges have nothing to compute behind them: a layer is a chain.

    project q, k, v | queries to whoever holds the keys (KVDP, then CP) | attend | states merged (CP)
    | results back (KVDP) | project out, summed over all ranks | MLP, summed over all ranks
"""

from __future__ import annotations

from collections.abc import Iterator

from attnmesh.plan.decode_load import DecodeShape, messages_sent
from attnmesh.plan.program import Messages, Program, Round
from attnmesh.plan.rounds.decode_layer import AROUND_ATTENTION, AROUND_MLP, EXCHANGE, MERGE, DecodeLayer
from attnmesh.plan.rounds.summing import summed
from attnmesh.plan.sharding import DecodeSharding
from attnmesh.planner.combine import pick_combine
from attnmesh.planner.hardware import Link


def decode_program(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Program:
    """One layer's step on all ranks. `link` is what ways to merge and to sum are chosen by."""
    sharding.check_heads(layer.shape.q_heads, layer.shape.kv_heads)
    return Program(f"decode {sharding}", sharding.ranks, lambda: _rounds(sharding, layer, link))


def _rounds(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Iterator[Round]:
    exchanges = _exchanges(sharding, layer.shape, link)
    nbytes = layer.rows * layer.shape.hidden * layer.shape.itemsize

    def trade(name: str, launches: int = EXCHANGE) -> Iterator[Round]:
        """An exchange, if there is anything to send, and the kernels that it wants afterwards."""
        if len(exchanges[name]):
            yield Round(name, {name: exchanges[name]}, (), (name,))
            yield Round(f"after {name}", work=(layer.small(sharding, launches),))

    yield Round("project", work=(layer.small(sharding, AROUND_ATTENTION), layer.projected(sharding)))
    yield from trade("kvdp in")
    yield from trade("cp in")
    yield Round("attend", work=(layer.attention(sharding),))
    yield from trade("cp lse")
    yield from trade("cp out", EXCHANGE + MERGE)
    yield from trade("kvdp out")
    yield Round("project out", work=(layer.projected_out(sharding),))
    yield from summed("sum of projections", nbytes, sharding.ranks, link)
    if layer.linear.mlp:
        yield Round("mlp", work=(layer.small(sharding, AROUND_MLP), layer.mlp(sharding)))
        yield from summed("sum of MLPs", nbytes, sharding.ranks, link)


def _exchanges(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[str, Messages]:
    """The messages between KVDP peers and between CP peers, by the name of their exchange."""
    combine = pick_combine(sharding, shape, link)
    assert combine != "all_reduce", "it costs more than a reduce-scatter on every link"
    found: dict[str, list[tuple[int, int, int]]] = {}
    for rank in range(sharding.ranks):
        for name, parts in messages_sent(sharding, shape, rank, combine=combine).items():
            found.setdefault(name, []).extend((rank, peer, nbytes) for peer, nbytes in parts.items())
    return {name: Messages.of(messages) for name, messages in found.items()}
