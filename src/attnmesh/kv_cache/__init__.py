"""Paged KV caches: block manager, BlockCache, ShardedCache."""
