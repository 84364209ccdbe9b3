"""A repeated forward must save the values of the first: statistics and caches are restored, workspaces ignored."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memory.recomputed_model import TOKENS, WORDS, batches, loss
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.memory.recompute import RecomputedBlock
from meshwise.model.forward import ForwardReplay
from meshwise.testing import RecordedSteps, agree, alone, outcome, run
from tensor.exact import with_exact_norms


def test_a_repeated_norm_saves_the_same_running_statistics() -> None:
    """An instance norm saves copies of them, one for each row of the batch, and changes them afterwards."""
    norm, x = nn.InstanceNorm1d(4, track_running_stats=True), torch.randn(2, 4, 6, requires_grad=True)
    plain = copy.deepcopy(norm)
    RecomputedBlock(norm, name="norm", mode="full", recall=ForwardReplay())
    for _ in range(2):
        (found,), (expected,) = (torch.autograd.grad(one(x).exp().sum(), [x]) for one in (norm, plain))
        assert torch.equal(found, expected)
        assert all(map(torch.equal, norm.buffers(), plain.buffers()))


def test_uninitialized_bytes_of_a_workspace_may_differ() -> None:
    """As those of the workspace that a kernel saves."""
    workspaces = iter((torch.zeros(9, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8)))

    class Working(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, next(workspaces))
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x: Tensor = ctx.saved_tensors[0]
            return gradient * x.cos()

    class Recurrent(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Working.apply(x)

    module, x = Recurrent(), torch.randn(3, requires_grad=True)
    RecomputedBlock(module, name="recurrent", mode="full", recall=ForwardReplay())
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


class Cache:
    """Grows as caches of keys and values do, or is written to in place, as those of a fixed size are."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.total = torch.zeros(2, 4)

    def joined(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.named[f"{len(self.named)}"] = x
        self.last = x if self.last is None else self.last + x
        return torch.cat([*self.seen, *self.named.values(), self.last])


class Caching(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        cache = past_key_values[0] if isinstance(past_key_values, tuple) else past_key_values or Cache()
        return cache.joined(x).exp()


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_repeated_block_finds_its_cache_restored(mode: str, inside: bool) -> None:
    first, x = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)
    found, caches = [], (Cache(), Cache())
    for cache, recomputed in zip(caches, (False, True), strict=True):
        cache.joined(first)
        module = Caching()
        if recomputed:
            RecomputedBlock(module, name="layers.0", mode=mode, recall=ForwardReplay())
        output = module(x, past_key_values=(cache,) if inside else cache)
        found.append(torch.autograd.grad(output.sum(), [x])[0])
    assert torch.equal(*found)
    plain, kept = caches
    assert len(kept.seen) == len(kept.named) == 2
    assert all(map(torch.equal, kept.seen, plain.seen))
    assert kept.last is not None
    assert torch.equal(kept.last, sum(plain.seen, torch.zeros(2, 4)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_decoder_that_keeps_a_cache_is_recomputed(name: str, attention: str) -> None:
    """Theirs keep one unless they are told not to, and each kernel took it otherwise when it was repeated."""
    build = functools.partial(_decoder, name, attention)
    one = alone(build, loss=loss, batches=batches(), options=_WITH_CACHE, lr=1e-2)
    for found in run(2, functools.partial(_recomputed, name=name, attention=attention)):
        agree(found, one, bound=1e-9)


def _recomputed(world: World, *, name: str, attention: str) -> RecordedSteps:
    build = functools.partial(_decoder, name, attention)
    plan = "dp=2 zero=3 recompute=full"
    trainer = parallelize(build, plan, loss=loss, world=world, options=_WITH_CACHE, lr=1e-2)
    assert set(trainer.blocks.modes.values()) == {"full"}
    return outcome(trainer, batches=batches())


def _decoder(name: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra with Hugging Face's models is not installed")
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if name == "GPT2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": TOKENS, **dropouts}
    config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, attn_implementation=attention, **shape)
    assert config.use_cache
    model: nn.Module = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    return with_exact_norms(model).double()


_WITH_CACHE = Options(forward=lambda model, batch: model(input_ids=batch[0]).logits)
