"""Test parameter servers: synchronous ones are exact, late ones equal the plain replay of their log, to 1e-12."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import Precision
from meshwise.reference import next_token_loss
from meshwise.sync.parameter_servers import ParameterServers, ServedGradient, largest_staleness
from meshwise.testing import agree, alone, build_whole, outcome, run
from meshwise.verify.verification import verify
from meshwise.verify.verification_report import Report
from sync.test_replay import ADAM, SGD, batch, build, require_equal

STEPS = 6
Log = Sequence[Sequence[ServedGradient]]


def made(world: World, plan: str, *, training: Mapping[str, Any] = ADAM, clip: float | None = None) -> Trainer:
    options = Options(parameter_options=lambda _name, _parameter: {}, clip_norm=clip)
    return parallelize(build, plan, world=world, loss=next_token_loss, options=options, **training)


def shards(trainer: Trainer) -> dict[str, list[tuple[int, int]]]:
    """Return which elements of each parameter each server has."""
    found = {}
    for place, size in ((bucket.place, bucket.group.size) for unit in trainer.units for bucket in unit.buckets):
        bounds = [place.shard(rank) for rank in range(place.ranks_without_shard, size)]
        for piece in place.pieces:
            own = [[min(max(at, piece.start), piece.stop) - piece.start for at in bound] for bound in bounds]
            found[piece.row.name] = [(low, high) for low, high in own]
    return found


def replay(
    logs: Log, parts: Mapping[str, list[tuple[int, int]]], *, workers: int, training: Mapping[str, Any], **how: Any
) -> dict[str, Tensor]:
    """Apply the gradients of the logs in one process: the algorithm of the servers, written plainly.

    how: `clip`, the largest norm of a worker's gradient; `dc`, the factor of DC-ASGD."""
    models = [build_whole(build, seed=0) for _ in logs]  # one for each server, of which only its elements count
    optimizers = [training["optimizer"](model.parameters(), **rest(training)) for model in models]
    versions = [[{name: p.detach().clone() for name, p in model.named_parameters()}] for model in models]
    gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
    reads = {(row.worker, row.clock, server): row.read for server, log in enumerate(logs) for row in log}
    left = [list(log) for log in logs]
    while any(left):
        for server, model in enumerate(models):
            if not left[server]:
                continue
            worker, clock, read, applied = left[server][0]
            seen = [reads[worker, clock, other] for other in range(len(models))]
            if any(version >= len(known) for version, known in zip(seen, versions, strict=True)):
                continue  # another server comes first
            left[server].pop(0)
            if (worker, clock) not in gradients:
                at = mosaic([known[version] for version, known in zip(seen, versions, strict=True)], parts)
                gradients[worker, clock] = gradient(at, batch(clock - 1), worker, workers, how.get("clip"))
            for name, p in model.named_parameters():
                g = gradients[worker, clock][name]
                p.grad = g + how.get("dc", 0.0) * g * g * (p.detach() - versions[server][read][name])
            for group in optimizers[server].param_groups:
                group["lr"] = rate(training, clock)
            optimizers[server].step()
            versions[server].append({name: p.detach().clone() for name, p in model.named_parameters()})
            assert len(versions[server]) == applied + 1
    return mosaic([known[-1] for known in versions], parts)


def rest(training: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in training.items() if key != "optimizer"}


def rate(training: Mapping[str, Any], clock: int) -> float:
    return float(training["lr"]) / clock


def mosaic(values: Sequence[Mapping[str, Tensor]], parts: Mapping[str, list[tuple[int, int]]]) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in values[0].items()}
    for name, value in found.items():
        for (low, high), own in zip(parts[name], values, strict=True):
            value.view(-1)[low:high] = own[name].reshape(-1)[low:high]
    return found


