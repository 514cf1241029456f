"""Dense attention on one device: `attention` and the pieces that context parallelism runs block by block."""
