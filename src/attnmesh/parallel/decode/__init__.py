"""Decode attention over a KV cache that is sharded over ranks."""