def gradient(
    at: Mapping[str, Tensor], rows: tuple[Tensor, ...], worker: int, workers: int, clip: float | None
) -> dict[str, Tensor]:
    model: nn.Module = build()
    model.load_state_dict(dict(at), strict=False)
    tokens, targets = (x.tensor_split(workers)[worker] for x in rows)
    total, count = next_token_loss(model(tokens), (tokens, targets))
    (total / count).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(trainer: Trainer, *, first: int = 0, last: int = STEPS, lr: float = 1e-2, slow: Sequence[int] = ()) -> None:
    for number in range(first, last):
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr / (number + 1)
        if trainer.world.rank in slow:
            time.sleep(0.01)
        trainer.step(batch(number))


def check_log(logs: Log, *, workers: int, bound: int | None, steps: int = STEPS) -> int:
    """Check that each gradient was applied once, and no parameters were older than the bound; return the oldest."""
    oldest = 0
    for log in logs:
        assert [row.applied for row in log] == list(range(1, len(log) + 1))
        assert sorted((row.worker, row.clock) for row in log) == [
            (worker, clock) for worker in range(workers) for clock in range(1, steps + 1)
        ]
        made_at = {(row.worker, row.clock): row.applied for row in log}
        for row in log:
            missing = [clock for (_, clock), applied in made_at.items() if applied > row.read and clock < row.clock]
            age = row.clock - min(missing, default=row.clock)
            oldest = max(oldest, age)
            assert bound is None or age <= bound, (row, log)
            assert row.read < row.applied
    return oldest


@pytest.mark.parametrize("plan", ["dp=3 server=1", "dp=2 server=2 microbatches=2"])
def test_synchronous_servers_train_the_same_model(plan: str) -> None:
    batches = [batch(number) for number in range(3)]

    def main(world: World) -> list[dict[str, Any]]:
        return outcome(made(world, plan, clip=0.5), batches=batches)

    options = Options(parameter_options=lambda _name, _parameter: {}, clip_norm=0.5)
    expected = alone(build, loss=next_token_loss, batches=batches, options=options, **ADAM)
    for found in run(4, main):
        agree(found, expected, bound=1e-9)


@pytest.mark.parametrize("staleness", ["0", "async"])
def test_each_worker_may_bring_its_own_rows(staleness: str) -> None:
    def main(world: World, plan: str, local: bool) -> dict[str, Tensor]:
        trainer = made(world, plan, training=SGD)
        for number in range(2):
            rows = batch(number)
            own = tuple(x.tensor_split(trainer.replicas)[trainer.replica] for x in rows)
            trainer.step(own if local else rows, local=local)
        return dict(copied(trainer))

    plan = f"dp=2 server=1 staleness={staleness}"
    if staleness == "0":
        require_equal(run(3, main, args=(plan, True))[0], run(1, main, args=("dp=1", False))[0])
    assert all(value.isfinite().all() for found in run(3, main, args=(plan, True)) for value in found.values())


def test_gradients_that_accumulate_in_another_dtype_are_pushed_to_late_servers() -> None:
    """One worker with gradients in fp32 trains as alone, up to their rounding."""

    def main(world: Any, plan: str) -> dict[str, Tensor]:
        options = Options(precision=Precision(accumulation=torch.float32))
        training: Any = {"optimizer": torch.optim.SGD, "lr": 1e-2, "options": options}
        trainer = parallelize(build, plan, loss=next_token_loss, world=world, **training)
        for number in range(3):
            trainer.step(batch(number))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    alone = run(1, main, args=("dp=1",))[0]
    for found in run(2, main, args=("dp=1 server=1 staleness=1",)):
        agree(found, alone, bound=1e-6)


def test_one_worker_of_a_late_server_trains_as_alone() -> None:
    def main(world: World, plan: str) -> dict[str, Tensor]:
        trainer = made(world, plan, clip=0.5)
        train(trainer)
        return dict(copied(trainer))

    require_equal(run(2, main, args=("dp=1 server=1 staleness=2",))[0], run(1, main, args=("dp=1",))[0])


