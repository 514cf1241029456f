"""KV caches that move: to another sharding, to other ranks, to files and back."""
