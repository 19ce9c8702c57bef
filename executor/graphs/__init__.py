"""The graphs of a planned step: what runs, and what autograd has to know of it."""