@pytest.mark.grid(
    Grid(
        {
            "shape": ("dp=2 server=1", "dp=3 server=1", "dp=2 server=2", "dp=3 server=2 microbatches=2"),
            "staleness": ("1", "3", "async"),
            "how": ({}, {"clip": 0.5}, {"dc": 0.04}),
            "training": ("adam", "sgd"),
        },
        strength=1,
    )
)
def test_late_servers_are_the_replay_of_their_log(
    shape: str, staleness: str, how: dict[str, float], training: str
) -> None:
    settings = {"adam": ADAM, "sgd": SGD}[training]
    workers, servers = int(shape[3]), int(shape[12])
    correction = f" correction=dc:{how['dc']}" if "dc" in how else ""

    def main(world: World) -> tuple[dict[str, Tensor], Log, Any]:
        trainer = made(world, f"{shape} staleness={staleness}{correction}", training=settings, clip=how.get("clip"))
        train(trainer, lr=settings["lr"], slow=[0])
        return {name: value.clone() for name, value in trainer.full_parameters()}, trainer.update_log(), shards(trainer)

    results = run(workers + servers, main)
    _, logs, parts = results[0]
    check_log(logs, workers=workers, bound=None if staleness == "async" else int(staleness))
    expected = replay(logs, parts, workers=workers, training=settings, **how)
    for found, _, _ in results:
        require_equal(found, expected)


@pytest.mark.parametrize("correction", ["none", "dc:0.04"])
def test_averaged_parameters_in_between_leave_no_trace(correction: str) -> None:
    """Every rank leaves the block with the newest parameters, and the log says so."""

    def main(world: World) -> tuple[dict[str, Tensor], Log, Any]:
        trainer = made(world, f"dp=2 server=1 staleness=1 correction={correction}")
        average = trainer.average(0.9)
        train(trainer, last=3, slow=[0])
        with average.applied():
            trainer.evaluate([batch(0)])
        train(trainer, first=3, slow=[0])
        return dict(copied(trainer)), trainer.update_log(), shards(trainer)

    found, logs, parts = run(3, main)[0]
    check_log(logs, workers=2, bound=1)
    factor = {"dc": float(correction[3:])} if correction != "none" else {}
    require_equal(found, replay(logs, parts, workers=2, training=ADAM, **factor))


def held_up(world: Any, bound: int, ended: list[int]) -> Log:
    """Train; worker 0 begins its second step when worker 1, which `ended` counts, cannot go on."""
    trainer = made(world, f"dp=2 server=1 staleness={bound}")
    for number in range(STEPS):
        if world.rank == 0 and number == 1:
            for pause in [0.001] * 5000 + [0.05]:
                if len(ended) < 1 + bound or pause > 0.001:
                    world.rendezvous.turn.give()
                    time.sleep(pause)
                    world.rendezvous.turn.take()
            assert len(ended) == 1 + bound
        trainer.step(batch(number))
        if world.rank == 1:
            ended.append(number)
    return trainer.update_log()


@pytest.mark.threads("its ranks share a list")
@pytest.mark.parametrize("bound", [1, 3])
def test_a_slow_worker_slows_the_others_by_the_bound_alone(bound: int) -> None:
    assert check_log(run(3, held_up, args=(bound, []))[0], workers=2, bound=bound) == bound


def test_a_worker_that_raises_leaves_and_comes_back() -> None:
    """The others go on; the log has each gradient once, and none of the step that raised."""

    def main(world: World) -> tuple[Log, dict[str, Tensor], Any]:
        trainer = made(world, "dp=3 server=1 staleness=1")
        for number in range(STEPS):
            for group in trainer.optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
            rows = batch(number)
            if world.rank == 1 and number in (2, 3):
                rows = (rows[0] + 99, rows[1])  # no such tokens
            try:
                trainer.step(rows)
            except IndexError:
                assert (world.rank, number) in ((1, 2), (1, 3))
        return trainer.update_log(), dict(copied(trainer)), shards(trainer)

    logs, found, parts = run(4, main)[0]
    assert sorted((row.worker, row.clock) for row in logs[0]) == [
        (worker, clock)
        for worker in range(3)
        for clock in range(1, STEPS + 1)
        if (worker, clock) not in ((1, 3), (1, 4))
    ]
    require_equal(found, replay(logs, parts, workers=3, training=ADAM))


