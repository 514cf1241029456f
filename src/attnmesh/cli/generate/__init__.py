"""`attnmesh generate`."""
