"""The fault campaign: a seeded number of faults into a small job, and after each of them three questions.

    lost      is every checkpoint that was published before the fault still there, whole?
    wrong     is any number of any later step another one than in the run that nothing happened to?
    hang      did the job, or what was left of it, end or report in the set time?

Kills come in chains: each run of a chain goes on where the last was killed, until the job is done, and then its
parameters have to be those of the undisturbed run, byte for byte. `python -m faults.campaign --help`."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from faults.damage import FILES, MANNERS, damage
from faults.job import RANKS, STEPS, Events, Numbers, events, in_folder, numbers, small_job, starts
from faults.ranks import STALL_SECONDS, Ended, Fault, run_ranks
from meshwise.checkpoint.checkpoint_folder import damages
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.train.job_settings import Job
from meshwise.train.loop import train

PLANS = ("dp=2", "dp=2 zero=1", "dp=2 zero=3", "dp=1 server=1 staleness=1")
LOST, WRONG, HANG = "lost", "wrong", "hang"


@dataclass
class Tally:
    """How many faults of each kind, and what they led to that they must not."""

    faults: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, problems: list[tuple[str, str]]) -> None:
        """One fault, and what is wrong after it."""
        self.faults[kind] += 1
        self.failures += problems

    def table(self) -> str:
        """The tally."""
        rows = [f"  {kind:<52} {count:>4}" for kind, count in sorted(self.faults.items())]
        count = Counter(failure for failure, _ in self.failures)
        said = ", ".join(f"{count[kind]} {word}" for kind, word in _WORDS.items())
        return "\n".join([f"{sum(self.faults.values())} faults: {said}", *rows, *(text for _, text in self.failures)])


_WORDS = {LOST: "lost a checkpoint", WRONG: "went on wrong", HANG: "hung"}


@dataclass(frozen=True)
class Reference:
    """The run that nothing happens to, under one plan."""

    job: Job
    numbers: Numbers
    parameters: bytes

    @classmethod
    def of(cls, folder: Path, *, plan: str) -> Reference:
        """Run it."""
        folder.mkdir()
        job = small_job(folder, plan=plan)
        ended = run_ranks(job, size=RANKS, log=folder / "log")
        assert ended.well, ended.output
        run = Path(job.train.output)
        return cls(job, numbers(events(run)), (run / "parameters.safetensors").read_bytes())


def published(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run, by step."""
    found = (folder / "checkpoints").glob("step-*/checkpoint.json")
    return {int(path.parent.name.partition("-")[2]): path.parent for path in found if "." not in path.parent.name}


# ---- ranks that are killed, stopped, and have no disk --------------------------------------------------------------


