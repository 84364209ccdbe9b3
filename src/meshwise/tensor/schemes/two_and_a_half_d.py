"""Scheme 2.5D: d grids of q x q (Wang et al., "Tesseract", arXiv 2105.14500; Solomonik and Demmel, 2011).

The d grids lie along the axis depth. They hold copies of the parameters and split the rows of the batch. So a rank's
activations, and the traffic of activations, are smaller by a factor of d:

    X  T/(depth·row), K/col          W  K/row, N/col, on every grid          Y  T/(depth·row), N/col

    forward of a block    7 b·s·h / (q·d) + 12 h² / q elements      on one grid (7 b·s·h + 12 h²) / q
    gradient of W         12 h² / q² elements per block, summed over depth once per step

With d = 1 the scheme is 2D; with q = 1 it is data parallelism.
"""

from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.schemes.two_d import two_d


def two_and_a_half_d() -> Scheme:
    """Return the scheme 2D with the rows of the batch split over the axis depth too."""
    return two_d(rows=("depth", "row"))
