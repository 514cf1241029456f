"""Recurrent layers: linear attention, state-space layers, delta rules and short convolutions."""

from attnmesh.core.segment import Segment
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.convolution import ShortConvolution
from attnmesh.ops.recurrent.delta_rules import GatedDeltaRule, KimiDeltaAttention
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.recurrent.linear_attention import RWKV7, LightningAttention
from attnmesh.ops.recurrent.state_space import Mamba1, Mamba2

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
