"""`attnmesh plan` and `attnmesh simulate`."""
