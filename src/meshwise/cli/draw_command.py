"""The command `meshwise draw`: schedules, attentions, stages, meshes, experts and steps as pictures (docs/view.md)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from meshwise.attention.cp_attention import work_table
from meshwise.attention.mask_pattern import parse_pattern
from meshwise.cli import shared_flags
from meshwise.engine.schedule_and_cut import cut_source, cutter, plan_schedule
from meshwise.model.deferred_init import build_with_values
from meshwise.model.forward import default_forward
from meshwise.pipeline.schedules.named_schedules import read_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import lower, peaks
from meshwise.plan import Plan
from meshwise.train.flags_and_toml import parse_flags, read_job
from meshwise.train.job_settings import JobError, StudiedJob, as_job_error
from meshwise.train.prepare_job import prepare
from meshwise.train.run_checkpoints import METRICS
from meshwise.view.drawing_data import PlanAccount, measured_accounts
from meshwise.view.picture import stacked
from meshwise.view.plan_pictures import mesh_picture
from meshwise.view.text_pictures import draw_in_columns, draw_to_scale, expert_table, load_picture, rank_table


@dataclass(frozen=True)
class DrawMeshFlags:
    """Draw the mesh of a plan: a grid of ranks for the two innermost axes, repeated for the other axes."""

    plan: str = ""
    """The plan, as in "pp=2 dp=2 tp=2"."""
    on: str = ""
    """A cluster, as in "4x8 h100": its number of ranks replaces dp=auto, and the picture shows its nodes."""
    png: Path | None = None
    """Write a PNG here; needs the extra `plot`."""
    svg: Path | None = None
    """Write an SVG here."""


@dataclass(frozen=True)
class DrawExpertsFlags:
    """Show which experts, which parts of them and which tokens each rank of a plan has in a mixture."""

    plan: str = ""
    """The plan, as in "dp=2 tp=2 ep=2 etp=2"."""
    experts: int = 8
    """Number of experts of the mixture."""


@dataclass(frozen=True)
class DrawLoadFlags:
    """Draw how much more than an even share the busiest expert of each mixture got over the steps of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/train")
    """The folder of the run."""


@dataclass(frozen=True)
class DrawAttentionFlags:
    """Draw the share of an attention's pairs of query and key that each rank computes in each step."""

    plan: str = ""
    """The plan, as in "cp=4 context=zigzag". Only cp, context and cp_heads are read."""
    pattern: str = "causal"
    """The pairs that count, as in "causal&window:1024" or "window:256+global:32"."""
    tokens: int = 4096
    """The number of tokens of a sequence."""


@dataclass(frozen=True)
class DrawScheduleFlags(shared_flags.DrawingFiles):
    """Draw when each rank computes which micro-batch, for a plan's schedule or your own table. Times have no unit."""

    plan: str = ""
    """The plan. Only pp, microbatches, schedule, virtual_stages and zero are read."""
    table: Path | None = None
    """A table in place of a plan: a text file with one row of actions per rank, as in `0F0 0F1 0B0 0B1`."""
    forward: float = 1.0
    """Time of the forward of one micro-batch in one stage."""
    input: float = 1.0
    """Time of the backward of one micro-batch in one stage, for the gradient of the input."""
    weight: float = 1.0
    """Time of the backward for the gradients of the weights; a whole backward takes `input` + `weight`."""
    link: float = 0.0
    """Time that a message between two stages takes."""
    actions: bool = False
    """Print the actions as a table too, with the sends, receives, gathers and reductions."""


