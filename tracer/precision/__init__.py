"""The types that a step computes in: autocast, its lists on a GPU, its cache, gradient scaling."""
