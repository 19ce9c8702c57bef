"""Training by a plan: the module that trains, the engines behind it, and what they promise."""
