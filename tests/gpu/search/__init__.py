"""Random calls of the library against float64: `python -m tests.gpu.search --help`.

A case is determined by its family, the seed and its number. It is a dict of a few parameters, and reads as one line.
"""
