"""What every package may use and what knows nothing of attention: checks of arguments, error texts, files, the log."""
