"""The norms of torch that keep statistics over batches, by the classes that torch gives no public names.

Batch norms and instance norms of every dimension, synchronised and lazy ones and those that others have derived share
these bases alone; a list of the public classes would miss some.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm

__all__ = ["BatchNorm", "RunningNorm"]
