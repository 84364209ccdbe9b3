"""Check that a plan can split a model's parts over its ranks; errors name the nearest plans that can."""

import math
from collections.abc import Mapping, Sequence

from torch import nn

from meshwise.base.batch_norm_classes import BatchNorm
from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.part import Part
from meshwise.tensor.detect.attention_heads import HeadSharing
from meshwise.tensor.detect.column_row_pairs import FoundAttention
from meshwise.tensor.detect.known_names import enclosing, of_all_blocks
from meshwise.tensor.detect.matrix_modules import PATCH_CONVOLUTIONS


def refuse_unfit_attentions(attentions: Sequence[FoundAttention], *, plan: Plan, sharing: HeadSharing) -> None:
    """Raise PlanError for attentions whose heads do not fit the ranks, or that read the sizes of a split input."""
    ranks = sharing.ranks
    for attention in attentions:
        if plan.sequence_parallel and not attention.enters_whole:
            raise PlanError(
                f"{attention.name} reads sizes of its input x, but under '{plan}' x has a part of the tokens. All "
                "tokens are gathered only if nothing but its first matrices reads x: call self.q(x), self.k(x), "
                "self.v(x), and read x nowhere else. Nearest that works as it is: sequence_parallel=0"
            )
        if not _fits(attention, ranks=ranks, sharing=sharing):
            heads = attention.heads
            why = "they cannot be shared out evenly" if heads.key_count >= ranks else "they are fewer"
            rules = _whole(
                [other for other in attentions if not _fits(other, ranks=ranks, sharing=sharing)], attentions
            )
            whole = f"; or keep it whole on every rank, by the rules {rules}"
            raise PlanError(
                f"{attention.name} has {heads.count} heads over {heads.key_count} key heads, and '{plan}' shares them "
                f"out over {ranks} ranks: {why}. {_nearest(attentions, plan=plan, sharing=sharing)}"
                f"{whole if plan.tp_mode == '1d' and not plan.sequence_parallel else ''}"
            )
    kv_replicas = {kv_replicas for attention in attentions if (kv_replicas := attention.heads.kv_replicas(ranks)) > 1}
    if len(kv_replicas) > 1:
        counts = sorted({attention.heads.key_count for attention in attentions})
        raise PlanError(
            f"attentions with {' and '.join(map(str, counts))} key heads cannot share them over the same {ranks} ranks "
            f"of '{plan}'. {_nearest(attentions, plan=plan, sharing=sharing)}"
        )


def refuse_compiled(module: nn.Module) -> None:
    """Raise PlanError for a model with compiled modules, whose graphs would not contain the collectives."""
    for name, inner in module.named_modules():
        if "_orig_mod" in inner._modules or vars(inner).get("_compiled_call_impl") is not None:
            raise PlanError(
                f"{name or 'the model'} is compiled, and tp changes what its modules compute; leave torch.compile out, "
                "or take tp=1"
            )


def refuse_unsupported_parts(
    parts: Mapping[str, Part], *, modules: Mapping[str, nn.Module], plan: Plan, width: int | None
) -> None:
    """Raise PlanError for a part that sequence parallelism or a `tp_mode` other than 1d cannot split.

    `modules`: the model's modules by name. `width`: the number of features of the hidden states; None if unknown."""
    inside = tuple(f"{name}." for name, part in parts.items() if part.role == "block")
    for name, module in modules.items():
        whole = any(holder in parts and parts[holder].role == "whole" for holder in (name, *enclosing(name)))
        if plan.sequence_parallel and isinstance(module, nn.TransformerDecoderLayer) and not whole:
            rule = f'keep it whole on every rank, as in {{"{of_all_blocks(name)}": "whole"}}, or take '
            others = any(not isinstance(modules[block[:-1]], nn.TransformerDecoderLayer) for block in inside)
            raise PlanError(
                f"{name} ({type(module).__name__}) reads an encoder's output, which has all tokens, by the matrix that "
                f"reads hidden states, and '{plan}' gives a rank a part of these. Nearest that works: "
                f"{rule if others else ''}sequence_parallel=0"
            )
        if plan.tp_mode != "1d" and isinstance(module, nn.Transformer):
            raise PlanError(
                f"{name or 'the model'} ({type(module).__name__}) asks for all features of its input, and "
                f"tp_mode={plan.tp_mode} splits them. Nearest that works: tp_mode=1d"
            )
    if plan.sequence_parallel:
        for name, part in parts.items():
            if part.role != "whole" or not name.startswith(inside) or name not in modules:
                continue
            if isinstance(modules[name], BatchNorm) or any(True for _ in modules[name].children()):
                raise PlanError(
                    f"{name} ({type(modules[name]).__name__}) is kept whole inside a block, where '{plan}' gives a "
                    "rank a part of the tokens, and it may mix tokens. Nearest that works: "
                    "sequence_parallel=0"
                )
    if plan.tp_mode == "1d":
        return
    whole = any(part.whole_features for part in parts.values())
    for name, part in parts.items():
        if whole and not name.startswith(inside):
            continue  # outside of the blocks, hidden states have all features
        own = modules.get(name)
        if own is not None and (reason := _only_1d(own, part, width, rows_move=plan.tp_mode == "3d")):
            raise PlanError(
                f"{name}: {reason}, which tp_mode={plan.tp_mode} has no part for. Nearest that works: tp_mode=1d"
            )
    ends = ("head", "block")
    if width and not any(p.role in ends or _reads_all(modules.get(name), p, width) for name, p in parts.items()):
        raise PlanError(
            f"the model takes and returns {width} features, and tp_mode={plan.tp_mode} gives a rank a part. But "
            "there are no repeated blocks, in a ModuleList, where the split would begin and end. Nearest that works: "
            "tp_mode=1d"
        )


