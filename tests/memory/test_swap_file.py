"""Tensors in the swap file: written values are read back, and failures are errors."""

import fcntl
import gc
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwise.comm.api.streams import streams_of
from meshwise.comm.launch.fork_server import start_context
from meshwise.memory.swap_file import (
    BLOCK,
    PIECE,
    BufferPool,
    SwapConfig,
    SwapFile,
    SwapTransfer,
    TierError,
    aligned,
    whole_blocks,
)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    made = SwapFile(tmp_path)
    yield made
    made.close()


def block(values: Tensor) -> Tensor:
    """Memory of whole blocks that begins with `values`."""
    memory = aligned(whole_blocks(values.nbytes))
    memory[: values.nbytes].view(values.dtype).copy_(values)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("numel", [1, 1000, 2 * PIECE // 8 + 3])
def test_written_values_are_read_directly_and_as_tensors(file: SwapFile, numel: int, dtype: torch.dtype) -> None:
    file.allocate(5, dtype=torch.float32)
    rest = file.allocate(numel, dtype=dtype)
    assert rest.shape == (numel,)
    assert not rest.any()
    values = torch.arange(numel).to(dtype)
    file.write(file.place(rest), values=block(values)).wait()
    assert torch.equal(rest, values)
    rest.neg_()
    memory = torch.zeros_like(block(values))
    memory = block(torch.zeros_like(values))
    file.read(file.place(rest), into=memory).wait()
    assert torch.equal(memory[: values.nbytes].view(dtype), -values)


def test_a_system_without_direct_access_and_reservation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("O_DIRECT", "posix_fallocate"):  # as macOS
        monkeypatch.delattr(os, name)
    file = SwapFile(tmp_path)
    rest, values = file.allocate(1000, dtype=torch.float32), torch.arange(1000.0)
    file.write(file.place(rest), values=block(values)).wait()
    assert rest.equal(values)
    assert not file.direct
    assert not list(tmp_path.iterdir())
    file.close()


def test_a_view_is_located_in_the_file(file: SwapFile) -> None:
    first, second = (file.allocate(4096, dtype=torch.float32) for _ in range(2))
    assert file.place(second) - file.place(first) == 4 * 4096
    assert file.place(second[1024:]) - file.place(second) == 4096
    assert file.locate(torch.zeros(4)) is None


def test_an_ordinary_disk_is_read_and_written_past_the_page_cache(file: SwapFile) -> None:
    descriptor = os.open(file.folder, os.O_TMPFILE | os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        os.pwritev(descriptor, [aligned(BLOCK).numpy().data], 0)
    except OSError:
        pytest.skip("this file system has no direct reads and writes")
    finally:
        os.close(descriptor)
    assert file.direct


def test_a_file_system_without_direct_access_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuse)
        file = SwapFile(tmp_path)
    assert not file.direct
    rest = file.allocate(3000, dtype=torch.float32)
    file.write(file.place(rest), values=block(torch.ones(3000))).wait()
    assert rest.sum() == 3000
    file.close()


def test_the_file_has_no_name(file: SwapFile, tmp_path: Path) -> None:
    file.allocate(100, dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_makes_no_nameless_file_gets_one_whose_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_open = os.open

    def plain(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return os_open(path, flags, *rest, **more)  # type: ignore[arg-type] # as os.open takes it

    monkeypatch.setattr(os, "open", plain)
    file = SwapFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert file.allocate(3, dtype=torch.float32).tolist() == [0, 0, 0]
    file.close()


def test_a_missing_folder_is_an_error_and_a_later_removal_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    file = SwapFile(folder)
    folder.rmdir()
    rest = file.allocate(1000, dtype=torch.float32)
    file.write(file.place(rest), values=block(torch.ones(1000))).wait()
    assert rest.sum() == 1000
    file.close()
    with pytest.raises(
        TierError, match=rf"can be made in {folder}: No such file or directory; name an existing, writable folder"
    ):
        SwapFile(folder)


def test_a_full_disk_is_an_error_before_anything_is_written(file: SwapFile) -> None:
    with pytest.raises(TierError, match=r"has no room for the swap file: .*; \d+ bytes are needed besides"):
        file.allocate(1 << 50, dtype=torch.float32)
    assert file.allocate(3, dtype=torch.float32).tolist() == [0, 0, 0]


def test_a_failed_write_is_a_tier_error(file: SwapFile) -> None:
    rest = file.allocate(10, dtype=torch.float32)
    place = file.place(rest)
    writable = file._file
    with io.FileIO(__file__) as file._file, pytest.raises(TierError, match="cannot write a tensor of the swap file in"):
        file.write(place, values=block(torch.ones(10))).wait()
    file._file = writable


def test_nothing_is_left_open_when_it_is_closed(tmp_path: Path) -> None:
    def open_files() -> list[str]:
        links = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        return [link for link in links if link.startswith(str(tmp_path))]

    file = SwapFile(tmp_path)
    assert len(open_files()) == 2  # of the file and of its mapping
    for _ in range(100):
        file.allocate(1000, dtype=torch.float32)
    assert len(open_files()) == 2
    kept = file.allocate(1000, dtype=torch.float32).fill_(2)
    file.close()
    file.close()
    assert kept.sum() == 2000
    del kept, file
    gc.collect()
    assert open_files() == []


def is_killed(folder: Path) -> None:
    SwapFile(folder).allocate(1000, dtype=torch.float32)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    process = start_context().Process(target=is_killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_calls_back_once_whether_it_succeeds_or_fails(file: SwapFile) -> None:
    ended: list[str] = []
    rest = file.allocate(3 * PIECE // 4, dtype=torch.float32)
    transfer = file.read(file.place(rest), into=aligned(3 * PIECE))
    transfer.then(lambda: ended.append("read"))
    transfer.wait()
    file.read(file.size, into=aligned(BLOCK)).then(lambda: ended.append("failed"))
    SwapTransfer([]).then(lambda: ended.append("nothing"))
    file.close()
    assert sorted(ended) == ["failed", "nothing", "read"]


def test_no_more_than_count_staging_buffers_are_made() -> None:
    staging = BufferPool(2 * BLOCK, streams=streams_of(torch.device("cpu")))
    first, second = staging.take(BLOCK), staging.take(BLOCK)
    assert staging.bytes == 2 * BLOCK
    assert staging.take_now(BLOCK) is None
    staging.give(first)
    assert staging.take(BLOCK) is first
    assert second.data_ptr() % BLOCK == 0
    with pytest.raises(ValueError, match=r"1 staging buffers of 10 bytes .*; give at least 2, of at least 4096 bytes"):
        SwapConfig(buffers=1, buffer=10)
