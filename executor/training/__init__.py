"""Training by a plan: the module that trains, and the captured and rewritten steps behind it."""