def copied(trainer: Trainer) -> list[tuple[str, Tensor]]:
    return [(name, value.clone()) for name, value in trainer.full_parameters()]


def test_a_training_resumes_and_any_other_plan_loads_it(tmp_path: Path) -> None:
    def begin(world: World) -> dict[str, Tensor]:
        trainer = made(world, "dp=2 server=2 staleness=2")
        train(trainer, last=3)
        trainer.save(tmp_path / "half")
        return dict(copied(trainer))

    def go_on(world: World) -> tuple[dict[str, Tensor], Log, Any]:
        trainer = made(world, "dp=2 server=2 staleness=2")
        trainer.load(tmp_path / "half")
        train(trainer, first=3)
        return dict(copied(trainer)), trainer.update_log(), shards(trainer)

    def loaded(world: World, plan: str) -> dict[str, Tensor]:
        trainer = made(world, plan)
        trainer.load(tmp_path / "half")
        found = dict(copied(trainer))
        trainer.step(batch(3))
        return found

    half = run(4, begin)[0]
    found, logs, parts = run(4, go_on)[0]
    check_log(logs, workers=2, bound=2)
    require_equal(found, replay(logs, parts, workers=2, training=ADAM))
    for ranks, plan in ((1, "dp=1"), (2, "dp=2 zero=3"), (4, "dp=3 server=1 staleness=async"), (2, "dp=1 server=1")):
        for other in run(ranks, loaded, args=(plan,)):
            require_equal(other, half)


