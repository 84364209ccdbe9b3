"""Build a torch optimizer over the flat slices that a rank owns, or refuse a class whose updates of slices are wrong.

An elementwise optimizer such as AdamW computes the same numbers on slices as on whole tensors. An optimizer that uses
rows, columns or the norm of a tensor does not. Such a class declares `needs` and receives access to whole tensors
(`model.whole_parameters`). torch's classes that need whole tensors are refused, and other classes whose updates of
slices differ in a trial (`slice_difference`).

Hyperparameters of groups are saved and restored by parameter name. torch's `state_dict` numbers parameters and groups,
so it fits only one plan. Names fit every plan."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import tensors
from meshwise.model.parameter_table import ParameterOptions
from meshwise.model.whole_parameters import NEEDS, LogicalTensors


def describe_groups(optimizer: torch.optim.Optimizer, *, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return each group of an optimizer for JSON: {"names": its item of `names`, "values": hyperparameters by key}.

    Raises ValueError for a hyperparameter other than numbers, strings, None, tensors, and lists of these."""
    kept = [{key: group[key] for key in group if key not in ("params", "names")} for group in optimizer.param_groups]
    values = ({key: plain_value(value, key=key) for key, value in group.items()} for group in kept)
    return [{"names": list(members), "values": own} for members, own in zip(names, values, strict=True)]


