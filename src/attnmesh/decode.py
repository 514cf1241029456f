"""Names of decode besides its operations and caches, which are at the top level: a block's parts, ranks and errors."""

from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.norm_rope import Norm, Rope
from attnmesh.ops.decode.device_errors import check_decode_errors
from attnmesh.parallel.decode.exchange import Exchange
from attnmesh.parallel.decode.ranks import decode_rank
from attnmesh.parallel.reshard.prefill import PrefillKV

__all__ = [
    "AttentionConfig",
    "AttentionWeights",
    "Exchange",
    "Norm",
    "PrefillKV",
    "Rope",
    "check_decode_errors",
    "decode_rank",
]
