"""What `attnmesh calibrate` measures: the kernels of this machine and what its processes exchange."""
