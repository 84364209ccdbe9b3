"""Test the trainer's methods besides `step`: evaluate, predict, memory, close."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from joined_worlds import holds_together
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig
from meshwise.testing import agree, run
from two_layers import WIDTH, Two, good, made, over_plans, squares, state

# ---- evaluation ------------------------------------------------------------------------------------------------------


@over_plans
def test_evaluation_puts_every_module_back_into_its_own_mode(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan)
        seen: list[bool] = []
        dropout, second = (trainer.model.get_submodule(name) for name in ("dropout", "second"))
        dropout.eval()
        second.register_forward_hook(lambda module, _args, _output: seen.append(module.training))
        trainer.evaluate([good(), good(1)[:3]])
        assert seen
        assert not any(seen)
        assert (trainer.model.training, dropout.training, second.training) == (True, False, True)
        with pytest.raises(RuntimeError):
            trainer.evaluate([torch.ones(4, WIDTH + 1)])
        assert (trainer.model.training, dropout.training, second.training) == (True, False, True)

    run(2, main)


class ByName(Two):
    """Uses its second matrix in a way that its source does not show."""

    def forward(self, x: Tensor) -> Any:
        return functional.linear(self.first(x), getattr(self, "sec" + "ond").weight)


@over_plans
def test_a_prediction_is_what_the_model_gives_in_eval_mode_and_changes_nothing(plan: str) -> None:
    def main(world: World) -> None:
        trainer = parallelize(ByName, plan, world=world, loss=squares, lr=1e-2)
        trainer.step(good())
        before = state(trainer)
        predicted = trainer.predict(good())
        full = {name: value.clone() for name, value in trainer.full_parameters()}
        expected = functional_call(ByName(), full, (good(),))
        agree({"output": predicted}, {"output": expected.detach()}, bound=1e-6)
        assert not predicted.requires_grad
        assert trainer.model.training
        agree(state(trainer), before, bound=0.0)

    run(2, main)


@over_plans
def test_evaluation_changes_nothing(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan)
        trainer.step(good())
        before = state(trainer)
        first, again = (trainer.evaluate([good(), good(1)]) for _ in range(2))
        assert first == again
        agree(state(trainer), before, bound=0.0)

    run(2, main)


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "zero, parameters, gradients, optimizer",
    [(0, 1, 1, 2), (1, 1, 1, 1), (2, 1, 0.5, 1), (3, 0.5, 0.5, 1)],
)
@pytest.mark.parametrize("dtype, masters", [(torch.float32, 1.0), (torch.bfloat16, 2.0)])
def test_memory_is_reported_by_category(
    zero: int, parameters: float, gradients: float, optimizer: float, dtype: torch.dtype, masters: float
) -> None:
    """One layer of 64 elements, which two ranks divide without padding, in units of its bytes in fp32."""
    whole = 64 * 4

    def main(world: World) -> tuple[dict[str, int], bool]:
        model = nn.Linear(8, 8, bias=False, dtype=dtype)
        trainer = parallelize(model, f"dp=2 zero={zero}", world=world, loss=squares, optimizer=torch.optim.Adam, lr=0.1)
        assert trainer.memory()["optimizer"] == 0
        trainer.step(torch.ones(2, 8, dtype=dtype))
        return trainer.memory(), holds_together(world)

    steps = 4
    narrow = dtype.itemsize / 4
    owned = 1.0 if zero == 0 else 0.5
    for memory, together in run(2, main):
        own = 0.5 if together and zero else parameters
        assert memory == {
            "parameters": whole * (own * narrow + (owned if masters > 1 else 0)),
            "gradients": whole * gradients,
            "optimizer": whole * optimizer + steps,
            "gathered_peak": whole * narrow if zero == 3 and not together else 0,
        }


def test_a_closed_trainer_leaves_a_plain_module() -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=auto")
        trainer.close()
        trainer.model(good()).sum().backward()
        assert all(parameter.grad is not None for parameter in trainer.model.parameters())

    run(2, main)


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("plan", ["dp=1", "dp=3", "dp=3 zero=3", "dp=2 tp=2", "pp=2 dp=2 microbatches=2"])
def test_a_split_prediction_has_each_row_once_on_every_rank(plan: str, rows: int) -> None:
    tokens = torch.randint(16, (rows, 4), generator=torch.Generator().manual_seed(3))

    def main(world: World) -> tuple[Tensor, Tensor]:
        options = Options(example=tokens.repeat(4, 1)[:4])
        trainer = parallelize(gpt, plan, world=world, loss=squares, lr=1e-2, options=options)
        return trainer.predict(tokens, split=True), trainer.predict(tokens)

    [(expected, _)] = run(1, parallelized_alone, args=(tokens,))
    for split, whole in run(Plan.parse(plan).mesh().size, main):
        assert type(split) is Tensor
        assert type(whole) is Tensor
        agree({"split": split, "whole": whole}, {"split": expected, "whole": expected}, bound=1e-9)


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, mlp_ratio=2)).double()


def parallelized_alone(world: World, tokens: Tensor) -> tuple[Tensor, None]:
    return parallelize(gpt, "dp=1", world=world, loss=squares, lr=1e-2).predict(tokens), None


class WithScalars(nn.Module):
    """Returns its rows, their mean, and a scalar that does not depend on them, as CLIP returns its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, 2), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        rows = self.layer(x)
        return rows, rows.mean(), self.scale.exp(), len(rows)


@pytest.mark.parametrize("plan, size", [("dp=1", 5), ("dp=2", 5), ("dp=2 zero=3", 5), ("dp=3", 2)])
def test_a_scalar_of_a_split_prediction_is_nan_if_it_depends_on_the_rows(plan: str, size: int) -> None:
    inputs = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))

    def main(world: World) -> Any:
        trainer = parallelize(WithScalars, plan, world=world, lr=1e-2)
        return trainer.predict(inputs, split=True), trainer.predict(inputs)

    for (rows, mean, scale, _), (expected, expected_mean, expected_scale, _) in run(ranks(plan), main):
        agree({"rows": rows, "scale": scale}, {"rows": expected, "scale": expected_scale}, bound=1e-6)
        assert scale.shape == mean.shape == ()
        assert mean == expected_mean if plan == "dp=1" else mean.isnan()


def ranks(plan: str) -> int:
    return Plan.parse(plan).mesh().size


# ---- calls of a script's old loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=1", "dp=2 zero=3 offload=optimizer:cpu", "pp=2"])
def test_a_step_of_the_optimizer_that_the_script_calls_is_refused(plan: str) -> None:
    """It would do nothing: gradients that the script's own backward makes are not the trainer's."""

    def main(world: World) -> None:
        trainer = parallelize(Two, plan, world=world, loss=squares, lr=1e-2, options=Options(example=good()))
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=1)
        for number in range(2):
            before = state(trainer)
            with pytest.raises(RuntimeError, match=r"remove the call, because trainer\.step\(batch\)"):
                trainer.optimizer.step()
            agree(state(trainer), before, bound=0.0)
            trainer.optimizer.zero_grad()
            trainer.step(good(number))
            scheduler.step()

    run(ranks(plan), main)


def test_tensors_that_do_not_count_samples_first_are_named_with_what_to_do() -> None:
    def main(world: World) -> None:
        made(world, "dp=1").step((torch.ones(4, WIDTH), torch.ones(4 * WIDTH)))

    with pytest.raises(ValueError, match=r"so transpose others; shapes: \[\(4, \d+\), \(\d+,\)\]"):
        run(1, main)
