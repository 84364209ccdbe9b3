"""Test that slow replicas get fewer rows, so that a step ends first, and that the result stays the same.

A step is one process's under any shares, to 1e-9. A run that gives a slow rank fewer rows, by an injected clock, is the
run with even shares, and resumes with its shares."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from data_parallel.test_agreement import BOUND, TRAINING, Case, batches, expected
from grid import Grid, ranks_of
from meshwise.base.mesh import weighted_split
from meshwise.base.tensor_tree import row_count, take_rows
from meshwise.comm.api import flight_recorder
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.testing import agree, outcome, run
from meshwise.train import loop
from meshwise.train.batch_and_lr import balanced_rows
from meshwise.train.job_settings import Job, JobError, TrainJob
from run_job import run_job
from train.test_global_batches import job as job_of_data
from train.test_global_batches import losses
from train.test_resume import change, events, killed_after, short, steps
from train.test_slow_ranks import Clocks


def test_no_other_shares_end_earlier() -> None:
    draw = random.Random(0)
    for _ in range(50):
        each = [draw.uniform(0.1, 3.0) for _ in range(3)]
        found = balanced_rows([3, 3, 3], seconds=[3 * one for one in each])
        ends = [
            max(count * one for count, one in zip(rows, each, strict=True))
            for rows in itertools.product(range(1, 8), repeat=3)
            if sum(rows) == 9
        ]
        if found != [3, 3, 3]:
            assert max(count * one for count, one in zip(found, each, strict=True)) == min(ends)
        else:
            assert min(ends) >= 0.95 * 3 * max(each), "new shares would have paid"


def test_shares_that_save_little_stay() -> None:
    assert balanced_rows([8, 8], seconds=[1.0, 1.05]) == [8, 8]
    assert balanced_rows([1, 0], seconds=[1.0, 0.0]) == [1, 0]
    assert balanced_rows([4, 4, 4, 4], seconds=[0.4, 0.4, 0.4, 1.2]) == [5, 5, 5, 1]


@pytest.mark.parametrize("weights", [(1,), (5, 1), (1, 9, 2), (1000, 1, 1, 1000)])
def test_a_split_by_weights_leaves_no_part_empty(weights: tuple[int, ...]) -> None:
    assert [stop - start for start, stop in weighted_split(sum(weights), weights=weights)] == list(weights)
    for size in range(30):
        parts = weighted_split(size, weights=weights)
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == size
        assert min(stop - start for start, stop in parts) >= int(size >= len(weights))


UNEVEN = ("dp=3", "dp=3 zero=2 microbatches=3", "dp=3 zero=3", "dp=3 tp=2 zero=1", "dp=2x2 zero=3")


@pytest.mark.grid(
    Grid({"plan": UNEVEN, "local": (False, True)}, heavy=lambda cell: "tp" in cell["plan"] and cell["local"])
)
def test_a_step_is_one_process_under_any_shares(plan: str, local: bool) -> None:
    def main(world: World) -> Any:
        trainer = parallelize(Case().model(), plan, world=world, **TRAINING)
        trainer.set_shares([5, *range(1, trainer.replicas)])
        if local:
            step = trainer.step

            def own(batch: Any) -> Any:
                start, stop = trainer.share(row_count(batch))
                return step(take_rows(batch, start=start, stop=stop), local=True, total=row_count(batch))

            vars(trainer)["step"] = own
        return outcome(trainer, batches=batches())

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected(Case()), bound=BOUND)


def refused_shares(world: World, plan: str) -> None:
    parallelize(Case().model(), plan, world=world, **TRAINING).set_shares([1] * Plan.parse(plan).row_parts)


def test_wrong_shares_are_refused() -> None:
    trainer = parallelize(Case().model(), "dp=1", **TRAINING)
    with pytest.raises(ValueError, match=r"weights \[1, 2\] are not 1 numbers above 0"):
        trainer.set_shares([1, 2])
    for plan in ("dp=2 sync=local every=2", "dp=1 server=1 staleness=1"):
        with pytest.raises(PlanError, match="shares change the result; leave out train"):
            run(2, refused_shares, args=(plan,))
    with pytest.raises(JobError, match="gives uneven micro-batches"):
        TrainJob(shares="auto", noise=True)


def slowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let a row take 10 ms of the clock, of rank 1 30 ms; return the list of (rank, rows) of all steps."""
    clocks, seen, step = Clocks(), list[tuple[int, int]](), Trainer.step

    def slow(self: Trainer, batch: Any, **given: Any) -> Any:
        start, stop = (0, row_count(batch)) if given["local"] else self.share(row_count(batch))
        result = step(self, batch, **given)
        seen.append((self.world.rank, stop - start))
        clocks.passes(max(stop - start, 1) * (0.03 if self.world.rank == 1 else 0.01))
        return result

    monkeypatch.setattr(Trainer, "step", slow)
    for module in (loop, flight_recorder):
        monkeypatch.setattr(module, "time", clocks)
    return seen


