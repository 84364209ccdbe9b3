"""The command `meshwise checkpoint`: list, show, check, export and import checkpoints.

    list FOLDER              list the checkpoints of a run, newest first
    show CHECKPOINT          print the tensors of a checkpoint, and the job and counts saved with them
    check FOLDER             compare every byte with its checksum, in one checkpoint or in all checkpoints of a run
    export CHECKPOINT INTO   write a Hugging Face folder, and compare its logits on random tokens
    export CHECKPOINT INTO --format dcp|torchtitan   write a folder of torch's DCP, with the optimizer's state
    import FOLDER INTO --format dcp                  write a checkpoint from a folder of torch's DCP that you trust

The exit status is 0 on success, 1 for damage and failed exports, 2 if the checkpoint to read does not exist."""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from meshwise.checkpoint.checkpoint_folder import LATEST, checkpoints, damages, is_checkpoint
from meshwise.checkpoint.checkpoint_format import INDEX, CheckpointIndex, DamageError, SaveError, read_index
from meshwise.checkpoint.dcp_conversion import export_dcp, import_dcp
from meshwise.checkpoint.hugging_face import ExportError, export
from meshwise.train.console_output import OutputConsole, counted, text_table
from meshwise.train.fine_tuning_data import tokenizer_files
from meshwise.train.flags_and_toml import from_text, from_toml
from meshwise.train.job_settings import HUB, Job, JobError, as_job_error
from meshwise.train.objects_by_name import model_function
from meshwise.train.prepare_job import with_tokenizer
from meshwise.train.pretrained_model import hub_folder

GENERATION = "generation_config.json"
_MOST_TEXT = 400
_MOST_NAMES = 3


