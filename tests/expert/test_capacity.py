"""Test that a capacity drops the same tokens under every plan, as a plain loop does, and where it is refused."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expert import mixtures_of_transformers as hugging_face
from expert.test_agreement import VOCABULARY, batches, build, training
from expert.test_called_experts import build as build_called
from expert.test_called_experts import training as training_of_called
from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.expert.expert_capacity import limit_experts
from meshwise.expert.router_updates import RouterUpdates
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, MixtureConfig, next_token_loss
from meshwise.testing import agree, run
from meshwise.verify import verify


def limited(given: Mapping[str, Any], capacity: float) -> dict[str, Any]:
    return {**given, "options": replace(given["options"], expert_capacity=capacity)}


@functools.cache
def dropped_by_the_model() -> Any:
    """Return the training of the reference model that drops by its own code."""
    return alone(functools.partial(build, "capacity", tied=False), batches=batches(), **training())


PLANS = (
    "dp=1",
    "dp=4 ep=2 zero=3 recompute=full",
    "dp=2 tp=2 ep=4 microbatches=2 chunk=3",
    "pp=2 dp=2 ep=2",
    "tp=2",
    "cp=2 ep=2",
    "cp=2 context=striped recompute=full",
)


@pytest.mark.parametrize("plan", [*PLANS, "dp=2 ep=2 dispatch=all-gather"])
def test_a_capacity_of_the_options_drops_what_the_reference_model_drops(plan: str) -> None:
    def main(world: World) -> Any:
        given = limited(training(), 1.0)
        trainer = parallelize(functools.partial(build, "top-2", tied=False), plan, world=world, **given)
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, dropped_by_the_model(), bound=1e-9)


FORMS = (("Mixtral", "cp=2 context=ring"), ("GptOss", "dp=2 tp=2 ep=2 etp=2"), ("Llama4", "cp=2 dp=2 ep=4"))
MORE = (
    ("Mixtral", "dp=4 ep=2 microbatches=2"),
    ("DeepseekV3", "dp=2 tp=2 ep=4 zero=3"),
    ("Llama4", "dp=4 ep=4 zero=1"),
)


@pytest.mark.grid(Grid({"case": FORMS + MORE}, heavy=lambda cell: cell["case"] in MORE))
def test_a_model_of_transformers_with_a_capacity_is_that_of_one_process(case: tuple[str, str]) -> None:
    family, plan = case
    pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    hugging_face.check(hugging_face.build(family), plan, given=lambda: limited(hugging_face.settings(), 0.75))


class Experts(nn.Module):
    """Experts that return how many choices of each token have a weight, or rows as they are."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.num_experts = 3
        self.matrices = nn.Parameter(torch.ones(3, 1, 1))
        self.forward = self.rows if form == "rows" else self.stacked

    def stacked(self, _hidden: Tensor, _index: Tensor, weights: Tensor) -> Tensor:
        return weights

    def rows(self, hidden: Tensor) -> Tensor:
        return hidden


class Around(nn.Module):
    """Module that sends the tokens of each sample to the experts in `index`."""

    def __init__(self, form: str, index: Tensor) -> None:
        super().__init__()
        self.experts, self.index = Experts(form), index

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        if self.experts.forward.__name__ == "stacked":
            weights: Tensor = self.experts(tokens, self.index, torch.ones_like(self.index, dtype=x.dtype))
            return weights
        chosen = nn.functional.one_hot(self.index, 3).sum(1).T
        kept: Tensor = self.experts((chosen.unsqueeze(-1) * tokens).flatten(0, 1)).view(3, -1)
        return kept.T.gather(1, self.index)


@pytest.mark.parametrize("form", ["stacked", "rows"])
def test_the_first_tokens_of_a_sample_are_kept(form: str) -> None:
    samples, tokens, choices, capacity = 4, 5, 2, 0.8
    index = torch.rand(samples * tokens, 3, generator=torch.Generator().manual_seed(3)).topk(choices).indices
    model = nn.ModuleDict({"mlp": Around(form, index)})
    limit_experts(model, capacity=capacity, routers=RouterUpdates(rate=0.0, device=torch.device("cpu")))
    kept = model["mlp"](torch.ones(samples, tokens, 1)).view(samples, -1)
    expected = torch.zeros(samples, tokens * choices)
    for sample in range(samples):
        taken = [0, 0, 0]
        for pair, expert in enumerate(index.view(samples, -1)[sample].tolist()):
            expected[sample, pair] = taken[expert] < 3  # ceil(5 tokens * 2 choices / 3 experts * 0.8)
            taken[expert] += 1
    assert kept.tolist() == expected.tolist()
    assert 0 < expected.mean() < 1