def _only_1d(module: nn.Module, part: Part, width: int | None, *, rows_move: bool) -> str:
    """Return the reason why only 1d can split a part, or "". `rows_move`: True for 3d, which moves rows."""
    if part.role == "whole":
        looks_up = isinstance(module, nn.Embedding)  # its number of rows may equal `width` by chance
        sizes = [parameter.shape[-1:] if looks_up else parameter.shape for parameter in module.parameters()]
        # a linear may read several tokens' features side by side
        multiple = isinstance(module, nn.Linear) and width and module.in_features in range(2 * width, 2**62, width)
        reads_stream = any(width in each for each in sizes) or multiple
        if reads_stream and not _reads_all(module, part, width):
            does = "makes" if looks_up else "reads"
            return f"{type(module).__name__} is kept whole, and it {does} hidden states, which are split by features"
    if part.role == "patches" and isinstance(module, PATCH_CONVOLUTIONS) and module.groups > 1:
        return f"{type(module).__name__} has groups of channels, and they become features, which are split"
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None:
            return "its keys and values have another width than the hidden states"
        if rows_move and not module.batch_first:
            return "batch_first=False puts the rows of the batch into dim 1"
    return ""


def _reads_all(module: nn.Module | None, part: Part, width: int | None) -> bool:
    """Return whether a module is a linear that is kept whole and reads all features of the hidden states."""
    return part.role == "whole" and isinstance(module, nn.Linear) and module.in_features == width


def _fits(attention: FoundAttention, *, ranks: int, sharing: HeadSharing) -> bool:
    """Return whether the ranks can split the heads: each gets whole key heads, with all or some of their queries."""
    keys = attention.heads.key_count
    if keys >= ranks:
        return keys % ranks == 0 or not (attention.cut_as_one and attention.heads.group > 1)
    return sharing.rows_stay and not attention.cut_as_one and attention.heads.kv_replicas(ranks) > 0


def _whole(unfit: Sequence[FoundAttention], attentions: Sequence[FoundAttention]) -> str:
    """Return the text of rules that keep the `unfit` attentions whole and change no other attention."""
    names = [attention.name for attention in unfit]
    patterns = {of_all_blocks(name) for name in names}
    all_unfit = all(attention.name in names for attention in attentions if of_all_blocks(attention.name) in patterns)
    return ", ".join(f"'{name}': 'whole'" for name in (sorted(patterns) if all_unfit else names))


def _nearest(attentions: Sequence[FoundAttention], *, plan: Plan, sharing: HeadSharing) -> str:
    """Return a text with the one or two nearest values of tp that fit all attentions."""
    most = max(attention.heads.count for attention in attentions)
    works = [n for n in range(1, most + 1) if all(_fits(each, ranks=n, sharing=sharing) for each in attentions)]
    near = sorted(sorted(works, key=lambda n: abs(math.log(n / sharing.ranks)))[:2])
    return f"Nearest that works: {' or '.join(f'tp={_ranks(plan, n)}' for n in near)}"


def _ranks(plan: Plan, side: int) -> int:
    """Return the tp of a plan whose heads are split over `side` ranks."""
    power = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[plan.tp_mode]
    return int(side**power) * (plan.tp_depth if plan.tp_mode == "2.5d" else 1)
