"""The training loop: `train` runs a job on the ranks of a world, from the first sample to the files at the end.

Every rank calls `train`; rank 0 prints, and writes all files except the checkpoints and failure reports.
`StepTimelines` measures some steps action by action. docs/faults.md says which ranks are slow."""

import contextlib
import itertools
import math
import resource
import shlex
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from meshwise.base.atomic_file import write_whole
from meshwise.base.mesh import weighted_split
from meshwise.base.tensor_tree import map_tensors
from meshwise.checkpoint.checkpoint_format import TensorSpec, header
from meshwise.comm.api.launcher_info import JobAttempt
from meshwise.comm.api.streams import gpu_properties, streams_of
from meshwise.comm.api.world import EmulatedLink, World
from meshwise.data_parallel.checkpoint_slices import buffers
from meshwise.engine.first_rank import on_first_rank
from meshwise.engine.parallelize import parallelize
from meshwise.engine.step_result import NonFiniteError, StepResult
from meshwise.engine.trainer import StepMeasurement, Trainer, measure, profile
from meshwise.memory.malloc_options import is_out_of_memory
from meshwise.plan import PlanError
from meshwise.simulate.predicted_memory import ShortageError
from meshwise.train import run_events
from meshwise.train.batch_and_lr import BatchSizes, balanced_rows, batch_factor, lr_schedule
from meshwise.train.console_output import OutputConsole, ProgressLines, leave_traceback
from meshwise.train.data_loading import START_TOKEN, SampleOrder, length, read_batches
from meshwise.train.job_settings import Job, JobError, SampleJob, as_job_error
from meshwise.train.prepare_job import PreparedJob, prepare
from meshwise.train.run_checkpoints import (
    BEST,
    CHECKPOINTS,
    JOB,
    METRICS,
    PARAMETERS,
    PROFILE,
    STOP,
    TIMELINE,
    RunCheckpoints,
    RunProgress,
    RunStart,
    checked_run_start,
    claim_run_folder,
    restore_run,
    run_extra,
    run_outputs,
)
from meshwise.train.run_events import EventSink, JsonLines, RunEvent, Slow, logger_maker
from meshwise.train.streams_and_collators import SampleStream, sample_source


@dataclass(frozen=True)
class RunSummary:
    """Results of a run: loss of the last step, and loss of the last validation (None without one). `folder`: path of
    the run's folder on rank 0; None on all other ranks."""

    loss: float
    validation: float | None
    folder: str | None


def train(world: World, *, job: Job, console: Console | None = None) -> RunSummary:
    """Run a job on the ranks of `world`; every rank calls it. `console`: where rank 0 prints, by default stdout.

    Raises JobError or PlanError when the job cannot run, and JobError when it differs from its checkpoint's job. Raises
    DamageError when no checkpoint is valid, SaveError when the last checkpoint could not be written, and ShortageError
    when memory runs out. Raises NonFiniteError when the loss or gradient is not finite and the job's key
    `train.nonfinite` allows no more skipped steps. Raises any exception of the user's model, loss and data."""
    prepared = prepare(job, ranks=world.size)
    job = prepared.job
    attempt = JobAttempt.current()
    refused = (JobError, PlanError)
    start = on_first_rank(lambda: checked_run_start(prepared, attempt=attempt), world=world, shared=refused)
    world.link = None if job.emulate is None else EmulatedLink.parse(job.emulate)
    with as_job_error(of=f"emulate = {job.emulate!r}: "):
        job.plan.mesh().expand(world.link.axes if world.link else ())
    if world.link is not None and world.device.type == "cuda":
        raise JobError(f"emulate = {job.emulate!r} delays ranks on CPUs, and these ranks have GPUs; leave emulate out")
    if job.train.shares == "auto" and world.device.type == "cuda":
        raise JobError('train.shares = "auto" measures the time of CPUs, and these ranks have GPUs; leave it out')
    if job.train.shares == "auto" and (job.plan.apart_axes or job.plan.sync_axes):
        raise JobError(f'train.shares = "auto" needs ranks that update together, unlike "{job.plan}"; leave it out')
    trainer = parallelize(prepared.model, job.plan, world=world, **prepared.training(prepared.example()))
    claim = partial(claim_run_folder, job, path=start.folder, attempt=attempt)
    folder = on_first_rank(claim, world=world, shared=refused)
    sinks: list[EventSink] = []
    if world.rank == 0:
        lines = ProgressLines(console or OutputConsole(), every=job.train.log_every)
        loggers = (logger_maker(name)(folder, job) for name in job.train.loggers)
        sinks += [lines, JsonLines(folder / METRICS), *loggers]

    def emit(event: RunEvent) -> None:
        for sink in sinks:
            sink.write(event)

    try:
        with contextlib.ExitStack() as closing:
            for sink in reversed(sinks):
                closing.callback(sink.close)
            return _Run(trainer, prepared, folder, emit).run(start)
    except Exception as error:
        leave_traceback(error, world=world, folder=folder)
        if is_out_of_memory(error):
            raise ShortageError(str(error), used=trainer.memory()) from error
        raise
    finally:
        trainer.close()


