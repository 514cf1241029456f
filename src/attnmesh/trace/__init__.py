"""Timelines of simulated and real runs."""
