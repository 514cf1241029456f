"""Measures this machine for the planner."""