def job(folder: Path, shares: str) -> Job:
    made = change(short(folder), "train", steps=24, batch=8, dtype="float64", keep_last=24, shares=shares)
    return dataclasses.replace(made, plan=Plan(dp=2, zero=3))


def test_servers_get_no_shares(tmp_path: Path) -> None:
    made = change(job(tmp_path, "auto"), "train", save_every=0)
    served = dataclasses.replace(made, plan=Plan(dp=1, server=1))
    assert len(steps(Path(str(run_job(served)[0].folder)))) == 24


def test_a_slow_rank_gets_fewer_rows_and_the_run_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "even").mkdir()
    (tmp_path / "auto").mkdir()
    seen = slowed(monkeypatch)
    jobs = change(job(tmp_path / "even", "even"), "train", save_every=0), job(tmp_path / "auto", "auto")
    whole, auto = (Path(str(run_job(one)[0].folder)) for one in jobs)
    assert seen.count((1, 4)) == 24 + 20
    assert seen.count((1, 2)) == seen.count((0, 6)) == 4
    [found] = events(auto, "shares")
    assert (found["step"], found["rows"]) == (20, [6, 2])
    assert found["seconds"] == pytest.approx([0.04, 0.12])
    assert events(whole, "shares") == []
    for one, other in zip(steps(whole), steps(auto), strict=True):
        assert one == pytest.approx(other, rel=1e-9)

    seen.clear()
    resumed = killed_after(21, auto, into=tmp_path / "killed")
    run_job(change(job(tmp_path / "auto", "auto"), "train", output=str(resumed), resume="auto"))
    assert sorted(seen) == [(0, 6)] * 3 + [(1, 2)] * 3
    assert steps(resumed) == steps(auto)[21:], "bit for bit"


@pytest.mark.grid(
    Grid({"plan": ("dp=2", "dp=2 server=1")}, heavy=lambda cell: cell["plan"] == "dp=2")  # a server has its replicas
)
def test_new_shares_inside_a_window_of_a_stream_leave_out_no_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: str
) -> None:
    seen = slowed(monkeypatch)
    for how in ("even", "auto"):
        made = job_of_data(tmp_path, "Stateful", plan=plan, bucket=3, collator="pad")
        given = {"steps": 24, "batch": 8, "save_every": 0, "output": str(tmp_path / how), "shares": how}
        run_job(change(made, "train", **given), ranks=ranks_of(plan))
    assert seen.count((1, 2)) == seen.count((0, 6)) == 4, "20 steps end inside a window of 3 batches"
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "even"), rel=1e-9)


@pytest.mark.parametrize("plan", ["dp=2 sync=local every=2", "dp=1 server=1 staleness=1"])
def test_replicas_that_update_apart_have_even_shares(plan: str, tmp_path: Path) -> None:
    apart = dataclasses.replace(job(tmp_path, "auto"), plan=Plan.parse(plan))
    with pytest.raises(JobError, match=r"needs ranks that update together, unlike .*; leave it out"):
        run_job(apart)
