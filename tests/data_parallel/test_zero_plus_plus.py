"""Test ZeRO++: encoded gathers of parameters, second shards inside a node (`hpz`), and codecs in two hops.

replay   the algorithm in plain lines in one process gives every loss, gradient and parameter to 1e-9
exact    `hpz` alone gives the numbers of one process, from the bytes of the formula in `data_parallel_engine.py`"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.test_agreement import BOUND, TRAINING, Case, batches, check
from data_parallel.test_collective_counts import LINE, TOTALS, build, counted, sizes
from data_parallel.test_compressed_reduction import EQUAL, LR, SGD, flat_gradient, layer, rows, square_loss
from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.data_parallel.gradient_reduction import CODECS
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import next_token_loss
from meshwise.testing import ReferenceRun, agree, run
from meshwise.verify import verify


def through(values: Tensor, codec: str) -> Tensor:
    name, _, number = codec.partition(":")
    made = CODECS[name](float(number or 0))
    return made.decode(made.encode(values), elements=values.shape[-1], dtype=values.dtype)


# ---- encoded gathers -----------------------------------------------------------------------------------------------


def gather_replay(
    codec: str, places: list[list[tuple[str, int, int]]], shards: int
) -> list[tuple[float, dict[str, Tensor]]]:
    """Train a GPT in one process: gradients at the decoded parameters, updates of the exact ones.

    places: (name, start, stop) of each parameter of each unit in its flat buffer of `shards` equal rows."""
    whole = ReferenceRun(Case().model(), **TRAINING)
    found = []
    for batch in batches():
        parameters = dict(whole.model.named_parameters())
        exact = {name: value.detach().clone() for name, value in parameters.items()}
        for unit in places:
            size = -(-unit[-1][2] // (LINE * shards)) * LINE
            flat = torch.zeros(shards * size, dtype=torch.float64)
            for name, start, stop in unit:
                flat[start:stop] = exact[name].view(-1)
            flat = through(flat.view(shards, size), codec).view(-1)
            for name, start, stop in unit:
                parameters[name].data.copy_(flat[start:stop].view(exact[name].shape))
        loss, _ = whole.backward(batch)
        for name, value in exact.items():
            parameters[name].data.copy_(value)
        whole.update()
        found.append((loss, {name: value.clone() for name, value in whole.parameters()}))
    return found


def places_of(trainer: Trainer) -> list[list[tuple[str, int, int]]]:
    buckets = [bucket for unit in trainer.units for bucket in unit.buckets]
    return [[(piece.row.name, piece.start, piece.stop) for piece in bucket.place.pieces] for bucket in buckets]


GATHERS = Grid(
    {
        "codec": ("int8", "int4", "fp8"),
        "plan": ("dp=2", "dp=3", "dp=2x2", "dp=4 hpz=2", "dp=2 cp=2"),
        "microbatches": (1, 3),
        "more": ("", "recompute=selective", "recompute=full", "offload=params:cpu,optimizer:cpu"),
    },
    exists=lambda cell: not ("hpz" in cell["plan"] and "offload" in cell["more"]),
    cost=lambda cell: ranks_of(f"{cell['plan']} zero=3") * cell["microbatches"],
    strength=1,
)


@pytest.mark.grid(GATHERS)
def test_encoded_gathers_are_the_algorithm_in_plain_lines(codec: str, plan: str, microbatches: int, more: str) -> None:
    made = Plan.parse(f"{plan} zero=3 gather={codec} microbatches={microbatches} {more}")

    def main(world: World) -> tuple[list[tuple[float, dict[str, Tensor]]], list[list[tuple[str, int, int]]]]:
        trainer = parallelize(Case().model(), made, world=world, **TRAINING)
        found = []
        for batch in batches():
            loss = trainer.step(batch).loss
            found.append((loss, {name: value.clone() for name, value in trainer.full_parameters()}))
        places = places_of(trainer)
        trainer.close()
        return found, places

    results = run(made.mesh().size, main)
    expected = gather_replay(codec, results[0][1], (made.shards or made.dp or 1) * made.cp)
    for found, _ in results:
        agree(found, expected, bound=BOUND)


@pytest.mark.grid(
    Grid(
        {"plan": ("dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=4 hpz=2 precision=bf16")},
        heavy=lambda cell: "tp=" in cell["plan"],  # `verify` has it below
    )
)
def test_encoded_gathers_go_with_the_other_axes(plan: str) -> None:
    """8 bits lose little: the losses stay near those of exact gathers, and every rank has the same."""

    def main(world: World, gather: str) -> list[float]:
        options = Options(example=batches()[0])
        model = Case().build().float() if "bf16" in plan else Case().model()
        made = f"{plan} zero=3 gather={gather}"
        trainer = parallelize(model, made, world=world, loss=next_token_loss, options=options, lr=1e-2)
        return [trainer.step(batch).loss for batch in batches()] + [trainer.evaluate(batches()).loss]

    ranks = Plan.parse(f"{plan} zero=3").mesh().size
    exact, first, *others = run(ranks, main, args=("exact",))[0], *run(ranks, main, args=("int8",))
    assert first == pytest.approx(exact, rel=1e-2)
    assert first != exact
    assert all(other == first for other in others)


def test_what_is_saved_and_loaded_is_exact(tmp_path: Path) -> None:
    def first(world: World) -> dict[str, Tensor]:
        trainer = parallelize(Case(frozen=True).model(), "dp=4 zero=3 hpz=2 gather=int4", world=world, **TRAINING)
        trainer.step(batches()[0])
        trainer.save(tmp_path / "saved")
        kept = {name: value.clone() for name, value in trainer.full_parameters()}
        before = trainer.evaluate(batches()).loss
        trainer.step(batches()[1])
        trainer.load(tmp_path / "saved")
        assert trainer.evaluate(batches()).loss == before
        return kept

    def second(world: World) -> dict[str, Tensor]:
        trainer = parallelize(Case(frozen=True).model(), "dp=1", world=world, **TRAINING)
        trainer.load(tmp_path / "saved")
        return {name: value.clone() for name, value in trainer.full_parameters()}

    for found in run(4, first):
        agree(found, run(1, second)[0], bound=0.0)


# ---- second shards -------------------------------------------------------------------------------------------------

HPZ = Grid(
    {
        "plan": ("dp=4 hpz=2", "dp=2x4 hpz=2", "dp=4 hpz=4", "dp=4 hpz=2 tp=2", "dp=4 hpz=2 cp=2", "dp=6 hpz=3"),
        "microbatches": (1, 3),
        "frozen": (False, True),
        "recompute": ("none", "full"),
    },
    heavy=lambda cell: "tp=" in cell["plan"],  # 8 ranks
    cost=lambda cell: ranks_of(f"{cell['plan']} zero=3") * cell["microbatches"],
    strength=1,
)


@pytest.mark.grid(HPZ)
def test_second_shards_are_one_process(plan: str, microbatches: int, frozen: bool, recompute: str) -> None:
    check(
        f"{plan} zero=3 microbatches={microbatches} recompute={recompute}", Case(tied=True, frozen=frozen), every=False
    )


def test_second_shards_go_with_pp() -> None:
    training = {**TRAINING, "options": Options(example=batches()[0])}

    def main(world: World, plan: str) -> Any:
        return outcome(parallelize(Case().model(), plan, world=world, **training), batches=batches())

    whole = alone(Case().model(), batches=batches(), **training)
    for steps in run(8, main, args=("dp=4 pp=2 zero=3 hpz=2 microbatches=3",)):
        agree(steps, whole, bound=BOUND)


@pytest.mark.grid(Grid({"m": (1, 3)}, heavy=lambda cell: cell["m"] == 1))
def test_a_unit_is_gathered_from_all_ranks_once_for_each_update(m: int) -> None:
    counts, table, together = run(4, counted, args=(Plan(dp=4, zero=3, hpz=2, microbatches=m), True))[0]
    if together:
        return
    own, others = (sizes(table, trained=which, ranks=4) for which in (True, False))
    (p, u), (f, v) = (sum(own), len(own)), (sum(others), len(others))
    counts.check(
        {
            "all_reduce[dp_node·dp_shard]": TOTALS,
            "reduce_scatter[dp_node·dp_shard]": (m * u, m * p),
            "all_gather[dp_node·dp_shard]": (u, p),
            "all_gather[dp_shard]": (m * (2 * (u + v) - 1) - u, m * (2 * (p + f) - own[-1]) - p),
        }
    )


@pytest.mark.threads("ranks of a host that share memory have one copy of the parameters", or_gpus=True)
def test_a_second_shard_counts_as_memory() -> None:
    def main(world: World, plan: str) -> tuple[int, int]:
        trainer = parallelize(build(), plan, world=world, loss=next_token_loss, lr=1e-3)
        return trainer.memory()["parameters"], sum(sizes(trainer.table, trained=True, ranks=4))

    (plain, size), (more, _) = (run(4, main, args=(f"dp=4 zero=3 {key}",))[0] for key in ("", "hpz=2"))
    assert more - plain == size // 2


def test_encoded_gathers_and_gradients_send_fewer_bytes() -> None:
    """n elements in shards of s: n + 4 ceil(s / 256) bytes a shard, to all; gradients in two hops."""

    def main(world: World) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 128))
        plan = "dp=4 hpz=2 zero=3 gather=int8 wire=int8"
        trainer = parallelize(model, plan, loss=square_loss, world=world, optimizer=SGD, lr=LR)
        with world.record() as records:
            trainer.step((torch.ones(4, 256), torch.ones(4, 128)))
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        for record in records:
            key = record.kind, record.axes
            found[key] = found.get(key, 0) + record.bytes
        return found, [bucket.place.size for unit in trainer.units for bucket in unit.buckets]

    found, sizes = run(4, main)[0]
    scales = lambda elements, of: sum(4 * elements * -(-size // of // 256) for size in sizes)  # noqa: E731
    assert found["all_gather", ("dp_node", "dp_shard")] == sum(sizes) + scales(4, of=4)
    assert found["all_to_all", ("dp_shard",)] == sum(sizes) + scales(2, of=2)
    assert found["all_to_all", ("dp_node",)] == sum(sizes) // 2 + scales(2, of=4)


# ---- codecs in two hops --------------------------------------------------------------------------------------------


def two_hops(wire: str, *, replicas: int, nodes: int, near: int, feedback: int, steps: int) -> dict[str, Tensor]:
    """Train by the algorithm, in one process: rank [r, n, i] is rank i of node n of replica r."""
    module, ranks = layer(), nodes * near
    used = sum(p.numel() for p in module.parameters())
    shard = -(-used // (LINE * ranks)) * LINE
    size = shard * ranks
    errors = torch.zeros(replicas, nodes, near, nodes, near, shard, dtype=torch.float64)
    for step in range(steps):
        x, y = (part.chunk(replicas * ranks) for part in rows(step, replicas * ranks))
        grads = torch.stack([flat_gradient(module, *own, size=size) for own in zip(x, y, strict=True)])
        wanted = grads.view(errors.shape) + errors
        sent = wanted
        if ranks > 1:
            sent = through(wanted.transpose(3, 4).reshape(-1, nodes * shard), wire)
            sent = sent.view(*errors.shape[:3], near, nodes, shard).transpose(3, 4)
        errors = wanted - sent
        total = sent.sum(2)  # [r, n] of shards [n', i]
        if nodes > 1:
            sent = through(total.reshape(-1, shard), wire).view(total.shape)
            for i in range(near):
                errors[:, :, i, :, i] += (total - sent)[:, :, :, i]
            total = sent
        total = total.sum(1).reshape(replicas, size)
        total[:, used:] = 0
        if replicas > 1:
            more = -shard % (LINE * replicas)
            parts = nn.functional.pad(total.view(replicas, ranks, shard), (0, more)).view(replicas, ranks, replicas, -1)
            sent = through(parts.reshape(-1, parts.shape[-1]), wire).view(parts.shape)
            lost, sums = parts - sent, sent.sum(0)
            final = through(sums.view(-1, sums.shape[-1]), wire).view(sums.shape)
            for r in range(replicas):
                lost[r, :, r] += (sums - final)[:, r]
            lost = lost.reshape(replicas, ranks, -1)[..., :shard]
            for rank in range(ranks):
                n, i = divmod(rank, near)
                errors[:, n, i, n, i] += lost[:, rank]
            total = final.reshape(ranks, -1)[:, :shard].reshape(1, size)
        errors.view(-1, size)[:, used:] = 0
        errors *= feedback
        with torch.no_grad():
            parts = total[0, :used].split([p.numel() for p in module.parameters()])
            for p, part in zip(module.parameters(), parts, strict=True):
                p.sub_(LR / len(y) / len(y[0]) * part.view_as(p))
    return {name: p.detach() for name, p in module.named_parameters()}


HOPS = Grid(
    {
        "wire": ("int8", "int4", "1bit", "topk:0.1", "qsgd:4"),
        "shape": ("dp=4 hpz=2", "dp=6 hpz=3", "dp=2x2", "dp=3x2", "dp=2x4 hpz=2", "dp=2x1"),
        "zero": (1, 2, 3),
        "feedback": (0, 1),
    },
    single=("shape", "feedback"),
)


@pytest.mark.grid(HOPS)
def test_codecs_in_two_hops_are_the_algorithm_in_plain_lines(wire: str, shape: str, zero: int, feedback: int) -> None:
    plan = Plan.parse(f"{shape} zero={3 if 'hpz' in shape else zero} wire={wire} feedback={feedback}")
    assert plan.dp is not None
    shards = plan.shards or plan.dp
    near = plan.hpz if plan.hpz > 1 else shards

    def main(world: World) -> dict[str, Tensor]:
        trainer = parallelize(layer(), plan, loss=square_loss, world=world, options=EQUAL, optimizer=SGD, lr=LR)
        for step in range(4):
            trainer.step(rows(step, world.size))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    replicas, nodes = plan.dp // shards, shards // near
    expected = two_hops(wire, replicas=replicas, nodes=nodes, near=near, feedback=feedback, steps=4)
    for found in run(plan.dp, main):
        agree(found, expected, bound=BOUND)


# ---- verify and refusals -------------------------------------------------------------------------------------------


CONTRACTS = ("dp=4 zero=3 hpz=2 gather=int8 wire=int8", "dp=2 tp=2 zero=3 gather=int4", "dp=2x2 zero=1 wire=1bit")


@pytest.mark.grid(Grid({"plan": CONTRACTS}, heavy=lambda cell: cell["plan"] == CONTRACTS[2]))
def test_verify_prints_the_contracts(plan: str) -> None:
    report = verify(Case().build, next_token_loss, batches()[:2], plan, lr=1e-2)
    assert report.ok, str(report)
    if "gather" in plan:
        assert "gathered parameters differ from the stored ones by" in str(report)
        assert "to 0.0e+00" not in str(report), "a codec loses something"
    if "wire" in plan:
        assert "add up to the true gradient" in str(report)


@pytest.mark.parametrize(
    "plan, nearest",
    [
        ("dp=4 zero=1 gather=int8", "dp=4 zero=1"),
        ("dp=4 zero=2 hpz=2", "dp=4 zero=2"),
        ("dp=6 zero=3 hpz=4", "dp=6 zero=3 hpz=2"),
        ("dp=2x4 zero=3 hpz=8", "dp=2x4 zero=3 hpz=4"),
        ("dp=2x2 zero=1 wire=powersgd:4", "dp=4 zero=1 wire=powersgd:4"),
    ],
)
def test_plans_that_cannot_work_name_the_nearest(plan: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=f"Nearest that works: '{nearest}'"):
        Plan.parse(plan)