class Chain:
    """One job through fault after fault; `folder` is where it runs."""

    def __init__(self, reference: Reference, folder: Path) -> None:
        self._reference = reference
        self._folder = folder
        self._job = in_folder(reference.job, folder / "run")
        self._newest = 0

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self._folder / "run"

    def suffer(self, fault: Fault) -> tuple[Ended, list[tuple[str, str]]]:
        """One run with a fault in it, and what is wrong afterwards."""
        before, begun = published(self.run), len(starts(self.run))
        ended = run_ranks(self._job, size=RANKS, log=self._folder / "log", fault=fault)
        said = events(self.run) if len(starts(self.run)) > begun else []
        return ended, [*self._lost(fault, said, max(before, default=0)), *self._wrong(fault, ended, said)]

    def finish(self) -> list[tuple[str, str]]:
        """The last run, in peace: it has to end as the undisturbed one did."""
        ended, problems = self.suffer(Fault("none"))
        if not ended.well:
            problems.append((WRONG, f"{self._folder.name}: the last run did not end well: {ended.output}"))
        elif (self.run / "parameters.safetensors").read_bytes() != self._reference.parameters:
            problems.append((WRONG, f"{self._folder.name}: other parameters at the end"))
        problems += [(WRONG, f"{self._folder.name}: {row}") for row in self._applied_wrongly()]
        return problems

    def _applied_wrongly(self) -> Iterator[str]:
        """The servers' logs in the newest checkpoint have each step of each worker once, and count the versions."""
        newest = published(self.run)[max(published(self.run))]
        saved = json.loads((newest / "checkpoint.json").read_text("utf-8"))["extra"].get("servers", {"logs": []})
        if len(saved["logs"]) != self._job.plan.server:
            yield f"{len(saved['logs'])} logs of servers"
        for log in saved["logs"]:
            clocks = sorted((worker, clock) for worker, clock, _, _ in log)
            versions = [applied for _, _, _, applied in log]
            if clocks != [(0, step) for step in range(1, STEPS + 1)] or versions != list(range(1, STEPS + 1)):
                yield f"the log of a server is {log}"

    def _lost(self, fault: Fault, said: Events, before: int) -> Iterator[tuple[str, str]]:
        where = f"{self._folder.name}, {fault}"
        after = published(self.run)
        for folder in after.values():
            for found in damages(folder):
                yield LOST, f"{where}: {found}"
        saved = [event["step"] for event in said if event["event"] == "saved"]
        if max(after, default=0) < max([before, *saved]):
            yield LOST, f"{where}: {sorted(after)} of {[before, *saved]} are left"
        begun = next((event["step"] for event in said if event["event"] == "resume"), None)
        if before and begun is not None and begun != before:
            yield LOST, f"{where}: went on from {begun}, not from {before}"

    def _wrong(self, fault: Fault, ended: Ended, said: Events) -> Iterator[tuple[str, str]]:
        where = f"{self._folder.name}, {fault}"
        for step, found_numbers in numbers(said).items():
            if found_numbers != self._reference.numbers[step]:
                yield WRONG, f"{where}: step {step} gave {found_numbers}, not {self._reference.numbers[step]}"
        if fault.kind == "stop" and (ended.statuses[1 - fault.rank] is None):
            yield HANG, f"{where}: nobody noticed in {ended.seconds:.0f} s"
        elif fault.kind == "stop" and not ended.well and "does not answer" not in ended.output:
            yield WRONG, f"{where}: the report does not say who does not answer: {ended.output}"
        elif fault.kind in ("none", "raise", "disk") and None in ended.statuses:
            yield HANG, f"{where}: {ended.statuses} after {ended.seconds:.0f} s: {ended.output}"


def drawn_fault(kind: str, draw: random.Random) -> Fault:
    """A fault of this kind at a random place."""
    rank = draw.randrange(RANKS)
    if kind == "disk":
        return Fault(kind, count=draw.randrange(2_000, 40_000))
    if kind == "publish":
        return Fault(kind, 0, draw.randrange(1, 14), draw.choice([0.0, 0.0, 0.0005, 0.002]))
    if kind == "save":
        return Fault(kind, rank, draw.randrange(1, 20), draw.choice([0.0, 0.001, 0.003]))
    return Fault(kind, rank, draw.randrange(1, 60))


def chains(reference: Reference, folder: Path, *, kinds: list[str], draw: random.Random) -> Tally:
    """These faults, one after the other, into jobs that each take as many as they can."""
    tally = Tally()
    waiting = list(kinds)
    number = 0
    while waiting:
        number += 1
        place = folder / f"chain-{number}"
        place.mkdir(parents=True)
        chain = Chain(reference, place)
        while waiting:
            fault = drawn_fault(waiting[0], draw)
            ended, problems = chain.suffer(fault)
            tally.failures += problems
            if ended.well:
                break  # the job was over before the fault had its moment
            tally.add(_NAMES[waiting.pop(0)], [])
        else:
            tally.failures += chain.finish()
        shutil.rmtree(place)
    return tally


_NAMES = {
    "step": "killed in a step",
    "save": "killed in a save",
    "publish": "killed in the publishing of a checkpoint",
    "stop": "stopped",
    "raise": "an exception in a step",
    "disk": "no file may grow further",
}


# ---- a full disk ---------------------------------------------------------------------------------------------------


def full_disk(reference: Reference, folder: Path, *, kilobytes: int) -> Tally:
    """A job on a disk that is too small, and then on one that is not."""
    tally = Tally()
    folder.mkdir(parents=True)
    with _tmpfs(folder, kilobytes) as mounted:
        if mounted:
            chain = Chain(reference, folder)
            ended, problems = chain.suffer(Fault("full"))
            if not ended.well:
                tally.add("a full disk", problems)
                subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
                tally.failures += chain.finish()
    return tally