class _Run:
    """One run of a job on one rank. Rank 0 writes into the run's folder, every rank into the checkpoints."""

    def __init__(self, trainer: Trainer, prepared: PreparedJob, folder: Path, emit: Callable[[RunEvent], None]) -> None:
        job = prepared.job
        self._trainer = trainer
        self._prepared = prepared
        self._job = job
        self._data = prepared.data
        self._folder = folder
        self._emit = emit
        self._progress = RunProgress()
        self._peaks = [group["lr"] for group in trainer.optimizer.param_groups]
        self._rate = lr_schedule(job.schedule, steps=job.train.steps)
        with as_job_error(TypeError, of="schedule.name: "):
            self._scheduler = prepared.scheduler and prepared.scheduler(trainer.optimizer)
        self._scheduled = 0
        with as_job_error(of="train.average: "):
            self._average = None if job.train.average is None else trainer.average(job.train.average)
        self._sizes, self._size = BatchSizes(job.train), 0
        self._source: Any = None
        self._reader: Iterator[Any] = iter(())
        self._signals: list[str] = []
        self._validation: float | None = None
        root, keep_last = folder / CHECKPOINTS, job.train.keep_last
        self._checkpoints = RunCheckpoints(trainer, root=root, keep_last=keep_last, emit=emit)

    def run(self, start: RunStart) -> RunSummary:
        """Restore a checkpoint if there is one, train, and write the output files."""
        job, trainer = self._job, self._trainer
        started, where = time.monotonic(), None if trainer.world.rank else str(self._folder)
        self._emit(self._start_event())
        self._progress = restore_run(trainer, start=start, prepared=self._prepared, emit=self._emit)
        if job.train.shares == "auto":
            if len(self._progress.shares) != trainer.replicas:
                self._progress.shares = [1] * trainer.replicas
            trainer.set_shares(self._progress.shares)
        self._source = sample_source(self._data.train, saved=self._progress.stream)
        with stop_signals(self._signals) if job.train.save_every else contextlib.nullcontext():
            self._follow_jobs(join=self._progress.step < job.train.steps)
            by = self._steps()
            if by not in ("", _FILE):  # after a signal little time is left: write only the checkpoint
                self._checkpoints.finish()
                return RunSummary(self._progress.loss, self._validation, where)
        # The parameters are written before validation or generation can fail.
        metadata = {"steps": str(self._progress.step), "plan": str(job.plan), "model": job.model.name}
        write_parameters(trainer, path=None if trainer.world.rank else self._folder / PARAMETERS, metadata=metadata)
        self._checkpoints.finish()
        self._validate(self._progress.step)
        self._checkpoints.finish()
        if job.sample.length:
            text = generate(trainer, sample=job.sample, context=job.data.context, seed=job.train.seed)
            self._emit(run_events.Sample(self._progress.step, job.sample.prompt, text))
        seconds, outputs = time.monotonic() - started, run_outputs(self._folder)
        following = shlex.join(["meshwise", "verify", outputs["job"]])
        self._emit(run_events.End(self._progress.step, seconds, self._progress.loss, outputs, following))
        return RunSummary(self._progress.loss, self._validation, where)

    def _start_event(self) -> run_events.Start:
        job, trainer = self._job, self._trainer
        return run_events.Start(
            plan=str(trainer.plan),
            mesh=trainer.world.mesh.picture() + f"\nserver={job.plan.server}: the last of dp" * (job.plan.server > 0),
            stages="" if trainer.cut is None else str(trainer.cut),
            device=_device(trainer.world),
            parameters=sum(row.numel for row in trainer.table.rows),
            trained=sum(row.numel for row in trainer.table.rows if row.trainable),
            data=self._data.summary,
            steps=job.train.steps,
            batch=self._sizes.first,
            memory=trainer.memory(),
            precision=dict(trainer.precision),
            output=str(self._folder),
        )

    def _steps(self) -> str:
        """Train, and return who asked the run to stop early; "" at its end."""
        job, trainer, progress = self._job.train, self._trainer, self._progress
        pace, before = RankPace(trainer.world), progress.step
        first = max(before + 1, min(before + 3, job.steps - job.timeline + 1))  # the first two steps are slower
        measured = range(first, min(first + job.timeline, job.steps + 1))
        timelines = StepTimelines(trainer, steps=measured, path=self._folder / TIMELINE, emit=self._emit)
        began = last = time.monotonic()
        budgeted, by = False, ""
        while (step := progress.step + 1) <= job.steps:
            batch = self._next_batch()
            lr = self._set_rate()
            timelines.before(step)
            with pace.timed(step):
                result = self._step(step, batch)
            progress.count(result, batch=self._size, apart=bool(trainer.plan.apart_axes))
            now = time.monotonic()
            self._emit(
                run_events.Step(
                    step=step,
                    steps=job.steps,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=lr,
                    tokens=result.tokens,
                    rate=result.tokens / (now - last),
                    memory=_peak_memory(trainer.world.device),
                    eta=(now - began) / (step - before) * (job.steps - step),
                    skipped=result.skipped,
                    samples=self._size,
                )
            )
            moved = self._follow_jobs()  # a late job has the others' state now
            step, before = step + moved, before + moved
            self._note_result(step, result)
            if not budgeted and trainer.blocks.costs:
                budgeted = True
                self._emit(run_events.Budgeted(step, trainer.blocks.table()))
            for slow in pace.slow() if not trainer.plan.asynchronous else ():
                self._emit(slow)
            if job.shares == "auto" and pace.times:
                self._rebalance(step, pace.times)
            if step % job.log_every == 0 and any(loads := (trainer.expert_imbalances(), trainer.expert_drops())):
                self._emit(run_events.ExpertLoad(step, *loads))
            timelines.after(step)
            if job.validate_every and step % job.validate_every == 0 and step < job.steps:
                self._validate(step)
                now = time.monotonic()
            by = self._stopped_by(step)
            self._checkpoints.report_published()
            if job.save_every and (step % job.save_every == 0 or by or step == job.steps):
                self._save(step, f"step-{step}")
            if by:
                again = ["meshwise", "train", str(self._folder / JOB), "--train.output", str(self._folder)]
                self._emit(run_events.Stopped(step, by, shlex.join([*again, "--train.resume", "auto"])))
                break
            last = now
        for slow in pace.slow(after=1) if not trainer.plan.asynchronous else ():
            self._emit(slow)
        return by

    def _follow_jobs(self, *, join: bool = True) -> int:
        """Go to the step and samples of the jobs that the run has joined, if it has; return how many steps it moved."""
        done, moved = self._progress, self._trainer.join() if join else 0
        if moved:
            done.samples += moved * self._sizes.at(done.samples, chosen=done.batch)
            done.step, done.updates = done.step + moved, done.updates + moved
            self._size = 0  # a new reader begins there
        return moved

    def _step(self, step: int, batch: Any) -> StepResult:
        traced = profile(self._trainer, into=self._folder / PROFILE) if step == self._job.train.profile else None
        try:
            with traced or contextlib.nullcontext():
                whole = self._data.collate is not None
                return self._trainer.step(batch, local=not whole, total=None if whole else self._size)
        except NonFiniteError as error:
            self._emit(run_events.NonFinite(step, str(error)))
            if not self._trainer.plan.apart_axes:
                # Every rank raises here, but no rank may end before rank 0 has printed the reason.
                self._trainer.world.barrier()
            raise

    def _set_rate(self) -> float:
        """Set the learning rate of the next step by updates, samples and batch; return the first group's rate."""
        if self._scheduler is not None:
            # A resumed run repeats all steps of the scheduler, so that a checkpoint needs no state of it.
            with as_job_error(of="schedule.name: "), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch expects an update before each step
                for _ in range(self._scheduled, self._progress.updates):
                    self._scheduler.step()
            self._scheduled = self._progress.updates
            return float(self._trainer.optimizer.param_groups[0]["lr"])
        fraction = self._rate(self._progress.updates)
        fraction *= batch_factor(self._job.schedule, samples=self._progress.samples, size=self._size)
        for group, peak in zip(self._trainer.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * fraction
        return float(self._peaks[0] * fraction)

    def _stopped_by(self, step: int) -> str:
        """Return, on every rank, the signal that a rank got or the file `stop`, which rank 0 then removes; else ""."""
        job, file, world = self._job.train, self._folder / STOP, self._trainer.world
        if not job.save_every or step == job.steps or (self._trainer.plan.asynchronous and step % job.log_every):
            return ""  # workers of servers exchange values only at these steps
        by = self._signals[0] if self._signals else ""
        if not by and world.rank == 0 and step % job.log_every == 0 and file.exists():
            file.unlink(missing_ok=True)
            by = _FILE
        return next(filter(None, world.exchange(by)), "")

    def _save(self, step: int, name: str) -> None:
        if isinstance(self._source, SampleStream):
            self._progress.stream = self._source.state(self._progress.samples)
        extra = run_extra(self._prepared, progress=self._progress, ranks=self._trainer.world.size)
        self._checkpoints.save(step, name=name, extra=extra)

    def _next_batch(self) -> Any:
        """Return this rank's rows of the next global batch, and set its size; a new size begins a new reader."""
        job, done = self._job.train, self._progress
        if (size := self._sizes.at(done.samples, chosen=done.batch)) != self._size:
            self._size = size
            numbers = range(done.samples, done.samples + (job.steps - done.step) * size, size)
            self._reader = self._read(self._source, numbers, SampleOrder(length(self._data.train), seed=job.seed))
        return next(self._reader)

    def _note_result(self, step: int, result: StepResult) -> None:
        """Report what was not finite. Average the noise, let the next batch follow it, report it as often as steps."""
        if result.problem is not None:
            self._emit(run_events.NonFinite(step, result.problem))
        if result.noise is None:
            return
        noise, job = self._progress.noise, self._job.train
        noise.add(result.noise)
        self._progress.batch = self._sizes.next_size(self._size, noise=noise)
        if step % job.log_every == 0 or step == job.steps:
            found = {name: scale if (scale := noise.critical(name)) < math.inf else None for name in noise.layers}
            trace, square = noise.layers[""]
            self._emit(run_events.Noise(step, found.pop(""), trace, square, found))

    def _rebalance(self, step: int, times: list[list[float]]) -> None:
        """Give slow replicas fewer rows if it pays; every rank has the same `times`, and so decides the same."""
        trainer, mesh = self._trainer, self._trainer.world.mesh
        groups = mesh.groups(mesh.others(trainer.plan.row_axes))[: trainer.replicas]  # servers have no rows
        seconds = [max(statistics.median(times[rank]) for rank in ranks) for ranks in groups]
        before = [stop - start for start, stop in weighted_split(self._size, weights=self._progress.shares)]
        if (rows := balanced_rows(before, seconds=seconds)) != before:
            trainer.set_shares(rows)
            self._progress.shares = rows
            if self._data.collate is None:  # else each rank reads the whole batch
                self._size = 0  # a new reader reads by these shares
            self._emit(run_events.Shares(step, rows, seconds))

    def _validate(self, step: int) -> None:
        if self._data.validation is None:
            return
        job = self._job.train
        size = length(self._data.validation)
        most = size if job.validate_batches is None else min(size, job.validate_batches * job.batch)
        batches = self._read(self._data.validation, range(0, most, job.batch), SampleOrder(size, seed=0))
        with self._average.applied() if self._average and self._progress.updates else contextlib.nullcontext():
            result = self._trainer.evaluate(batches, local=self._data.collate is None)
        self._validation, best = result.loss, self._progress.best
        self._emit(run_events.Validation(step, result.loss, result.tokens))
        if job.keep_best and (best is None or result.loss < best):
            self._progress.best = result.loss
            self._save(step, BEST)

    def _read(self, source: Any, numbers: range, order: SampleOrder) -> Iterator[Any]:
        workers, collate = self._job.data.workers, self._data.collate
        given: dict[str, Any] = {"share": self._trainer.share, "order": order, "workers": workers}
        window = 1 if source is self._data.validation else self._data.window
        rows = read_batches(source, numbers=numbers, **given, collate=collate, window=window)
        if self._job.train.dtype is None:
            return rows
        dtype = getattr(torch, self._job.train.dtype)
        return (map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch) for batch in rows)


