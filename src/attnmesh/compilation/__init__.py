"""Kernels of a model compiled ahead: the calls that a program will make, made once, by several processes."""
