"""The command `meshwise plan`: search the fastest plans for a job on a cluster, and say why other plans are slower."""

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshwise.attention.cp_attention import sequence_length
from meshwise.base.tensor_tree import tensors
from meshwise.cli.shared_flags import DrawingFiles, check_drawings, check_outputs, named_cluster, write_drawings
from meshwise.comm.launch.launch import cores
from meshwise.model.deferred_init import shapes_of
from meshwise.model.find_mixtures import find_mixtures
from meshwise.plan import Plan
from meshwise.plan.plan_keys import plan_notation, read_size
from meshwise.planner.plan_search import SearchEffort, SearchResult, best_table, lost_table, prediction_of, search
from meshwise.planner.plan_space import SEARCHED, UNDIVIDED, PlanSpace, parse_fixed
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.predicted_memory import size_text
from meshwise.simulate.rehearsal import RehearsalSubject
from meshwise.tensor.detect.assign_tp_roles import planned_roles
from meshwise.train.console_output import console_of_width, counted, text_table
from meshwise.train.flags_and_toml import change_file, read_job
from meshwise.train.job_settings import JobError, StudiedJob, check_least
from meshwise.train.prepare_job import prepare
from meshwise.view.drawing_data import predicted_account

_MOST_DRAWN = 4
_WRAPPED = ("plan", "nearest", "lost because")


