"""Assign each module of a plain model its role in tensor parallelism: from rules, `_tp_plan` or its structure.

Each module gets its role (docs/tensor.md explains them) from the first of these sources that has one:

    | 1. rules        of the user: {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    | 2. declared     roles of matrices in `_tp_plan`, an attribute of transformers models
    | 3. structure    sizes, attributes that count heads, the order of registration (`ModelStructure`)

A rule that matches nothing is an error, with similar names. A parameter without a role is an error, with rules to copy.
A module that the plan cannot split is an error that names the nearest plans that can."""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from meshwise.base.batch_norm_classes import BatchNorm
from meshwise.model.find_mixtures import find_mixtures, ruled_mixtures
from meshwise.model.parameter_units import dotted_names, matches, of_all_blocks, partition, pattern_of
from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.detect.adapter_parts import prompt_rules, with_adapters, without_adapters
from meshwise.tensor.detect.attention_heads import head_degree, latent_attentions, latent_parts
from meshwise.tensor.detect.attention_names import DECLARED, enclosing
from meshwise.tensor.detect.column_row_pairs import FoundAttention
from meshwise.tensor.detect.layer_formulas import PATCH_CONVOLUTIONS, as_matrix
from meshwise.tensor.detect.roles_from_structure import ModelStructure

Rules: TypeAlias = Mapping[str, str]
"""Mapping from a name pattern to the role of the modules or parameters that match; docs/tensor.md has an example."""

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "attention": ("heads", "kv_heads"),
    "colwise": ("sections", "grain"),
    "rowwise": ("grain",),
    "inner": ("grain",),
}
"""Names of the options that a rule may give with a role."""

_BY_HAND = ("colwise", "rowwise", "single", "head", "embedding", "positions", "patches", "vector", "inner", "each_head")
_ALLOWED = (*_BY_HAND, "norm", "attention", "experts", "whole")


@dataclass(frozen=True)
class Rule:
    """Right side of a rule, such as `colwise sections=3`: a role and options."""

    role: str
    options: Mapping[str, int]

    @classmethod
    def parse(cls, text: str, *, pattern: str) -> "Rule":
        """Return the rule in `text`; `pattern` is for errors. Raises ValueError for an unknown role or option."""
        role, *words = text.split() or [""]
        if role not in _ALLOWED:
            near = difflib.get_close_matches(role, _ALLOWED, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"rule {pattern!r}: {role!r} is not a role; {hint}the roles are {' '.join(_ALLOWED)}")
        options = {}
        for word in words:
            match = re.fullmatch(r"(\w+)=([1-9]\d*)", word)
            taken = _OPTIONS.get(role, ())
            if match is None or match[1] not in taken:
                takes = f"takes {' and '.join(f'{name}=number' for name in taken)}" if taken else "takes no options"
                raise ValueError(f"rule {pattern!r}: {word!r} in {text!r}; the role {role!r} {takes}")
            options[match[1]] = int(match[2])
        return cls(role, options)


_SHOWN = 8
"""Largest number of parameters, and of rules for modules of one name, that an error message shows."""

_OF_TOKENS = ("attention pattern=", "tokens whole")
"""First words of the rules that concern tokens and not matrices; see `attention/context_parallel.py`."""


def assign_roles(module: nn.Module, *, plan: Plan, rules: Rules | None = None) -> Mapping[str, Part]:
    """Return the roles (as `Part`) under a plan, by name of a module, or of a parameter that a module holds itself.

    The module stays unchanged and may be on the meta device. With adapters of PEFT, rules name the adapted modules.
    Raises ValueError for a rule that matches nothing or contradicts the sizes, and for parameters without a role.
    Raises PlanError for a compiled model, and for modules that the plan cannot split, with the nearest plans."""
    refuse_compiled(module, plan=plan)
    rules = {**prompt_rules(module, plan=plan), **(rules or {})}
    bare = without_adapters(module)
    if bare is not module:
        return with_adapters(assign_roles(bare, plan=plan, rules=rules), module=module, plan=plan)
    found = _read(module, plan=plan, rules=rules)
    if found.left:
        raise ValueError(_no_role(module, found, plan=plan, rules=rules))
    parts = _fitting(found, plan=plan)
    if wrong := found.structure.wrong_splits(parts):
        pairs = {name: enclosing(name)[0] for name, part in parts.items() if part.role in ("colwise", "rowwise")}
        around = [home for home in wrong if any(other.startswith(f"{home}.") for other in pairs.values())]
        kept = [home for home in wrong if home not in around] + [name for name in pairs if pairs[name] in around]
        left = [name for name, _ in module.named_parameters() if pairs.get(enclosing(name)[0]) in wrong]
        found = dataclasses.replace(found, left=left)
        raise ValueError(_no_role(module, found, plan=plan, rules=rules, kept=kept))
    return parts


