"""What is wrong, in one sentence, with what to do about it."""

import dataclasses
import os
import re
from collections.abc import Mapping
from unittest import mock

import pytest

from meshwise.bench.doctor import (
    MachineFinding,
    check_gpu_settings,
    examine_machine,
    examine_roll_call,
)
from meshwise.bench.machine import Machine, machine_facts, machine_table
from meshwise.comm.network.job_store import RollCallEntry

GOOD = Machine(
    software=(("meshwise", "1"), ("torch", "2.13.0"), ("python", "3.11"), ("gloo", "yes"), ("nccl", "no")),
    processor="a processor",
    cores=8,
    memory=32 << 30,
    shared_memory=16 << 30,
    gpus=(),
    gpus_of_driver=0,
    topology="",
    host="here",
    open_files=65536,
)
FACTS = {**dict(GOOD.software), "device": "cpu"}


def level_and_text(findings: list[MachineFinding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings]


def test_this_machine_can_be_looked_at() -> None:
    machine = machine_facts()

    assert machine.cores >= 1
    assert machine.memory > 1 << 28
    assert dict(machine.software)["gloo"] == "yes"
    assert all(text for _, text in machine_table(machine))


def test_a_good_machine_has_no_findings() -> None:
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        assert list(examine_machine(GOOD, ranks=4)) == []


WITH_GPUS = dataclasses.replace(
    GOOD, gpus=("a GPU", "a GPU"), gpus_of_driver=2, software=(*GOOD.software[:-1], ("nccl", "2.27.5"))
)
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    "environment, ranks, what, remedy",
    [
        (EXPANDABLE, 2, "", ""),
        ({}, 2, "the allocator's segments cannot grow", "expandable_segments:True"),
        (
            {**EXPANDABLE, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            2,
            "streams for compute, NCCL and copies share 1 queue of",
            "set it to 32",
        ),
        ({**EXPANDABLE, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 2, "", ""),
        (EXPANDABLE, 4, "4 ranks share 2 GPUs", "start 2 ranks"),
        ({**EXPANDABLE, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 4, "", ""),
    ],
)
def test_settings_of_gpus_are_advised_on(environment: Mapping[str, str], ranks: int, what: str, remedy: str) -> None:
    found = list(check_gpu_settings(environment, machine=WITH_GPUS, ranks=ranks))
    assert len(found) == bool(what)
    for finding in found:
        assert finding.level == "note"
        assert what in finding.what
        assert remedy in finding.remedy


@pytest.mark.parametrize(
    "change, level, what, remedy",
    [
        ({"gpus_of_driver": 8}, "problem", "the driver has 8 GPUs and torch .* sees none", "CUDA build of torch"),
        ({"shared_memory": 64 << 20}, "note", "/dev/shm has 64 MiB", "--shm-size"),
        ({"open_files": 1024}, "note", "1024 open files", "ulimit -n"),
        ({"cores": 2}, "note", "4 ranks of 1 threads share 2 cores", "at most 2 ranks"),
    ],
)
def test_what_hinders_training_on_a_machine_is_named_with_its_remedy(
    change: Mapping[str, object], level: str, what: str, remedy: str
) -> None:
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        [finding] = examine_machine(dataclasses.replace(GOOD, **change), ranks=4)  # type: ignore[arg-type]

    assert finding.level == level
    assert re.search(what, finding.what)
    assert remedy in finding.remedy


def test_threads_are_no_matter_where_gpus_do_the_work() -> None:
    machine = dataclasses.replace(GOOD, cores=1, gpus=("a GPU",) * 4, gpus_of_driver=4)
    with mock.patch.dict(os.environ, EXPANDABLE):
        assert list(examine_machine(machine, ranks=4)) == []


# ---- the roll call -----------------------------------------------------------------------------------------------


def entry(rank: int, *, size: int = 4, **facts: str) -> RollCallEntry:
    return RollCallEntry(rank, size, FACTS | facts)


ALL = [entry(rank) for rank in range(4)]


@pytest.mark.parametrize(
    "entries, what",
    [
        (ALL, None),
        (ALL[:2], "ranks 2,3 of 4 did not answer the roll call within 10 s"),
        ([*ALL[:3], entry(2)], "rank 3 of 4 did not answer the roll call within 10 s"),
        ([*ALL, entry(1)], "rank 1 answered the roll call more than once"),
        (
            [*ALL[:3], entry(3, size=8)],
            "the ranks differ in the size of the world: 4 on ranks 0,1,2 and 8 on rank 3",
        ),
        ([*ALL[:3], entry(3, torch="2.11.0")], "the ranks differ in torch: 2.13.0 on ranks 0,1,2 and 2.11.0 on rank 3"),
        ([*ALL[:3], entry(3, meshwise="2")], "the ranks differ in meshwise: 1 on ranks 0,1,2 and 2 on rank 3"),
        ([*ALL[:3], entry(3, python="3.12")], "the ranks differ in python: 3.11 on ranks 0,1,2 and 3.12 on rank 3"),
        ([*ALL[:3], entry(3, nccl="2.27.3")], "the ranks differ in nccl: no on ranks 0,1,2 and 2.27.3 on rank 3"),
        ([*ALL[:3], entry(3, device="cuda")], "the ranks differ in device: cpu on ranks 0,1,2 and cuda on rank 3"),
    ],
)
def test_what_differs_between_ranks_is_one_sentence(entries: list[RollCallEntry], what: str | None) -> None:
    found = list(examine_roll_call(entries, size=4, seconds=10))

    assert ("problem", what) in level_and_text(found) if what else found == []
    assert all(finding.remedy for finding in found)