_FILE = "the file `stop`"


@contextlib.contextmanager
def stop_signals(received: list[str]) -> Iterator[None]:
    """Append the names of signals (SIGINT, SIGTERM, SIGUSR1 of Slurm) to `received` inside the block; do nothing else.
    Launchers repeat the first signal at once, so only a Ctrl-C more than a second later raises KeyboardInterrupt.

    Python handles signals in the main thread. A run in another thread leaves the handlers as they are."""
    began = math.inf

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal began
        if number == signal.SIGINT and time.monotonic() - began > 1:
            raise KeyboardInterrupt
        began = min(began, time.monotonic())
        received.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    in_main_thread = threading.current_thread() is threading.main_thread()
    kept = {one: signal.signal(one, handle) for one in numbers if in_main_thread}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _device(world: World) -> str:
    threads = torch.get_num_threads()
    on_cpu = f"CPU, {threads} thread{'s' * (threads > 1)} a rank"
    name = gpu_properties(world.device).name if world.device.type == "cuda" else on_cpu
    link = "" if world.link is None else f", as slow as {world.link.text} by emulation"
    return f"{name}, joined by {world.medium}{link}" if world.size > 1 else name


def _peak_memory(device: torch.device) -> int:
    """Return the peak bytes of this process so far: allocated on its GPU, or resident."""
    if (memory := streams_of(device).memory) is not None:
        return memory.peak
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text("utf-8").partition("VmHWM:")[2].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux it includes the peak of the parent
    return peak if sys.platform == "darwin" else peak * 1024


