"""Test docs/moving.md: the code of each row, in a small script, gives the numbers of the plain script."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax, softplus
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwise as mw
from grid import Grid
from meshwise.testing import agree, build_whole, run
from plain_scripts import (
    STEPS,
    Coder,
    Labelled,
    Recurrent,
    batch,
    chunks,
    contrast,
    made,
    plain_accumulation,
    plain_average,
    plain_clamped,
    plain_clipping,
    plain_contrast,
    plain_gan,
    plain_gradient_penalty,
    plain_groups,
    plain_logging,
    plain_metrics,
    plain_own_loss,
    plain_penalty,
    plain_resumed,
    plain_sampler,
    plain_sampling,
    plain_schedules,
    plain_sum,
    plain_teacher,
    plain_tokens_first,
    plain_weighted,
    rows,
    size_of,
    sums,
    weights,
)

PAGE = Path(__file__).parents[1] / "docs" / "moving.md"
PLANS = ("dp=1", "dp=2 zero=1", "dp=3 zero=3")


def trainer_of(world: mw.World, plan: str, seed: int = 0, sizes: Any = None, **settings: Any) -> mw.Trainer:
    settings = {"optimizer": torch.optim.SGD, "lr": 0.1, **settings}
    return mw.parallelize(made(seed, **(sizes or {})), plan, world=world, **settings)


def values(trainer: mw.Trainer) -> list[Tensor]:
    return [value.clone() for _, value in trainer.full_parameters()]


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {}
"""Plain script, and the script with meshwise, by the first cell of the row."""


def row(title: str, plain: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a script with meshwise for the row `title`."""

    def add(ours: Callable[..., Any]) -> Callable[..., Any]:
        CASES[title] = plain, ours
        return ours

    return add


# ---- batch and loss --------------------------------------------------------------------------------------------------


@row("a model that computes its mean loss", plain_own_loss)
def own_loss(world: mw.World, plan: str) -> Any:
    def loss(output: Any, batch: Any) -> Any:
        return output[1] * len(batch["labels"]), len(batch["labels"])

    model = build_whole(Labelled, seed=0)
    trainer = mw.parallelize(model, plan, world=world, loss=loss, optimizer=torch.optim.SGD, lr=0.1)
    losses = []
    for number in range(STEPS):
        x, labels = batch(number)
        losses.append(trainer.step({"x": x, "labels": labels}).loss)
    return losses, values(trainer)


@row("a loss that is a sum", plain_sum)
def summed(world: mw.World, plan: str) -> Any:
    trainer, losses = trainer_of(world, plan, lr=0.01), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            x, labels = step.rows(batch(number))
            total = cross_entropy(step.forward(x), labels, reduction="sum")
            step.backward(step.sum(total))
            losses.append(step.update().loss)
    return losses, values(trainer)


@row("weights of samples or tokens", plain_weighted)
def weighted(world: mw.World, plan: str) -> Any:
    trainer, losses = trainer_of(world, plan), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            x, labels, weight = step.rows((*batch(number), weights(number)))
            each = cross_entropy(step.forward(x), labels, reduction="none")
            step.backward(step.mean((each * weight).sum(), weight.sum()))
            losses.append(step.update().loss)
    return losses, values(trainer)


@row("a penalty on the weights", plain_penalty)
def penalty(world: mw.World, plan: str) -> Any:
    trainer, losses = trainer_of(world, plan.replace("zero=3", "zero=2")), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            x, labels = step.rows(batch(number))
            penalty = size_of(trainer.model)
            loss = step.mean(cross_entropy(step.forward(x), labels, reduction="sum"), len(labels))
            step.backward(loss + step.mean(penalty, 1))
            losses.append(step.update().loss)
    return losses, values(trainer)


@row("batches of (tokens, samples)", plain_tokens_first)
def tokens_first(world: mw.World, plan: str) -> Any:
    model = build_whole(lambda: Recurrent().double(), seed=0)
    trainer = mw.parallelize(model, plan, world=world, optimizer=torch.optim.SGD, lr=0.1)
    start, stop = trainer.share(6)
    losses, hidden = [], torch.zeros(1, stop - start, 8, dtype=torch.float64)
    for chunk in chunks():
        with trainer.open_step() as step:
            x, target = (each.transpose(0, 1) for each in step.rows([each.transpose(0, 1) for each in chunk]))
            output, hidden = step.forward(x, hidden.detach())
            step.backward(step.mean(mse_loss(output, target, reduction="sum"), target.numel()))
            losses.append(step.update().loss)
    return losses, values(trainer)


# ---- the loop --------------------------------------------------------------------------------------------------------


@row("accumulation, `no_sync`", plain_accumulation)
def accumulation(world: mw.World, plan: str) -> Any:
    trainer, losses = trainer_of(world, plan), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            for part in range(4):
                x, labels = step.rows(batch(4 * number + part))
                loss = step.mean(cross_entropy(step.forward(x), labels, reduction="sum"), len(labels))
                step.backward(loss / 4)
            step.clip(0.1)
            losses.append(step.update().loss)
    return losses, values(trainer)