def test_a_capacity_is_in_the_report_and_refused_where_samples_are_not_seen() -> None:
    given = limited(training(), 0.5)
    report = verify(
        functools.partial(build, "top-2", tied=False), next_token_loss, batches(), "dp=2 ep=2", **without_loss(given)
    )
    assert report.ok, report.verdict
    assert any("expert_capacity=0.5 drops tokens on both sides: another model" in note for note in report.notes)


def without_loss(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != "loss"}


def plain() -> nn.Module:
    return GPT(GPTConfig(vocabulary=VOCABULARY, context=4, layers=1, heads=1, width=4))


REFUSED: Mapping[str, tuple[Any, str, dict[str, Any], str]] = {
    "no experts": (plain, "dp=2", training(), r"GPT has no mixture of experts"),
    "called": (lambda: build_called("masked"), "dp=2 ep=2", training_of_called("masked"), "do not show their samples"),
    "split tokens": (
        functools.partial(build, "top-2", tied=False),
        "tp=2 ep=2 sequence_parallel=1",
        training(),
        "counts all tokens of a sample.*Nearest that works: 'tp=2'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_capacity_that_cannot_be_counted_is_refused(case: str) -> None:
    model, plan, given, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        run(2, lambda world: parallelize(model, plan, world=world, **limited(given, 1.25)))


@pytest.mark.parametrize("capacity", [0, -1.0, float("inf")])
def test_a_capacity_that_is_no_share_is_refused(capacity: float) -> None:
    given = limited(training(), capacity)
    with pytest.raises(PlanError, match=r"is no number above 0. Leave it out to drop no token, or give 1\.25"):
        run(1, lambda world: parallelize(functools.partial(build, "top-2", tied=False), "dp=1", world=world, **given))
    with pytest.raises(ValueError, match=r"capacity=.* must be above 0, as 1\.25; leave it out for no limit"):
        MixtureConfig(vocabulary=VOCABULARY, context=4, capacity=capacity)


# micro-batches and chunks with a capacity are above
@pytest.mark.grid(Grid({"plan": PLANS}, heavy=lambda cell: "microbatches" in cell["plan"] or "striped" in cell["plan"]))
def test_dropped_pairs_are_counted_once_under_every_plan(plan: str) -> None:
    def main(world: World) -> Any:
        given = limited(training(), 0.5)
        trainer = parallelize(functools.partial(build, "top-2", tied=False), plan, world=world, **given)
        found = []
        for batch in batches():
            trainer.evaluate([batch])
            trainer.step(batch)
            found.append(dict(trainer.expert_drops()))
        assert all(pairs == [0, 0] for pairs in trainer.expert_drops().values())
        trainer.close()
        return found

    alone = run(1, functools.partial(by_hand, capacity=0.5))[0]
    assert all(dropped for step in alone for dropped, _ in step.values())
    for found in run(Plan.parse(plan).mesh().size, main):
        assert found == alone


def by_hand(world: World, capacity: float) -> list[dict[str, list[int]]]:
    """Return the dropped and all pairs of each mixture and step, counted at the outputs of the routers."""
    given = limited(training(), capacity)
    trainer = parallelize(functools.partial(build, "top-2", tied=False), "dp=1", world=world, **given)
    found: list[dict[str, list[int]]] = []

    def count(name: str, _module: nn.Module, _given: Any, out: Any) -> None:
        most, dropped = math.ceil(out[0][0].numel() / 4 * capacity), 0
        for sample in out[0]:
            dropped += sum(max(0, int(taken) - most) for taken in sample.flatten().bincount(minlength=4))
        found[-1][name] = [dropped, out[0].numel()]

    for name, module in trainer.model.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(functools.partial(count, name.replace("router", "experts")))
    for batch in batches():
        found.append({})
        trainer.step(batch)
    return found
