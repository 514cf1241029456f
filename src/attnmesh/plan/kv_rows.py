"""Whether a KVDP rank projects K and V for all sequences, fused with Q, or for its own only."""

from __future__ import annotations

from typing import Literal

from attnmesh.plan.rates import Machine

KvRows = Literal["auto", "all", "own"]


def own_rows_pay(spared: int, weights: int, machine: Machine) -> bool:
    """Whether `spared` rows less through `weights` numbers of W_k and W_v are worth one more operation.

    Fused with the queries' projection, keys and values of all sequences cost no launch, and the weights are read either
    way: with few rows nothing is to be won.
    """
    return 2 * spared * weights / machine.flops > machine.launch
