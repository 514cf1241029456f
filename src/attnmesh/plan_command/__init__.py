"""`attnmesh plan` and `attnmesh simulate`: from what a person asked to what they read."""
