"""The muscles: plans executed with one device's operations over a comm."""