@contextmanager
def _tmpfs(folder: Path, kilobytes: int) -> Iterator[bool]:
    """A file system of this size at `folder`, where the system lets us make one."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- files that are not as they were written -----------------------------------------------------------------------


def harmed_files(reference: Reference, folder: Path, *, number: int, draw: random.Random) -> Tally:
    """One file of a run that was killed after step 8 is harmed, and the run goes on."""
    tally = Tally()
    folder.mkdir(parents=True)
    base = Path(reference.job.train.output)
    order = [(file, manner) for file in FILES for manner in MANNERS]
    draw.shuffle(order)
    tries = 0
    while sum(tally.faults.values()) < number:
        file, manner = order[tries % len(order)]
        tries += 1
        run = folder / "run"
        shutil.copytree(base, run)
        for step, path in published(run).items():
            if step > STEPS - 2:
                shutil.rmtree(path)
        newest = max(published(run))
        path, older = (run / file.format(newest=f"step-{step}") for step in (newest, newest - 1))
        if path.exists() and damage(path, manner=manner, older=older, draw=draw):
            problems = list(_resumed(reference, run, path, newest))
            kind = path.name.replace("00000", "N").replace("00001", "N")
            tally.add(f"{kind} {manner}", problems)
        shutil.rmtree(run)
    return tally


def _resumed(reference: Reference, run: Path, path: Path, newest: int) -> Iterator[tuple[str, str]]:
    """Go on with the harmed run; what is wrong with how it does."""
    job = in_folder(reference.job, run)

    def main(world: World) -> None:
        with Path("/dev/null").open("w") as nowhere:
            train(world, job=job, console=Console(file=nowhere))

    run_threads(RANKS, main)
    said = events(run)
    [resume] = [event for event in said if event["event"] == "resume"]
    told = any(str(path.parent) in damage for damage in resume["damaged"])
    if resume["step"] == newest - 1 and not told:
        yield WRONG, f"{path} was passed over in silence"
    if resume["step"] not in (newest, newest - 1):
        yield LOST, f"{path}: went on from step {resume['step']} though {newest - 1} was whole"
    for step, found in numbers(said).items():
        if found != reference.numbers[step]:
            yield WRONG, f"{path}: step {step} gave {found}, not {reference.numbers[step]}"


# ---- all of it -----------------------------------------------------------------------------------------------------


def campaign(folder: Path, *, seed: int, faults: int, plans: Sequence[str] = PLANS) -> Tally:
    """About so many faults: four tenths kills, a twentieth each stopped ranks, exceptions and disks, the rest files."""
    torch.set_num_threads(1)
    draw, parts = random.Random(seed), min(_PARTS, 1 + faults // 20)
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda item: Reference.of(folder / f"whole-{item[0]}", plan=item[1]), enumerate(plans))
        references = list(made)
        kinds = ["step", "save", "publish"] * (faults * 4 // 30) + ["stop", "raise", "disk"] * max(1, faults // 20)
        draw.shuffle(kinds)
        jobs = [
            pool.submit(
                chains,
                references[part % len(plans)],
                folder / f"chains-{part}",
                kinds=kinds[part::parts],
                draw=random.Random(draw.random()),
            )
            for part in range(parts)
        ]
        jobs += [
            pool.submit(full_disk, references[number % len(plans)], folder / f"disk-{number}", kilobytes=size)
            for number, size in enumerate(draw.sample(range(60, 400), k=max(1, faults // 25)))
        ]
        tallies = [job.result() for job in jobs]
    done = sum(sum(tally.faults.values()) for tally in tallies)
    tallies.append(harmed_files(references[len(plans) // 2], folder / "files", number=max(1, faults - done), draw=draw))
    total = Tally()
    for tally in tallies:
        total.faults += tally.faults
        total.failures += tally.failures
    return total


_PARTS = 6
"""Chains at most; a chain ends with a run in peace."""


def main() -> int:
    """Run it and print the tally; status 1 when a fault led to what it must not."""
    parser = argparse.ArgumentParser(description="Inject faults into a small job and count what they lead to.")
    parser.add_argument("--seed", type=int, default=0, help="which faults")
    parser.add_argument("--faults", type=int, default=220, help="how many")
    parser.add_argument("--plans", nargs="+", default=PLANS, help="plans for two ranks")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwise-faults-") as folder:
        tally = campaign(Path(folder), seed=arguments.seed, faults=arguments.faults, plans=arguments.plans)
    print(f"seed {arguments.seed}, {time.monotonic() - began:.0f} s, stopped ranks reported at {STALL_SECONDS:g} s")
    print(tally.table())
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
