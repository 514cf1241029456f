"""Random problems, their results in float64, and the error rule; shared by the tests and `attnmesh verify`."""
