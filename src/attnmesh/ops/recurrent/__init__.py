"""Recurrent layers on one device: their recurrences, the chunked computation, the short convolution."""