def generate(trainer: Trainer, *, sample: SampleJob, context: int, seed: int) -> str:
    """Generate `sample.length` bytes after the prompt; return them decoded as UTF-8, with U+FFFD for bad bytes.

    The model maps tokens (1, T), T at most `context`, to logits (1, T, vocabulary). Every rank calls it and generates
    the same text from `seed`, because under zero=3 a forward gathers parameters from all ranks."""
    generator = torch.Generator().manual_seed(seed)
    prompt = [START_TOKEN, *sample.prompt.encode()]
    tokens = list(prompt)
    for _ in range(sample.length):
        logits = trainer.predict(torch.tensor([tokens[-context:]]))[0, -1].double().cpu()
        if sample.temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            likely = torch.softmax(logits / sample.temperature, dim=-1)
            tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(token % 256 for token in tokens[len(prompt) :]).replace(b"\0", b"").decode(errors="replace")


class StepTimelines:
    """Measurement of the given steps; it writes the step of median time to `path` and emits `Measured`."""

    def __init__(self, trainer: Trainer, *, steps: range, path: Path, emit: Callable[[RunEvent], None]) -> None:
        self._trainer, self._steps, self._path, self._emit = trainer, steps, path, emit
        self._block = contextlib.ExitStack()
        self._measuring: StepMeasurement | None = None

    def before(self, step: int) -> None:
        """Begin the measurement if `step`, which runs next, is the first step to measure."""
        if step == self._steps.start and self._steps:
            self._measuring = self._block.enter_context(measure(self._trainer))

    def after(self, step: int) -> None:
        """End the measurement if `step` was the last step to measure: write the file and emit its times."""
        if self._measuring is None or step + 1 < self._steps.stop:
            return
        self._block.close()
        typical = self._measuring.typical()
        self._measuring = None
        assert typical is not None
        if self._trainer.world.rank == 0:
            typical.write(self._path)
        self._emit(run_events.Measured(step, len(self._steps), str(typical), str(self._path)))


