"""Test that the buffers of routers are updated once a step from the tokens of the whole batch, under every plan."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from expert.mixtures_of_transformers import batches as tokens_of_transformers
from expert.mixtures_of_transformers import build as hugging_face
from expert.mixtures_of_transformers import check, settings
from expert.test_agreement import build
from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.expert.router_losses import RouterLosses
from meshwise.expert.router_updates import RouterUpdates
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run

RATE = 0.02
PLANS = ("dp=1", "dp=4 ep=2 microbatches=3", "dp=2 tp=2 ep=4 zero=3 recompute=full", "pp=2 dp=2 ep=2 microbatches=2")


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return batches of 7 and of 1 row: with the second one most ranks run a spare row."""
    tokens = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(2))
    return [(rows[:, :-1], rows[:, 1:]) for rows in (tokens[:7], tokens[7:])]


def trainer_of(world: World, plan: str, kind: str, *, rate: float = RATE, shares: bool = False) -> Trainer:
    losses = {"balance": 0.3, "over": "batch"} if shares else {}
    options = Options(expert_bias_rate=rate, router_losses=losses, example=batches()[0])
    model = functools.partial(build, kind, tied=False)
    return parallelize(model, plan, world=world, loss=next_token_loss, options=options, lr=0.1)


def buffers(world: World, plan: str, shares: bool, folder: Path | None) -> dict[str, Tensor]:
    """Return the buffers after two steps, each with an evaluation before; with `folder`, of another trainer each."""
    trainer = trainer_of(world, plan, "biased", shares=shares)
    for batch in batches():
        trainer.evaluate([batches()[0]])
        trainer.step(batch)
        if folder is not None:
            trainer.save(folder / plan)
            trainer.close()
            trainer = trainer_of(world, plan, "biased", shares=shares)
            trainer.load(folder / plan)
    found = {name: value.clone() for name, value in trainer.full_buffers()}
    trainer.close()
    return found


@functools.cache
def counted(shares: bool) -> dict[str, list[Tensor]]:
    """Return the tokens of each expert by layer, in two steps on one process, counted at the output of the router."""
    counts: dict[str, list[Tensor]] = {}

    def main(world: World) -> None:
        trainer = trainer_of(world, "dp=1", "biased", shares=shares)
        for name, module in trainer.model.named_modules():
            if name.endswith("router"):
                count = lambda _module, _given, out, name=name: counts.setdefault(name, []).append(  # noqa: E731
                    out[0].flatten().bincount(minlength=4)
                )
                module.register_forward_hook(count)
        for batch in batches():
            trainer.step(batch)

    run(1, main)
    return counts


# losses over the batch have shares besides the biases
@pytest.mark.grid(Grid({"plan": PLANS, "shares": (False, True)}, heavy=lambda cell: not cell["shares"]))
def test_buffers_follow_the_load_of_the_whole_batch(shares: bool, plan: str, tmp_path: Path) -> None:
    folder = tmp_path if plan == PLANS[1] else None
    for found in run(Plan.parse(plan).mesh().size, buffers, args=(plan, shares, folder)):
        for name, (first, second) in counted(shares).items():
            bias = sum(RATE * (load.double().mean() - load).sign() for load in (first, second))
            agree(found[f"{name}.e_score_correction_bias"], bias, bound=1e-12)
            if shares:
                agree(found[f"{name}.scores.expert_shares"], second.double() / second.sum(), bound=1e-12)


def test_a_step_without_tokens_leaves_the_buffers() -> None:
    model = build("biased", tied=False)
    updates = RouterUpdates(rate=RATE, device=torch.device("cpu"), losses=RouterLosses(balance=0.3, over="batch"))
    updates.prepare(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    updates.follow(model)
    updates.update()
    assert len(before) == 4
    assert all(model.get_buffer(name).equal(buffer) for name, buffer in before.items())


@pytest.mark.parametrize("family", ["DeepseekV3", "Ernie"])  # a buffer, and a parameter without gradient
def test_biases_of_a_model_of_transformers_move_and_a_skipped_step_leaves_them(family: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    given = {**settings(), "options": replace(settings()["options"], expert_bias_rate=RATE, nonfinite="skip:1")}
    check(hugging_face(family), "dp=4 ep=2 microbatches=2", given=lambda: given)

    def main(world: World) -> None:
        own = hugging_face(family)
        trainer = parallelize(own, "dp=2 ep=2", world=world, **given)
        trainer.step(tokens_of_transformers()[0])
        biases = {name: buffer.clone() for name, buffer in own.named_buffers() if name.endswith("bias")}
        assert all(bias.abs().max() == RATE for bias in biases.values())
        own.get_parameter("model.norm.weight").detach()[0] = float("nan")
        assert trainer.step(tokens_of_transformers()[0]).skipped
        assert all(own.get_buffer(name).equal(bias) for name, bias in biases.items())
        assert biases

    run(2, main)


def test_a_rate_without_a_bias_and_replicas_that_differ_are_refused() -> None:
    options = Options(expert_bias_rate=RATE)
    with pytest.raises(ValueError, match="no router of GPT has a buffer e_score_correction_bias"):
        run(1, lambda world: parallelize(plain, "dp=1", world=world, loss=next_token_loss, options=options))
    with pytest.raises(ValueError, match=r"no router of MixtureGPT has a buffer .* has it with routing=biased"):
        run(1, lambda world: trainer_of(world, "dp=1", "top-2"))
    with pytest.raises(ValueError, match=r"expert_bias_rate=-0\.1 would move tokens to the busiest experts"):
        run(1, lambda world: trainer_of(world, "dp=1", "biased", rate=-0.1))
    message = "expert_shares of the router beside blocks.0.mlp.experts .*use sync=step"
    with pytest.raises(PlanError, match=message):
        run(2, lambda world: trainer_of(world, "dp=2 sync=local every=2", "top-2", rate=0.0, shares=True))

    def frozen() -> nn.Module:
        """A bias that is a parameter without gradient, as in ERNIE 4.5."""
        model = build("biased", tied=False)
        for module in [each for each in model.modules() if "e_score_correction_bias" in each._buffers]:
            bias = module._buffers.pop("e_score_correction_bias")
            assert bias is not None
            module.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        return model

    with pytest.raises(PlanError, match=r"e_score_correction_bias of the router beside .*use sync=step"):
        run(2, lambda world: parallelize(frozen, "dp=2 sync=local", world=world, loss=next_token_loss, options=options))


def plain() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=1, heads=1, width=4))
