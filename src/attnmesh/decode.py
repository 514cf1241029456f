"""Names of decode and caches that fewer programs need; the operations and caches themselves are at the top level."""

from attnmesh.core.state import merge_sinks
from attnmesh.kv_cache.block_manager import CacheFull, content_ids
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.norm_rope import Norm, Rope
from attnmesh.ops.decode.device_errors import check_decode_errors
from attnmesh.ops.paged import paged_prefill_attention
from attnmesh.parallel.decode.exchange import Exchange
from attnmesh.parallel.decode.ranks import decode_rank
from attnmesh.parallel.reshard.api import reshard
from attnmesh.parallel.reshard.contents import PrefillKV
from attnmesh.parallel.reshard.files import load_cache, save_cache

__all__ = [
    "AttentionConfig",
    "AttentionWeights",
    "CacheFull",
    "Exchange",
    "Norm",
    "PrefillKV",
    "Rope",
    "check_decode_errors",
    "content_ids",
    "decode_rank",
    "load_cache",
    "merge_sinks",
    "paged_prefill_attention",
    "reshard",
    "save_cache",
]
