"""Times of every kernel beside its reference, its peers and the limits of the GPU."""
