"""A training step on the real device, op by op."""
