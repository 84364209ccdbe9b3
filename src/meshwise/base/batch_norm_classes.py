"""The norms of torch that keep statistics over batches, by the classes that torch gives no public names.

All batch norms and instance norms share these base classes: every dimension, synchronised, lazy, and derived ones. A
list of the public classes would miss some.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm

__all__ = ["BatchNorm", "RunningNorm"]
