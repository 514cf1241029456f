"""Exact attention over a mesh of devices."""

from attnmesh.balanced import Balanced
from attnmesh.cache.cache import BlockCache
from attnmesh.cache.stats import CacheFull
from attnmesh.comm import Comm, CommError, comm_from, run_virtual
from attnmesh.joint import Joint
from attnmesh.layout import Contiguous, Layout, Striped, Zigzag
from attnmesh.mask import Causal, Documents, Full, Mask, SlidingWindow, Verdict
from attnmesh.ops.decode.api import decode_attention, paged_decode_attention
from attnmesh.ops.decode.faults import check_decode_faults
from attnmesh.ops.dense.api import attention, explain_attention
from attnmesh.ops.storage import Quantised, quantise
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.queries import gather_ring_outputs, ring_chunks, ring_distributed_attention
from attnmesh.parallel.sdpa import attention_context_parallel
from attnmesh.plan.sharding import DecodeSharding
from attnmesh.state import State, merge

__version__ = "0.1.0"

__all__ = [
    "Balanced",
    "BlockCache",
    "CacheFull",
    "Causal",
    "Comm",
    "CommError",
    "ContextParallel",
    "Contiguous",
    "DecodeSharding",
    "Documents",
    "Full",
    "Joint",
    "Layout",
    "Mask",
    "Quantised",
    "SlidingWindow",
    "State",
    "Striped",
    "Verdict",
    "Zigzag",
    "attention",
    "attention_context_parallel",
    "check_decode_faults",
    "comm_from",
    "decode_attention",
    "explain_attention",
    "gather_ring_outputs",
    "merge",
    "paged_decode_attention",
    "quantise",
    "ring_chunks",
    "ring_distributed_attention",
    "run_virtual",
]
