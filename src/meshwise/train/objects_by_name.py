"""Find the model, loss, optimizer and dataset function that a job names, and check their arguments."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import meshwise.optim
from meshwise.model.deferred_init import shapes_of
from meshwise.model.forward import Loss
from meshwise.model.parameter_table import ParameterOptions
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim.build_optimizer import build_optimizer, needs_of
from meshwise.optim.lars_lamb_muon import Muon
from meshwise.optim.parameter_rules import Several, parameter_rule
from meshwise.optim.whole_tensors import whole
from meshwise.reference import GPT, MLP, GPTConfig, MixtureConfig, MixtureGPT, MLPConfig, next_token_loss
from meshwise.reference.gpt import IGNORED
from meshwise.train.flags_and_toml import flags_of, parse_flags
from meshwise.train.job_settings import HUB, Job, JobError, OptimizerJob, as_job_error
from meshwise.train.pretrained_model import pretrained_model


def mean_squared_error(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the squared differences of `output` and the target `batch[1]`, and the number of elements.

    Raises ValueError when the shapes differ."""
    target = batch[1]
    if output.shape != target.shape:
        raise ValueError(f"mse: the output is {tuple(output.shape)} but the target {tuple(target.shape)}")
    return torch.square(output - target).sum(), target.numel()


def answer_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats, summed over the tokens with a target, and their number: two scalar tensors.

    | output   logits (batch, tokens, vocabulary), or an output of transformers that has them
    | batch    a pair (inputs, targets); or a mapping with `targets`, or with `labels` (targets are the next labels)"""
    logits = getattr(output, "logits", output)
    if not isinstance(batch, Mapping):
        return next_token_loss(logits, batch)
    if not batch.keys() & {"targets", "labels"}:
        raise ValueError(f"loss = 'cross-entropy' needs a key 'labels' or 'targets'; the samples have {sorted(batch)}")
    if "targets" not in batch:
        batch = {**batch, "targets": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)}
    return next_token_loss(logits, (logits, batch["targets"]))


LOSSES: Mapping[str, Loss] = {"cross-entropy": next_token_loss, "mse": mean_squared_error}
"""Losses that a job can name without a module."""
OptimizerParts: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]
"""Class and keyword arguments of an optimizer."""

_MODELS: Mapping[str, tuple[Callable[[Any], nn.Module], type]] = {
    "gpt": (GPT, GPTConfig),
    "mixture": (MixtureGPT, MixtureConfig),
    "mlp": (MLP, MLPConfig),
}
"""Models that a job can name without a module: class, and class of the configuration."""


def model_function(job: Job) -> Callable[[], nn.Module] | nn.Module:
    """Return a function without arguments that builds the model of a job, or a quantized model itself.

    Raises JobError for a wrong model name."""
    if job.model.lora and not job.model.name.startswith(HUB):
        raise JobError(f'model.lora needs model.name = "hf:FOLDER", not {job.model.name!r}; call peft in your function')
    if job.model.name in _MODELS:
        build: Callable[[], nn.Module] | nn.Module = partial(_MODELS[job.model.name][0], _configuration(job))
    elif job.model.name.startswith(HUB):
        build = pretrained_model(job.model, seed=job.train.seed)
    elif ":" in job.model.name:
        build = bind(locate(job.model.name, key="model.name"), arguments=job.model.arguments, key="model.arguments")
    else:
        known = "'gpt', 'mixture', 'mlp' nor a 'module:function' nor hf:FOLDER"
        raise JobError(f"model.name = {job.model.name!r} is neither {known}")
    dtype = job.train.dtype
    if isinstance(build, nn.Module) and dtype is not None:
        raise JobError(f"train.dtype = {dtype!r} does not go with model.quantization; leave it out")
    return build if dtype is None else lambda: build().to(getattr(torch, dtype))


def check_text(job: Job) -> None:
    """Raise JobError if the model cannot read bytes: an `hf:` model, or a GPT with a small vocabulary or context."""
    if job.model.name.startswith(HUB):
        raise JobError(f'model.name = {job.model.name!r} cannot read bytes; set data.dataset = "json:train.jsonl"')
    if job.model.name not in ("gpt", "mixture"):
        return
    shape, name = _configuration(job), job.model.name
    for key, least, what in (("vocabulary", 256, ""), ("context", job.data.context, "data.context = ")):
        if (value := getattr(shape, key)) < least:
            raise JobError(f"model.arguments of {name}: {key}={value} is less than {what}{least}; leave it out")


def loss_function(job: Job) -> Loss:
    """Return the loss function of a job. Raises JobError for an unknown name."""
    if job.loss == "cross-entropy" and (job.data.has_records or job.data.collator):
        return answer_loss
    if job.loss in LOSSES:
        return LOSSES[job.loss]
    if ":" not in job.loss:
        raise JobError(f"loss = {job.loss!r} is neither {' nor '.join(LOSSES)}, nor a 'module:function' of your own")
    return locate(job.loss, key="loss")


def optimizer(job: OptimizerJob) -> OptimizerParts:
    """Return the optimizer's class and keyword arguments. Raises JobError if it fails on a small parameter."""
    given = {"weight_decay": job.weight_decay, "betas": job.betas}
    arguments = {"lr": job.lr, **{key: value for key, value in given.items() if value is not None}, **job.arguments}
    first = _tried_optimizer(job.name, arguments, key="optimizer")
    if not job.rest:
        if first[0] is Muon:
            raise JobError('optimizer.name = "Muon" updates matrices only; add rest = {name = "AdamW", lr = 3e-4}')
        return first
    others = {name: value for name, value in job.rest.items() if name != "name"}
    rest = _tried_optimizer(job.rest.get("name", "AdamW"), others, key="optimizer.rest")
    return Several, {"optimizers": {"hidden": first, "rest": rest}}


