"""Text generation over ranks."""
