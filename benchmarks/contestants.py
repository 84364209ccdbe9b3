"""Who is measured: one row per contestant, and how each is set up on the one model of `gpt.py`.

Each peer runs as its own documentation advises for speed, without changing what it computes: fp32, no clipping, no
compression. Imports of peers are inside their builders, because each lives in an interpreter of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gpt

Step = Callable[[int], float | None]
"""Trains one step of the given number and returns the mean loss over this rank's rows (or over all of them); None on a
rank that has no loss."""

Builder = Callable[[gpt.Shape, int, int], Step]


@dataclass(frozen=True)
class Contestant:
    """`stage`: the ZeRO stage it is compared at. `package`: what has to be installed in its interpreter. `module`: the
    one whose function `contestant` knows it."""

    name: str
    stage: int
    package: str
    what: str
    build: Builder
    module: str = "contestants"


def _autograd_step(
    model: nn.Module, optimizer: Any, shape: gpt.Shape, rank: int, size: int, clear: Callable[[], None] | None = None
) -> Step:
    clear = clear or optimizer.zero_grad

    def step(number: int) -> float:
        tokens, targets = gpt.rank_batch(shape, step=number, rank=rank, size=size)
        loss = gpt.mean_loss(model(tokens), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        clear()
        return loss.item()

    return step


def _meshwise(stage: int) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        import meshwise as mw

        def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
            targets = batch[1]
            total = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="sum")
            return total, targets.numel()

        options = mw.Options(
            parameter_options=lambda _name, _parameter: {}
        )  # as the peers: one group decays everything
        plan = mw.Plan(dp=size, zero=stage)
        trainer = mw.parallelize(gpt.build(shape), plan, loss=loss, world=mw.connect(), options=options, **gpt.ADAMW)
        return lambda number: trainer.step(gpt.global_batch(shape, step=number)).loss

    return build


def _single(shape: gpt.Shape, rank: int, size: int) -> Step:
    model = gpt.build(shape)
    return _autograd_step(model, torch.optim.AdamW(model.parameters(), **gpt.ADAMW), shape, 0, 1)


def _apart(*, rows: int | None = None) -> Builder:
    """Each rank trains a model of its own on its part of the batch, `rows` sequences at a time (None: all)."""

    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        model = gpt.build(shape)
        optimizer = torch.optim.AdamW(model.parameters(), **gpt.ADAMW)

        def step(number: int) -> float:
            tokens, targets = gpt.rank_batch(shape, step=number, rank=rank, size=size)
            count = max(1, len(tokens) // (rows or len(tokens)))
            total = 0.0
            for inputs, wanted in zip(tokens.tensor_split(count), targets.tensor_split(count), strict=True):
                loss = gpt.mean_loss(model(inputs), wanted) / count
                torch.autograd.backward(loss)
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    return build


def _data_parallel(model: nn.Module, *, tuned: bool) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=tuned, static_graph=tuned)


def _ddp(*, tuned: bool) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        torch.distributed.init_process_group("gloo")
        model = _data_parallel(gpt.build(shape), tuned=tuned)
        return _autograd_step(model, torch.optim.AdamW(model.parameters(), **gpt.ADAMW), shape, rank, size)

    return build


def _zero_redundancy(shape: gpt.Shape, rank: int, size: int) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group("gloo")
    model = _data_parallel(gpt.build(shape), tuned=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **gpt.ADAMW
    )
    return _autograd_step(model, optimizer, shape, rank, size)


def _fsdp2(*, reshard_after_forward: bool) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        model = gpt.build(shape)
        mesh = init_device_mesh("cpu", (size,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return _autograd_step(model, torch.optim.AdamW(model.parameters(), **gpt.ADAMW), shape, rank, size)

    return build


def _deepspeed(stage: int) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed("gloo")
        model = gpt.build(shape)
        config = {
            "train_batch_size": shape.batch,
            "train_micro_batch_size_per_gpu": shape.batch // size,
            "gradient_clipping": 0.0,  # its default clips to 1.0
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), **gpt.ADAMW)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(number: int) -> float:
            tokens, targets = gpt.rank_batch(shape, step=number, rank=rank, size=size)
            loss = gpt.mean_loss(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    return build


def _fairscale(*, sharded: bool) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        torch.distributed.init_process_group("gloo")
        model = gpt.build(shape)
        optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, **gpt.ADAMW)
        if sharded:  # its gradients lie in buckets that only its own zero_grad clears
            wrapped = ShardedDataParallel(model, optimizer)
            return _autograd_step(wrapped, optimizer, shape, rank, size, wrapped.zero_grad)
        return _autograd_step(_data_parallel(model, tuned=True), optimizer, shape, rank, size)

    return build


SINGLE = Contestant("single", -1, "torch", "plain torch, one process, the whole batch", _single)

APART = (
    Contestant("torch, apart", -1, "torch", "a part of the batch each, nothing exchanged", _apart()),
    Contestant("torch, apart, micro-batches", -1, "torch", "the same, two sequences at a time", _apart(rows=2)),
)

OURS = tuple(
    Contestant(f"meshwise zero={stage}", stage, "meshwise", f"`dp=N zero={stage}`", _meshwise(stage))
    for stage in range(4)
)

PEERS = (
    Contestant("torch DDP", 0, "torch", "DistributedDataParallel, default settings", _ddp(tuned=False)),
    Contestant("torch DDP, tuned", 0, "torch", "gradient_as_bucket_view, static_graph", _ddp(tuned=True)),
    Contestant("DeepSpeed ZeRO-0", 0, "deepspeed", "engine, stage 0", _deepspeed(0)),
    Contestant("torch ZeroRedundancy", 1, "torch", "ZeroRedundancyOptimizer on tuned DDP", _zero_redundancy),
    Contestant("DeepSpeed ZeRO-1", 1, "deepspeed", "engine, stage 1", _deepspeed(1)),
    Contestant("FairScale OSS", 1, "fairscale", "OSS on tuned DDP", _fairscale(sharded=False)),
    Contestant(
        "torch FSDP2, kept", 2, "torch", "fully_shard, reshard_after_forward=False", _fsdp2(reshard_after_forward=False)
    ),
    Contestant("DeepSpeed ZeRO-2", 2, "deepspeed", "engine, stage 2", _deepspeed(2)),
    Contestant("FairScale ShardedDDP", 2, "fairscale", "OSS and ShardedDataParallel", _fairscale(sharded=True)),
    Contestant(
        "torch FSDP2", 3, "torch", "fully_shard, reshard_after_forward=True", _fsdp2(reshard_after_forward=True)
    ),
    Contestant("DeepSpeed ZeRO-3", 3, "deepspeed", "engine, stage 3", _deepspeed(3)),
)


def contestant(name: str) -> Contestant:
    """The row of that name. Raises ValueError, listing the names, when there is none."""
    rows = {row.name: row for row in (SINGLE, *APART, *OURS, *PEERS)}
    if name not in rows:
        raise ValueError(f"no contestant {name!r}; there are {', '.join(rows)}")
    return rows[name]
