"""`attnmesh generate`: answers questions about a text with a language model over ranks."""