def write_parameters(trainer: Trainer, *, path: Path | None, metadata: Mapping[str, str]) -> None:
    """Write all full parameters and persistent buffers into a safetensors file at `path`, by their names.

    A tied parameter is written once, under its first name. Every rank calls it, and all ranks but one pass None as
    path. `metadata` is written into the header. The file appears whole or not at all; OSError is raised if not."""
    own = [buffer.name for buffer in buffers(trainer.modules)]
    persistent = {name for names in trainer.world.exchange(own) for name in names}
    persistent_buffers = [(name, value) for name, value in trainer.full_buffers() if name in persistent]
    if path is None:
        for _ in trainer.full_parameters():
            pass
        return
    specs = [TensorSpec(row.name, row.dtype, row.shape) for row in trainer.table.rows]
    specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in persistent_buffers]

    def write(place: Path) -> None:
        with place.open("wb") as file:
            file.write(header(specs, metadata=metadata))
            for _, tensor in itertools.chain(trainer.full_parameters(), persistent_buffers):
                # A copy, because numpy forbids resizing memory that it views, and zero=3 resizes it.
                copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                file.write(copy.reshape(-1).view(torch.uint8).numpy().data)

    write_whole(path, write=write, aside=path.with_name(f"{path.name}.partial"))


WINDOW = 20
"""Steps between two comparisons."""


