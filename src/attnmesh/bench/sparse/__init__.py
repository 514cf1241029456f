"""Sparse attention, its distribution, the indexer and its loss: speed and memory beside the roofline."""
