"""Models of Transformers: attention over ranks, prompts read and tokens generated, weights found and loaded."""
