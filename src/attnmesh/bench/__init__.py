"""Benchmarks: ratios measured in one run, with the machine and the peers beside each figure."""
