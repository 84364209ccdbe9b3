"""Measured steps: the lost time of a rank is split by cause, and runs write their timelines."""

import contextlib
import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerator.simulated_accelerators import SimulatedAccelerators
from grid import Grid
from meshwise.base.step_timeline import Event, Timeline, TimelineRow
from meshwise.cli.main import main as command
from meshwise.comm.api.flight_recorder import ActivityStopwatch, StepPhase, TimedSpan
from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import measure, profile
from meshwise.pipeline.run.measured_step import LostTime, MeasuredStep, clock_offset
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import COMPUTE, Action, Schedule, lower
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import run
from meshwise.train.job_settings import DataJob, Job, ModelJob, TrainJob
from meshwise.train.loop import train
from warm_processes import Processes

# ---- where the time went ------------------------------------------------------------------------------------------


def step_of(run: Timeline) -> Timeline:
    """A step around the rows of a schedule: 1 before it, 2 after it."""
    length = run.seconds
    moved = [dataclasses.replace(event, start=event.start + 1, stop=event.stop + 1) for event in run.events]
    for rank in range(run.ranks):
        last = max(event.stop for event in moved if event.rank == rank)
        around = (("begin", 0.0, 1.0), ("exchange", last, length + 1), ("update", length + 1, length + 3))
        moved += [Event(rank, TimelineRow.COLLECTIVE, kind, start, stop) for kind, start, stop in around]
        moved.append(Event(rank, TimelineRow.WAIT, "all_reduce", last, length + 1))
    return Timeline(tuple(moved), run.pipelines)


def lost(schedule: Schedule, run: Timeline) -> tuple[LostTime, ...]:
    found = MeasuredStep(schedule, step_of(run))
    for rank, one in enumerate(found.lost):
        assert one.seconds == pytest.approx(run.seconds - run.busy[rank])
    return found.lost


