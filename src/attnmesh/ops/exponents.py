"""Numbers of the online softmax that the kernels in Triton and in Gluon share; `ops.gluon` says why."""

HUGE = 2.0**28  # scores in base 2, from which on the largest of a row has all the weight
LOWEST = -(2.0**126)  # less than any score
EXPONENT_BITS = 0x7F800000  # of a float32 that is positive: without the others it is a power of two
