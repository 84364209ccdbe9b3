"""A save is complete or absent, ends in the same way on every rank, and lets training continue meanwhile."""

import os
import resource
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint.reader import read
from meshwise.checkpoint.checkpoint_folder import newest_valid, prune
from meshwise.checkpoint.checkpoint_format import SaveError, read_index
from meshwise.checkpoint.save_state import CHUNK_BYTES, BufferedWriter, PendingSave
from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import World
from meshwise.data_parallel.checkpoint_slices import StoredSlice
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.testing import run
from warm_command import WarmCommand

CPU = torch.device("cpu")


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def trainer(world: World, plan: str = "dp=auto zero=2") -> Trainer:
    torch.manual_seed(0)
    return parallelize(nn.Sequential(nn.Linear(40, 90), nn.Linear(90, 40)), plan, loss=loss, world=world, lr=1e-2)


BATCH = torch.ones(4, 40)


def whole(training: Trainer) -> dict[str, Tensor]:
    return {f"parameter/{name}": value.clone() for name, value in training.full_parameters()}


def go_on(world: World, folder: Path) -> None:
    training = trainer(world)
    training.step(BATCH)
    before = whole(training)
    saving = training.save(folder, wait=False)
    training.step(BATCH)
    training.step(BATCH)
    assert saving.wait() == folder
    state = read(folder)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert not all(torch.equal(state[name], value) for name, value in whole(training).items())


def test_the_state_at_the_call_is_saved_while_training_continues(tmp_path: Path) -> None:
    run(2, go_on, args=(tmp_path / "one",))