def saved_groups(*, names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the saved hyperparameters of each group; {} for a group whose parameters are not in the checkpoint.

    names: parameter names of each group now. saved: the groups of the checkpoint, from `describe_groups`.

    Raises ValueError if parameters that share a group now were saved with different hyperparameters."""
    by_name = {name: group["values"] for group in saved for name in group["names"]}
    found: list[Mapping[str, Any]] = []
    for members in names:
        known = [name for name in members if name in by_name]
        for name in known[1:]:
            if by_name[name] != by_name[known[0]]:
                raise ValueError(
                    f"{known[0]} and {name} share a group of the optimizer and were saved with {by_name[known[0]]} and "
                    f"{by_name[name]}; give them different optimizer options, as when they were saved"
                )
        found.append(by_name[known[0]] if known else {})
    return found


IMPLEMENTATIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Keys that choose an optimizer's implementation: not restored, since they depend on the device and the dtypes."""


def restore_groups(optimizer: torch.optim.Optimizer, *, values: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyperparameters of each group, in order, to `values`; `IMPLEMENTATIONS` are left as they are."""
    for group, restored in zip(optimizer.param_groups, values, strict=True):
        for key, value in restored.items():
            if key in IMPLEMENTATIONS:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.copy_(torch.as_tensor(value))
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def plain_value(value: Any, *, key: str) -> Any:
    """Return the value of hyperparameter `key` for JSON, tensors as numbers or lists. Raises ValueError for others."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, tuple | list):
        return [plain_value(part, key=key) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"the optimizer's {key} = {value!r} is of type {type(value).__name__}; a checkpoint keeps numbers")


_SHAPES = ((3, 4), (5,))
_CUTS = (7, 10)
_STEPS = 10
_BOUND = 1e-3
"""Largest difference of two updates that rounding explains, relative to the largest update."""

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]

NEED_WHOLE_TENSORS: Mapping[str, str] = {
    "Adafactor": "it factors the second moment of a matrix into rows and columns",
    "Muon": "it orthogonalises the momentum of a whole matrix",
    "LBFGS": "it takes inner products over the whole model and calls the loss several times a step",
    "SparseAdam": "it needs sparse gradients, and buckets are dense",
}
"""Why torch's optimizers of these names cannot update slices; classes derived from them are refused too."""
REFUSED_BY_WHOLE = ("LBFGS", "SparseAdam")
"""Keys of `NEED_WHOLE_TENSORS` that `meshwise.optim.whole` refuses too."""


def build_optimizer(
    optimizer: OptimizerClass,
    *,
    groups: Sequence[dict[str, Any]],
    logical: LogicalTensors | None = None,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Build `optimizer` over parameter groups of slices; a group may be empty on a rank.

    logical: access to whole parameters; passed only to a class that declares `needs`. The groups of such a class have
    the key `names`: the names of their parameters on all ranks.

    Uses torch's fused implementation, which reads and writes every buffer once. Exceptions: the class has none for the
    device, a parameter is complex, or `arguments` name an implementation.

    Raises ValueError if `optimizer` is no optimizer class or does not take an argument. Without `needs`, also if it is
    in `NEED_WHOLE_TENSORS` or updates slices differently (`slice_difference`)."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(  # noqa: TRY004
            f"optimizer={optimizer!r} is not an optimizer class; pass a class and its arguments: "
            "parallelize(…, optimizer=torch.optim.AdamW, lr=3e-4)"
        )
    own = needs_of(optimizer)
    if not own:
        refuse_bases(optimizer, names=NEED_WHOLE_TENSORS)
    else:
        arguments["logical"] = logical
    accepted = inspect.signature(optimizer).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    if not takes_any and (unknown := sorted(set(arguments) - set(accepted))):
        raise ValueError(f"{optimizer.__name__} takes no {', '.join(unknown)}; it takes {', '.join([*accepted][1:])}")
    if not own and (how := slice_difference(optimizer, arguments=arguments)):
        name = optimizer.__name__
        raise ValueError(
            f"{name} needs whole parameters, but ranks update flat slices of them: {how}. Run it on whole tensors: "
            f"optimizer=meshwise.optim.whole({name}); or declare `needs`, as in meshwise/model/whole_parameters.py"
        )
    adagrad = issubclass(optimizer, torch.optim.Adagrad)  # torch has it fused on CPUs only
    slices = [parameter for group in groups for parameter in group["params"]]
    plain = not any(one.is_complex() or (adagrad and one.is_cuda) for one in slices)
    if plain and "fused" in accepted and not IMPLEMENTATIONS & set(arguments):
        arguments["fused"] = True
    return optimizer(groups, **arguments)


def refuse_bases(optimizer: OptimizerClass, *, names: Iterable[str]) -> None:
    """Raise ValueError if the class or one of its bases has one of `names`, which are keys of `NEED_WHOLE_TENSORS`."""
    name, module = optimizer.__name__, optimizer.__module__
    where = name if module.startswith("torch.") else f"{module}:{name}"
    for base in (base.__name__ for base in optimizer.__mro__ if base.__name__ in names):
        instead = f'run it on whole tensors: optimizer=meshwise.optim.whole({name}), in a job name = "whole:{where}"'
        if base in REFUSED_BY_WHOLE:
            instead = "use AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam or another elementwise optimizer"
        derived = "" if base == name else f", as a kind of {base},"
        raise ValueError(f"{name}{derived} cannot run on slices of parameters: {NEED_WHOLE_TENSORS[base]}; {instead}")


def default_options(optimizer: object, *, module: nn.Module) -> ParameterOptions | None:
    """Return the default options of a model's parameters for an optimizer class that has its own, else None."""
    rule = getattr(optimizer, "parameter_options", None)
    return None if rule is None else rule(module)


def needs_of(optimizer: object) -> str:
    """Return the attribute `needs` of an optimizer class, one of `model.whole_parameters.NEEDS`; "" for none.

    Raises ValueError for another value."""
    needs = str(getattr(optimizer, "needs", None) or "")
    if needs not in ("", *NEEDS):
        raise ValueError(f"{optimizer!r} declares needs={needs!r}; write one of {', '.join(map(repr, NEEDS))}, or none")
    return needs


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class; of `Several`, the names of its optimizers."""
    return str(getattr(optimizer, "name", type(optimizer).__name__))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state on this rank, each once."""
    return list({id(tensor): tensor for state in optimizer.state.values() for tensor in tensors(state)}.values())


def slice_difference(optimizer: OptimizerClass, *, arguments: Mapping[str, Any], single: bool = False) -> str:
    """Return as text how updates of slices differ from updates of whole parameters; "" if they do not.

    A rank updates flat slices, which may hold the end of one parameter and the beginning of the next. So the class is
    tried on a matrix and a vector of 17 elements in all, and on two flat slices of the same elements:

        whole     | matrix (3, 4)               | vector (5,) |
        slices    | slice of 7       | slice of 10             |

    single: try an optimizer for each parameter in place of slices, as `whole` does. Return "" too for a class of
    `torch.optim`, and for a class whose steps on whole parameters raise an error. Torch's CPU generator is restored."""
    if optimizer.__module__.partition(".")[0] == "torch":
        return ""
    start = torch.linspace(-1.0, 1.5, sum(_CUTS))
    parts = zip(start.split([math.prod(shape) for shape in _SHAPES]), _SHAPES, strict=True)
    parameters = [part.view(shape) for part, shape in parts]
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _trained(optimizer, parameters, arguments, single=False)
        except Exception:  # noqa: BLE001 - a user's class may fail in any way
            return ""
        try:
            sliced = _trained(optimizer, parameters if single else start.split(_CUTS), arguments, single=single)
        except Exception as error:  # noqa: BLE001
            return f"in a trial its step on slices raised {type(error).__name__}: {error}"
    apart, moved = float((sliced - whole).abs().max()), float((whole - start).abs().max())
    if not bool(whole.isfinite().all()) or apart <= _BOUND * moved:
        return ""
    what = "single parameters" if single else "slices"
    return f"in a trial its updates of {what} were off by up to {apart / max(moved, 1e-30):.0%}"


def _trained(kind: OptimizerClass, values: Sequence[Tensor], arguments: Mapping[str, Any], *, single: bool) -> Tensor:
    """Return all elements after a few steps from `values`, with gradients that depend on the element and the step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(value.clone()) for value in values]
    tried = [kind(own, **arguments) for own in ([[one] for one in parameters] if single else [parameters])]
    for step in range(_STEPS):
        slopes = torch.cos(torch.arange(sum(_CUTS), dtype=torch.float32) * (step + 1))
        for parameter, slope in zip(parameters, slopes.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = slope.clone().view_as(parameter)
        for each in tried:
            each.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
