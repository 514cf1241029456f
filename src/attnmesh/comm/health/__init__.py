"""Failure detection: ranks that have ended, do not arrive or are out of step, and the error that the others raise."""
