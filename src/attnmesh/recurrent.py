"""Recurrent layers: linear attention, state-space layers, delta rules and short convolutions."""

from attnmesh.core.segment import Segment
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.recurrent.layers import (
    RWKV7,
    GatedDeltaRule,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)

__all__ = [
    "RWKV7",
    "GatedDeltaRule",
    "KimiDeltaAttention",
    "LightningAttention",
    "Mamba1",
    "Mamba2",
    "RecurrentLayer",
    "Segment",
    "ShortConvolution",
    "scan",
]