def main(words: Sequence[str]) -> int:
    """Run a subcommand and return the exit status. Raises JobError for a folder without a checkpoint."""
    console = OutputConsole(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    flags = _parser().parse_args(words)
    if "checkpoint" in flags:
        _require(flags.checkpoint)
    act: Callable[[argparse.Namespace, OutputConsole], int] = flags.act
    try:
        with as_job_error():
            return act(flags, console)
    except FileExistsError as error:
        raise JobError(f"{error.filename} exists and is not replaced; name another folder") from error
    except (DamageError, ExportError, SaveError) as error:
        print(f"meshwise checkpoint: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshwise checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verbs: Mapping[str, tuple[Callable[[argparse.Namespace, OutputConsole], int], str]] = {
        "list": (_list, "folder"),
        "show": (_show, "checkpoint"),
        "check": (_check, "folder"),
        "export": (_export, "checkpoint into"),
        "import": (_import, "folder into"),
    }
    for name, (act, places) in verbs.items():
        verb = commands.add_parser(name)
        for place in places.split():
            verb.add_argument(place, type=Path, metavar=place.upper())
        if name == "import":
            verb.add_argument("--format", choices=["dcp"], default="dcp", help="dcp: torch.distributed.checkpoint")
        if name == "export":
            verb.add_argument("--format", choices=["hf", "dcp", "torchtitan"], default="hf", help="default: hf")
            verb.add_argument("--job", type=Path, help="the job whose model it is; default: the job saved with it")
            verb.add_argument("--average", action="store_true", help="the average that trainer.average(decay) kept")
            verb.add_argument("--merge", action="store_true", help="add the adapters of a PEFT model to its base model")
        verb.set_defaults(act=act)
    return parser


def _list(flags: argparse.Namespace, console: OutputConsole) -> int:
    root = _root(flags.folder)
    rows = [("checkpoint", "tensors", "MB", "saved under", "")]
    latest = (root / LATEST).read_text(encoding="utf-8").strip() if (root / LATEST).exists() else None
    found = checkpoints(root)
    for path, index in found:
        mark = "latest" if path.name == latest else ""
        if isinstance(index, CheckpointIndex):
            plan = str(index.extra.get("plan", ""))
            rows.append((path.name, str(len(index.tensors)), f"{index.nbytes / 1e6:.1f}", plan, mark))
        else:
            rows.append((path.name, "", "", "", f"damaged: {index.damages[0]}"))
    if found:
        console.show(text_table(rows, wrapped=("saved under", "")))
    else:
        console.print(f"no checkpoint in {root}")
    return 0 if all(isinstance(index, CheckpointIndex) for _, index in found) else 1


def _show(flags: argparse.Namespace, console: OutputConsole) -> int:
    index = read_index(flags.checkpoint)
    rows = [("tensor", "dtype", "shape", "parts")]
    for name, stored in index.tensors.items():
        dtype = str(stored.dtype).removeprefix("torch.")
        rows.append((name, dtype, "·".join(map(str, stored.shape)) or "one", str(len(stored.parts))))
    console.show(text_table(rows, wrapped=("tensor",)))
    for alias, name in index.aliases.items():
        console.print(f"{alias} is {name}", markup=False)
    parameters = sum(math.prod(row.shape) for name, row in index.tensors.items() if name.startswith("parameter/"))
    console.print(
        f"{counted(parameters, of='parameter')}, {counted(len(index.tensors), of='tensor')}, "
        f"{index.nbytes / 1e6:.1f} MB in {counted(len(index.files), of='file')}"
    )
    for key, value in index.extra.items():
        text = json.dumps(value)
        console.print(f"{key}: {text if len(text) <= _MOST_TEXT else f'{text[:_MOST_TEXT]}…'}", markup=False)
    return 0


def _check(flags: argparse.Namespace, console: OutputConsole) -> int:
    if not (folders := [path for path, _ in checkpoints(_root(flags.folder))]):
        raise JobError(f"no checkpoint in {flags.folder}: name a checkpoint or a run")
    wrong = 0
    for folder in folders:
        found = list(damages(folder))
        verdict = f"{counted(len(found), of='place')} damaged" if found else "whole"
        console.print(f"{folder}: {verdict}", style="red" if found else "green", markup=False)
        for damage in found:
            console.print(f"  {damage}", markup=False)
        wrong += bool(found)
    return 1 if wrong else 0


def _import(flags: argparse.Namespace, console: OutputConsole) -> int:
    index = import_dcp(flags.folder, into=flags.into)
    tensors, steps = counted(len(index.tensors), of="tensor"), counted(index.extra["steps"], of="step")
    console.print(f"{index.folder}: {tensors}, after {steps}", markup=False)
    return 0


def _export(flags: argparse.Namespace, console: OutputConsole) -> int:
    if flags.format != "hf":
        if flags.merge:
            raise JobError("--merge writes a model, and --format dcp the state of a training; leave out --merge")
        titan = flags.format == "torchtitan"
        files = export_dcp(flags.checkpoint, into=flags.into, torchtitan=titan, average=flags.average)
        console.print("\n".join(map(str, files)), markup=False)
        return 0
    job, average = _job(flags), flags.average
    if job.model.quantization and flags.merge:
        raise JobError("--merge would round the adapters to the quantized model; leave it out, and merge with peft")
    model = model_function(job)
    build = (lambda: model) if isinstance(model, nn.Module) else model
    done = export(flags.checkpoint, into=flags.into, build=build, merge=flags.merge, average=average)
    if job.model.name.startswith(HUB):
        _keep_settings(hub_folder(job.model.name, key="model.name"), into=flags.into)
    name = with_tokenizer(job).data.tokenizer
    copied = [] if name is None else tokenizer_files(hub_folder(name, key="data.tokenizer"))
    for path in (*done.files, *(Path(shutil.copy(path, flags.into)) for path in copied)):
        console.print(str(path), markup=False)
    console.print(f"read back, its logits on random tokens are the same (largest difference {done.difference:.3g})")
    return 0


def _keep_settings(folder: Path, *, into: Path) -> None:
    """Give an exported model, but not adapters, the key `use_cache` and the settings for generation of its folder."""
    if (written := into / "config.json").exists():
        given = json.loads((folder / written.name).read_text()).get("use_cache", True)
        written.write_text(json.dumps({**json.loads(written.read_text()), "use_cache": given}, indent=2) + "\n")
        (into / GENERATION).unlink(missing_ok=True)
        if (folder / GENERATION).exists():
            shutil.copy(folder / GENERATION, into)


def _job(flags: argparse.Namespace) -> Job:
    """Return the job whose model is exported. Raises JobError for a checkpoint without a job."""
    if flags.job is not None:
        return from_toml(flags.job, kind=Job)
    if (text := read_index(flags.checkpoint).extra.get("user", {}).get("job")) is None:
        raise JobError(f"{flags.checkpoint} was saved without a job, which builds the model; name one with --job")
    return from_text(text, source=str(flags.checkpoint / INDEX), kind=Job)


def _require(folder: Path) -> None:
    """Raise JobError for a folder that is no checkpoint; the message names the checkpoints inside the folder."""
    if is_checkpoint(folder):
        return
    inside = [str(path) for path, _ in checkpoints(_root(folder))]
    names = f"; name one of: {', '.join(inside[:_MOST_NAMES])}" if inside else ""
    raise JobError(f"{folder} is no checkpoint: it has no {INDEX}{names}")


def _root(folder: Path) -> Path:
    """Return the `checkpoints` folder inside `folder` if there is one, else `folder`. Raises JobError for no folder."""
    if not folder.is_dir():
        raise JobError(f"{folder} is {'a file' if folder.exists() else 'not there'}; name a run or its checkpoints")
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
