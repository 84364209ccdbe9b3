"""Test that `verify` replays replicas in one process, says so, and finds a replica that does something else."""

from typing import Any

import pytest
import torch

from grid import Grid, ranks_of
from meshwise.engine.parallelize import Options
from meshwise.reference import next_token_loss
from meshwise.sync.diverging_replicas import Replicas
from meshwise.verify import Report, verify
from sync.test_replay import batch, build

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local every=2", {}),
    "post-local": ("local every=3", {"after": 2, "state": "reset"}),
    "groups": ("local every=4", {"group": 2, "group_every": 2}),
    "slowmo": ("slowmo every=2", {}),
    "streaming": ("diloco every=3", {"fragments": 2, "delay": 1, "blend": 0.5}),
    "gossip": ("gossip", {"graph": "exponential"}),
}


def report(plan: str, settings: dict[str, Any], **training: Any) -> Report:
    batches = [batch(number) for number in range(6)]
    options = Options(sync=settings)
    return verify(build, next_token_loss, batches, plan, lr=1e-2, options=options, **training)


SHAPES = ("dp=2", "dp=4", "dp=2 tp=2", "dp=2 pp=2 microbatches=2")


@pytest.mark.grid(
    Grid(
        {"case": tuple(CASES), "shape": SHAPES},
        exists=lambda cell: (cell["case"], cell["shape"]) != ("groups", "dp=2"),
        cost=lambda cell: ranks_of(cell["shape"]),
        strength=1,
        heavy=lambda cell: "tp" in cell["shape"],  # what a codec loses is verified under it
    )
)
def test_a_plan_is_verified_against_its_replay(case: str, shape: str) -> None:
    sync, settings = CASES[case]
    found = report(f"{shape} sync={sync}", settings)
    assert found.ok, str(found)
    assert f"is the same algorithm as {shape[3]} replicas in one process" in found.verdict
    assert "contract: replay" in str(found)


def test_a_forgotten_agreement_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicas, "_apply", lambda *_: None)
    found = report("dp=2 sync=local every=3", {"state": "keep"})
    assert "is NOT the same algorithm as 2 replicas" in found.verdict
    assert found.first is not None
    assert found.first.step > 3


def test_other_dtypes_than_float64_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replayed in float64 only; verify with dtype=torch\.float64"):
        report("dp=2 sync=local", {}, dtype=torch.float32)
