"""Devices and links by name."""
