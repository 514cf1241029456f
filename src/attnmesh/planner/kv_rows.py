"""Whether a KVDP rank projects K and V for all sequences, fused with Q, or for its own only."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from attnmesh.planner.hardware import Device

KvRows = Literal["auto", "all", "own"]


@lru_cache(maxsize=1024)
def own_rows_pay(spared: int, weights: int, device: Device) -> bool:
    """Whether `spared` rows less through `weights` numbers of W_k and W_v are worth one more operation.

    Fused with the queries' projection, keys and values of all sequences cost no launch, and the weights are read either
    way: with few rows nothing is to be won.
    """
    return float(device.curve("matmul").seconds(2.0 * spared * weights)) > device.launch
