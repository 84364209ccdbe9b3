"""Test that mixtures of transformers are rehearsed, and cut on the meta device, as a balanced router would use them."""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

import meshwise as mw
from expert.mixtures_of_transformers import batches, build, forward, loss, settings
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import PlanError
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.testing import run


def subject(family: str) -> RehearsalSubject:
    options = Options(forward=forward, example=batches()[0])
    return RehearsalSubject(lambda: build(family), loss, batches()[0], options=options)


def exchanged(calls: Any) -> tuple[int, int]:
    """Return the number of all-to-alls and their bytes."""
    found = [call.bytes for call in calls if call.kind == "all_to_all"]
    return len(found), sum(found)


@pytest.mark.parametrize("choices", [1, 2])
def test_llama_4_is_rehearsed_with_the_rows_of_its_choices(choices: int) -> None:
    """A rank sends in a step what is sent on average, whatever the router chooses."""

    def model() -> Any:
        return build("Llama4", num_experts_per_tok=choices)

    def main(world: World) -> tuple[tuple[int, int], tuple[int, float]]:
        trainer = parallelize(model, "dp=2 ep=2", world=world, **settings())
        with trainer.world.record() as records:
            trainer.step(batches()[0])
        experts: Any = trainer.model.get_submodule("model.layers.0.feed_forward.experts")
        trainer.close()
        return exchanged(records), (experts.sharding.exchange.received, experts.sharding.exchange.even_share)

    outcomes = run(2, main)
    found = [sent for sent, _ in outcomes]
    assert sum(received for _, (received, _) in outcomes) == sum(share for _, (_, share) in outcomes)
    given = RehearsalSubject(model, loss, batches()[0], options=Options(forward=forward, example=batches()[0]))
    made = rehearse(given, plan="dp=2 ep=2", ranks=2)
    number, size = exchanged(call.record for part in made.steps[0] for call in part.calls())
    assert number == found[0][0]
    assert size == sum(sent for _, sent in found) / 2


@pytest.mark.parametrize("plan", ["tp=2 ep=2", "dp=2 ep=2 dispatch=all-gather", "dp=2 ep=2 replicate=1 chunk=12"])
def test_llama_4_is_rehearsed_under_every_dispatch(plan: str) -> None:
    assert rehearse(subject("Llama4"), plan=plan, ranks=2).steps[0]


def test_llama_4_given_as_a_function_is_compared_under_pp() -> None:
    options = mw.Options(forward=forward)
    assert mw.verify(lambda: build("Llama4"), loss, batches()[:1], "pp=2 dp=2 ep=2", lr=1e-3, options=options).ok


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 ep=2"])
@pytest.mark.parametrize("family", ["Switch", "Nllb"])
def test_experts_that_are_called_in_a_loop_are_refused_by_a_rehearsal(family: str, plan: str) -> None:
    with pytest.raises(PlanError, match=r"experts.* calls its experts in a loop over values .* Measure a short run"):
        rehearse(subject(family), plan=plan, ranks=2)
