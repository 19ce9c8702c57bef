"""A training step -> the joint graph of its forward and backward, without running it."""
