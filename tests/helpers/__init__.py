"""Modules shared by the tests."""
