"""Runs programs on a model of a cluster."""
