"""Transformers attention and model loading."""
