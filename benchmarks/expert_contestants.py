"""Mixtures of experts of Megatron-Core and of DeepSpeed in the reference GPT, on CPUs over gloo.

Each builder replaces the mixture of every block by a layer of its library, with equal parameters, and trains the model
as the library does: its data parallelism for the rest of the model, torch's fused AdamW. No token is dropped. Imports
of a library are inside its builder, because most interpreters do not have it.

Megatron-Core 0.16.1 asks for CUDA where it needs none: a stream for copies to the CPU, the device of gradient buffers.
Here `_StandInStream` and the device `cpu` take their place. Without Transformer Engine it reads `te_general_gemm`,
which it has not defined. It turns the sizes of all-to-alls into lists only if they lie on a GPU. `megatron` mends both.

With the same parameters and rows, the losses of the first four steps of all contestants agree to 3e-5."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.reference import MixtureConfig, MixtureGPT

LEARNING_RATE = 1e-3
Batch = tuple[Tensor, Tensor]
Step = Callable[[], float]
"""Function that trains one step and returns the loss of this rank's rows."""


class _Layer(nn.Module):
    """Mixture of a library, as a block of the reference GPT calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        mixed: Tensor = self.layer(x)[0]
        return mixed


class _StandInStream:
    """Stream and event of CUDA on a machine without it: copies are done when they return."""

    def wait_stream(self, _other: Any) -> None:
        """Do nothing."""

    def record_event(self) -> _StandInStream:
        """Return an event that is complete."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""


def _stand_in_for_cuda() -> None:
    only = _StandInStream()
    stand_ins: dict[str, Any] = {
        "Stream": lambda *_, **__: only,
        "current_stream": lambda *_: only,
        "stream": contextlib.nullcontext,
        "current_device": lambda: torch.device("cpu"),
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)


def megatron(model: MixtureGPT, shape: MixtureConfig, batch: Batch) -> tuple[Step, int]:
    """Return a step of Megatron-Core with `ep` over all ranks, and the bytes of this rank's parameters."""
    _stand_in_for_cuda()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe_utils.te_general_gemm = None  # undefined without Transformer Engine, and read all the same
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **_: (
        x.tolist() if as_numpy and isinstance(x, Tensor) else x
    )
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads,
        num_moe_experts=shape.experts, moe_ffn_hidden_size=shape.hidden, ffn_hidden_size=shape.hidden,
        moe_router_topk=shape.choices,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="alltoall", expert_model_parallel_size=ranks,
        add_bias_linear=False, activation_func=functional.gelu, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=shape.experts)
    block: Any
    for number, block in enumerate(model.blocks):
        layer, own = build_module(spec, config, layer_number=number + 1), block.mlp
        with torch.no_grad():
            layer.router.weight.copy_(own.router.scores.weight)
            first = rank * shape.experts // ranks
            for place, expert in enumerate(layer.experts.local_experts, first):
                expert.linear_fc1.weight.copy_(own.experts.expansion[place].T)
                expert.linear_fc2.weight.copy_(own.experts.projection[place].T)
        block.mlp = _Layer(layer)
    network = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        network.zero_grad_buffer()
        loss = _loss(network, batch)
        loss.backward()
        network.finish_grad_sync()
        for parameter in network.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, _bytes(network)


class _Expert(nn.Module):
    """One expert, of which DeepSpeed makes copies."""

    def __init__(self, shape: MixtureConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(shape.width, shape.hidden, bias=False)
        self.projection = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to the same shape."""
        output: Tensor = self.projection(functional.gelu(self.expansion(x)))
        return output


def deepspeed(model: MixtureGPT, shape: MixtureConfig, batch: Batch) -> tuple[Step, int]:
    """Return a step of DeepSpeed-MoE with `ep_size` of all ranks, and the bytes of this rank's parameters."""
    import deepspeed as library
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    library.init_distributed("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    block: Any
    for block in model.blocks:
        own, layer = block.mlp, MoE(
            shape.width, _Expert(shape), shape.experts, ep_size=ranks, k=shape.choices, drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )  # fmt: skip
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.copy_(own.router.scores.weight)
            for place, expert in enumerate(
                layer.deepspeed_moe.experts.deepspeed_experts, rank * shape.experts // ranks
            ):
                expert.expansion.weight.copy_(own.experts.expansion[place].T)
                expert.projection.weight.copy_(own.experts.projection[place].T)
        block.mlp = _Layer(layer)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    engine, *_ = library.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True),
        config={
            "train_micro_batch_size_per_gpu": len(batch[0]), "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
            "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
        },
    )  # fmt: skip

    def step() -> float:
        loss = _loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, _bytes(engine)


def _loss(network: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(network(batch[0]).flatten(0, 1), batch[1].flatten())


def _bytes(network: nn.Module) -> int:
    return sum(each.numel() * each.itemsize for each in network.parameters())


CONTESTANTS = {"DeepSpeed-MoE": ("deepspeed", deepspeed), "Megatron-Core": ("megatron", megatron)}
"""By name: the package that has to be there, and the builder."""
