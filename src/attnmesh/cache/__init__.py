"""The block KV cache: a pool of blocks, who holds which, and prefixes found again."""
