"""How the ranks of a block exchange, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from attnmesh.plan.decode import Combine, DecodeShape, DecodeSharding, Trade
from attnmesh.planner.auto import pick_combine
from attnmesh.planner.catalog import usual_cluster


@dataclass(frozen=True)
class Exchange:
    """KVDP's trades, CP's combining of states, and who projects the queries.

    `cp="auto"` goes by the size of the messages. With `replicate_q` CP ranks project the same queries, as in Helix: W_q
    is held `cp` times, and no queries are gathered.
    """

    kvdp: Trade = "all_to_all"
    cp: Literal["auto"] | Combine = "auto"
    replicate_q: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kvdp", self.kvdp, get_args(Trade)),
            ("cp", self.cp, ("auto", *get_args(Combine))),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    def combine(self, sharding: DecodeSharding, shape: DecodeShape, device: str) -> Combine:
        """How CP ranks combine their states of such a step: on every rank the same."""
        return pick_combine(sharding, shape, usual_cluster(device).near) if self.cp == "auto" else self.cp
