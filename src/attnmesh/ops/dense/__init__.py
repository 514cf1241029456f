"""Dense attention on one device: `attention`, and the blockwise form that context parallelism uses."""
