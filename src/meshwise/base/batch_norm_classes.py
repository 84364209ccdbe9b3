"""Public names for torch's private base classes of batch norms (`BatchNorm`), and of batch and instance norms
(`RunningNorm`, which may keep running statistics).

`isinstance` with a base class also finds lazy and synchronised norms, of every dimension."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm

__all__ = ["BatchNorm", "RunningNorm"]