@dataclass(frozen=True)
class PlanJob(StudiedJob, DrawingFiles):
    """Search the fastest plans for a training job. Lower bounds exclude most plans; the others are rehearsed."""

    on: str = ""
    """The cluster, as in "64x8 h100": nodes, ranks per node, and the name of a shipped cluster or of a cluster file."""
    fix: str = ""
    """Plan keys with fixed values, as in "tp=2 zero=1"; the other keys are searched."""
    memory_limit: str = ""
    """Bytes that a rank may use, as in "70G". Default: the memory of the cluster's device."""
    top: int = 10
    """Number of best plans to find and print."""
    rehearsals: int = 20
    """Most plans to rehearse. A `?` after a plan's number: a plan that was not rehearsed could be faster."""
    workers: int | None = None
    """Processes that rehearse at the same time. Default: the number of cores that this process may use."""
    write: bool = False
    """Write the best plan and its cut of the model into the job's file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, least=1, names="top rehearsals workers")


def main(arguments: Sequence[str]) -> int:
    """Search plans for the job and print them; return the exit status 0. Raises JobError when no plan works or fits."""
    job = read_job(arguments, prog="meshwise plan", kind=PlanJob)
    path = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if job.write and path is None:
        raise JobError("--write writes into the job's file: name one, as in meshwise plan job.toml --write")
    check_drawings(job)
    check_outputs([path] if job.write else [])
    if not job.on:
        raise JobError('--on is missing: name the cluster, as in --on "64x8 h100"')
    cluster = named_cluster(job.on)
    subject, space, parameters = _searched(job, cluster)
    limit = read_size(job.memory_limit) if job.memory_limit else cluster.device.memory
    if limit is None:
        raise JobError(f"--memory-limit {job.memory_limit} is no number of bytes; write a size such as 70G")
    effort = SearchEffort(job.top, job.rehearsals, job.workers or cores())
    began = time.monotonic()
    result = _watched(search(subject, cluster=cluster, space=space, limit=limit, effort=effort))
    if not result.candidates:
        ranks = counted(cluster.ranks, of="rank") + (f" with {job.fix}" if job.fix else "")
        raise JobError(f"no plan for {ranks} divides this job; try another number of ranks")
    best = result.best()
    if best and job.write and path is not None:  # before printing: the reader of stdout may end
        change_file(path, changes={("plan",): str(best[0].plan), ("model", "cut_at"): list(best[0].at) or None})
    heading = _heading(job, cluster, space, limit=limit, parameters=parameters)
    _print_result(result, heading=heading, top=job.top, seconds=time.monotonic() - began)
    if not best:
        raise JobError(_closest(result))
    if job.write:
        print(f'{path}: plan = "{best[0].plan}"')
    if job.wanted:
        shown = best[:_MOST_DRAWN]
        predictions = [prediction_of(subject, candidate=one, cluster=cluster) for one in shown]
        accounts = [predicted_account(each, title=str(one.plan)) for each, one in zip(predictions, shown, strict=True)]
        write_drawings(accounts, files=job, title=f"the best plans on {job.on}")
    return 0


def _searched(job: PlanJob, cluster: Cluster) -> tuple[RehearsalSubject, PlanSpace, int]:
    """Return the subject to rehearse, the plan space and the number of parameters. Raises JobError for bad `--fix`."""
    fixed = parse_fixed(job.fix)
    if unknown := sorted(set(fixed) - set(SEARCHED)):
        problem = f"--fix: {', '.join(unknown)} is not searched, so give it in the job's plan"
        raise JobError(f"{problem}; searched keys: {' '.join(SEARCHED)}")
    if job.plan.sync_axes or job.plan.server:
        raise JobError(f"the search has no servers and no sync, and the plan is '{job.plan}'; use meshwise simulate")
    one = dataclasses.replace(job.plan, dp=None, pp=1, **UNDIVIDED)
    prepared = prepare(dataclasses.replace(job, plan=one), ranks=1)
    subject = prepared.rehearsal_subject()
    first = next(tensors(subject.batch))
    module = shapes_of(subject.model, seed=subject.options.seed).module
    planned_roles(module, plan=Plan(), rules=subject.options.tensor_rules)  # which refuses a rule without a match
    space = PlanSpace(
        dataclasses.replace(job.plan, dp=None, partition="time"),
        ranks=cluster.ranks,
        node=cluster.ranks_per_node,
        batch=job.train.batch,
        pieces=cluster.ranks,
        experts=min((mixture.experts for mixture in find_mixtures(module).values()), default=1),
        stages=len(job.model.cut_at) + 1 if job.model.cut_at else None,
        tokens=sequence_length(first) if first.dim() == 3 - (not first.is_floating_point()) else 0,
        fixed=fixed,
    )
    return subject, space, sum(one.numel() for one in module.parameters())


def _watched(results: Iterator[SearchResult]) -> SearchResult:
    """Run the search to its end and return the last result; print its state on a terminal."""
    last = None
    with Console(stderr=True).status("") as status:
        for last in results:
            best = last.best()
            state = f"{len(last.candidates):,} plans, {last.rehearsals} rehearsed"
            status.update(state + (f", best {best[0].figures.seconds:.4g} s" if best else ""))
    assert last is not None
    return last


def _heading(job: PlanJob, cluster: Cluster, space: PlanSpace, *, limit: float, parameters: int) -> Iterator[str]:
    """Yield the question of a search as lines of text: job, cluster and limit, searched and fixed keys."""
    of = counted(parameters, of="parameter")
    yield f"model     {job.model.name}, {of}, {counted(job.train.batch, of='sample')} a step"
    nodes, each = counted(cluster.nodes, of="node"), counted(cluster.ranks_per_node, of="rank")
    device = f" on {cluster.device.name}" if cluster.device.name else ""
    room = f", at most {size_text(limit)} a rank" if limit < math.inf else ""
    yield f"cluster   {job.on}: {nodes} of {each}{device}{room}"
    yield f"searched  {' '.join(key for key in SEARCHED if key not in space.fixed) or 'nothing'}"
    usual, base = Plan(dp=1).to_toml(), space.base.to_toml()
    kept = {key: value for key, value in base.items() if key not in SEARCHED and value != usual.get(key)}
    if fixed := {**space.fixed, **kept}:  # the keys that are equal in all plans
        yield f"fixed     {' '.join(f'{key}={plan_notation(value)}' for key, value in fixed.items())}"


def _print_result(result: SearchResult, *, heading: Iterable[str], top: int, seconds: float) -> None:
    console = console_of_width(160)
    summary = f"{counted(len(result.candidates), of='plan')}, {result.rehearsals} of them rehearsed, in {seconds:.0f} s"
    for line in (*heading, summary):
        console.show(line)
    if result.best():
        console.show(text_table(best_table(result, top=top), wrapped=_WRAPPED))
    lost = lost_table(result, top=top)
    if len(lost) > 1:
        console.show(text_table(lost, wrapped=_WRAPPED))


def _closest(result: SearchResult) -> str:
    """Return the error message of a search that found no plan: a reason, or the smallest plan and its missing bytes."""
    tried = [one for one in result.candidates.values() if not one.refused]
    reasons = sorted({one.refused for one in result.candidates.values() if one.refused})
    if not tried:
        return f"no plan works for this model: {reasons[0]}"
    if any(map(result.fits, tried)):
        return (
            f"none of the {result.rehearsals} plans that were rehearsed works for this model: {reasons[0]}\nOther "
            f"plans were not rehearsed and may work: --rehearsals {2 * result.rehearsals}"
        )
    one = min(tried, key=lambda one: (one.figures.memory, one.figures.seconds))
    missing = one.figures.memory - result.limit
    needs = "needs" if one.rehearsed else "needs at least"
    return (
        f"no plan fits {size_text(result.limit)} a rank. The closest, '{one.plan}', {needs} "
        f"{size_text(one.figures.memory)}: {missing:,.0f} bytes ({size_text(missing)}) are missing. Take more ranks, "
        "or a smaller train.batch or data.context"
    )
