"""A calibration is a cluster that prices rehearsals."""

import dataclasses
from pathlib import Path

import tomlkit
import torch
from torch import nn

from meshwise.bench.calibrate import CalibrationEffort, calibrate
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.simulate.cluster import Cluster, load
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict

LITTLE = CalibrationEffort(lengths=(16, 64), sizes=(1 << 12, 1 << 14), rounds=1)


def _calibrated(world: World) -> Cluster:
    return calibrate(world, effort=LITTLE)


def test_what_is_measured_is_read_back_and_prices_a_step(tmp_path: Path) -> None:
    cluster = run_threads(1, _calibrated)[0]
    path = tmp_path / "here.toml"
    path.write_text(tomlkit.dumps(dataclasses.asdict(cluster)))
    assert load(path) == cluster
    assert not cluster.overlap
    subject = RehearsalSubject(
        lambda: nn.Linear(64, 64), lambda output, batch: (output.sum(), len(batch)), torch.zeros(4, 64)
    )
    prediction = predict(rehearse(subject, plan="dp=1", ranks=1), cluster=cluster)
    assert prediction.seconds >= cluster.device.step + cluster.device.launch
