"""Torn, altered and forged checkpoints are reported with file, tensor, expected and found value, and never loaded."""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.checkpoint.checkpoint_folder import damages, newest_valid
from meshwise.checkpoint.checkpoint_format import BLOCK, INDEX, DamageError, read_index
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.testing import run

DATA = "rank-00001.safetensors"


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def trainer(world: World) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 900), nn.Linear(900, 400))
    return parallelize(model, "dp=2 zero=1", loss=loss, world=world, lr=1e-2)


def two_checkpoints(world: World, root: Path) -> list[dict[str, Tensor]]:
    """step-1 and step-2, and the parameters at both."""
    training = trainer(world)
    states = []
    for step in (1, 2):
        training.step(torch.ones(4, 400) * step)
        training.save(root / f"step-{step}", extra={"step": step})
        states.append({name: value.clone() for name, value in training.full_parameters()})
    return states


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    root = tmp_path_factory.mktemp("good")
    return root, run(2, two_checkpoints, args=(root,))[0]


@pytest.fixture
def root(good: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path) -> Path:
    copy = tmp_path / "root"
    shutil.copytree(good[0], copy)
    return copy


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def lengthened(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def zeroed(path: Path) -> None:
    start = path.stat().st_size // 2
    overwrite(path, start, bytes(64))


def flipped(path: Path) -> None:
    at = path.stat().st_size * 2 // 3
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 4]))


def torn_header(path: Path) -> None:
    overwrite(path, 3, b"\xff\xff\xff")


def removed(path: Path) -> None:
    path.unlink()


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


TORN: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    f"{what.__name__} {name}": (name, what)
    for name in (DATA, INDEX)
    for what in (truncated, emptied, lengthened, zeroed, flipped, torn_header, removed)
}


def restore(world: World, root: Path) -> tuple[Any, ...]:
    training = trainer(world)
    restored = training.restore(root)
    assert restored is not None
    state = {name: value.clone() for name, value in training.full_parameters()}
    return restored.path.name, restored.extra, [str(damage) for damage in restored.damaged], state


@pytest.mark.parametrize("name,tear", TORN.values(), ids=TORN)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(
    name: str, tear: Callable[[Path], None], root: Path, good: tuple[Path, list[dict[str, Tensor]]]
) -> None:
    tear(root / "step-2" / name)
    found = list(damages(root / "step-2"))
    assert found
    assert {Path(damage.file).name for damage in found} == {name}
    for path, extra, named, state in run(2, restore, args=(root,)):
        assert (path, extra) == ("step-1", {"step": 1})
        assert any(name in damage and "expected" in damage and "found" in damage for damage in named)
        assert all(torch.equal(state[key], value) for key, value in good[1][0].items())


def load(world: World, folder: Path) -> str:
    with pytest.raises(DamageError) as caught:
        trainer(world).load(folder)
    return str(caught.value)


def test_a_flipped_bit_is_reported_with_file_tensor_expected_and_found_on_every_rank(root: Path) -> None:
    folder = root / "step-2"
    index = read_index(folder)
    path = folder / DATA
    [entry] = [part.entry for part in index.tensors["optimizer/exp_avg/1.weight"].parts if part.file == DATA][:1]
    flipped(path)
    at = path.stat().st_size * 2 // 3 // BLOCK
    expected, found = index.files[DATA].checksums[at], zlib.crc32(path.read_bytes()[at * BLOCK : (at + 1) * BLOCK])
    for message in run(2, load, args=(folder,)):
        assert f"{expected:08x}" in message
        assert f"found {found:08x}" in message
        assert str(path) in message
        assert "/1.weight@" in message
    assert entry in " ".join(str(damage) for damage in damages(folder)) or "/1.weight@" in str(list(damages(folder)))


def test_the_error_is_the_same_in_another_process(root: Path) -> None:
    flipped(root / "step-2" / DATA)
    found = tuple(damages(root / "step-2"))
    error = pickle.loads(pickle.dumps(DamageError(found)))
    assert error.damages == found
    assert str(error) == str(DamageError(found))


def test_an_index_that_is_cut_off_is_reported(root: Path) -> None:
    os.truncate(root / "step-2" / INDEX, 100)
    with pytest.raises(DamageError, match="expected a checksum at its end, found none: the file is cut off"):
        read_index(root / "step-2")