@dataclass(frozen=True)
class DrawTimelineFlags(shared_flags.DrawingFiles):
    """Draw a step of a run that was trained with `--train.timeline`: the actions of each rank, and idle time."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/train")
    """The folder of the run, or its timeline.json."""


def main(words: Sequence[str]) -> int:
    """Make the drawing that the first word names; return the exit status 0. Raises JobError if it cannot be drawn."""
    return shared_flags.run_chosen(words, command="draw", kind="drawing", choices=_DRAWINGS)


def _draw_cut(words: Sequence[str]) -> None:
    """Print the pipeline stages of a job. Raises JobError or PlanError for a job that could not run, or for pp=1."""
    job = read_job(words, prog="meshwise draw cut", kind=StudiedJob)
    prepared = prepare(job, ranks=shared_flags.local_ranks(job))
    plan = prepared.job.plan
    if plan.pp == 1:
        raise JobError(f"the plan '{plan}' has one stage; give one with pp, as in --plan 'pp=4 microbatches=8'")
    source = build_with_values(prepared.model, seed=job.train.seed)
    source.fill_buffers()
    rows = next(prepared.batches(1))
    make = cutter(source.module, plan=plan, schedule=plan_schedule(plan), where=job.model.cut_options)
    cpu = torch.device("cpu")
    cut = cut_source(source, plan=plan, make=make, example=rows, forward=default_forward, device=cpu)
    shared_flags.drawing_console().show(str(cut))


def _draw_attention(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise draw attention", default=DrawAttentionFlags())
    if not flags.plan or flags.tokens < 1:
        raise JobError('give a plan and 1 token or more: meshwise draw attention --plan "cp=4" --tokens 4096')
    plan = Plan.parse(flags.plan)
    with as_job_error():
        table = work_table(plan, pattern=parse_pattern(flags.pattern), length=flags.tokens)
    console = shared_flags.drawing_console()
    console.show("source: percent of all pairs of query and key, by rank and step\n")
    console.show(str(table))


def _draw_mesh(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise draw mesh", default=DrawMeshFlags())
    if not flags.plan:
        raise JobError('give a plan: meshwise draw mesh --plan "pp=2 dp=2 tp=2"')
    shared_flags.check_drawings(shared_flags.DrawingFiles(png=flags.png, svg=flags.svg))
    plan = Plan.parse(flags.plan)
    cluster = shared_flags.named_cluster(flags.on) if flags.on else None
    if cluster is not None:
        plan = plan.resolve(cluster.ranks)
    elif plan.dp is None:
        raise JobError('dp=auto fills a cluster: name it, as in --on "4x8 h100"')
    mesh = plan.mesh()
    nodes = mesh_picture(mesh, ranks_per_node=cluster.ranks_per_node if cluster else 0)
    shared_flags.drawing_console().show(mesh.picture())
    shared_flags.write_picture(stacked([nodes]), png=flags.png, svg=flags.svg)


def _draw_experts(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise draw experts", default=DrawExpertsFlags())
    if not flags.plan or Plan.parse(flags.plan).dp is None:
        raise JobError('give a plan with a number for dp: meshwise draw experts --plan "dp=4 ep=2" --experts 8')
    with as_job_error():
        shared_flags.drawing_console().show(expert_table(Plan.parse(flags.plan), experts=flags.experts))


def _draw_load(words: Sequence[str]) -> None:
    path = parse_flags(words, prog="meshwise draw load", default=DrawLoadFlags()).run / METRICS
    try:
        events = list(map(json.loads, path.read_text("utf-8").splitlines()))
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read: {error}; name the folder of a run") from error
    if not (found := [event for event in events if event.get("mixtures")]):
        raise JobError(f"{path} has no loads of experts; train a mixture for train.log_every steps or more")
    console = shared_flags.drawing_console()
    console.show(f"steps {found[0]['step']} to {found[-1]['step']}")
    console.show(load_picture([event["mixtures"] for event in found[-console.width // 2 :]]))


def _draw_schedule(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise draw schedule", default=DrawScheduleFlags())
    if (flags.table is None) == (not flags.plan):
        raise JobError('give either a plan or a table: meshwise draw schedule --plan "pp=4 microbatches=8"')
    if not min(flags.forward, flags.input, flags.weight) > 0 or not flags.link >= 0:
        raise JobError("times have to be above 0, and --link at least 0")
    shared_flags.check_drawings(flags)
    plan = Plan.parse(flags.plan)
    try:
        with as_job_error():
            schedule = read_schedule(flags.table) if flags.table else plan_schedule(plan)
            lowered = lower(schedule, gathers=plan.zero == 3)
    except OSError as error:
        raise JobError(f"{flags.table} cannot be read: {error.strerror}; name a text file") from error
    title = flags.table.name if flags.table else flags.plan
    console = shared_flags.drawing_console()
    timeline = clock(lowered, costs=ActionCost(flags.forward, flags.input, flags.weight, link=flags.link))
    console.show(draw_in_columns(timeline, width=console.width))
    console.print()
    console.show(rank_table(timeline, peaks=peaks(lowered)))
    if flags.actions:
        console.show(f"\n{lowered}")
    shared_flags.write_drawings([PlanAccount(title, timeline, unit="")], files=flags, title=title)


def _draw_timeline(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise draw timeline", default=DrawTimelineFlags())
    shared_flags.check_drawings(flags)
    run = shared_flags.read_step(flags.run)
    console = shared_flags.drawing_console()
    accounts = measured_accounts(run)
    longest = max(account.timeline.seconds for account in accounts)
    for account in accounts[:2]:
        console.show(f"{account.title}: {account.timeline.seconds:.4g} s")
        console.show(draw_to_scale(account.timeline, width=console.width, seconds=longest, rows=account.names))
        console.print()
    console.show(str(run))
    shared_flags.write_drawings(accounts, files=flags, title=f"a step of {flags.run}")


_DRAWINGS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "schedule": _draw_schedule,
    "attention": _draw_attention,
    "cut": _draw_cut,
    "mesh": _draw_mesh,
    "experts": _draw_experts,
    "load": _draw_load,
    "timeline": _draw_timeline,
}
