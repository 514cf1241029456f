"""Language models from files: checkpoint folders, GGUF files, and weights that are divided over ranks."""

from attnmesh.integrations.attention_weights import attention_from_transformers

__all__ = ["attention_from_transformers"]
