"""Build a causal language model of transformers from a folder or a name of the Hugging Face hub, with LoRA if wanted.

The function that `pretrained_model` returns copies each weight out of a file that is mapped into memory. Within
`parallelize` these copies are only recorded, so no rank holds the whole model (docs/fine_tuning.md)."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshwise.checkpoint.checkpoint_format import CheckpointIndex, DamageError
from meshwise.checkpoint.hugging_face import read_pretrained, with_model_names
from meshwise.train.job_settings import HUB, JobError, ModelJob, as_job_error

_HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")
# In the source of a model whose attention separates packed records: it makes the mask from position_ids.
_APART = re.compile(r"(?:create_causal_mask|mask_function)\([^)]*position_ids=|\"position_ids\": position_ids")
_EXTRAS: Mapping[str, str] = {
    "transformers": "hf",
    "huggingface_hub": "hf",
    "pyarrow.parquet": "datasets",
    "torch.utils.tensorboard": "tensorboard",
    "torchao.quantization": "torchao",
}
"""Extra that installs a library, where it has another name."""
_QUANTIZED: Mapping[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "nf4": ("bitsandbytes", lambda auto, _: auto.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "int8": ("bitsandbytes", lambda auto, _: auto.BitsAndBytesConfig(load_in_8bit=True)),
    "torchao-int8": ("torchao.quantization", lambda auto, ao: auto.TorchAoConfig(ao.Int8WeightOnlyConfig())),
}
"""Library of each `model.quantization`, and its settings from transformers and this library."""
_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types that separate packed records; others, such as recurrent layers, carry state from record to record."""


def pretrained_model(job: ModelJob, *, seed: int) -> Callable[[], nn.Module] | nn.Module:
    """Return a function that builds the model of `hf:FOLDER_OR_NAME`. Its parameters are fp32, unless `dtype` is given.

    A quantized model is returned itself: every rank holds it whole, with adapters that begin by `seed`.

    Raises JobError for a name that cannot be fetched, a model that transformers does not know, wrong arguments of the
    configuration or of LoRA, and missing weights. The function raises JobError for weights of another model."""
    folder = hub_folder(job.name, key="model.name")
    auto = import_library("transformers", key="model.name")
    settings = {"use_cache": False, "dtype": "float32", **job.arguments}
    peft = import_library("peft", key="model.lora") if job.lora else None
    try:
        config, unknown = auto.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **settings)
        index = read_pretrained(folder)
        adapters = peft and peft.LoraConfig(**{"task_type": "CAUSAL_LM", **job.lora})
    except (OSError, ValueError, KeyError, TypeError, DamageError) as error:
        raise JobError(f"model {_shown(job)}: {error}; check the folder and the keys") from error
    if unknown:
        raise JobError(f"model.arguments: {next(iter(unknown))!r} is no key of {folder}/config.json; use a key of it")
    config.name_or_path = job.name.removeprefix(HUB)
    if job.quantization:
        name, settings_of = _QUANTIZED[job.quantization]
        quantized = settings_of(auto, import_library(name, key="model.quantization"))
        kind = auto.AutoModelForCausalLM
        whole = kind.from_pretrained(folder, config=config, dtype=config.dtype, quantization_config=quantized)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return peft.get_peft_model(whole, adapters)  # type: ignore[no-any-return, union-attr]
    weights = {
        (file, entry): tensors.get_tensor(entry)  # a view of the mapped file
        for file in index.files
        for tensors in [safe_open(folder / file, framework="pt")]
        for entry in tensors.keys()  # noqa: SIM118 - not a dict
    }

    def build() -> nn.Module:
        with as_job_error(of=f"model {_shown(job)}: "):
            model: nn.Module = auto.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
            _fill(model, index, weights)
            return peft.get_peft_model(model, adapters) if peft else model

    return build


def hub_folder(name: str, *, key: str) -> Path:
    """Return the folder of `hf:FOLDER_OR_NAME`; fetch it from the hub if there is no such folder.

    Raises JobError, which names the job's `key`, if the folder is not there and cannot be fetched."""
    plain = name.removeprefix(HUB)
    if Path(plain).is_dir():
        return Path(plain)
    hub = import_library("huggingface_hub", key=key)
    try:
        return Path(hub.snapshot_download(plain, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # of the network, the hub or its cache
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise JobError(
            f"{key} = {name!r} is no folder here, and cannot be fetched from the Hugging Face hub ({reason}); name a "
            f'folder with a config.json: {key} = "hf:/models/llama"'
        ) from error


def import_library(name: str, *, key: str) -> Any:
    """Return an optional library. Raises JobError that names the job's `key` and the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JobError(f"{key} needs a library: {error}; pip install 'meshwise[{_EXTRAS.get(name, name)}]'") from error


def check_rows_fit(module: nn.Module, *, largest: int, context: int, packed: bool) -> None:
    """Raise JobError if a model of transformers has too small a vocabulary or context, or cannot read packed rows."""
    kinds: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    model: Any = next((part for part in module.modules() if isinstance(part, kinds)), None)
    if model is None:
        return
    vocabulary, config = model.get_input_embeddings().num_embeddings, model.config
    if largest >= vocabulary:
        raise JobError(f"data.tokenizer: token {largest} is beyond the model's {vocabulary}; name its own tokenizer")
    if context > (most := getattr(config, "max_position_embeddings", None) or context):
        raise JobError(f"data.context = {context} exceeds the model's max_position_embeddings = {most}; use {most}")
    source = inspect.getsource(sys.modules[type(model).__module__])
    if packed and not (_APART.search(source) and set(getattr(config, "layer_types", None) or ()) <= _LAYERS):
        raise JobError(f"data.pack = true: {type(model).__name__} lets packed records attend to each other; use false")


def _shown(job: ModelJob) -> str:
    return f"{job.name!r} with arguments = {dict(job.arguments)}, lora = {dict(job.lora)}"


def _fill(model: nn.Module, index: CheckpointIndex, weights: Mapping[tuple[str, str], Tensor]) -> None:
    """Copy the weights of a folder into a model. Raises ValueError for weights that are missing or of another shape."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        names.setdefault(tensor, []).append(name)
    known = {all_of_them[0]: all_of_them for all_of_them in names.values()}
    renamed, _ = with_model_names(index, names=known, base=str(getattr(model, "base_model_prefix", "")))
    for tensor, (name, *_) in names.items():
        found = renamed.tensors.get(f"parameter/{name}")
        if found is None and isinstance(tensor, nn.Parameter):
            raise ValueError(f"the folder lacks {name} of {type(model).__name__}")
        if found is not None and found.shape != tuple(tensor.shape):
            raise ValueError(f"{name} has the shape {found.shape} in the folder, and {tuple(tensor.shape)} here")
        for part in () if found is None else found.parts:
            with torch.no_grad():
                place = tensor if part.rectangle.sizes == tuple(tensor.shape) else tensor[part.rectangle.slices]
                place.copy_(weights[part.file, part.entry].reshape(place.shape))
