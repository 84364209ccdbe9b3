"""Test steps whose forwards and backwards the script runs: they train as the script does on one process."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Cell, Grid, ranks_of
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError
from meshwise.engine.trainer import Trainer
from meshwise.model.forward import LossError
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, build_whole, run

WIDTH, STEPS = 4, 3
AXES = {
    "split": ("dp=1", "dp=3", "dp=2 tp=2", "tp=4 tp_mode=2d"),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full"),
}


def exists(cell: Cell) -> bool:
    return "2d" not in cell["split"] or cell["zero"] in (0, 2)


ONCE = {"dp=2 tp=2": 3, "tp=4 tp_mode=2d": 2}


def cost(cell: Cell) -> float:
    return ranks_of(cell["split"])


PLANS = Grid(
    AXES,
    exists=exists,
    cost=cost,
    single=("recompute",),
    # Every stage of ZeRO with three replicas, there with blocks that are computed again; the splits of matrices once.
    heavy=lambda cell: (
        cell["split"] != "dp=3" and (cell["zero"] != ONCE.get(cell["split"], 0) or cell["recompute"] != "none")
    ),
)
FEW_PLANS = Grid(AXES, exists=exists, cost=cost, strength=1, heavy=lambda cell: "2d" in cell["split"])


def plan_of(split: str, zero: int, recompute: str) -> str:
    return f"{split} zero={zero} recompute={recompute}"


def ranks(plan: str) -> int:
    return Plan.parse(plan).mesh().size


def gpt(dropout: float = 0.0) -> nn.Module:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=4, width=16, mlp_ratio=2, tied=True, dropout=dropout)
    return GPT(shape).double()


def tokens(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(16, (rows, 5), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_parameters()}


def plain_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


# ---- one loss: the step that trainer.step takes ----------------------------------------------------------------------


@pytest.mark.grid(FEW_PLANS)
def test_one_loss_is_the_step_of_the_trainer_to_the_last_dropout_mask(split: str, zero: int, recompute: str) -> None:
    plan = plan_of(split, zero, recompute)

    def main(world: World, open_: bool) -> Any:
        build = functools.partial(gpt, dropout=0.3)
        trainer = parallelize(build, plan, loss=next_token_loss, world=world, lr=1e-2, options=Options(clip_norm=0.5))
        figures = []
        for number, rows in enumerate((6, 5, 1)):
            batch = tokens(rows, number)
            if open_:
                with trainer.open_step() as step:
                    step.backward(step.loss(batch), last=number == 1)
                    result = step.update()
            else:
                result = trainer.step(batch)
            figures.append([result.loss, result.grad_norm, result.tokens, values(trainer)])
        return figures

    opened, closed = (run(ranks(plan), main, args=(flag,)) for flag in (True, False))
    for one, other in zip(opened, closed, strict=True):
        agree(one, other, bound=1e-9)


@pytest.mark.parametrize("plan", ["dp=2 precision=fp16", "dp=2 zero=2 precision=fp16", "dp=2 zero=3 precision=bf16"])
def test_in_half_precision_gradients_are_without_the_loss_scale(plan: str) -> None:
    def main(world: World, open_: bool) -> Any:
        trainer = parallelize(lambda: gpt().float(), plan, loss=next_token_loss, world=world, lr=1e-2)
        if not open_:
            result = trainer.step(tokens(6, 0))
            return [result.loss, result.grad_norm, dict(_copied(trainer.full_gradients()))]
        with trainer.open_step() as step:
            step.backward(step.loss(tokens(6, 0)))
            gradients = dict(_copied(step.gradients()))
            norm = step.norm()
            return [step.update().loss, norm, gradients]

    opened, closed = (run(2, main, args=(flag,)) for flag in (True, False))
    for one, other in zip(opened, closed, strict=True):
        agree(one, other, bound=0.05)  # rounding of half precision; a scale that is left in would be a power of two


def _copied(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.clone()) for name, value in named)


# ---- several losses, changed gradients, accumulation -----------------------------------------------------------------


def halved(name: str, gradient: Tensor) -> None:
    """Change a gradient in place, by name and by its full shape."""
    if name.endswith("up.weight"):
        gradient[: len(gradient) // 2] *= 0.5
    if gradient.ndim == 1:
        gradient += 0.01


def losses(output: Tensor, labels: Tensor) -> list[tuple[Tensor, float]]:
    """Two losses with different counts: a masked cross-entropy over tokens, and a mean over samples."""
    kept = labels != 3
    entropy = functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    spread = torch.logsumexp(output, -1).mean(-1).square().sum()
    return [((entropy * kept.flatten()).sum(), float(kept.sum())), (spread, float(len(labels)))]


@functools.cache
def plain_run() -> list[Any]:
    model = build_whole(gpt, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):  # two batches of different sizes are accumulated
            inputs, labels = tokens(6 - part, 10 * step + part)
            first, second = losses(model(inputs), labels)
            (first[0] / first[1] + 0.1 * (second[0] / second[1]).sqrt()).backward()
        inputs, labels = tokens(4, 77)
        (0.3 * model(inputs).square().mean()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            halved(name, parameter.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found.append([float(norm), gradients, plain_values(model)])
    return found


@pytest.mark.grid(PLANS)
def test_several_losses_changed_gradients_and_accumulation(split: str, zero: int, recompute: str) -> None:
    plan = plan_of(split, zero, recompute)

    def main(world: World) -> Any:
        trainer = parallelize(gpt, plan, world=world, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9)
        found = []
        for number in range(STEPS):
            with trainer.open_step() as step:
                for part in range(2):
                    inputs, labels = step.rows(tokens(6 - part, 10 * number + part))
                    first, second = losses(step.forward(inputs), labels)
                    step.backward(step.mean(*first) + 0.1 * step.mean(*second).sqrt())
                inputs, _ = step.rows(tokens(4, 77))
                output = step.forward(inputs)
                step.backward(0.3 * step.mean(output.square().sum(), output.numel()))
                for name, gradient in step.gradients():
                    halved(name, gradient)
                norm = step.clip(0.4)
                gradients = {name: gradient.clone() for name, gradient in step.gradients()}
                step.update()
            found.append([norm, gradients, values(trainer)])
        return found

    for one in run(ranks(plan), main):
        agree(one, plain_run(), bound=1e-9)


# ---- two trainers, a teacher -----------------------------------------------------------------------------------------


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs)).double()


def noise(seed: int, columns: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def plain_gan() -> list[Any]:
    generator, critic = build_whole(lambda: net(3, WIDTH), seed=0), build_whole(lambda: net(WIDTH, 1), seed=1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic)]
    found = []
    for step in range(STEPS):
        optimizers[1].zero_grad()
        with torch.no_grad():
            fake = generator(noise(step, 3))
        functional.softplus(-critic(noise(90 + step, WIDTH))).mean().backward()
        functional.softplus(critic(fake)).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        functional.softplus(-critic(generator(noise(50 + step, 3)))).mean().backward()
        optimizers[0].step()
        found.append(
            [plain_values(generator), plain_values(critic), dict(critic.named_buffers())["1.running_mean"].clone()]
        )
    return found


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=1", "dp=3 zero=2", "dp=2 zero=3", "dp=4 zero=3"])
def test_a_gan_with_two_trainers(plan: str) -> None:
    def main(world: World) -> Any:
        settings: Any = {"world": world, "optimizer": torch.optim.Adam, "lr": 1e-2}
        generator = parallelize(lambda: net(3, WIDTH), plan, options=Options(seed=0), **settings)
        critic = parallelize(lambda: net(WIDTH, 1), plan, options=Options(seed=1), **settings)
        found = []
        for number in range(STEPS):
            with critic.open_step() as step:
                with torch.no_grad():
                    fake = step.through(generator, step.rows(noise(number, 3)))
                real = functional.softplus(-step.forward(step.rows(noise(90 + number, WIDTH))))
                step.backward(step.mean(real.sum(), len(real)))
                loss = functional.softplus(step.forward(fake))
                step.backward(step.mean(loss.sum(), len(loss)))
                step.update()
            with generator.open_step() as step:
                made = step.forward(step.rows(noise(50 + number, 3)))
                loss = functional.softplus(-step.through(critic, made))
                step.backward(step.mean(loss.sum(), len(loss)))
                step.update()
            mean = dict(critic.full_buffers())["1.running_mean"].clone()
            found.append([values(generator), values(critic), mean])
        return found

    for one in run(ranks(plan), main):
        agree(one, plain_gan(), bound=1e-9)


@functools.cache
def plain_distillation() -> list[Any]:
    student, teacher = build_whole(gpt, seed=0), build_whole(gpt, seed=5).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        inputs, _ = tokens(5, step)
        with torch.no_grad():
            wanted = teacher(inputs)
        optimizer.zero_grad()
        loss = functional.kl_div(student(inputs).log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        loss.backward()
        optimizer.step()
        found.append([float(loss.detach()), plain_values(student)])
    return found


@pytest.mark.grid(FEW_PLANS)
def test_a_teacher_that_is_split_too(split: str, zero: int, recompute: str) -> None:
    plan = plan_of(split, zero, recompute)

    def main(world: World) -> Any:
        student = parallelize(gpt, plan, world=world, lr=1e-2, weight_decay=0.01, options=NO_GROUPS)
        teacher = parallelize(gpt, plan, world=world, optimizer=None, options=Options(seed=5))
        found = []
        for number in range(STEPS):
            with student.open_step() as step:
                inputs, _ = step.rows(tokens(5, number))
                wanted = teacher.predict(inputs)
                loss = functional.kl_div(step.forward(inputs).log_softmax(-1), wanted.softmax(-1), reduction="sum")
                step.backward(step.mean(loss, len(inputs)))
                result = step.update()
            found.append([result.loss, values(student)])
        assert teacher.memory()["optimizer"] == 0
        assert teacher.memory()["gradients"] == 0
        with pytest.raises(LossError, match="made without a loss"):
            teacher.evaluate([tokens(5, 0)])
        return found

    for one in run(ranks(plan), main):
        agree(one, plain_distillation(), bound=1e-9)


NO_GROUPS = Options(parameter_options=lambda _name, _parameter: {})

# ---- gathered rows ---------------------------------------------------------------------------------------------------


def contrast(rows: Tensor, own: Tensor, first: int) -> Tensor:
    """Cross-entropy of each own row against all rows, whose right one is the sample itself."""
    target = torch.arange(first, first + len(own))
    return functional.cross_entropy(own @ rows.T, target, reduction="sum")


def features() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


@functools.cache
def plain_contrast() -> list[Any]:
    model = build_whole(features, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(noise(step, WIDTH, 7))
        loss = contrast(output, output, 0) / 7
        loss.backward()
        optimizer.step()
        found.append([float(loss.detach()), plain_values(model)])
    return found


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=3 zero=1", "dp=2 zero=3", "dp=2 tp=2"])
def test_rows_of_all_ranks_have_gradients(plan: str, opened: bool) -> None:
    def main(world: World) -> Any:
        def loss(output: Tensor, _batch: Tensor) -> tuple[Tensor, int]:
            rows, first = trainer.gather(output)
            return contrast(rows, output, first), len(output)

        options = Options(tensor_rules={"0": "colwise", "2": "rowwise"})
        settings: Any = {"world": world, "options": options, "lr": 1e-2, "weight_decay": 0.0}
        trainer = parallelize(features, plan, loss=loss, **settings)
        found = []
        for number in range(STEPS):
            batch = noise(number, WIDTH, 7)
            if opened:
                with trainer.open_step() as step:
                    output = step.forward(step.rows(batch))
                    rows, first = step.gather(output)
                    step.backward(step.mean(contrast(rows, output, first), len(output)))
                    result = step.update()
            else:
                result = trainer.step(batch)
            found.append([result.loss, values(trainer)])
        return found

    for one in run(ranks(plan), main):
        agree(one, plain_contrast(), bound=1e-9)


def test_spare_rows_are_gathered_by_no_rank() -> None:
    def main(world: World) -> Any:
        trainer = parallelize(lambda: nn.Linear(WIDTH, 5), "dp=3 zero=3", world=world, lr=1e-2)
        with trainer.open_step() as step:
            output = step.forward(step.rows(torch.ones(2, WIDTH)))
            rows, first = step.gather(output)
            step.skip()
        return len(output), len(rows), first, step.counts

    assert run(3, main) == [(1, 2, 0, True), (1, 2, 1, True), (1, 2, 0, False)]


# ---- what is refused -------------------------------------------------------------------------------------------------


def linear(world: World, plan: str = "dp=2", **settings: Any) -> Trainer:
    return parallelize(lambda: nn.Linear(WIDTH, 1), plan, world=world, lr=0.1, **settings)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=1", "dp=2 zero=3"])
def test_a_skipped_step_changes_nothing(plan: str) -> None:
    def main(world: World) -> None:
        trainer = linear(world, plan)
        before = values(trainer)
        with trainer.open_step() as step:
            output = step.forward(step.rows(torch.ones(4, WIDTH)))
            step.backward(step.mean(output.sum(), len(output)))
            result = step.skip()
        assert (result.skipped, result.tokens) == (True, 4)
        agree(values(trainer), before, bound=0.0)

    run(2, main)


def test_a_loss_of_one_rank_alone_is_refused_with_the_line_to_write() -> None:
    def main(world: World) -> None:
        trainer = linear(world)
        batch = torch.arange(4.0 * WIDTH).view(4, WIDTH)
        with trainer.open_step() as step:
            step.backward(step.forward(step.rows(batch)).mean())
            step.update()

    with pytest.raises(ValueError, match=r"'weight' outside of step\.mean.*step\.mean\(loss_sum, count\)"):
        run(2, main)


def test_losses_that_differ_are_refused_with_the_line_to_write() -> None:
    def main(world: World) -> None:
        trainer = linear(world)
        with trainer.open_step() as step:
            output = step.forward(step.rows(torch.ones(4, WIDTH)))
            step.backward(step.mean(output.sum(), len(output)) * (1 + world.rank))
            step.update()

    with pytest.raises(RanksDisagree, match=r"different losses \(rank 0: .*loss = step\.mean\(loss_sum, count\)"):
        run(2, main)


def _unended(trainer: Trainer) -> None:
    with trainer.open_step() as step:
        step.forward(step.rows(torch.ones(4, WIDTH)))


def _ended_twice(trainer: Trainer) -> None:
    with trainer.open_step() as step:
        step.skip()
        step.update()


def _late_backward(trainer: Trainer) -> None:
    with trainer.open_step() as step:
        loss = step.mean(step.forward(step.rows(torch.ones(4, WIDTH))).sum(), 1)
        step.norm()
        step.backward(loss)


@pytest.mark.parametrize(
    "act, message",
    [
        (_unended, r"call step\.update\(\) or step\.skip\(\)"),
        (_ended_twice, r"open another one"),
        (_late_backward, r"reduced already; call step\.backward before"),
    ],
)
def test_calls_in_a_wrong_order_are_refused_and_the_next_step_works(
    act: Callable[[Trainer], None], message: str
) -> None:
    def main(world: World) -> float:
        trainer = linear(world)
        with pytest.raises(RuntimeError, match=message):
            act(trainer)
        with trainer.open_step() as step:
            step.backward(step.mean(step.forward(step.rows(torch.ones(4, WIDTH))).sum(), 2))
            return step.update().grad_norm

    for norm in run(2, main):
        assert norm == pytest.approx((WIDTH + 1) ** 0.5)


def _update_from(trainer: Trainer, batch: Tensor) -> None:
    with trainer.open_step() as step:
        output = step.forward(step.rows(batch))
        step.backward(step.mean(output.sum(), len(output)))
        step.update()


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    def main(world: World) -> None:
        trainer = linear(world)
        before = values(trainer)
        with pytest.raises(NonFiniteError, match="the loss is nan"):
            _update_from(trainer, torch.full((4, WIDTH), torch.nan))
        agree(values(trainer), before, bound=0.0)

    run(2, main)


def test_pp_refuses_an_open_step_in_one_sentence() -> None:
    def main(world: World) -> None:
        trainer = parallelize(
            gpt, "pp=2 microbatches=2", world=world, loss=next_token_loss, lr=0.1, options=Options(example=tokens(4, 0))
        )
        with pytest.raises(PlanError, match=r"open_step runs .* pp=2 runs them by a schedule"):
            trainer.open_step()

    run(2, main)


def test_a_frozen_model_is_told_how_to_pass_it() -> None:
    with pytest.raises(ValueError, match="pass optimizer=None"):
        run(1, lambda world: parallelize(nn.Linear(2, 2).requires_grad_(False), "dp=1", world=world))
