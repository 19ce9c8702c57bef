"""A training step from a model's name, or from a function of the user's."""
