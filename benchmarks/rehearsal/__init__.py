"""Rehearses runs on many nodes: network namespaces of one machine as nodes, with shaped links between them."""
