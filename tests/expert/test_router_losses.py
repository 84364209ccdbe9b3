"""Test that losses of routers are those of one process that computes them by hand from the routers' scores."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import meshwise as mw
from expert import test_agreement as reference
from expert.exact_casts import ExactCasts
from expert.mixtures_of_transformers import TOKENS, batches, build, forward, loss
from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.expert.router_losses import router_of
from meshwise.plan import Plan, PlanError
from meshwise.reference import next_token_loss
from meshwise.testing import agree, run

BALANCE, Z = 0.3, 0.02
LOSSES = {"balance": BALANCE, "z": Z}


def settings(**options: Any) -> dict[str, Any]:
    given = {"clip_norm": 0.5, "forward": forward, "example": batches()[0], "router_losses": LOSSES, **options}
    return {"loss": loss, "lr": 1e-2, "options": Options(**given)}


def scored_forward(model: Any, batch: Any) -> Any:
    """Return the logits and the scores of the routers, each (rows * tokens, experts)."""
    with ExactCasts():
        output = model(batch[0], use_cache=False, output_router_logits=True)
    return output.logits, output.router_logits


def loss_by_hand(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits, scores = output
    total, count = loss(logits, batch)
    for of_layer in scores:
        by_row = of_layer.view(len(batch[0]), TOKENS, -1)
        chosen = functional.one_hot(by_row.topk(2).indices, by_row.size(-1)).sum(2).double()
        shares = chosen.sum(1) / (2 * TOKENS)
        even = (shares * by_row.softmax(-1).mean(1)).sum(-1) * by_row.size(-1)
        total = total + BALANCE * TOKENS * even.sum() + Z * by_row.logsumexp(-1).square().sum()
    return total, count


@functools.cache
def by_hand(family: str) -> Any:
    given = settings(forward=scored_forward, router_losses={})
    return alone(build(family), batches=batches(), **{**given, "loss": loss_by_hand})


BY_HAND = (
    ("Mixtral", "dp=1"),
    ("Mixtral", "dp=4 ep=2 zero=3 microbatches=3"),
    ("Mixtral", "pp=2 dp=2 ep=2 microbatches=2 schedule=zb-h1"),
    ("Qwen3Moe", "dp=2 tp=2 ep=2 etp=2 zero=1"),
    ("Qwen3Moe", "dp=2 cp=2 ep=4 context=ring"),
    ("Olmoe", "pp=2 tp=2 microbatches=2"),
    ("Olmoe", "dp=2 ep=2 dispatch=all-gather chunk=3"),
)


# the reference mixture has micro-batches and stages
@pytest.mark.grid(Grid({"case": BY_HAND}, heavy=lambda cell: "microbatches" in cell["case"][1]))
def test_losses_are_those_of_one_process_by_hand(case: tuple[str, str]) -> None:
    family, plan = case
    pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

    def main(world: World) -> Any:
        trainer = parallelize(build(family), plan, world=world, **settings())
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, by_hand(family), bound=1e-9)


KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sequence": ("top-2", LOSSES),
    "batch": ("top-2", {**LOSSES, "over": "batch"}),
    "biased": ("biased", {"balance": BALANCE, "over": "batch"}),
    "expert-choice": ("expert-choice", LOSSES),
    "5 experts": ("5 experts", LOSSES),
}


def training(kind: str) -> tuple[Any, dict[str, Any]]:
    routing, losses = KINDS[kind]
    given = reference.training(routing)
    model = functools.partial(reference.build, routing, tied=False)
    return model, {**given, "options": replace(given["options"], router_losses=losses)}


@functools.cache
def scores_by_hand(kind: str) -> Any:
    """Train the reference mixture on one process with a loss that reads scores and choices of its routers."""
    model, given = training(kind)
    seen: list[tuple[Any, Tensor]] = []
    shares: dict[int, Tensor] = {}
    over_batch = KINDS[kind][1].get("over") == "batch"

    def watched() -> Any:
        made = model()
        for module in made.modules():
            if type(module).__name__ == "Router":
                module.scores.register_forward_hook(lambda *call: seen.append((None, call[2])))
                module.register_forward_hook(lambda *call: seen.append((call[2][0], seen.pop()[1])))
        return made

    def total_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = next_token_loss(output, batch)
        for number, (index, scores) in enumerate(seen):
            experts = scores.size(-1)
            chosen = functional.one_hot(index, experts + 1)[..., :-1].sum(2).double()
            share = chosen.sum(1, keepdim=True) / chosen.sum((1, 2)).view(-1, 1, 1)
            if over_batch:
                share = shares.get(number, scores.new_full((experts,), 1 / experts))
                shares[number] = chosen.sum((0, 1)) / chosen.sum()
            losses = KINDS[kind][1]
            total = total + losses["balance"] * experts * (share * scores.softmax(-1)).sum()
            total = total + losses.get("z", 0.0) * scores.logsumexp(-1).square().sum()
        seen.clear()
        return total, count

    given["options"] = replace(given["options"], router_losses={})
    return alone(watched, batches=reference.batches(), **{**given, "loss": total_loss})


STAGES = "pp=2 dp=2 ep=2 recompute=selective microbatches=3"
EACH = Grid(
    {"plan": ("dp=1 microbatches=2", "dp=4 ep=2 recompute=full", STAGES), "kind": tuple(KINDS)},
    heavy=lambda cell: cell["plan"] == STAGES and cell["kind"] not in ("sequence", "batch"),
)


@pytest.mark.grid(EACH)
def test_each_kind_is_that_of_one_process_by_hand(kind: str, plan: str) -> None:
    model, given = training(kind)

    def main(world: World) -> Any:
        trainer = parallelize(model, plan, world=world, **given)
        steps = outcome(trainer, batches=reference.batches())
        trainer.close()
        return steps

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, scores_by_hand(kind), bound=1e-9)


def test_shares_of_the_batch_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    model, given = training("batch")
    first, second = reference.batches()

    def saves(world: World) -> None:
        trainer = parallelize(model, "dp=2 ep=2", world=world, **given)
        trainer.step(first)
        trainer.save(tmp_path / "state")
        trainer.close()

    def loads(world: World) -> Any:
        trainer = parallelize(model, "pp=2 microbatches=2", world=world, **given)
        trainer.load(tmp_path / "state")
        return outcome(trainer, batches=[second])

    run(2, saves)
    for found in run(2, loads):
        agree(found[0], scores_by_hand("batch")[1], bound=1e-9)


def test_an_evaluation_has_no_losses_of_routers_and_a_skipped_step_forgets_them() -> None:
    model, given = training("sequence")
    first, _ = reference.batches()

    def main(world: World) -> tuple[float, float, float, float]:
        trainer = parallelize(model, "dp=2 ep=2", world=world, **given)
        plain = parallelize(model, "dp=2 ep=2", world=world, **reference.training("top-2"))
        evaluated = trainer.evaluate([first]).loss, plain.evaluate([first]).loss
        return *evaluated, trainer.step(first).loss, plain.step(first).loss

    for with_losses, without, trained, plainly in run(2, main):
        assert with_losses == without
        assert trained > plainly + 0.5 * BALANCE


def test_a_model_goes_on_without_losses_when_its_trainer_is_closed() -> None:
    build_one, given = training("batch")
    plain = reference.training("top-2")
    batch, model, other = reference.batches()[0], build_one(), build_one()
    other.load_state_dict(model.state_dict())

    def main(world: World) -> tuple[float, float]:
        parallelize(model, "dp=1", world=world, **given).close()
        limited = {**plain, "options": replace(plain["options"], expert_capacity=0.5)}
        parallelize(model, "dp=1", world=world, **limited).close()
        one, another = (parallelize(each, "dp=1", world=world, **plain) for each in (model, other))
        return one.step(batch).grad_norm, another.step(batch).grad_norm

    ((one, another),) = run(1, main)
    assert one == another
    assert not [name for name, _ in model.named_buffers() if name.endswith("expert_shares")]


def test_a_model_in_eval_mode_trains_with_losses() -> None:
    model, given = training("sequence")

    def main(world: World) -> Any:
        trainer = parallelize(lambda: model().eval(), "dp=2 ep=2", world=world, **given)
        steps = outcome(trainer, batches=reference.batches())
        assert trainer.expert_imbalances()
        return steps

    expected = alone(lambda: model().eval(), batches=reference.batches(), **given)
    for found in run(2, main):
        agree(found, expected, bound=1e-9)
    agree(expected, scores_by_hand("sequence"), bound=1e-9)


def test_shares_begin_even_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    model, given = training("batch")

    def main(world: World) -> tuple[Tensor, Tensor]:
        saved = parallelize(model, "dp=2 ep=2", world=world, **reference.training("top-2"))
        saved.save(tmp_path / "state")
        trainer = parallelize(model, "dp=2 ep=2", world=world, **given)
        trainer.load(tmp_path / "state")
        shares = [value.clone() for name, value in trainer.full_buffers() if name.endswith("expert_shares")]
        return shares[0], shares[1]

    for shares in run(2, main):
        assert all(share.tolist() == [0.25] * 4 for share in shares)


def test_a_router_is_found_by_its_name_or_alone() -> None:
    """Adapters, and other matrices with as many rows as there are experts, are no routers; two candidates are none."""
    holder: Any = reference.build("top-2", tied=False).get_submodule("blocks.0.mlp")
    assert router_of(holder, name="experts", experts=4) is holder.get_submodule("router.scores")
    holder.shared = torch.nn.Linear(8, 4)
    assert router_of(holder, name="experts", experts=4) is holder.get_submodule("router.scores")
    holder.scores = holder.router.scores
    del holder.router
    assert router_of(holder, name="experts", experts=4) is None
    del holder.shared
    assert router_of(holder, name="experts", experts=4) is holder.scores


def test_fp16_scales_the_losses_of_routers_too() -> None:
    """With a loss scale the gradients are those without one, but for the rounding of fp16."""
    model, _ = training("sequence")

    def norms(world: World, precision: str) -> list[float]:
        trainer = parallelize(
            lambda: model().float(), f"dp=2 ep=2 precision={precision}", world=world, loss=next_token_loss, lr=1e-3,
            options=Options(router_losses={"balance": 10.0, "z": 1.0}),
        )  # fmt: skip
        return [trainer.step(batch).grad_norm for batch in reference.batches()]

    for narrow, wide in zip(run(2, norms, args=("fp16",)), run(2, norms, args=("fp32",)), strict=True):
        assert narrow == pytest.approx(wide, rel=0.01)


def test_verify_trains_both_sides_with_losses_of_routers() -> None:
    model, given = training("sequence")
    options = replace(given["options"], example=None)
    report = mw.verify(model, next_token_loss, reference.batches(), "dp=2 tp=2 ep=4", lr=1e-2, options=options)
    assert report.ok


@pytest.mark.parametrize(
    "losses, plan, message",
    [
        ({"balence": 1.0}, "dp=1", r"balence=1\.0 is wrong\..* write balance=0\.01 z=0\.001 over=sequence"),
        ({"balance": "much"}, "dp=1", "balance='much' is wrong"),
        ({"balance": -1.0}, "dp=1", r"balance=-1\.0 is wrong"),
        ({"z": 1.0, "over": "tokens"}, "dp=1", "over='tokens' is wrong"),
        (LOSSES, "tp=2 sequence_parallel=1", r"router_losses counts all tokens of a sample.* works: 'tp=2'"),
    ],
)
def test_wrong_losses_say_what_to_change(losses: Mapping[str, Any], plan: str, message: str) -> None:
    model, given = training("sequence")
    options = replace(given["options"], router_losses=losses)
    with pytest.raises(ValueError, match=message):
        run(Plan.parse(plan).mesh().size, lambda world: parallelize(
            model, plan, world=world, **{**given, "options": options}
        ))  # fmt: skip


def test_models_without_routers_that_are_found_are_refused() -> None:
    options = Options(router_losses=LOSSES)
    plain = mw.reference.GPT(mw.reference.GPTConfig(vocabulary=16, context=4, layers=1, heads=1, width=4))
    with pytest.raises(PlanError, match="router_losses: GPT has no mixture of experts"):
        run(1, lambda world: parallelize(plain, "dp=1", world=world, loss=next_token_loss, options=options))
    pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    with pytest.raises(PlanError, match=r"mlp\.experts calls its experts with rows that do not show"):
        run(1, lambda world: parallelize(build("Switch"), "dp=1", world=world, loss=loss, options=options))


def test_an_open_step_refuses_losses_of_routers() -> None:
    model, given = training("sequence")
    with pytest.raises(PlanError, match=r"router_losses are added by trainer\.step"):
        run(1, lambda world: parallelize(model, "dp=1", world=world, **given).open_step())
