"""The command `meshwise launch`: write the file with which a cluster starts a training job.

A recipe is a text file in `launch_recipes`, in which `{{name}}` is replaced by a value (docs/clusters.md)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import tyro

from meshwise.cli.shared_flags import check_outputs, write_and_say
from meshwise.train.flags_and_toml import from_toml, parse_flags
from meshwise.train.job_settings import Job, JobError, check_least

Recipe = Literal["slurm", "kubernetes", "ray", "sagemaker", "azureml"]


@dataclass(frozen=True)
class LaunchFlags:
    """Print the file with which a cluster starts a training job."""

    job: Annotated[Path, tyro.conf.Positional] = Path("job.toml")
    """The job's file. Its path and `train.output` are paths on the cluster, relative to `folder`."""
    recipe: Annotated[Recipe, tyro.conf.arg(name="for")] = "slurm"
    """The cluster: Slurm, Kubernetes with JobSet, Ray Train, Amazon SageMaker or Azure Machine Learning."""
    nodes: int = 1
    """Number of nodes."""
    ranks_per_node: int = 8
    """Ranks of a node, one for each GPU."""
    hours: int = 24
    """Time limit of the job; Ray has none."""
    grace: int = 300
    """Seconds before the time limit at which the run is asked to save a checkpoint and to end. The run looks for the
    request every `train.log_every` steps."""
    restarts: int = 3
    """How many times the ranks are started again after a failure."""
    folder: str = "/shared"
    """Folder that every node sees, in which the job starts."""
    image: str = "registry.example.com/meshwise:latest"
    """Container image with meshwise. Slurm and Ray do not use it."""
    gpus: bool = True
    """Give each rank a GPU. Only Ray's recipe works without GPUs."""
    write: Path | None = None
    """Write the file here, and print the path in place of the file."""


def main(words: Sequence[str]) -> int:
    """Print or write the recipe; return the exit status 0. Raises JobError or PlanError for a job that cannot run."""
    flags = parse_flags(words, prog="meshwise launch", default=LaunchFlags())
    check_outputs([flags.write])
    text = recipe(flags, job=from_toml(flags.job, kind=Job))
    if flags.write is None:
        print(text, end="")
    write_and_say(flags.write, write=lambda path: path.write_text(text, encoding="utf-8"))
    return 0


def recipe(flags: LaunchFlags, *, job: Job) -> str:
    """Return the file for a cluster. Raises JobError for wrong numbers, PlanError if the plan does not fit."""
    check_least(flags, least=1, names="nodes ranks_per_node hours grace")
    if flags.grace >= 3600 * flags.hours:
        raise JobError(f"grace = {flags.grace} seconds are not before the end of {flags.hours} h; use --grace 300")
    if not job.train.save_every:
        raise JobError(f"{flags.job}: train.save_every = 0: a restart would begin from step 0; set train.save_every")
    ranks, seconds = flags.nodes * flags.ranks_per_node, 3600 * flags.hours
    job.plan.resolve(ranks)
    recipes = resources.files("meshwise.cli").joinpath("launch_recipes").iterdir()
    source = next(file for file in recipes if file.name.startswith(f"{flags.recipe}."))
    values = {name: str(value) for name, value in vars(flags).items()} | {
        "name": re.sub(r"[^a-z0-9]+", "-", flags.job.stem.lower()).strip("-") or "job",
        "ranks": str(ranks),
        "seconds": str(seconds),
        "stop_after": str(seconds - flags.grace),
        "attempts": str(max(1, flags.restarts)),
        "output": job.train.output,
        "stop": str(PurePosixPath(flags.folder, job.train.output, "stop")),
        "file": str(flags.write or source.name.removesuffix(".txt")),
    }
    if odd := [f"{name} = {value!r}" for name, value in values.items() if not re.fullmatch(r"[\w./:@+-]+", value)]:
        raise JobError(f"{', '.join(odd)}: write paths and images without blanks and quotes, as /shared/run-1")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], source.read_text("utf-8"))
