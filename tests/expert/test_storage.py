"""Test that experts are stored once over the ranks, and move between plans in checkpoints."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.test_agreement import batches, build, training
from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.expert.token_exchange import gathers
from meshwise.plan import Plan
from meshwise.testing import SavedForBackward, agree, alone, build_whole, count, run


def trainer_of(world: World, plan: str) -> Trainer:
    return parallelize(lambda: build("top-2", tied=False), plan, world=world, **training())


DIVISIONS = (
    ("dp=4 ep=4 zero=3", "dp=2 tp=2 ep=2 etp=2 zero=1"),
    ("dp=2 tp=2 ep=2 etp=2 zero=1", "dp=1"),
    ("dp=1", "pp=2 dp=2 ep=2 zero=2 microbatches=2"),
    ("dp=2x2 ep=4 zero=1", "dp=4 hpz=2 ep=2 zero=3"),
)
"""In those of `make test` each way to divide is saved or loaded."""

MORE = (
    ("pp=2 dp=2 ep=2 zero=2 microbatches=2", "dp=4 ep=2"),
    ("dp=2x2 ep=2 zero=3", "dp=4 ep=4"),
    ("dp=4 ep=4 zero=1", "dp=2x2 ep=2 zero=2"),
)


@pytest.mark.grid(Grid({"divisions": DIVISIONS + MORE}, heavy=lambda cell: cell["divisions"] in MORE))
def test_a_checkpoint_is_loaded_under_another_division_of_the_experts(
    divisions: tuple[str, str], tmp_path: Path
) -> None:
    before, after = divisions
    first, second = batches()

    def save(world: World) -> None:
        trainer = trainer_of(world, before)
        trainer.step(first)
        trainer.save(tmp_path / "saved")
        trainer.close()

    def load(world: World) -> Any:
        trainer = trainer_of(world, after)
        trainer.load(tmp_path / "saved")
        trainer.step(second)
        found = {name: value.clone() for name, value in trainer.full_parameters()}
        trainer.close()
        return found

    run(Plan.parse(before).mesh().size, save)
    expected = alone(lambda: build("top-2", tied=False), batches=batches(), **training())[1]["parameters"]
    for found in run(Plan.parse(after).mesh().size, load):
        agree(found, expected, bound=1e-9)


@pytest.mark.parametrize("plan, part", [("dp=4 ep=2", 2), ("dp=4 ep=4", 4), ("dp=2 tp=2 ep=2 etp=2", 4), ("tp=2", 1)])
def test_a_rank_stores_its_part_of_the_experts(plan: str, part: int) -> None:
    def experts(world: World) -> int:
        trainer = trainer_of(world, plan)
        held = sum(p.numel() for name, p in trainer.model.named_parameters() if ".experts." in name)
        trainer.close()
        return held

    whole = sum(p.numel() for name, p in build("top-2", tied=False).named_parameters() if ".experts." in name)
    size = Plan.parse(plan).mesh().size
    assert run(size, experts) == [whole // part] * size


@functools.cache
def moved(plan: str) -> list[dict[str, tuple[int, int]]]:
    """Return the calls and bytes of each kind of collective in a step, by rank."""

    def main(world: World) -> dict[str, tuple[int, int]]:
        trainer = trainer_of(world, plan)
        with trainer.world.record() as records:
            trainer.step(batches()[0])
        trainer.close()
        return dict(count(records))

    return run(Plan.parse(plan).mesh().size, main)


@pytest.mark.threads("ranks of a host that share memory have one copy of the parameters", or_gpus=True)
@pytest.mark.grid(Grid({"ep": (2, 4)}, heavy=lambda cell: cell["ep"] == 2))
def test_a_rank_keeps_its_part_of_the_experts_under_every_zero(ep: int) -> None:
    """Under zero=1 its parameters and gradients are those of its experts, under zero=3 a part of all."""

    def kept(world: World, plan: str) -> dict[str, int]:
        trainer = trainer_of(world, plan)
        trainer.step(batches()[0])
        found = dict(trainer.memory())
        trainer.close()
        return found

    experts = sum(p.nbytes for name, p in build("top-2", tied=False).named_parameters() if ".experts." in name)
    whole = run(4, kept, args=("dp=4 zero=1",))[0]
    found = {zero: run(4, kept, args=(f"dp=4 ep={ep} zero={zero}",)) for zero in (1, 3)}
    for kind in ("parameters", "gradients"):
        assert {each[kind] for each in found[1]} == {whole[kind] - experts + experts // ep}
        assert {each[kind] for each in found[3]} == {whole[kind] // 4}
    for ranks in found.values():  # two moments, and small counts of steps
        for each in ranks:
            assert 0 <= each["optimizer"] - 2 * whole["parameters"] // 4 < 64


@pytest.mark.parametrize(
    "plan, times",
    [
        ("dp=2 ep=2", 1),
        ("dp=2 ep=2 microbatches=2", 1),
        ("dp=4 ep=4", 1),
        ("dp=2 tp=2 ep=4", 1),  # the ranks of tp share the tokens out
        ("dp=2 tp=2 ep=2 etp=2", 2),  # both ranks of etp get them
    ],
)
def test_tokens_move_as_often_and_as_far_as_the_formula_says(plan: str, times: int) -> None:
    layers, features, choices, experts, tokens = 2, 8, 2, 4, 7 * 4
    ranks, microbatches = Plan.parse(plan).mesh().size, Plan.parse(plan).microbatches
    found = [next(each for name, each in rank.items() if name.startswith("all_to_all")) for rank in moved(plan)]
    # in each layer the counts, and the tokens of all choices there and back, forward and backward
    assert {calls for calls, _ in found} == {5 * layers * microbatches}
    counts = 8 * experts * ranks * layers * microbatches
    assert sum(size for _, size in found) == 4 * layers * times * tokens * choices * features * 8 + counts


def test_results_of_divided_matrices_are_summed_as_often_and_as_far_as_the_formula_says() -> None:
    layers, features, choices, tokens = 2, 8, 2, 7 * 4
    whole, divided = (
        [rank["all_reduce[tp]"] for rank in moved(plan)] for plan in ("dp=2 tp=2 ep=4", "dp=2 tp=2 ep=2 etp=2")
    )
    # in each layer the results of the experts, and the gradients of their rows, on both ranks of etp
    assert {more - calls for (calls, _), (more, _) in zip(whole, divided, strict=True)} == {2 * layers}
    assert sum(size for _, size in divided) - sum(size for _, size in whole) == (
        2 * layers * 2 * tokens * choices * features * 8
    )


def test_an_all_gather_moves_as_much_as_the_formula_says() -> None:
    layers, features, choices, tokens = 2, 8, 2, 7 * 4

    for rank in moved("dp=2 ep=2 dispatch=all-gather"):
        assert not any(name.startswith("all_to_all") for name in rank)
        # in each layer tokens and weights are gathered and results reduced; the backward does the opposite
        values = layers * tokens * (2 * features + choices) * 8
        assert rank["reduce_scatter[dp]"] == (3 * layers, values)
        calls, size = rank["all_gather[dp]"]
        assert calls == (3 + 1 + 2) * layers  # also of the choices, and of the number of tokens as a small object
        assert 0 < size - values - layers * tokens * choices * 8 < 100 * layers


def test_auto_takes_the_dispatch_that_moves_less() -> None:
    assert not gathers(Plan.parse("dp=2 ep=2"), choices=2, experts=8)  # equal: both move each token once
    assert gathers(Plan.parse("dp=2 ep=2"), choices=3, experts=8)
    assert not gathers(Plan.parse("dp=4 ep=4"), choices=3, experts=8)
    assert not gathers(Plan.parse("dp=2 ep=2"), choices=8, experts=8)  # expert choice: a mask of all experts
    assert not gathers(Plan.parse("dp=2 ep=2 dispatch=all-to-all"), choices=3, experts=8)
    assert gathers(Plan.parse("dp=4 ep=4 dispatch=all-gather"), choices=1, experts=8)


@pytest.mark.parametrize("chunk", [4, 7])
def test_a_chunk_bounds_the_rows_that_a_rank_holds(chunk: int) -> None:
    layers, features, inner, choices, ranks = 2, 8, 16, 2, 2

    def kept(world: World, plan: str) -> tuple[int, int]:
        trainer = trainer_of(world, plan)
        received: list[int] = []
        for name, module in trainer.model.named_modules():
            if name.endswith("experts"):
                module.register_forward_hook(lambda each, *_: received.append(each.sharding.exchange.received))
        with SavedForBackward(trainer.model) as saved:
            trainer.step(batches()[0])
        trainer.close()
        return saved.bytes, sum(received)

    chunked = run(ranks, kept, args=(f"dp=2 ep=2 chunk={chunk}",))
    for (whole_bytes, rows), (bytes_kept, last) in zip(run(ranks, kept, args=("dp=2 ep=2",)), chunked, strict=True):
        # without chunks a rank keeps for each row its token, its result, and the inner sizes before and after GELU
        assert whole_bytes - bytes_kept > rows * (2 * features + 2 * inner) * 8
        assert last <= layers * chunk * choices * ranks


def test_an_error_of_memory_names_the_mixture_with_the_most_rows() -> None:
    def notes(world: World) -> tuple[str, int]:
        trainer = trainer_of(world, "dp=2 ep=2")
        experts: Any = trainer.model.get_submodule("blocks.0.mlp.experts")

        def fail(*_: object) -> None:
            raise MemoryError

        trainer.model.get_submodule("blocks.1.mlp_norm").register_forward_pre_hook(fail)
        with pytest.raises(MemoryError) as caught:
            trainer.step(batches()[0])
        trainer.close()
        return "\n".join(caught.value.__notes__), experts.sharding.exchange.received

    for note, rows in run(2, notes):
        share = 7 * 4 * 2 / 2  # tokens of all ranks, choices; half of the experts
        assert f"in blocks.0.mlp.experts got {rows} rows at once, " in note
        assert abs(float(note.partition("at once, ")[2].split()[0]) - rows / share) < 0.2  # 4 and 3 of the 7 samples
        assert "chunk=1024" in note


def test_copies_of_experts_halve_the_rows_of_the_busiest_rank() -> None:
    """Every token chooses the first expert: under ep=4 one rank gets all rows, under ep=2 each copy half of them."""

    def busiest(world: World, plan: str) -> int:
        trainer = trainer_of(world, plan)
        router = trainer.model.get_submodule("blocks.0.mlp.router")
        router.register_forward_hook(lambda _module, _given, output: (torch.zeros_like(output[0]), *output[1:]))
        trainer.step((batches()[0][0][:4], batches()[0][1][:4]))
        experts: Any = trainer.model.get_submodule("blocks.0.mlp.experts")
        trainer.close()
        return int(experts.sharding.exchange.received)

    assert run(4, busiest, args=("dp=4 ep=4",)) == [32, 0, 0, 0]
    assert run(4, busiest, args=("dp=4 ep=2",)) == [16, 0, 16, 0]


@pytest.mark.parametrize(
    "plan", ["dp=2 zero=3 recompute=full", "dp=2 ep=2", "tp=2 ep=2", "tp=2 etp=2", "pp=2 dp=2 ep=2 microbatches=2"]
)
def test_the_busiest_expert_is_the_same_under_every_plan(plan: str) -> None:
    batch = batches()[0][0][:4], batches()[0][1][:4]

    def loads(world: World) -> dict[str, float]:
        trainer = trainer_of(world, plan)
        trainer.step(batch)
        found = dict(trainer.expert_imbalances())
        assert trainer.expert_imbalances() == {}
        trainer.close()
        return found

    chosen: dict[str, torch.Tensor] = {}
    model = build_whole(lambda: build("top-2", tied=False), seed=0)
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        router = model.get_submodule(f"{name}.router")
        router.register_forward_hook(lambda _module, _args, output, name=name: chosen.update({name: output[0]}))
    model(batch[0])
    counts = {f"{name}.experts": index.flatten().bincount(minlength=4) for name, index in chosen.items()}
    expected = {name: float(count.max() / count.double().mean()) for name, count in counts.items()}
    for found in run(Plan.parse(plan).mesh().size, loads):
        assert found == pytest.approx(expected)
