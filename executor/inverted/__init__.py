"""GELU and SiLU that save their output, which the next layer saves anyway, in place of their input.

After Inverted Activations (Novikov and Oseledets, arXiv:2407.15545). `Fit` says how gradients are rounded.
"""

from executor.inverted.modules import GELU, SiLU, convert

__all__ = ["GELU", "SiLU", "convert"]