def planned_roles(module: nn.Module, *, plan: Plan, rules: Rules | None) -> Mapping[str, Part]:
    """Return the roles as `assign_roles` does; none if the plan has no `tp`. Raises ValueError for wrong rules, and
    PlanError for modules that were compiled and that the plan changes."""
    if plan.tp > 1:
        return assign_roles(module, plan=plan, rules=rules)
    refuse_compiled(module, plan=plan)
    _matched(without_adapters(module), rules or {})
    return {}


@dataclass(frozen=True)
class _Found:
    """Parts from all sources, names that a rule keeps whole, and names of parameters without a role (`left`)."""

    structure: ModelStructure
    parts: Mapping[str, Part]
    whole: Collection[str]
    left: Sequence[str]


def _read(module: nn.Module, *, plan: Plan, rules: Rules) -> _Found:
    matched, latents = _matched(module, rules), latent_attentions(module)
    mixtures = {**find_mixtures(module), **ruled_mixtures(module, rules=rules)}
    given = {**{name: Rule("whole", {}) for name in (*mixtures, *latents)}, **matched}
    stated = {name: rule.role for name, rule in given.items()}
    declared = _declared(module, stated=stated)
    structure = ModelStructure(
        module, stated={**declared, **stated}, options={name: rule.options for name, rule in given.items()}, plan=plan
    )
    whole = {name for name, role in stated.items() if role == "whole"}
    parts = {name: own for name, own in structure.parts.items() if name in stated or not _lies_in(name, holders=whole)}
    divided = [name for name in mixtures if name not in matched and not _lies_in(name, holders=whole)]
    parts |= dict.fromkeys(divided, Part("experts"))
    for name, attention in latents.items():
        if name not in matched and not _lies_in(name, holders=whole):
            parts |= latent_parts(attention, name=name, plan=plan, declared=_declared(module, stated=matched))
    for name, rule in given.items():
        if rule.role in ("colwise", "rowwise") and name in parts and parts[name].role != rule.role:
            raise ValueError(
                f"a rule gives {name!r} the role {rule.role!r}, but no pair of matrices was found with it in that "
                f"role; without the rule it is {parts[name].role!r}"
            )
    placed = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if _places(parts, name)}
    left = [name for name, p in module.named_parameters() if id(p) not in placed]
    # Routers, gates of shared experts, matrices around experts: every rank computes the same from all features.
    around = {enclosing(name)[0] for name in divided} - {"", *structure.blocks}
    pair = [name for name, part in parts.items() if part.role in ("colwise", "rowwise") or part.inner]
    beside = [name for name in pair if enclosing(name)[0] in around]
    held = [name for name in (*left, *beside) if name not in stated and _lies_in(name, holders=around)]
    parts |= dict.fromkeys(held, Part("whole"))
    left = [name for name in left if name not in parts]
    return _Found(structure, parts, whole, left)


def _fitting(found: _Found, *, plan: Plan) -> Mapping[str, Part]:
    """Return the parts with the changes that the plan needs. Raises PlanError if the plan cannot split a part."""
    structure, whole = found.structure, found.whole
    split = [each for each in structure.attentions if each.name not in whole and not _lies_in(each.name, holders=whole)]
    refuse_unfit_attentions(split, modules=structure.modules, plan=plan)
    parts = whole_outside(found.parts, plan=plan, needs_all_features=structure.needs_all_features)
    refuse_unsupported_parts(parts, modules=structure.modules, plan=plan, width=structure.width)
    return parts


def _lies_in(name: str, *, holders: Collection[str]) -> bool:
    """Return whether a module around `name` is among `holders`."""
    return any(holder in holders for holder in enclosing(name))


def _matched(module: nn.Module, rules: Rules) -> dict[str, Rule]:
    """Return the rule of every module or parameter that a pattern matches; the last one if several match."""
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    matched: dict[str, Rule] = {}
    for pattern, text in rules.items():
        names = [name for name in (*modules, *parameters) if matches(name, pattern=pattern)]
        if not names:
            raise PlanError(f"rule {pattern!r} matches no module and no parameter; {_near(pattern, modules[1:])}")
        if text.startswith(_OF_TOKENS):
            continue
        rule = Rule.parse(text, pattern=pattern)
        if rule.role != "experts":  # see `ruled_mixtures`
            matched |= dict.fromkeys(names, rule)
    return matched


