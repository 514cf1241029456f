"""Which way CP ranks merge their results, by what the messages cost.

| combine | rounds | messages a rank starts | bytes |
|---|---|---|---|
| all_to_all | 1 | cp - 1 | the least: each result once, to the rank that wants it |
| reduce_scatter | 2 x log2(cp) | as many | the lse of all heads to all, then each result once |
| all_reduce | 3 x log2(cp) | as many | the same, then all results to all |

An all-to-all is one round, but its cp - 1 messages are started one after another. Gathering and summing go by doubling
and halving, one message a round: worth it when there are many ranks and little to send. An all-reduce also returns all
heads to everyone, which nobody asked for, so it costs more than a reduce-scatter always.
"""

from __future__ import annotations

from functools import lru_cache

from attnmesh.plan.decode_load import COMBINES, Combine, DecodeShape, bytes_sent
from attnmesh.plan.sharding import DecodeSharding
from attnmesh.planner.hardware import Link


@lru_cache(maxsize=256)
def pick_combine(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> Combine:
    """The cheapest combine by estimate; all ranks come to the same answer, since the largest rank's bytes count."""
    seconds = combine_seconds(sharding, shape, link)
    return min(COMBINES, key=lambda combine: seconds[combine])


def combine_seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[Combine, float]:
    """Estimated seconds of every combine. Estimates rank, they do not predict."""
    return {combine: _seconds(sharding, shape, link, combine) for combine in COMBINES}


def _seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link, combine: Combine) -> float:
    halvings = (sharding.cp - 1).bit_length()  # log2, rounded up
    if combine == "all_to_all":
        rounds, messages = min(1, sharding.cp - 1), sharding.cp - 1
    else:
        rounds = messages = halvings * (2 if combine == "reduce_scatter" else 3)
    loads = [bytes_sent(sharding, shape, rank, combine=combine) for rank in range(sharding.ranks)]
    nbytes = max(load["cp lse"] + load["cp out"] for load in loads)
    return rounds * link.latency + messages * link.message + nbytes / link.bandwidth
