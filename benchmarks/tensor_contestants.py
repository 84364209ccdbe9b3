"""Who is measured in `tensor_peers.py`: tensor parallelism of this project and its peers, on the model of `gpt.py`.

The peers cannot split a fused q|k|v matrix, so their blocks hold three; the numbers are the same. Imports of peers are
inside their builders, because each lives in an interpreter of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gpt
from contestants import Builder, Contestant, Step


def _meshwise(keys: str) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        import meshwise as mw

        def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
            targets = batch[1]
            total = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="sum")
            return total, targets.numel()

        options = mw.Options(parameter_options=lambda _name, _parameter: {})  # one group decays everything
        plan = f"tp={size} {keys}"
        trainer = mw.parallelize(gpt.build(shape), plan, loss=loss, world=mw.connect(), options=options, **gpt.ADAMW)
        return lambda number: trainer.step(gpt.global_batch(shape, step=number)).loss

    return build


class _Attention(nn.Module):
    """A block's attention with q, k and v as three matrices; `heads` are those of this rank."""

    def __init__(self, block: gpt.Block, *, heads: int) -> None:
        super().__init__()
        width = block.qkv.in_features
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        weights, biases = block.qkv.weight.split(width), block.qkv.bias.split(width)
        with torch.no_grad():
            for linear, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
        self.project = block.project

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, width] -> [B, T, width]."""
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(y.transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    """A block's MLP."""

    def __init__(self, block: gpt.Block) -> None:
        super().__init__()
        self.up, self.down = block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, width] -> [B, T, width]."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class _Block(nn.Module):
    """The same block in modules that the peers can be told about."""

    def __init__(self, block: gpt.Block, *, ranks: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = block.norm_attention, block.norm_mlp
        self.attention = _Attention(block, heads=block.heads // ranks)
        self.mlp = _FeedForward(block)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, width] -> [B, T, width]."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


def _opened(shape: gpt.Shape, size: int) -> gpt.GPT:
    model = gpt.build(shape)
    model.blocks = nn.ModuleList(_Block(block, ranks=size) for block in model.blocks)  # type: ignore[arg-type]
    return model


def _trained(model: nn.Module, optimizers: Sequence[Any], shape: gpt.Shape, loss: Callable[..., Tensor]) -> Step:
    def step(number: int) -> float:
        tokens, targets = gpt.global_batch(shape, step=number)
        total = loss(model(tokens), targets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total.item()

    return step


def _dtensor(*, sequence: bool) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        torch.distributed.init_process_group("gloo")
        mesh, model = init_device_mesh("cpu", (size,)), _opened(shape, size)
        between = Shard(1) if sequence else Replicate()
        gather = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.up"), ColwiseParallel())
        for entry, end in (("attention", "project"), ("mlp", "down")):
            plan |= {entry: gather, f"{entry}.{end}": RowwiseParallel(output_layouts=between)}
        norms = dict.fromkeys(("norm_attention", "norm_mlp"), SequenceParallel()) if sequence else {}
        for block in model.blocks:
            parallelize_module(block, mesh, {**plan, **norms})
        ends: dict[str, Any] = {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        if sequence:
            ends |= {"position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))}
            ends |= {"norm": SequenceParallel()}
        parallelize_module(model, mesh, ends)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            with loss_parallel():
                total = gpt.mean_loss(logits, targets)
                total.backward()
            return total.full_tensor() if isinstance(total, DTensor) else total

        # The fused kernel refuses a group of plain tensors and DTensors.
        kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
        return _trained(model, [torch.optim.AdamW(kind, **gpt.ADAMW) for kind in kinds if kind], shape, loss)

    return build


def _megatron(shape: gpt.Shape, rank: int, size: int) -> Step:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )

    torch.distributed.init_process_group("gloo")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value] # it always asks
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = ModelParallelConfig(
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )

    class Linear(nn.Module):
        """A layer that returns its output alone, with its part of a plain linear's values."""

        def __init__(self, plain: Any, kind: Any, **arguments: Any) -> None:
            super().__init__()
            bias = plain.bias is not None
            sizes = (plain.in_features, plain.out_features)
            self.layer = kind(*sizes, config=config, init_method=nn.init.zeros_, bias=bias, **arguments)
            dim = 1 if kind is RowParallelLinear else 0
            with torch.no_grad():
                self.layer.weight.copy_(plain.weight.chunk(size, dim)[rank])
                if bias:
                    self.layer.bias.copy_(plain.bias if dim else plain.bias.chunk(size)[rank])

        def forward(self, x: Tensor) -> Tensor:
            """As the plain linear."""
            out: Tensor = self.layer(x)[0]
            return out

    model = _opened(shape, size)
    for module in [m for block in model.blocks for m in block.modules()]:
        for name, plain in list(module.named_children()):
            if name in ("q", "k", "v", "up"):
                setattr(module, name, Linear(plain, ColumnParallelLinear, gather_output=False))
            elif name in ("project", "down"):
                setattr(module, name, Linear(plain, RowParallelLinear, input_is_parallel=True, skip_bias_add=False))
    token = VocabParallelEmbedding(shape.vocabulary, shape.width, init_method=nn.init.zeros_, config=config)
    with torch.no_grad():
        token.weight.copy_(model.token.weight.chunk(size)[rank])
    model.token = token
    model.output = Linear(model.output, ColumnParallelLinear, gather_output=False)  # type: ignore[assignment]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = vocab_parallel_cross_entropy(logits, targets).mean()
        total.backward()
        return total

    return _trained(model, [torch.optim.AdamW(model.parameters(), **gpt.ADAMW)], shape, loss)


def _row(name: str, package: str, what: str, build: Builder) -> Contestant:
    return Contestant(name, 0, package, what, build, module=__name__)


OURS = (
    _row("meshwise 1d", "meshwise", "`tp=N`", _meshwise("")),
    _row("meshwise 1d, sequence", "meshwise", "`tp=N sequence_parallel=1`", _meshwise("sequence_parallel=1")),
    _row("meshwise 2d", "meshwise", "`tp=N tp_mode=2d`", _meshwise("tp_mode=2d")),
)

PEERS = (
    _row("torch DTensor", "torch", "ColwiseParallel, RowwiseParallel, loss_parallel", _dtensor(sequence=False)),
    _row("torch DTensor, sequence", "torch", "the same, SequenceParallel norms", _dtensor(sequence=True)),
    _row("Megatron-Core", "megatron", "its linear and embedding layers and its split cross-entropy", _megatron),
)


def contestant(name: str) -> Contestant:
    """The row of that name. Raises ValueError, listing the names, when there is none."""
    rows = {row.name: row for row in (*OURS, *PEERS)}
    if name not in rows:
        raise ValueError(f"no contestant {name!r}; there are {', '.join(rows)}")
    return rows[name]
