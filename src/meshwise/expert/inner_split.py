"""Split the matrices of stacked experts over the ranks of `etp`: the first by columns, the last by rows.

    | first   (experts, n · inner, features)   split in each of its n sections (gate and value), or in groups of n
    | last    (experts, features, inner)       split in `inner`; the results are summed over the ranks

The bias of the first, (experts, n · inner), is split as the first. The bias of the last, (experts, features), is whole.

Both matrices may be stored the other way round, (experts, inputs, outputs)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from meshwise.layout.layout import ANYWHERE, DimSplit
from meshwise.model.find_mixtures import Mixture
from meshwise.plan import PlanError

WIDTHS = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "hidden", "inner")
"""Names of the attribute that holds the inner size of an expert."""


@dataclass(frozen=True)
class InnerSplit:
    """How the parameters of stacked experts are split over `etp`.

    | cuts     dim that is split, and how, by name of the parameter; other parameters stay whole
    | bias     name of the bias that is added to the results; "" for none
    | inner    inner size over all ranks"""

    cuts: Mapping[str, tuple[int, DimSplit]]
    bias: str
    inner: int


def inner_split(experts: nn.Module, *, mixture: Mixture, name: str) -> InnerSplit:
    """Return how the experts of a module called `name` are split over `etp`.

    Raises PlanError for experts with other parts, and where the sizes do not show which dim is the inner one."""
    own = dict(experts.named_parameters(recurse=False))
    matrices = {key: each for key, each in own.items() if each.dim() == 3}
    if mixture.form == "modules" or len(own) < sum(1 for _ in experts.parameters()) or len(matrices) != 2:
        raise PlanError(
            f"{name} ({type(experts).__name__}) has other parameters than two matrices for each expert, so etp cannot "
            "split it. Nearest that works: 'etp=1'"
        )
    (first_name, first), (last_name, last) = matrices.items()
    stored = {
        flipped: (first.size(1 + flipped), last.size(2 - flipped))
        for flipped in (False, True)
        if first.size(2 - flipped) == last.size(1 + flipped) and first.size(1 + flipped) % last.size(2 - flipped) == 0
    }
    declared = vars(experts).get("is_transposed")
    flipped = declared if declared in stored or len(stored) != 1 else next(iter(stored))
    if flipped not in stored:
        raise PlanError(
            f"{name}: matrices of {tuple(first.shape)} and {tuple(last.shape)} do not show which dim is the inner one. "
            "State it by an attribute of the module, is_transposed: True for (experts, inputs, outputs). Nearest that "
            "works as it is: 'etp=1'"
        )
    outputs, inner = stored[flipped]
    number = outputs // inner
    together = vars(experts).get("is_concatenated", True)
    cut = ANYWHERE if number == 1 else DimSplit((inner,) * number) if together else DimSplit(grain=number)
    cuts = {first_name: (1 + flipped, cut), last_name: (2 - flipped, ANYWHERE)}
    biases = [key for key, each in own.items() if each.dim() == 2]
    cuts |= {key: (1, cut) for key in biases if key.startswith(first_name)}
    rest = [key for key in biases if key not in cuts]
    if len(rest) > 1 or len(own) != len(cuts) + len(rest):
        raise PlanError(f"{name} has parameters that etp cannot split: {', '.join(rest)}. Nearest that works: 'etp=1'")
    return InnerSplit(cuts, next(iter(rest), ""), inner)
