"""GELU and SiLU that save their output, which the next layer saves anyway, in place of their input.

After Inverted Activations (Novikov and Oseledets, arXiv:2407.15545): the derivative is computed from the output and one
bit an element (or two), which says on what side of the function's minimum the input lay. Forward is torch's own;
gradients are rounded otherwise than torch's (see `executor.inverted.fits` for by how much).
"""

from executor.inverted.modules import GELU, SiLU, convert

__all__ = ["GELU", "SiLU", "convert"]
