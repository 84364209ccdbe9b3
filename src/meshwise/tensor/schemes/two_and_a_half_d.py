"""2.5D: d grids of q x q behind each other (Wang et al., "Tesseract", arXiv 2105.14500; Solomonik and Demmel, 2011).

The grids hold copies of the parameters and split the rows of the batch, so a rank's activations, and what it gathers of
them, shrink by the depth as well:

    X  T/(depth·row), K/col          W  K/row, N/col, on every grid          Y  T/(depth·row), N/col

    forward   7 b·s·h / (q·d) + 12 h² / q       (7 b·s·h + 12 h²) / q on one grid of the same q
    and once a step the gradient of W, 12 h² / q² elements a block, summed over depth

With d = 1 it is 2D; with q = 1, data parallel.
"""

from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.schemes.two_d import two_d


def two_and_a_half_d() -> Scheme:
    """2D on every grid, with the rows of the batch split over the grids too."""
    return two_d(rows=("depth", "row"))
