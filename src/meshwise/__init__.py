"""Train one plain PyTorch model on many devices, and prove that the split model is the same model."""

from meshwise.mesh import Mesh

__all__ = [
    "Mesh",
]
