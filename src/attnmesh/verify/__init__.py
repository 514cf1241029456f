"""`attnmesh verify`: every mode on fresh random inputs against float64, by the error rule of `attnmesh.testing`."""
