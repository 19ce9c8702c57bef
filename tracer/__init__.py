"""A model's training step -> Trace. The only rooms that import torch are this one and `executor`."""