def test_sparse_rows_travel_alone() -> None:
    """An embedding of 512 rows: a push has the rows that its batch uses, and the training is the dense one."""

    def sums(output: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (output - rows[1]).square().sum(), len(output)

    def main(world: World, sparse: bool) -> tuple[dict[str, Tensor], int]:
        def model() -> nn.Module:
            return nn.Sequential(nn.Embedding(512, 8, sparse=sparse), nn.Linear(8, 1)).double()

        trainer = parallelize(model, "dp=1 server=2 staleness=1", loss=sums, world=world, lr=0.1)
        pushed = 0
        for number in range(3):
            drawn = torch.randint(512, (5,), generator=torch.Generator().manual_seed(number))
            with world.record() as calls:
                trainer.step((drawn, torch.ones(5, 1, dtype=torch.float64)))
            pushed += sum(call.bytes for call in calls if call.kind == "send")
        return dict(copied(trainer)), pushed

    (expected, dense), (found, few) = (run(3, main, args=(sparse,))[0] for sparse in (False, True))
    require_equal(found, expected)
    assert dense > 3 * 512 * 8 * 8
    assert few < 3 * 3000


def test_a_replay_notices_a_gradient_that_is_applied_twice() -> None:
    def main(world: World) -> tuple[dict[str, Tensor], Log, Any]:
        trainer = made(world, "dp=2 server=1 staleness=1")
        train(trainer)
        return dict(copied(trainer)), trainer.update_log(), shards(trainer)

    found, logs, parts = run(3, main)[0]
    *rows, last = logs[0]
    twice = [[*rows, last, last._replace(applied=last.applied + 1)]]
    with pytest.raises(AssertionError):
        check_log(twice, workers=2, bound=1)
    with pytest.raises(AssertionError):
        require_equal(found, replay(twice, parts, workers=2, training=ADAM))


def verified(plan: str, **training: Any) -> Report:
    def main(world: World) -> Report:
        return verify(build, next_token_loss, [batch(n) for n in range(3)], plan, world=world, lr=1e-2, **training)

    report: Report = run(Plan.parse(plan).mesh().size, main)[0]
    return report


LATE = ("dp=3 server=1 staleness=2 correction=dc:0.5", "dp=2 server=2 staleness=async", "dp=3 server=2 staleness=1")


@pytest.mark.grid(Grid({"plan": LATE}, heavy=lambda cell: ranks_of(cell["plan"]) > 4))
def test_verify_checks_the_synchronous_plan_and_replays_the_log(plan: str) -> None:
    report = verified(plan, options=Options(clip_norm=0.5))
    assert report.ok, str(report)
    assert f"{3 * int(plan[3]) * int(plan[12])} gradients were applied once each" in str(report)
    assert "Applied in one process, they give the same parameters" in str(report)


class Awkward(nn.Module):
    """An attention with a key bias, whose gradient is 0 but for rounding; a transposed parameter; another eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Parameter(torch.randn(32, 8).t())

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        logits = self.attention(x, x, x, need_weights=False)[0] @ self.head
        return (logits, x) if self.training else logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_verify_replays_models_whose_gradients_are_rounding(dtype: torch.dtype) -> None:
    def loss(output: tuple[Tensor, Tensor], rows: Any) -> tuple[Tensor, Tensor]:
        return next_token_loss(output[0], rows)

    def main(world: World) -> Report:
        batches = [tuple(part % 32 for part in batch(n)) for n in range(3)]
        plan = "dp=2 server=2 staleness=1"
        return verify(Awkward, loss, batches, plan, world=world, lr=1e-2, dtype=dtype, options=Options(clip_norm=0.1))

    report = run(4, main)[0]
    assert report.ok, str(report)
    assert ("Applied in one process" in str(report)) == (dtype == torch.float64)


def test_verify_finds_a_server_that_applies_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ParameterServers._gradient

    def doubled(self: ParameterServers, bucket: Any, worker: int, rows: int) -> Tensor:
        return late(self, bucket, worker, rows) * (2 if worker == 1 and self.version > 2 else 1)

    monkeypatch.setattr(ParameterServers, "_gradient", doubled)
    report = verified("dp=2 server=1 staleness=1", optimizer=torch.optim.SGD)
    assert report.first is not None
    assert "after the servers' log" in report.first.what


@pytest.mark.threads("its ranks share a list")
def test_a_worker_notices_a_server_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ParameterServers._restart

    def unbounded(self: ParameterServers, **counts: int) -> None:
        begin(self, **counts)
        self._bound = None if self.serving else self._bound

    monkeypatch.setattr(ParameterServers, "_restart", unbounded)
    with pytest.raises(RuntimeError, match="answered step 3 when the slowest worker had ended step 1"):
        run(3, held_up, args=(1, []))


@pytest.mark.parametrize("log", [[(0, 1, 0, 1), (0, 1, 0, 2)], [(0, 1, 0, 1), (1, 1, 0, 1)]])
def test_a_log_with_a_gradient_or_a_version_twice_is_refused(log: list[tuple[int, int, int, int]]) -> None:
    with pytest.raises(ValueError, match="twice"):
        largest_staleness([ServedGradient(*row) for row in log])


def test_a_hundred_steps_raise_and_nothing_is_applied_twice() -> None:
    """Steps raise at random; every other gradient is applied once, and the log gives the parameters."""

    def main(world: World) -> tuple[Log, int, dict[str, Tensor], Any]:
        trainer = made(world, "dp=3 server=2 staleness=2")
        chance, raised = torch.Generator().manual_seed(world.rank), 0
        for number in range(70):
            for group in trainer.optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
            rows, bad = batch(number), world.rank < 3 and bool(torch.rand((), generator=chance) < 0.5)
            try:
                trainer.step((rows[0] + 99 * bad, rows[1]))
            except IndexError:
                raised += 1
        return trainer.update_log(), sum(world.exchange(raised)), dict(copied(trainer)), shards(trainer)

    logs, raised, found, parts = run(5, main)[0]
    assert raised >= 100
    assert [len(log) for log in logs] == [3 * 70 - raised] * 2
    assert max(largest_staleness(log) for log in logs) >= 1
    require_equal(found, replay(logs, parts, workers=3, training=ADAM))
