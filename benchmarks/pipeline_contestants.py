"""Who is measured in `pipeline_peers.py`: pipelines of this project and its peers, on the model of `gpt.py`.

Every rank is one stage (or two, where the schedule has them) of the whole batch in 8 micro-batches. The peers are given
a list of layers and told where to cut it: into the stages whose largest has the least to compute. Imports of peers are
inside their builders, because each lives in an interpreter of its own."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gpt
from contestants import Builder, Contestant, Step

MICROBATCHES = 8


def _meshwise(keys: str) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        import meshwise as mw

        def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
            targets = batch[1]
            total = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="sum")
            return total, targets.numel()

        options = mw.Options(
            parameter_options=lambda _name, _parameter: {},  # one group decays everything
            example=gpt.global_batch(shape, step=0),
        )
        plan = f"pp={size} microbatches={MICROBATCHES} {keys}"
        trainer = mw.parallelize(gpt.build(shape), plan, loss=loss, world=mw.connect(), options=options, **gpt.ADAMW)
        return lambda number: trainer.step(gpt.global_batch(shape, step=number)).loss

    return build


class _First(nn.Module):
    """What comes before the blocks."""

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[B, T] -> [B, T, width]."""
        out: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return out


class _Last(nn.Module):
    """What comes after them."""

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()
        self.norm, self.output = model.norm, model.output

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, width] -> logits[B, T, vocabulary]."""
        logits: Tensor = self.output(self.norm(x))
        return logits


def layers(shape: gpt.Shape) -> list[nn.Module]:
    """The model as a list."""
    model = gpt.build(shape)
    return [_First(model), *model.blocks, _Last(model)]


def cut(shape: gpt.Shape, *, stages: int) -> tuple[int, ...]:
    """The bounds of the stages in the list of layers, by the multiplications of each layer for a token."""
    block = 12 * shape.width**2 + 2 * shape.sequence * shape.width
    costs = [0, *[block] * shape.layers, shape.width * shape.vocabulary]
    choices = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [(0, *inner, len(costs)) for inner in choices]
    return min(every, key=lambda bounds: sorted(_cost(costs, *part) for part in itertools.pairwise(bounds))[::-1])


def _cost(costs: Sequence[int], start: int, stop: int) -> int:
    return sum(costs[start:stop])


def _torch(name: str, *, per_rank: int = 1, checked: bool = False) -> Builder:
    """`checked`: every rank learns the loss and the norm of the whole gradient, and tests the norm for being finite."""

    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        from torch.distributed import pipelining

        torch.distributed.init_process_group("gloo")
        count = size * per_rank
        bounds, every = cut(shape, stages=count), layers(shape)
        own = range(rank, count, size)
        modules = [nn.Sequential(*every[bounds[index] : bounds[index + 1]]) for index in own]
        stages = [
            pipelining.PipelineStage(module, index, count, torch.device("cpu"))
            for index, module in zip(own, modules, strict=True)
        ]
        schedule: Any = getattr(pipelining, name)(
            stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=gpt.mean_loss
        )
        parameters = [p for module in modules for p in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, **gpt.ADAMW)

        def check(losses: list[Tensor]) -> float:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            totals = torch.stack([torch.stack(losses).mean() if losses else torch.zeros(()), norm.square()]).double()
            torch.distributed.all_reduce(totals)
            loss, square = totals.tolist()
            if math.isfinite(square):
                optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        def step(number: int) -> float | None:
            tokens, targets = gpt.global_batch(shape, step=number)
            losses: list[Tensor] = []
            inputs = (tokens,) if rank == 0 else ()
            if rank == size - 1:
                schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            else:
                schedule.step(*inputs, return_outputs=False)
            if checked:
                return check(losses)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean().item() if losses else None

        return step

    return build


def _deepspeed(shape: gpt.Shape, rank: int, size: int) -> Step:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    class Cut(PipelineModule):  # type: ignore[misc] # a peer without types
        """Cut where it is told."""

        def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002 - the signature is its own
            self.parts = list(cut(shape, stages=size))
            self._set_bounds(start=self.parts[rank], stop=self.parts[rank + 1])

    deepspeed.init_distributed("gloo")
    rows = shape.batch // MICROBATCHES
    config = {
        "train_batch_size": shape.batch,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0,  # its default clips to 1.0
        "steps_per_print": 10**9,
    }
    model = Cut(layers(shape), num_stages=size, loss_fn=gpt.mean_loss)
    optimizer = torch.optim.AdamW(model.parameters(), **gpt.ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(number: int) -> float:
        parts = [part.split(rows) for part in gpt.global_batch(shape, step=number)]
        loss: Tensor = engine.train_batch(data_iter=iter(list(zip(*parts, strict=True))))
        return loss.item()

    return step


def _row(name: str, package: str, what: str, build: Builder) -> Contestant:
    return Contestant(name, 0, package, what, build, module=__name__)


def _ours(schedule: str, keys: str = "") -> Contestant:
    keys = f"schedule={schedule} {keys}".strip()
    what = f"`pp=N microbatches={MICROBATCHES} {keys}`"
    return _row(f"meshwise {schedule}", "meshwise", what, _meshwise(keys))


OURS = (
    _ours("gpipe"),
    _ours("1f1b"),
    _ours("interleaved", "virtual_stages=2"),
    _ours("looped", "virtual_stages=2"),
    _ours("zb-h1"),
    _ours("zb-h2"),
    _ours("zb-v", "virtual_stages=2"),
    _ours("dualpipev", "virtual_stages=2"),
)

PEERS = (
    _row("torch GPipe", "torch", "ScheduleGPipe", _torch("ScheduleGPipe")),
    _row("torch 1F1B", "torch", "Schedule1F1B", _torch("Schedule1F1B")),
    _row(
        "torch interleaved",
        "torch",
        "ScheduleInterleaved1F1B, two stages a rank",
        _torch("ScheduleInterleaved1F1B", per_rank=2),
    ),
    _row("DeepSpeed pipeline", "deepspeed", "PipelineModule, its 1F1B", _deepspeed),
)


CHECKED = _row(
    "torch 1F1B, checked", "torch", "Schedule1F1B, loss and norm on every rank", _torch("Schedule1F1B", checked=True)
)
"""Does what a step of meshwise does; for `host.py`."""

BUCKETS = tuple(
    _row(f"meshwise 1f1b, bucket={size}", "meshwise", what, _meshwise(f"schedule=1f1b bucket={size}"))
    for size, what in (("0", "each unit apart"), ("25M", "a stage is one unit"))
)


def contestant(name: str) -> Contestant:
    """The row of that name. Raises ValueError, listing the names, when there is none."""
    rows = {row.name: row for row in (*OURS, *PEERS, CHECKED, *BUCKETS)}
    if name not in rows:
        raise ValueError(f"no contestant {name!r}; there are {', '.join(rows)}")
    return rows[name]
