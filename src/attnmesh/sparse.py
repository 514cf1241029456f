"""Names of sparse attention besides its operations, which are at the top level."""

from attnmesh.ops.sparse.arguments import canonicalize, convert_lse
from attnmesh.ops.sparse.indexer import indexer_scores_at
from attnmesh.ops.sparse.indexer_loss import AttentionTarget
from attnmesh.ops.storage import unpack_index_keys, unpack_latent

__all__ = [
    "AttentionTarget",
    "canonicalize",
    "convert_lse",
    "indexer_scores_at",
    "unpack_index_keys",
    "unpack_latent",
]
