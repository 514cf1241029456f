"""Decode attention on one device: a few queries per sequence over a long KV cache, contiguous or paged."""
