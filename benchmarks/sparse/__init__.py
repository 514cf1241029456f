"""Sparse attention."""