def _near(pattern: str, names: Sequence[str]) -> str:
    general = list(dict.fromkeys(of_all_blocks(name) for name in names))
    near = difflib.get_close_matches(of_all_blocks(pattern), general, n=3, cutoff=0.5)
    return f"near names: {' '.join(near)}" if near else f"there are {' '.join(general[:8])} and more"


def _declared(module: nn.Module, *, stated: Collection[str]) -> dict[str, str]:
    """Return the roles in a transformers model's `_tp_plan`, by module name. Raises ValueError for an unknown word."""
    found: dict[str, str] = {}
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for owner_name, owner in module.named_modules():
        declared = getattr(owner, "_tp_plan", None)
        if not isinstance(declared, Mapping):
            continue
        for pattern, word in declared.items():
            below = f"{owner_name}.{pattern}" if owner_name else pattern
            matched = [
                name
                for name in names
                if matches(name, pattern=below) and name not in stated and not _lies_in(name, holders=stated)
            ]
            if matched and word not in DECLARED:
                around = below.rpartition(".")[0]
                raise ValueError(
                    f"{type(owner).__name__} declares {below!r} as {word!r} in `_tp_plan`; no such role exists here. "
                    f'A rule that works keeps the module around it whole on every rank: {{"{around}": "whole"}}'
                )
            if role := DECLARED.get(word):
                found |= dict.fromkeys(matched, role)
    return found


def _no_role(module: nn.Module, found: _Found, *, plan: Plan, rules: Rules, kept: Sequence[str] | None = None) -> str:
    """Return an error message about parameters without a role, with rules to copy that were tried and work.

    `kept`: modules to keep whole; None for modules around these parameters."""
    structure = found.structure
    of_any_block = list({of_all_blocks(name): name for name in reversed(found.left)}.values())[::-1]
    reasons = {name: f"  ({why})" if (why := structure.reason(name)) else "" for name in of_any_block[:_SHOWN]}
    lines = [f"  {name}  {tuple(module.get_parameter(name).shape)}{why}" for name, why in reasons.items()]
    more = [f"  and {len(of_any_block) - _SHOWN} more"] if len(of_any_block) > _SHOWN else []
    plainer = dataclasses.replace(plan, tp_mode="1d", tp_depth=1, sequence_parallel=0)
    units = [_to_keep_whole(module, name, found) for name in found.left] if kept is None else kept
    examples = {pattern_of(unit, module=module): "whole" for unit in dict.fromkeys(units)}
    plans = dict.fromkeys((plan, plainer))
    works = [each for each in plans if _rules_work(module, plan=each, rules={**rules, **examples})]
    shown = ", ".join(f'"{name}": "{role}"' for name, role in examples.items())
    instead = "" if plan in works else f", and take tp_mode=1d{' sequence_parallel=0' * plan.sequence_parallel}"
    advice = f"State them in Options(tensor_rules=…), or model.tensor_rules of a job, as in {{{shown}}}{instead}"
    advice = advice if works else f"No working rules found for '{plan}': write your own, or use tp=1"
    roles = f"the roles are {' '.join(_ALLOWED)}"
    return "\n".join(["tensor parallelism found no role for these parameters:", *lines, *more, f"{advice}; {roles}"])


def _rules_work(module: nn.Module, *, plan: Plan, rules: Rules) -> bool:
    """Return whether every parameter gets a role that the plan can split. Whole matrices in blocks need 1d, and a block
    that holds a whole matrix itself needs all tokens."""
    try:
        found = _read(module, plan=plan, rules=rules)
        modules, blocks = found.structure.modules, found.structure.blocks
        held = [name for name in found.whole if name in modules and enclosing(name)[0] in blocks]
        if plan.sequence_parallel and any(as_matrix(modules[name], name=name) for name in held):
            return False
        if found.left or (plan.tp_mode != "1d" and any(map(found.structure.writes_hidden_states, found.whole))):
            return False
        split = any(part.hidden_width or part.role in ("colwise", "head") for part in found.parts.values())
        return bool(_fitting(found, plan=plan)) and split
    except ValueError:
        return False


