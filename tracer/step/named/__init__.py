"""Training steps of models that are known by name, or by a configuration in a file."""