def test_an_update_waits_until_the_tensors_are_staged(tmp_path: Path) -> None:
    big = torch.arange(6 * CHUNK_BYTES // 4, dtype=torch.float32)
    writing = BufferedWriter(tmp_path / "file", head=bytes(4), tensors=[big], streams=streams_of(CPU), staging=0)
    assert not writing._staged.wait(0.1), "two chunks hold a third of it, and nobody writes"
    writer = threading.Thread(target=writing.write)
    writer.start()
    writing.wait_staged()
    big.zero_()
    writer.join()
    written = torch.from_file(str(tmp_path / "file"), size=big.numel() + 1, dtype=torch.float32)
    assert torch.equal(written[1:], torch.arange(6 * CHUNK_BYTES // 4, dtype=torch.float32))


def test_a_disk_that_fails_as_it_flushes_a_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writing = BufferedWriter(tmp_path / "file", head=bytes(4), tensors=[torch.ones(3)], streams=streams_of(CPU))
    with pytest.raises(OSError, match="No space left on device"):
        writing.write()


class Counting(nn.Module):
    """A model whose buffer changes in every forward, before any optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(3 * CHUNK_BYTES // 8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x)


def count(world: World, folder: Path) -> None:
    training = parallelize(Counting(), "dp=2", loss=loss, world=world)
    training.step(torch.ones(2, 4))
    saving = training.save(folder, wait=False)
    training.step(torch.ones(2, 4))
    saving.wait()


def test_a_large_buffer_that_changes_before_the_next_update_is_saved_as_it_was(tmp_path: Path) -> None:
    run(2, count, args=(tmp_path / "one",))
    assert (read(tmp_path / "one")["buffer/calls"] == 1).all()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail(world: World, root: Path, *, later: bool) -> str:
    training = trainer(world)
    training.step(BATCH)
    training.save(root / "step-1")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    world.barrier()
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    world.barrier()
    saving = training.save(root / "step-2", wait=False)
    with pytest.raises(SaveError) as caught:
        _ = training.save(root / "step-3") if later else saving.wait()
    found = sorted(path.name for path in root.iterdir())
    assert found == ["latest", "step-1"], "what failed is gone before the error is raised"
    world.barrier()
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    world.barrier()
    training.save(root / "step-4")
    return str(caught.value)


@pytest.mark.parametrize("later", [False, True], ids=["at wait", "at the next save"])
def test_a_full_disk_is_the_same_error_on_every_rank_and_the_old_checkpoint_survives(
    later: bool, tmp_path: Path
) -> None:
    with files_of_at_most(resource.RLIM_INFINITY):
        messages = run(2, lambda world: fail(world, tmp_path, later=later))
    assert len(set(messages)) == 1
    assert "step-2 was not saved: rank 0: File too large" in messages[0]
    assert names(tmp_path) == ["step-1", "step-4"]
    assert (tmp_path / "latest").read_text() == "step-4\n"


def no_place(world: World, folder: Path, extra: object) -> str:
    with pytest.raises(SaveError) as caught:
        trainer(world).save(folder, extra={"value": extra})
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for message in run(2, no_place, args=(tmp_path / "file" / "step-1", 0)):
        assert "rank 0:" in message
        assert "file" in message


@pytest.mark.parametrize(
    "name, words",
    [
        *((name, "it exists and is no checkpoint") for name in ("", "mine", "mine/notes.txt")),
        ("latest", "this name is reserved for the newest checkpoint's name"),
        ("mine/latest", "this name is reserved for the newest checkpoint's name"),
    ],
)
def test_a_save_replaces_nothing_but_a_checkpoint(name: str, words: str, tmp_path: Path) -> None:
    run(2, overwrite, args=(tmp_path,))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("years of work")
    before = sorted(tmp_path.parent.rglob("*"))
    for message in run(2, no_place, args=(tmp_path / name, 0)):
        assert words in message
    assert sorted(tmp_path.parent.rglob("*")) == before
    assert (tmp_path / "latest").read_text() == "last\n"


def test_a_checkpoint_may_be_saved_into_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    run(2, overwrite, args=(tmp_path,))
    assert names(tmp_path) == ["last"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.ones(2)], ids=["nan", "a set", "a tensor"])
def test_extra_that_is_not_json_is_refused_before_anything_is_written(value: object, tmp_path: Path) -> None:
    for message in run(2, no_place, args=(tmp_path / "step-1", value)):
        assert "JSON" in message
    assert list(tmp_path.iterdir()) == []


class Lost(Exception):
    pass


def test_a_rank_that_never_writes_its_part_leaves_the_old_checkpoint_alone(tmp_path: Path) -> None:
    def main(world: World) -> None:
        training = trainer(world)
        training.save(tmp_path / "step-1")
        saving = training.save(tmp_path / "step-2", wait=False)
        if world.rank == 1:
            saving._written.wait()
            raise Lost
        saving.cancel()
        assert saving.done

    (tmp_path / "step-2").mkdir()
    with pytest.raises(Lost):
        run(2, main)
    assert newest_valid(tmp_path)[0] is not None


def overwrite(world: World, root: Path) -> None:
    training = trainer(world)
    for _ in range(3):
        training.step(BATCH)
        training.save(root / "last")


def test_a_checkpoint_can_be_saved_again_under_its_name(tmp_path: Path) -> None:
    run(2, overwrite, args=(tmp_path,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "latest"]
    assert read(tmp_path / "last")["scalar/step/0.weight"].item() == 3
    assert read_index(tmp_path / "last").sequence == 3


def many(world: World, root: Path, keep_last: int | None) -> None:
    training = trainer(world)
    for step in range(1, 6):
        training.step(BATCH)
        training.save(root / f"step-{step}", keep_last=keep_last)
        if step == 2 and keep_last is not None:
            training.save(root / "best")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_keep_last_removes_older_checkpoints(tmp_path: Path) -> None:
    run(2, many, args=(tmp_path, 2))
    assert names(tmp_path) == ["best", "step-4", "step-5"]


def test_keep_last_counts_valid_checkpoints_only(tmp_path: Path) -> None:
    run(2, many, args=(tmp_path, None))
    data = tmp_path / "step-4" / "rank-00000.safetensors"
    os.truncate(data, data.stat().st_size - 4)
    (tmp_path / "step-2").rename(tmp_path / "step-2.replaced-00ab")  # a save stopped before it removed the old one
    (tmp_path / "step-6.partial-0000").mkdir()
    (tmp_path / "step-1.partial-0000").mkdir()
    early = (tmp_path / "step-1" / "checkpoint.json").stat().st_mtime
    os.utime(tmp_path / "step-1.partial-0000", (early, early))
    gone = prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in gone) == ["step-1", "step-1.partial-0000", "step-2.replaced-00ab", "step-4"]
    assert names(tmp_path) == ["step-3", "step-5", "step-6.partial-0000"]
    with pytest.raises(ValueError, match="keep_last=0"):
        prune(tmp_path, keep_last=0)


def test_a_tensor_that_is_not_contiguous_is_saved_in_its_logical_order(tmp_path: Path) -> None:
    full = torch.arange(3 * 5 * (CHUNK_BYTES // 32), dtype=torch.float64).view(3, -1, 5)
    tensors = {"columns": full[:, :, 1:3], "turned": full.permute(2, 1, 0), "row": full[1]}

    def main(world: World) -> None:
        holdings = [StoredSlice.of_full(tensor, name=name, slot="parameter") for name, tensor in tensors.items()]
        PendingSave(tmp_path / "one", holdings=holdings, aliases={}, extra={}, world=world).wait()

    run(1, main)
    for name, tensor in tensors.items():
        assert torch.equal(read(tmp_path / "one")[f"parameter/{name}"], tensor)


MEMORY = """
    import sys, torch
    from pathlib import Path
    from meshwise.checkpoint.checkpoint_format import read_index
    from meshwise.checkpoint.checkpoint_folder import CheckpointReader
    from meshwise.checkpoint.save_state import PendingSave
    from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
    from meshwise.data_parallel.checkpoint_slices import StoredSlice

    MB = 1 << 20
    state = [torch.ones(64 * MB // 4) for _ in range(4)]

    def holdings():
        return [StoredSlice.of_full(tensor, name=str(number), slot="parameter") for number, tensor in enumerate(state)]

    def peak():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def main(world):
        folder = Path(sys.argv[1]) / "one"
        before = peak()
        PendingSave(folder, holdings=holdings(), aliases={}, extra={}, world=world).wait()
        saved = peak()
        for tensor in state:
            tensor.zero_()
        CheckpointReader(read_index(folder)).fill(holdings())
        assert all(bool((tensor == 1).all()) for tensor in state)
        print((saved - before) // MB, (peak() - saved) // MB)

    run_threads(1, main)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_save_takes_one_staging_buffer_of_memory_and_a_load_one_window(tmp_path: Path) -> None:
    """By the high-water mark of its memory: that of `getrusage` begins with the one of the process that started it."""
    script = textwrap.dedent(MEMORY)
    status, output, errors = WarmCommand("-c", script, str(tmp_path)).end()
    assert status == 0, errors
    saving, loading = map(int, output.split())
    assert saving <= 64 + 8, "MB above 256 MB of state; the staging buffer is 64 MB"
    assert loading <= 8 + 8, "the window is 8 MB"
