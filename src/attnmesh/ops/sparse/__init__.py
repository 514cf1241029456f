"""Sparse attention over the top-k keys of every query, and the indexer that selects them."""
