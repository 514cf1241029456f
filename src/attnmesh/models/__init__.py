"""Language models from files: checkpoint folders, GGUF files, and weights that are divided over ranks."""
