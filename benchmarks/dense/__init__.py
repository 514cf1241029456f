"""Dense attention kernels."""
