"""Attention modules of other libraries, taken apart into configurations and weights."""