def test_without_a_valid_checkpoint_every_rank_raises(root: Path) -> None:
    truncated(root / "step-1" / DATA)
    removed(root / "step-2" / DATA)
    assert newest_valid(root)[0] is None

    def main(world: World) -> str:
        with pytest.raises(DamageError) as caught:
            trainer(world).restore(root)
        return str(caught.value)

    for message in run(2, main):
        assert "step-1" in message
        assert "step-2" in message


def test_an_empty_root_restores_none(tmp_path: Path) -> None:
    assert run(2, lambda world: trainer(world).restore(tmp_path / "nothing")) == [None, None]


# ---- forged: right checksums of contradictory contents -------------------------------------------------------------


def forge(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index, or a header, and make every checksum fit."""
    path = folder / INDEX
    body = json.loads(path.read_text())
    change(body)
    for name, row in body["files"].items():
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            row["bytes"] = len(data)
            row["crc32"] = [f"{zlib.crc32(data[at : at + BLOCK]):08x}" for at in range(0, len(data), BLOCK)]
    del body["checksum"]
    text = json.dumps(body)[:-1]
    path.write_text(f'{text}, "checksum": "{zlib.crc32(text.encode()):08x}"}}\n')


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", ".hidden", "", "a\\b", "a\n"])
def test_a_name_cannot_lead_out_of_the_folder(name: str, root: Path) -> None:
    def change(body: Any) -> None:
        body["files"][name] = body["files"].pop(DATA)
        for row in body["tensors"].values():
            for part in row["parts"]:
                part["file"] = name if part["file"] == DATA else part["file"]

    forge(root / "step-2", change)
    with pytest.raises(DamageError, match="plain name"):
        read_index(root / "step-2")


def shape(body: Any) -> dict[str, Any]:
    row: dict[str, Any] = body["tensors"]["parameter/0.weight"]
    return row


LIES: Mapping[str, Callable[[Any], None]] = {
    "a shape that no disk could hold": lambda body: shape(body).update(shape=[1 << 40, 1 << 40]),
    "a part that is missing": lambda body: shape(body)["parts"].pop(),
    "a part outside the tensor": lambda body: shape(body)["parts"][0].update(offsets=[899, 0]),
    "a part of negative size": lambda body: shape(body)["parts"][0].update(sizes=[-1, -1]),
    "a dtype that is none": lambda body: shape(body).update(dtype="pickle"),
    "a part in a file that is not listed": lambda body: shape(body)["parts"][0].update(file="other"),
    "another format": lambda body: body.update(format="meshwise checkpoint 99"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_contradictory_index_is_refused(lie: Callable[[Any], None], root: Path) -> None:
    forge(root / "step-2", lie)
    with pytest.raises(DamageError):
        read_index(root / "step-2")
    assert run(2, restore, args=(root,))[0][0] == "step-1"


def header_with(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + length])
        next(row for name, row in table.items() if name != "__metadata__").update(changes)
        text = json.dumps(table, separators=(",", ":")).encode()
        assert len(text) <= length + 64
        text = text.ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change


FORGED_HEADERS = {
    "more bytes than the file": header_with(data_offsets=[0, 1 << 50]),
    "a shape of more bytes than given": header_with(shape=[1 << 20, 1 << 20]),
    "negative offsets": header_with(data_offsets=[-8, 0]),
    "negative sizes": header_with(shape=[-1, -1]),
    "a length beyond the file": lambda path: overwrite(path, 0, (1 << 62).to_bytes(8, "little")),
    "a header that is no table": lambda path: overwrite(path, 8, b"[]"),
}


@pytest.mark.parametrize("change", FORGED_HEADERS.values(), ids=FORGED_HEADERS)
def test_sizes_in_a_header_are_checked_before_anything_is_read(change: Callable[[Path], None], root: Path) -> None:
    change(root / "step-2" / DATA)
    forge(root / "step-2", lambda _: None)
    for path, _, named, _ in run(2, restore, args=(root,)):
        assert path == "step-1"
        assert any(DATA in damage for damage in named)
    assert list(damages(root / "step-2"))
