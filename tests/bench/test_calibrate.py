"""A calibration is a cluster that prices rehearsals."""

import dataclasses
from pathlib import Path

import pytest
import tomlkit
import torch
from torch import nn

from meshwise.bench.calibrate import CalibrationEffort, CalibrationResult, calibrate
from meshwise.cli import bench_command as command
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.simulate.cluster import load, parse_cluster
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict

LITTLE = CalibrationEffort(lengths=(16, 64), sizes=(1 << 12, 1 << 14), rounds=1)


def _calibrated(world: World) -> CalibrationResult:
    return calibrate(world, effort=LITTLE)


def test_what_is_measured_is_read_back_and_prices_a_step(tmp_path: Path) -> None:
    found = run_threads(1, _calibrated)[0]
    cluster = found.cluster
    assert 0 < found.cpu_share <= 1
    path = tmp_path / "here.toml"
    path.write_text(tomlkit.dumps(dataclasses.asdict(cluster)))
    assert load(path) == cluster
    assert not cluster.overlap
    subject = RehearsalSubject(
        lambda: nn.Linear(64, 64), lambda output, batch: (output.sum(), len(batch)), torch.zeros(4, 64)
    )
    prediction = predict(rehearse(subject, plan="dp=1", ranks=1), cluster=cluster)
    assert prediction.seconds >= cluster.device.step + cluster.device.launch


@pytest.mark.parametrize(
    "cores, reason",
    [
        (1, "2 ranks share 1 core: calibrate and train with --ranks 1"),
        (4, "other work took 45% of the CPU time: calibrate again when the machine is quieter"),
    ],
)
def test_ranks_that_did_not_have_their_cores_are_told_why(
    cores: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = CalibrationResult(parse_cluster("cpu4"), cpu_share=0.55)
    monkeypatch.setattr(command, "run", lambda *_, **__: [found])
    monkeypatch.setattr(command, "cores", lambda: cores)
    assert command.main(["calibrate", "--ranks", "2", "--device", "cpu", "--output", str(tmp_path / "here.toml")]) == 0
    assert capsys.readouterr().out.endswith(f"2 ranks; {reason}\n")
