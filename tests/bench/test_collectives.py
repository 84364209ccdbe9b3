"""Timing every collective: what is called, with how many bytes, by which ranks; the table, the files, the picture."""

from pathlib import Path

import pytest

from meshwise.bench.collective_benchmark import (
    CALLS,
    COPY,
    VARIANTS,
    Measurement,
    SizeSweep,
    as_table,
    measure,
    plot,
    rows,
)
from meshwise.cli.main import main
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from warm_processes import Processes

ALL = tuple(CALLS)


def measured(world: World, sweep: SizeSweep) -> tuple[list[Measurement], list[CallRecord]]:
    with world.flight_recorder.record() as records:
        return measure(world, sweep=sweep), records


def test_every_collective_is_measured_at_every_size_in_every_group_with_a_copy_beside_it() -> None:
    sweep = SizeSweep(kinds=("all_reduce", "gather"), sizes=(64, 4096), groups=(2, 4), rounds=2)

    by_rank = [found for found, _ in run_threads(4, measured, args=(sweep,))]

    def keys(rank: int) -> set[tuple[str, int, int]]:
        return {(one.kind, one.ranks, one.bytes) for one in by_rank[rank]}

    everything = {(kind, n, size) for kind in ("all_reduce", "gather", "copy") for n in (2, 4) for size in (64, 4096)}
    assert keys(0) == keys(1) == everything
    assert keys(2) == keys(3) == {key for key in everything if key[1] == 4}
    assert by_rank[0] == by_rank[1], "the slowest rank's time counts for all"
    assert all(0 < one.min_seconds <= one.median_seconds for one in by_rank[0])


def test_the_bytes_of_each_collective_are_what_its_definition_counts() -> None:
    sweep = SizeSweep(kinds=ALL, sizes=(4096,), groups=(4,), rounds=1, warmup=0)

    [found, records], *_ = run_threads(4, measured, args=(sweep,))

    assert {one.bytes for one in found} == {4096}
    called = {(record.kind, record.bytes) for record in records if record.bytes >= 4096}
    one_sided = {"gather", "scatter"}  # a rank's record only tells its own part
    assert called == {(kind, 4096) for kind in (*ALL[:-2], "send", "recv") if kind not in one_sided}


def test_sizes_are_rounded_to_whole_numbers_per_rank_and_never_to_nothing() -> None:
    sweep = SizeSweep(kinds=("all_gather",), sizes=(1, 100), groups=(3,), rounds=1)

    found, _ = run_threads(3, measured, args=(sweep,))[0]

    assert sorted({one.bytes for one in found}) == [12, 96]


@pytest.mark.parametrize(
    "sweep, message",
    [
        (SizeSweep(("all_reduze",), (4,), (2,)), "no collective all_reduze; there are all_reduce"),
        (SizeSweep(("reduce",), (4,), (3,)), "4 ranks have no groups of 3; groups may have 2, 4 ranks"),
        (SizeSweep(("reduce",), (4,), (1,)), "no groups of 1"),
        (SizeSweep((), (4,), (2,)), "nothing to measure"),
        (SizeSweep(("reduce",), (4,), (2,), on=()), "nothing to measure"),
        (SizeSweep(("reduce",), (4,), (2,), on=("joint",)), "nothing to measure: on joint memory only all_gather is"),
        (SizeSweep(("reduce",), (4,), (2,), rounds=0), "nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(sweep: SizeSweep, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep.check(world_size=4)


@pytest.mark.processes
def test_real_processes_are_measured_on_everything(processes: Processes) -> None:
    found, _ = processes.run(2, measured, args=(SizeSweep(ALL, (1 << 18,), (2,), rounds=1, on=VARIANTS),))[0]

    everywhere = {(kind, on) for kind in ALL if kind != COPY for on in ("ordinary", "shared")} | {(COPY, "ordinary")}
    elsewhere_measured = {(kind, "gloo") for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")}
    elsewhere_measured.add(("all_gather", "joint"))
    assert {(one.kind, one.on) for one in found} == everywhere | elsewhere_measured
    assert all(1e3 < one.bus_bandwidth < 1e12 for one in found), "bytes per second"


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--device", "cuda", "--sizes", "4K", "--rounds", "2"]
    assert main(["bench", "collectives", *words]) == 0
    assert "all_reduce" in capsys.readouterr().out


# ---- what is printed -----------------------------------------------------------------------------------------------

EXAMPLE = [
    Measurement("all_reduce", 4, 1 << 20, 3e-3, 2e-3),
    Measurement("copy", 4, 1 << 20, 1e-4, 1e-4),
    Measurement("all_reduce", 2, 1 << 20, 2e-3, 1e-3),
    Measurement("copy", 2, 1 << 20, 1e-4, 1e-4),
]


def test_files_hold_seconds_and_bytes_per_second_and_the_share_of_a_copy() -> None:
    first, second = rows(EXAMPLE)[:2]

    assert (first["collective"], first["ranks"], first["bytes"]) == ("all_reduce", 2, 1 << 20)
    assert second["bus_bandwidth"] == pytest.approx(1.5 * (1 << 20) / 3e-3)
    assert second["share_of_copy"] == pytest.approx(1.5 * 1e-4 / 3e-3)


def test_the_table_has_a_line_for_each_collective_and_none_for_the_copy() -> None:
    titles, *lines = as_table(EXAMPLE)

    assert [line[:3] for line in lines] == [("all_reduce", "2", "1.0 MiB"), ("all_reduce", "4", "1.0 MiB")]
    assert "3 ms" in lines[1]
    assert len(titles) == len(lines[0])


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(EXAMPLE, path=tmp_path / "bandwidth.png")
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("meshwise.cli.shared_flags.find_spec", lambda _: None)
    assert main(["bench", "collectives", "--png", str(tmp_path / "x.png")]) == 2
    assert "meshwise[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "meshwise bench collectives"),
        (["colectives"], "unknown benchmark 'colectives'"),
        (["collectives", "--groups", "3", "--ranks", "4"], "groups may have 2, 4 ranks"),
        (["collectives", "--sizes", "4X"], "'4X' is not a size"),
        (["collectives", "--collectives", "alreduce"], "no collective alreduce"),
        (["collectives", "--size", "4K"], "size"),
    ],
)
def test_a_bad_command_line_ends_with_status_2_and_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
