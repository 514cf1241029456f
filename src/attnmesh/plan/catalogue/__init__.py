"""Devices and links by name, and the TOML files that say them."""
