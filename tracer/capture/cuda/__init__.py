"""Which ops and kernels a GPU would run for what a model calls."""