def _to_keep_whole(module: nn.Module, name: str, found: _Found) -> str:
    """Return the outermost module to keep whole for a parameter without a role, or the parameter itself.

    A module outside of the blocks must hold no parameter with a role. No module may hold blocks or experts. For a
    parameter of an attention that is a block itself, return the attention, because the heads of all ranks use it."""
    blocks, left = found.structure.blocks, set(found.left)
    divided = [*blocks, *(key for key, part in found.parts.items() if part.role == "experts")]
    for holder in reversed(enclosing(name)[:-1]):
        within, kept = f"{holder}.", module.get_submodule(holder)
        lacking = all(within + key in left for key, _ in kept.named_parameters())
        fits = lacking or _lies_in(holder, holders=blocks) or isinstance(kept, nn.MultiheadAttention)
        if fits and not any(f"{key}.".startswith(within) for key in divided):
            return holder
    around = [key for key in enclosing(name) if key in found.parts and found.parts[key].role == "attention"]
    return around[0] if around else name


def _places(parts: Mapping[str, Part], name: str) -> bool:
    """Return whether a parameter has a role, directly or through the module that holds it."""
    around = [parts.get(holder) for holder in enclosing(name)]
    if any(part is not None and part.role in ("whole", "experts") for part in around):
        return True
    holder = around[0]
    return name in parts or (holder is not None and holder.role not in ("attention", "pair", "block"))


def whole_outside(parts: Mapping[str, Part], *, plan: Plan, needs_all_features: bool) -> dict[str, Part]:
    """Return the parts, changed for a model that uses all features of hidden states outside of the blocks.

    A model does so if it has no head, or if `needs_all_features` (modules outside of the blocks do). Then blocks get
    `whole_features`, as do embeddings and split linears outside of blocks. Small parts there, such as norms, become
    whole. Under 1d, or without blocks, nothing changes."""
    blocks = tuple(name for name, part in parts.items() if part.role == "block")
    split = any(part.role == "head" for part in parts.values()) and not needs_all_features
    if plan.tp_mode == "1d" or not blocks or split:
        return dict(parts)
    inside = tuple(f"{block}." for block in blocks)
    changed = {}
    for name, part in parts.items():
        if part.role == "block" or (part.role in ("embedding", "single", "rowwise") and not name.startswith(inside)):
            changed[name] = dataclasses.replace(part, whole_features=True)
        elif part.role in ("norm", "positions", "patches", "vector") and not name.startswith(inside):
            changed[name] = Part("whole")
    return {**parts, **changed}


def refuse_unfit_attentions(
    attentions: Sequence[FoundAttention], *, modules: Mapping[str, nn.Module], plan: Plan
) -> None:
    """Raise PlanError for attentions with heads that do not fit the ranks, that read sizes of a split input, or whose
    `forward` another of the `modules` calls."""
    ranks = head_degree(plan)
    for attention in attentions:
        around, _, last = attention.name.rpartition(".")
        if (last, "forward") in dotted_names(type(modules[around])):
            raise PlanError(
                f"{around} calls self.{last}.forward(…), which leaves out the hooks that sum gradients under '{plan}'. "
                f"Call self.{last}(…) there"
            )
        if plan.sequence_parallel and not attention.tried:
            raise PlanError(
                f"{attention.name} needs other arguments than a trial has, so it may read sizes of its input, which "
                f"has only some tokens under '{plan}'. Nearest that works: sequence_parallel=0"
            )
        if not attention.fits(ranks=ranks, plan=plan):
            heads = attention.heads
            rules = _whole([other for other in attentions if not other.fits(ranks=ranks, plan=plan)], attentions)
            whole = f"; or keep it whole on every rank, by the rules {rules}"
            raise PlanError(
                f"{attention.name} has {heads.count} heads over {heads.key_count} KV heads, which '{plan}' can neither "
                f"divide nor replicate evenly over {ranks} ranks. {_nearest(attentions, plan)}"
                f"{whole if plan.tp_mode == '1d' and not plan.sequence_parallel else ''}"
            )
    kv_replicas = {kv_replicas for attention in attentions if (kv_replicas := attention.heads.kv_replicas(ranks)) > 1}
    if len(kv_replicas) > 1:
        counts = sorted({attention.heads.key_count for attention in attentions})
        raise PlanError(
            f"attentions with {' and '.join(map(str, counts))} KV heads cannot share them over the same {ranks} ranks "
            f"of '{plan}'. {_nearest(attentions, plan)}"
        )


def refuse_compiled(module: nn.Module, *, plan: Plan) -> None:
    """Raise PlanError for a module that the user has compiled, if a graph of it would miss a part of the plan's work.

    Under zero=3 a module may be compiled inside a unit: torch.compile cannot trace the hooks that gather a unit."""
    for name, inner in module.named_modules():
        if "_orig_mod" not in inner._modules and vars(inner).get("_compiled_call_impl") is None:
            continue
        why = "tp changes what its modules compute" if plan.tp > 1 else ""
        gathered = [piece.module for unit in partition(module) for piece in unit] if plan.zero == 3 else []
        if plan.cp > 1:
            why = "cp changes its attention"
        elif any(f"{held}.".startswith(f"{name}." if name else "") for held in gathered):
            why = why or "zero=3 gathers its parameters"
        if why:
            raise PlanError(
                f"{name or 'the model'} is compiled, and {why}; leave torch.compile out, and "
                f"{'take cp=1 with' if plan.cp > 1 else 'let the plan compile:'} compile=blocks"
            )


