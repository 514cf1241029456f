"""Attention over ranks: executors that follow the plans with the operations of one device and a comm."""
