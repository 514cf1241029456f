"""Token generation on one device: a few queries a sequence against a long cache, contiguous or in blocks."""
