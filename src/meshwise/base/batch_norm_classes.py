"""Base classes of torch's norms with statistics over batches, under public names.

All batch norms and instance norms derive from them: of every dimension, synchronised and lazy ones too. A list of the
public classes would miss some.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm

__all__ = ["BatchNorm", "RunningNorm"]