SCHEDULE = lower(make_schedule("1f1b", pp=4, microbatches=8), gathers=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev", "interleaved"])
def test_with_equal_stages_all_lost_time_is_the_ideal_bubble(name: str) -> None:
    schedule = lower(make_schedule(name, pp=4, microbatches=8), gathers=False)
    for one in lost(schedule, clock(schedule, costs=ActionCost(1, 1.5, 0.75))):
        assert one.ideal > 0
        rest = (one.imbalance, one.receives, one.collectives, one.other)
        assert rest == pytest.approx((0, 0, 0, 0), abs=1e-9)


def test_stages_that_differ_are_the_imbalance() -> None:
    run = clock(SCHEDULE, costs=[ActionCost(1, 1, 1), ActionCost(2, 2, 2), ActionCost(1, 1, 1), ActionCost(1, 1, 1)])
    ideal = clock(SCHEDULE, costs=ActionCost(1.25, 1.25, 1.25))
    for rank, one in enumerate(lost(SCHEDULE, run)):
        assert one.ideal == pytest.approx(ideal.seconds - ideal.busy[rank])
        assert one.imbalance == pytest.approx(run.seconds - run.busy[rank] - one.ideal)
        assert (one.receives, one.collectives, one.other) == pytest.approx((0, 0, 0), abs=1e-9)


def test_slow_links_are_the_receives() -> None:
    run = clock(SCHEDULE, costs=ActionCost(1, 1, 1, link=0.5))
    for rank, one in enumerate(lost(SCHEDULE, run)):
        assert one.receives == pytest.approx(run.seconds - run.busy[rank] - one.ideal)
        assert one.receives > 1
        assert (one.imbalance, one.collectives, one.other) == pytest.approx((0, 0, 0), abs=1e-9)


def test_waits_within_computations_and_reductions_are_the_collectives() -> None:
    schedule = lower(make_schedule("naive", pp=1, microbatches=2), gathers=False)
    events = [
        Event(0, TimelineRow.COMPUTE, "F", 0, 3, 0, 0),
        Event(0, TimelineRow.WAIT, "all_gather", 1, 2),
        Event(0, TimelineRow.COMPUTE, "B", 3, 7, 0, 0),
        Event(0, TimelineRow.COMPUTE, "F", 8, 10, 0, 1),
        Event(0, TimelineRow.COMPUTE, "B", 10, 14, 0, 1),
        Event(0, TimelineRow.COLLECTIVE, "REDUCE", 14, 16, 0),
        Event(0, TimelineRow.WAIT, "reduce_scatter", 15, 16),
    ]
    [one] = lost(schedule, Timeline(tuple(events), ((0,),)))
    assert dataclasses.astuple(one) == pytest.approx((0, 0, 0, 3, 1))


def test_a_wait_for_a_slower_replica_is_counted_once() -> None:
    schedule = lower(make_schedule("naive", pp=1, microbatches=1), gathers=False)
    rows = [(("F", 0, 1), ("B", 1, 3), ("REDUCE", 3, 7)), (("F", 0, 2), ("B", 2, 6), ("REDUCE", 6, 7))]
    events = [
        Event(rank, TimelineRow.COLLECTIVE if kind == "REDUCE" else TimelineRow.COMPUTE, kind, start, stop, 0, 0)
        for rank, row in enumerate(rows)
        for kind, start, stop in row
    ]
    fast, slow = lost(schedule, Timeline(tuple(events), ((0,), (1,))))
    assert dataclasses.astuple(fast) == pytest.approx((0, 3, 0, 1, 0))
    assert dataclasses.astuple(slow) == pytest.approx((0, 0, 0, 1, 0))


def test_each_pipeline_has_its_own_costs() -> None:
    fast, slow = (clock(SCHEDULE, costs=ActionCost(*[length] * 3)).events for length in (1, 2))
    events = [dataclasses.replace(event, rank=2 * event.rank) for event in fast]
    events += [dataclasses.replace(event, rank=2 * event.rank + 1) for event in slow]
    run = Timeline(tuple(events), ((0, 2, 4, 6), (1, 3, 5, 7)))
    found = lost(SCHEDULE, run)
    assert all(one.receives == pytest.approx(0, abs=1e-9) for one in found)
    assert found[0].imbalance > found[1].imbalance > 0


def test_micro_batches_without_rows_are_not_expected() -> None:
    few = Schedule(tuple(tuple(one for one in row if (one.microbatch or 0) < 5) for row in SCHEDULE.rows))
    for one in lost(SCHEDULE, clock(few)):
        assert (one.imbalance, one.receives, one.other) == pytest.approx((0, 0, 0), abs=1e-9)


def test_a_measured_step_prints_as_a_table_and_is_read_from_a_file(tmp_path: Path) -> None:
    measured = MeasuredStep(SCHEDULE, step_of(clock(SCHEDULE)))
    lines = str(measured).splitlines()
    assert lines[0].split() == [
        "rank",
        "stages",
        "computes",
        "lost",
        "ideal",
        "imbalance",
        "receives",
        "collectives",
        "other",
    ]
    assert lines[1].split() == [
        "0",
        "0",
        "24",
        "s",
        "27.3",
        "%",
        "27.3",
        "%",
        "0.0",
        "%",
        "0.0",
        "%",
        "0.0",
        "%",
        "0.0",
        "%",
    ]
    assert lines[5] == "step 36 s, the schedule's part of it 33 s"
    assert lines[-1] == "bubble 27.3 % on average, ideal 27.3 %"
    measured.write(tmp_path / "a.json")
    assert MeasuredStep.read(tmp_path / "a.json") == measured


# ---- what is noted -------------------------------------------------------------------------------------------------


def noted(world: World) -> list[TimedSpan]:
    flight_recorder = world.flight_recorder
    flight_recorder.doing = "before"
    with world.timed() as watch:
        for doing in (Action.parse("2F0"), StepPhase.OUTSIDE, StepPhase.UPDATE, StepPhase.OUTSIDE):
            flight_recorder.doing = doing
            world.barrier()
        with pytest.raises(RuntimeError, match="in a `timed` block already"), world.timed():
            pass
    flight_recorder.doing = "after"
    world.barrier()
    return watch.read(offset=1000.0)


def test_only_steps_inside_of_measure_are_recorded() -> None:
    for spans in run(2, noted):
        assert [(str(span.what), span.waits) for span in spans] == [
            ("2F0", False),
            ("update", False),
            *[("barrier rank", True)] * 4,
        ]
        assert all(span.start <= span.stop < torch.inf for span in spans)
        assert spans[0].start <= spans[2].start <= spans[2].stop <= spans[0].stop


def test_times_of_activities_are_times_of_the_hosts_clock() -> None:
    before = now()
    watch = ActivityStopwatch(streams_of(torch.device("cpu")))
    watch.begins("0F0")
    watch.begins(StepPhase.OUTSIDE)
    [span] = watch.read()
    assert before <= span.start <= span.stop <= now()


@pytest.mark.threads("ranks of a host that share memory gather nothing", or_gpus=True)
def test_a_profiled_step_has_ranges_of_its_actions_units_and_collectives(tmp_path: Path) -> None:
    def main(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        trainer = parallelize(model, "dp=2 zero=1", world=world, loss=lambda y, _: (y.sum(), 4), lr=0.1)
        trainer.step(torch.ones(4, 2))
        with profile(trainer, into=tmp_path / str(world.rank)) if world.rank == 0 else contextlib.nullcontext():
            trainer.step(torch.ones(4, 2))

    run(2, main)
    trace = json.loads((tmp_path / "0" / "rank-0.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"0F0", "0B0", "exchange", "update", "wait all_reduce dp", "wait all_gather dp"} <= names
    assert {"start reduce_scatter dp", "start all_gather dp"} <= names, "a collective runs from its start on"
    assert {"unit 0", "unit 1"} <= names


def test_under_nsight_systems_a_profile_has_nvtx_ranges_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    class Ranges(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            begun.append("emit_nvtx")

    def main(world: World) -> list[str]:
        trainer = parallelize(nn.Linear(2, 2), "dp=1", world=world, loss=lambda y, _: (y.sum(), 4), lr=0.1)
        with profile(trainer, into=tmp_path / "traces"):
            recorder = world.flight_recorder
            assert recorder._range is not None
            trainer.step(torch.ones(4, 2))
        return begun

    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Ranges)
    assert run(1, main, on=SimulatedAccelerators()) == [["emit_nvtx"]]
    assert not (tmp_path / "traces").exists()


@pytest.mark.gpu
def test_on_a_gpu_readings_are_events_without_waits() -> None:
    x = torch.ones(1024, 1024, device="cuda")
    watch = ActivityStopwatch(streams_of(x.device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        watch.begins("0F0")
        since = watch.now()
        for _ in range(20):
            x = x @ x
        watch.waited("all_reduce", since=since)
        watch.begins(StepPhase.OUTSIDE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    span, wait = watch.read()
    assert (span.what, wait.what) == ("0F0", "all_reduce")
    assert span.start <= wait.start < wait.stop <= span.stop
    assert abs(span.start - now()) < 60


def ahead(world: World, seconds: float) -> float:
    return clock_offset(world, now=lambda: now() + seconds * world.rank)


def now() -> float:
    import time  # noqa: PLC0415

    return time.monotonic()


def test_clock_offsets_are_found_and_equal_clocks_have_none() -> None:
    assert run(3, ahead, args=(100.0,)) == pytest.approx([0, 100, 200], abs=1.0)
    assert run(3, ahead, args=(0.0,)) == [0, 0, 0]


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:].clone()


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=6, heads=2, width=8, mlp_ratio=2))


def steps(world: World, plan: str) -> Any:
    trainer = parallelize(gpt, plan, world=world, loss=next_token_loss, options=Options(example=batch()), lr=1e-2)
    trainer.step(batch())
    with measure(trainer) as measuring:
        for _ in range(2):
            trainer.step(batch())
            trainer.evaluate([batch()])
    trainer.step(batch())
    return measuring.steps(), trainer.schedule


def check(plan: str, on: Any) -> None:
    ranks = run(Plan.parse(plan).mesh().size, steps, on=on, args=(plan,))
    for found, schedule in ranks:
        assert found == ranks[0][0]
        assert len(found) == 2
        for one in found:
            timeline = one.run
            for pipeline in timeline.pipelines:
                for rank, row in zip(pipeline, schedule.rows, strict=True):
                    computed = [str(action) for action in row if action.kind in COMPUTE]
                    assert [str(event) for event in timeline.computing[rank]] == computed
            assert all(0 < busy < timeline.seconds for busy in timeline.busy)
            assert timeline.seconds < one.step.seconds
            assert {event.kind for event in one.step.events} >= {"begin", "exchange", "update"}


PLANS = (
    "pp=2 microbatches=4 schedule=zb-v virtual_stages=2",
    "pp=2 dp=2 zero=3 microbatches=2",
    "pp=2 tp=2 microbatches=2 schedule=zb-h1",
    "tp=2",
    "dp=2 zero=2 microbatches=2",
)


@pytest.mark.grid(Grid({"plan": PLANS}, heavy=lambda cell: cell["plan"] == PLANS[2]))
def test_under_every_plan_the_steps_are_those_of_its_schedule(plan: str) -> None:
    check(plan, "threads")


@pytest.mark.processes
def test_on_processes(processes: Processes) -> None:
    check("pp=2 dp=2 zero=1 microbatches=4", processes)


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_timeline_and_it_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what is read here is of no matter " * 20)
    job = Job(
        model=ModelJob(arguments={"layers": 2, "heads": 2, "width": 8}),
        data=DataJob(files=(str(text),), context=8, validation=0, cache=str(tmp_path / "cache")),
        train=TrainJob(steps=4, batch=4, timeline=2, output=str(tmp_path / "run")),
        plan=Plan.parse("pp=2 microbatches=2"),
    )
    run(2, lambda world: train(world, job=job))
    output = capsys.readouterr().out
    assert "rank stages computes lost ideal imbalance receives collectives other" in " ".join(output.split())
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [found] = [event for event in events if event["event"] == "measured"]
    assert (found["step"], found["steps"]) == (4, 2)

    assert command(["draw", "timeline", str(tmp_path / "run"), f"--trace={tmp_path / 'a.json'}"]) == 0
    drawn = capsys.readouterr().out
    assert "measured:" in drawn
    assert "by the clock:" in drawn
    assert "bubble" in drawn
    names = {event["args"]["name"] for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"]
             if event["name"] == "process_name"}  # fmt: skip
    assert "measured: rank 1: stages 1" in names
    assert "by the clock: rank 0: stages 0" in names


def test_a_run_traces_the_step_that_its_job_names(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what is read here is of no matter " * 20)
    job = Job(
        model=ModelJob(arguments={"layers": 1, "heads": 1, "width": 4}),
        data=DataJob(files=(str(text),), context=8, validation=0, cache=str(tmp_path / "cache")),
        train=TrainJob(steps=3, batch=2, profile=2, output=str(tmp_path / "run")),
    )
    run(1, lambda world: train(world, job=job))
    trace = json.loads((tmp_path / "run" / "profile" / "rank-0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("0F0") == names.count("update") == 1


def test_drawing_without_a_measurement_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["draw", "timeline", str(tmp_path)]) == 2
    assert "train with --train.timeline=3" in capsys.readouterr().err
    (tmp_path / "timeline.json").write_text('{"events": 3}')
    assert command(["draw", "timeline", str(tmp_path)]) == 2
    assert "is not a timeline of a run" in capsys.readouterr().err