@row("`clip_grad_norm_`, `clip_grad_value_`", plain_clipping)
def clipping(world: mw.World, plan: str) -> Any:
    trainer, norms = trainer_of(world, plan), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            x, labels = step.rows(batch(number))
            step.backward(step.mean(cross_entropy(step.forward(x), labels, reduction="sum"), len(labels)))
            for _, gradient in step.gradients():
                gradient.clamp_(-0.02, 0.02)
            norms.append(step.clip(0.05))
            step.update()
    return norms, values(trainer)


@row("schedulers", plain_schedules)
def schedules(world: mw.World, plan: str) -> Any:
    trainer, found = trainer_of(world, plan, loss=sums), []
    scheduler = OneCycleLR(trainer.optimizer, max_lr=0.2, total_steps=2 * STEPS)
    plateau = ReduceLROnPlateau(trainer.optimizer, patience=0, threshold=0.5)
    for number in range(2 * STEPS):
        found.append(trainer.step(batch(number)).loss)
        if number < STEPS:
            scheduler.step()
        else:
            plateau.step(trainer.evaluate([batch(99)]).loss)
        found += [trainer.optimizer.param_groups[0]["lr"], trainer.optimizer.param_groups[0]["momentum"]]
    return found, values(trainer)


@row("groups, weight decay, rates by hand", plain_groups)
def groups(world: mw.World, plan: str) -> Any:
    def rule(name: str, parameter: Any) -> Any:
        return {"weight_decay": 0.0, "lr": 0.05} if name.endswith("bias") else {"weight_decay": 0.5}

    options = mw.Options(parameter_options=rule)
    trainer = trainer_of(world, plan, loss=sums, optimizer=torch.optim.AdamW, lr=0.01, options=options)
    first = [group["lr"] for group in trainer.optimizer.param_groups]
    for number in range(STEPS):
        for group, rate in zip(trainer.optimizer.param_groups, first, strict=True):
            group["lr"] = rate / (1 + number)
        trainer.step(batch(number))
    return values(trainer)


