"""Sparse attention: every query reads the keys that its indices name."""