class RankPace:
    """Busy times of this rank's steps, which are compared with the other ranks' times every 20 steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._busy: dict[int, float] = {}
        self.times: list[list[float]] = []
        """Busy seconds of each rank in each step, if the last call of `slow` has compared; else empty."""

    @contextlib.contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Measure the seconds of the block, without the seconds in which this rank waits in collectives."""
        recorder = self._world.flight_recorder
        began, waited = time.monotonic(), recorder.waited
        yield
        self._busy[step] = time.monotonic() - began - (recorder.waited - waited)

    def slow(self, *, after: int = WINDOW) -> list[Slow]:
        """Return the slow ranks if `after` steps have been timed since the last comparison. Every rank calls it."""
        world, steps, self.times = self._world, list(self._busy), []
        if len(steps) < after:
            return []
        own, self._busy = list(self._busy.values()), {}
        if world.size == 1:
            return []
        self.times = world.exchange(own)
        return list(slow_ranks(steps, times=self.times))


def slow_ranks(steps: list[int], *, times: list[list[float]]) -> Iterator[Slow]:
    """Yield one event for each rank that was slow in a step. `times[rank][i]`: busy seconds in step `steps[i]`."""
    for rank, own in enumerate(times):
        found = []
        for number, step in enumerate(steps):
            others = statistics.median(row[number] for other, row in enumerate(times) if other != rank)
            if own[number] > max(2 * others, others + 0.05):
                found.append((step, own[number], others))
        if found:
            named, seconds, others_took = zip(*found, strict=True)
            yield Slow(steps[-1], rank, list(named), statistics.mean(seconds), statistics.mean(others_took))