def refuse_unsupported_parts(
    parts: Mapping[str, Part], *, modules: Mapping[str, nn.Module], plan: Plan, width: int | None
) -> None:
    """Raise PlanError for a part that sequence parallelism or a `tp_mode` other than 1d cannot split.

    `modules`: the model's modules by name. `width`: the number of features of the hidden states; None if unknown."""
    inside = tuple(f"{name}." for name, part in parts.items() if part.role == "block")
    widths = sorted({part.hidden_width for part in parts.values() if part.role == "block"})
    if len(widths) > 1 and (plan.sequence_parallel or plan.tp_mode != "1d"):
        raise PlanError(
            f"the model has blocks with hidden states of {' and of '.join(map(str, widths))} features, and '{plan}' "
            "splits hidden states of one width alone. Nearest that works: tp_mode=1d sequence_parallel=0"
        )
    for name, module in modules.items():
        whole = any(holder in parts and parts[holder].role == "whole" for holder in (name, *enclosing(name)))
        if plan.sequence_parallel and isinstance(module, nn.TransformerDecoderLayer) and not whole:
            rule = f'keep it whole on every rank, as in {{"{of_all_blocks(name)}": "whole"}}, or take '
            others = any(not isinstance(modules[block[:-1]], nn.TransformerDecoderLayer) for block in inside)
            raise PlanError(
                f"{name} ({type(module).__name__}) uses one matrix for the encoder's output (all tokens) and for "
                f"hidden states (under '{plan}', some tokens). Nearest that works: "
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
            raise PlanError(f"{name}: {reason}. tp_mode={plan.tp_mode} cannot split it. Nearest that works: tp_mode=1d")
    ends = ("head", "block")
    if width and not any(p.role in ends or _reads_all(modules.get(name), p, width) for name, p in parts.items()):
        raise PlanError(
            f"the model takes and returns {width} features, and tp_mode={plan.tp_mode} gives each rank some of them. "
            "But the model has no repeated blocks (in a ModuleList) where the split would begin and end. Nearest that "
            "works: tp_mode=1d"
        )


def _only_1d(module: nn.Module, part: Part, width: int | None, *, rows_move: bool) -> str:
    """Return the reason why only 1d can split a part, or "". `rows_move`: True for 3d, which moves rows."""
    if part.role == "whole":
        looks_up = isinstance(module, nn.Embedding)  # its number of rows may equal `width` by chance
        sizes = [parameter.shape[-1:] if looks_up else parameter.shape for parameter in module.parameters()]
        # a linear may read several tokens' features side by side
        multiple = isinstance(module, nn.Linear) and width and module.in_features in range(2 * width, 2**62, width)
        reads_hidden = any(width in each for each in sizes) or multiple
        if reads_hidden and not _reads_all(module, part, width):
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


def _whole(unfit: Sequence[FoundAttention], attentions: Sequence[FoundAttention]) -> str:
    """Return the text of rules that keep the `unfit` attentions whole and change no other attention."""
    names = [attention.name for attention in unfit]
    patterns = {of_all_blocks(name) for name in names}
    all_unfit = all(attention.name in names for attention in attentions if of_all_blocks(attention.name) in patterns)
    return ", ".join(f"'{name}': 'whole'" for name in (sorted(patterns) if all_unfit else names))


def _nearest(attentions: Sequence[FoundAttention], plan: Plan) -> str:
    """Return a text with the one or two nearest values of tp that fit all attentions."""
    ranks, most = head_degree(plan), max(attention.heads.count for attention in attentions)
    works = [n for n in range(1, most + 1) if all(each.fits(ranks=n, plan=plan) for each in attentions)]
    near = sorted(sorted(works, key=lambda n: abs(math.log(n / ranks)))[:2])
    return f"Nearest that works: {' or '.join(f'tp={_ranks(plan, n)}' for n in near)}"


def _ranks(plan: Plan, side: int) -> int:
    """Return the tp of a plan whose heads are split over `side` ranks."""
    power = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[plan.tp_mode]
    return int(side**power) * (plan.tp_depth if plan.tp_mode == "2.5d" else 1)
