"""All tests that need a GPU, on one GPU: `make test-gpu`."""
