"""`attnmesh verify`: every mode against float64."""
