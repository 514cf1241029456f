"""`attnmesh generate`: a document and questions about it, answered by ranks that share the reading and the cache."""
