"""Language models from files: checkpoint folders, GGUF files, and weights that are divided over ranks."""

from attnmesh.integrations.attention_weights import attention_from_transformers
from attnmesh.models.checkpoint import ModelError
from attnmesh.models.sharded import shard_model

__all__ = ["ModelError", "attention_from_transformers", "shard_model"]
