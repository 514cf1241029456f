"""Names of sparse attention that fewer programs need; its operations over whole tensors are at the top level."""

from attnmesh.ops.sparse.arguments import TopKIndices, canonicalize, convert_lse
from attnmesh.ops.sparse.decode import paged_indexer_topk, paged_sparse_decode_attention
from attnmesh.ops.sparse.indexer import indexer_scores_at
from attnmesh.ops.sparse.indexer_loss import AttentionTarget
from attnmesh.ops.storage import unpack_index_keys, unpack_latent
from attnmesh.parallel.sparse.decode import SparseDecode

__all__ = [
    "AttentionTarget",
    "SparseDecode",
    "TopKIndices",
    "canonicalize",
    "convert_lse",
    "indexer_scores_at",
    "paged_indexer_topk",
    "paged_sparse_decode_attention",
    "unpack_index_keys",
    "unpack_latent",
]
