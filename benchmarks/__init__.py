"""Benchmarks: `python -m benchmarks.NAME --help`. Every table names the machine; not part of the package."""
