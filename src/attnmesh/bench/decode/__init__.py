"""Decode measured: shapes, peers, storage types, tokens, splits."""
