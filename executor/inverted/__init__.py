"""GELU and SiLU that save their output, which the next layer saves anyway, in place of their input.

After Inverted Activations (Novikov and Oseledets, arXiv:2407.15545). Forward is torch's own; gradients are rounded
otherwise than torch's (see `executor.inverted.fits` for by how much).
"""

from executor.inverted.modules import GELU, SiLU, convert

__all__ = ["GELU", "SiLU", "convert"]