@row("weights that the script clamps after a step", plain_clamped)
def clamped(world: mw.World, plan: str) -> Any:
    class Clamped(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for each in group["params"]:
                    each.clamp_(-0.3, 0.3)

    trainer = trainer_of(world, plan, loss=sums, optimizer=Clamped)
    for number in range(STEPS):
        trainer.step(batch(number))
    return values(trainer)


# ---- more than one model ---------------------------------------------------------------------------------------------


@row("two optimizers (GAN)", plain_gan)
def gan(world: mw.World, plan: str) -> Any:
    generator = trainer_of(world, plan, 1, sizes={"outputs": 2})
    critic, losses = trainer_of(world, plan, 2, sizes={"outputs": 1, "inputs": 2}), []
    for number in range(STEPS):
        with generator.open_step() as step:
            fake = step.forward(step.rows(rows(number)))
            with critic.open_step() as judging:
                real = judging.rows(rows(50 + number, 2))
                score = softplus(-judging.forward(real)) + softplus(judging.forward(fake.detach()))
                judging.backward(judging.mean(score.sum(), len(score)))
                losses.append(judging.update().loss)
            score = softplus(-step.through(critic, fake))
            step.backward(step.mean(score.sum(), len(score)))
            losses.append(step.update().loss)
    return losses, values(generator), values(critic)


@row("a frozen teacher or reference model", plain_teacher)
def distillation(world: mw.World, plan: str) -> Any:
    teacher = mw.parallelize(made(7), plan, world=world, optimizer=None)
    trainer, losses = trainer_of(world, plan), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            x = step.rows(rows(number))
            wanted = softmax(teacher.predict(x) / 2, -1)
            loss = kl_div(log_softmax(step.forward(x) / 2, -1), wanted, reduction="sum")
            step.backward(step.mean(loss, len(x)))
            losses.append(step.update().loss)
    return losses, values(trainer)


@row("a contrastive loss over the global batch", plain_contrast)
def contrastive(world: mw.World, plan: str) -> Any:
    trainer, losses = trainer_of(world, plan), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            one, other = step.rows((rows(number), rows(50 + number)))
            a, _ = step.gather(step.forward(one))
            b, _ = step.gather(step.forward(other))
            step.backward(step.mean(contrast(a, b), 1))
            losses.append(step.update().loss)
    return losses, values(trainer)


@row("a gradient penalty", plain_gradient_penalty)
def gradient_penalty(world: mw.World, plan: str) -> Any:
    trainer, losses = trainer_of(world, plan), []
    for number in range(STEPS):
        with trainer.open_step() as step:
            x = step.rows(rows(number)).requires_grad_()
            output = step.forward(x)
            [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
            size = step.mean(output.square().sum(), output.numel())
            step.backward(size + step.mean((slope.norm(dim=1) - 1).square().sum(), len(x)))
            losses.append(step.update().loss)
    return losses, values(trainer)


# ---- around the loop -------------------------------------------------------------------------------------------------


@row("an average of the weights (EMA)", plain_average)
def average(world: mw.World, plan: str) -> Any:
    trainer, found = trainer_of(world, plan, loss=sums), []
    average = trainer.average(0.9)
    for number in range(STEPS):
        trainer.step(batch(number))
        with average.applied():
            found.append(trainer.evaluate([batch(99)]).loss)
    return found, values(trainer)


@row("evaluation and metrics", plain_metrics)
def metrics(world: mw.World, plan: str) -> Any:
    trainer = trainer_of(world, plan, loss=sums)
    batches = [batch(number, count=count) for number, count in enumerate((6, 6, 1))]
    loss, right, count = trainer.evaluate(batches).loss, 0, 0
    for x, labels in batches:
        output = trainer.predict(x, split=True)
        right, count = right + int((output.argmax(1) == labels).sum()), count + len(labels)
    return loss, right / count


@row("checkpoints and resuming", plain_resumed)
def resumed(world: mw.World, plan: str) -> Any:
    losses, folder = [], Path("run") / plan.replace(" ", "-")
    for part in range(2):
        trainer = trainer_of(world, plan, loss=sums, optimizer=torch.optim.Adam, lr=0.01)
        scheduler = OneCycleLR(trainer.optimizer, max_lr=0.1, total_steps=10)
        found = trainer.restore(folder)
        assert (found is None) == (part == 0)
        if found is not None:
            scheduler.load_state_dict(found.extra["scheduler"])
        for number in range(found.extra["next"] if found else 0, 2 * part + 2):
            losses.append(trainer.step(batch(number)).loss)
            scheduler.step()
        state = {"next": 2 * part + 2, "scheduler": scheduler.state_dict()}
        trainer.save(folder / f"step-{2 * part + 2}", extra=state)
    return losses, values(trainer)


@row("`DistributedSampler`", plain_sampler)
def sampler(world: mw.World, plan: str) -> Any:
    trainer, data, losses = trainer_of(world, plan, loss=sums), TensorDataset(*batch(0, count=24)), []
    sampler: DistributedSampler[Any] = DistributedSampler(data, trainer.replicas, trainer.replica)
    loader = DataLoader(data, batch_size=6 // trainer.replicas, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses += [trainer.step(local, local=True).loss for local in loader]
    return losses, values(trainer)


@row("logging by one rank", plain_logging)
def logging(world: mw.World, plan: str) -> Any:
    trainer, losses, norms = trainer_of(world, plan, loss=sums), [], []
    for number in range(STEPS):
        result = trainer.step(batch(number))
        gradients = {name: float(gradient.norm()) for name, gradient in trainer.full_gradients()}
        if world.rank == 0:
            losses.append(result.loss)
            norms.append(gradients)
    written = {"losses": losses, "norms": norms}
    return [(world.exchange(written))[0]]


@row("`model.generate`, `model.decode`", plain_sampling)
def sampling(world: mw.World, plan: str) -> Any:
    def loss(output: Any, batch: Any) -> Any:
        return mse_loss(output, batch, reduction="sum"), batch.numel()

    model = build_whole(Coder, seed=0)
    trainer = mw.parallelize(model, plan, world=world, loss=loss, optimizer=torch.optim.SGD, lr=0.1)
    losses = [trainer.step(rows(number)).loss for number in range(STEPS)]
    noise = rows(99, 2)
    trainer.model.eval()
    with torch.no_grad():
        images = trainer.model.decode(noise)  # type: ignore[operator]
    trainer.model.train()
    return losses, images.clone()


# ---- the page --------------------------------------------------------------------------------------------------------


def table_rows() -> dict[str, str]:
    """Return the second cells of the page's tables by the first ones, without the headers."""
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.read_text().split("\n## Limits")[0], re.MULTILINE)
    return {title: cell for title, cell in cells if title != "in your script"}


@pytest.mark.filterwarnings("ignore:the model drew random numbers")
@pytest.mark.grid(Grid({"title": tuple(CASES), "plan": PLANS}, strength=1, heavy=lambda cell: cell["plan"] == "dp=1"))
def test_a_row_gives_the_numbers_of_the_plain_script(
    title: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, ours = CASES[title]
    expected = plain()
    for found in run(mw.Plan.parse(plan).mesh().size, ours, args=(plan,)):
        agree({"": list(found)}, {"": _detached(list(expected))}, bound=1e-9)


def _detached(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _detached(value) for key, value in tree.items()}
    return [_detached(one) for one in tree] if isinstance(tree, list | tuple) else _value(tree)


def _value(one: Any) -> Any:
    return one.detach() if isinstance(one, Tensor) else one


def test_the_page_has_a_row_for_each_script_and_their_code() -> None:
    found = table_rows()
    assert found.keys() == CASES.keys()
    for title, cell in found.items():
        source = " ".join(inspect.getsource(CASES[title][1]).split())
        source = re.sub(r": (Any|str)\b| -> Any\b", "", source)
        for code in re.findall(r"`([^`]+)`", cell):
            assert " ".join(code.split()) in source, (title, code)