def optimizer_options(job: OptimizerJob, *, model: Callable[[], nn.Module]) -> ParameterOptions | None:
    """Return a job's optimizer options of each parameter; None for the default. Raises JobError if one is wrong."""
    if not (job.groups or job.rest or job.layer_decay is not None):
        return None
    kind, arguments = optimizer(job)
    kinds = arguments["optimizers"] if kind is Several else {"": (kind, arguments)}
    known = {name: _trial(*one).param_groups[0] for name, one in kinds.items()}
    keys = {"optimizer", *(key for group in known.values() for key in group)} - {"params", "names"}
    for pattern, options in job.groups.items():
        if unknown := sorted(set(options) - keys):
            hint = name_hint(unknown[0], known=keys)
            raise JobError(f"optimizer.groups: {pattern!r}: unknown option {unknown[0]!r}; {hint}")
        if (chosen := options.get("optimizer")) not in (None, *kinds):
            raise JobError(
                f"optimizer.groups: {pattern!r}: optimizer = {chosen!r} is unknown. A job with two optimizers has "
                '"hidden" and "rest"; write rest = {name = "AdamW", lr = 3e-4}'
            )
    with as_job_error(of="optimizer.groups: "):
        return parameter_rule(
            shapes_of(model, seed=0).module,
            groups=job.groups,
            several=kind is Several,
            lr={name: group["lr"] for name, group in known.items()},
            layer_decay=1.0 if job.layer_decay is None else job.layer_decay,
        )


def _tried_optimizer(name: str, arguments: dict[str, Any], *, key: str) -> OptimizerParts:
    """Return the optimizer class of a name and its arguments, after a trial. Raises JobError if one is wrong."""
    kinds = {
        kind.__name__: kind
        for module in (torch.optim, meshwise.optim)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    is_whole, name = name.startswith("whole:"), name.removeprefix("whole:")
    if ":" not in name and name not in kinds:
        near, known = name_hint(name, known=kinds), ", ".join(kinds)
        hint = near if known in near else f"{near} The classes are {known}"
        raise JobError(f"{key}.name = {name!r} is no class of torch.optim; {hint}. Or write 'module:Class'")
    found: Any = kinds[name] if name in kinds else locate(name, key=f"{key}.name")
    with as_job_error(TypeError, of=f"{key}.name = {name!r} with {arguments}: "):
        found = whole(found) if is_whole else found
        access = {"logical": None} if needs_of(found) else {}
        bind(partial(found, [], **access), arguments=arguments, key=key)
        _trial(found, arguments)
    return found, arguments


def _trial(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    small = nn.Parameter(torch.zeros(1, 1))
    return build_optimizer(kind, groups=[{"params": [small]}], logical=LogicalTensors({"weight": small}), **arguments)


def locate(name: str, *, key: str) -> Callable[..., Any]:
    """Import and return the function or class with this name: `package.module:function` or `path/to/file.py:function`.

    `key`: the job's key, for error messages. Side effect: the folder of the file, or else the current folder, becomes
    the first of the import path. Raises JobError for an unknown object; raises any exception of the imported module."""
    where, _, what = name.rpartition(":")
    if not where:
        raise JobError(f"{key} = {name!r} is no 'module:function', as in 'my_module:{what.removesuffix('.py')}'")
    path = Path(where).absolute() if where.endswith(".py") else None
    if path is not None and not path.is_file():
        raise JobError(f"{key} = {name!r}: there is no file {where}")
    module_name, folder = (where, Path.cwd()) if path is None else (path.stem, path.parent)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise JobError(f"{key} = {name!r} cannot be imported: {error}") from error
    if path is not None and Path(module.__file__ or "").resolve() != path.resolve():
        raise JobError(f"{key} = {name!r}: another module has the name {module_name!r}; rename the file")
    if not callable(found := getattr(module, what, None)):
        functions = [known for known, value in vars(module).items() if callable(value)]
        raise JobError(f"{key} = {name!r}: no function {what!r} in {where}; {name_hint(what, known=functions)}")
    return found  # type: ignore[no-any-return]


def bind(function: Callable[..., Any], *, arguments: Mapping[str, Any], key: str) -> Callable[[], Any]:
    """Return a function that calls `function` with `arguments`. Raises JobError if it does not accept them."""
    signature = inspect.signature(function)
    unknown = [name for name in arguments if name not in signature.parameters]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if unknown and not takes_all:
        raise JobError(f"{key}: unknown argument {unknown[0]!r}; {name_hint(unknown[0], known=signature.parameters)}")
    with as_job_error(TypeError, of=f"{key}: "):
        signature.bind(**arguments)
    return partial(function, **arguments)


def _configuration(job: Job) -> Any:
    """Return the configuration of a reference model: its defaults, changed by `model.arguments` of the job."""
    kind = _MODELS[job.model.name][1]
    default = kind() if kind is MLPConfig else kind(context=job.data.context)
    words = [word for _, flag in flags_of(job.model.arguments, leaves=()) for word in flag]
    try:
        return parse_flags(words, prog="model", default=default)
    except ValueError as error:
        raise JobError(f"model.arguments of {job.model.name}: {str(error).lstrip('-')}") from error


def name_hint(name: str, *, known: Iterable[str]) -> str:
    """Return a hint for an error about an unknown name: the most similar one of `known`, else all of them."""
    names = {item.lower(): item for item in known if not item.startswith("_")}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(sorted(names.values())) or 'none'}"
