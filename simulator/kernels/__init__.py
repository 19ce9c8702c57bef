"""Turn arrays of ints into figures: the inner loops, compiled."""
