"""Exact attention over a mesh of devices."""

from typing import TYPE_CHECKING

from attnmesh.cli.starting import start as _start

_start()  # before torch is imported

# ruff: noqa: E402
from attnmesh import comm as comm
from attnmesh import decode as decode
from attnmesh import generation as generation
from attnmesh import models as models
from attnmesh import recurrent as recurrent
from attnmesh import sparse as sparse
from attnmesh.comm import comm_from, run_virtual
from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.mask import CustomMask
from attnmesh.core.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from attnmesh.core.state import State
from attnmesh.generation.generator import Generator, generate
from attnmesh.generation.sampling import Sampling
from attnmesh.integrations.sdpa import attention_context_parallel
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.models.loading import load_model
from attnmesh.ops.decode.api import decode_attention, paged_decode_attention
from attnmesh.ops.dense.api import attention, explain_attention
from attnmesh.ops.merge import merge
from attnmesh.ops.sparse.arguments import SparseMask
from attnmesh.ops.sparse.attention import attention_distribution, sparse_attention
from attnmesh.ops.sparse.indexer import indexer_topk
from attnmesh.ops.sparse.indexer_loss import indexer_kl_loss
from attnmesh.ops.storage import Quantized, quantize
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.block import AttentionBlock
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_chunks, ring_distributed_attention
from attnmesh.parallel.sparse.api import SparseParallel
from attnmesh.plan.decode import DecodeSharding
from attnmesh.training.batch import gather_log_probs, shard_inputs

if TYPE_CHECKING:
    from attnmesh.planner.recommend import recommend_sharding

__version__ = "0.2.0"

__all__ = [
    "AttentionBlock",
    "Balanced",
    "BlockCache",
    "BlockCausal",
    "CacheSpec",
    "Causal",
    "Chunked",
    "ContextParallel",
    "Contiguous",
    "CustomMask",
    "DecodeSharding",
    "Documents",
    "Full",
    "Generator",
    "Global",
    "Joint",
    "Layout",
    "Mask",
    "Padding",
    "PerSequence",
    "Prefix",
    "Quantized",
    "Sampling",
    "ShardedCache",
    "Slices",
    "SlidingWindow",
    "SparseMask",
    "SparseParallel",
    "State",
    "Striped",
    "Zigzag",
    "attention",
    "attention_context_parallel",
    "attention_distribution",
    "comm_from",
    "decode_attention",
    "explain_attention",
    "gather_log_probs",
    "gather_ring_outputs",
    "generate",
    "indexer_kl_loss",
    "indexer_topk",
    "load_model",
    "merge",
    "paged_decode_attention",
    "quantize",
    "recommend_sharding",
    "register_attention",
    "ring_chunks",
    "ring_distributed_attention",
    "run_virtual",
    "shard_inputs",
    "sparse_attention",
]


if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import the planner on first use: attention with an explicit schedule does not need it."""
        if name == "recommend_sharding":
            from attnmesh.planner.recommend import recommend_sharding

            return recommend_sharding
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
