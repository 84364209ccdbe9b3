"""Hand-written attentions and MLPs are the same model when they are split, or refused with a rule that works.

Each class is a form that was split wrongly without an error, or refused although a split exists."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from meshwise import verify
from meshwise.plan import Plan
from meshwise.tensor.detect.assign_tp_roles import assign_roles

WIDTH, HEADS, WORDS = 16, 4, 29
HEAD = WIDTH // HEADS


def mixed(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_heads = HEADS

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1, self.num_heads, HEAD).transpose(1, 2)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [self.heads(linear(x)) for linear in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(mixed(*self.parts(x)))
        return output


class HeadsInnermost(Attention):
    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), -1, self.num_heads).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        y = functional.scaled_dot_product_attention(q, k, v)
        output: Tensor = self.out(y.permute(0, 2, 3, 1).flatten(2))
        return output


class NormOfEachHead(Attention):
    def __init__(self, kind: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.norms = kind([nn.LayerNorm(HEAD) for _ in range(HEADS)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        normed = [norm(one) for norm, one in zip(self.norms.children(), q.unbind(1), strict=False)]
        output: Tensor = self.out(mixed(torch.stack(normed, 1), k, v))
        return output


class GateOverHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, HEADS), self.out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(y) for y in (self.q(x), self.k(x), self.v(x)))
        y = functional.scaled_dot_product_attention(q, k, v)
        y = y * self.gate(x).softmax(-1).transpose(1, 2)[..., None]
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


class MeanOfHeads(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        output: Tensor = self.out(mixed(q, k, v - v.mean(1, keepdim=True)))
        return output


class TiledKeys(nn.Module):
    """Query head i reads key head i % 2."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, 2
        self.q, self.k, self.v = (nn.Linear(WIDTH, outputs) for outputs in (WIDTH, 2 * HEAD, 2 * HEAD))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        times = self.num_heads // self.num_kv_heads
        output: Tensor = self.out(mixed(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)))
        return output


class ResidualInDecorator(Attention):
    @staticmethod
    def added(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: Any, x: Tensor) -> Tensor:
            output: Tensor = x + forward(self, x)
            return output

        return run

    forward = added(Attention.forward)


class GatedByInput(Attention):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(mixed(*self.parts(x)) * torch.sigmoid(x[..., :1]))
        return output


class SizesThroughAlias(Attention):
    def forward(self, x: Tensor) -> Tensor:
        same = x
        rows, tokens = same.shape[:2]
        q, k, v = (one(x).view(rows, tokens, self.num_heads, HEAD).transpose(1, 2) for one in (self.q, self.k, self.v))
        output: Tensor = self.out(mixed(q, k, v))
        return output


def length(x: Tensor) -> int:
    return len(x[0])


class SizesInFunction(Attention):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(mixed(*self.parts(x)) / length(x))
        return output


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.head_dim = HEADS, HEAD

    def three(self, x: Tensor) -> Any:
        """Return q, k and v; all of each in turn, which `split` along the heads shows."""
        y = self.qkv(x).view(*x.shape[:2], 3 * self.num_heads, HEAD).transpose(1, 2)
        return y.split(self.num_heads, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(mixed(*self.three(x)))
        return output


class FusedInEachHead(Fused):
    def three(self, x: Tensor) -> Any:
        y = self.qkv(x).view(*x.shape[:2], self.num_heads, 3 * self.head_dim).transpose(1, 2)
        return y[..., :HEAD], y[..., HEAD : 2 * HEAD], y[..., 2 * HEAD :]


class EveryThirdFeature(Fused):
    def three(self, x: Tensor) -> Any:
        return [self.qkv(x)[..., i::3].unflatten(-1, (-1, HEAD)).transpose(1, 2) for i in range(3)]


class Mlp(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, times * 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def inner(self, y: Tensor) -> Tensor:
        return functional.gelu(y)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.inner(self.up(x)))
        return output


class SoftmaxOfFeatures(Mlp):
    def inner(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class LengthOfFeatures(Mlp):
    def inner(self, y: Tensor) -> Tensor:
        return y / y.square().sum(-1, keepdim=True).sqrt()


class Rolled(Mlp):
    def inner(self, y: Tensor) -> Tensor:
        return y + y.roll(1, -1)


class MlpGatedByInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.inner(self.up(x)) * torch.sigmoid(x[..., :1]))
        return output


class GateBesideValue(Mlp):
    def __init__(self) -> None:
        super().__init__(times=2)

    def inner(self, y: Tensor) -> Tensor:
        return functional.silu(y[..., ::2]) * y[..., 1::2]


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), attention()
        self.second, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor, *memory: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), *memory)
        output: Tensor = x + self.mlp(self.second(x))
        return output


class Model(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module] = Attention, mlp: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(attention, mlp) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Conditional(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (self.heads(y) for y in (self.q(x), self.k(source), self.v(source)))
        output: Tensor = self.out(mixed(q, k, v))
        return output


class Decoder(Model):
    """Its first attention reads another sequence."""

    def __init__(self) -> None:
        super().__init__(Conditional)
        self.memory = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x, memory = self.embed(tokens), self.memory(tokens.flip(1))
        for block in self.blocks:
            x = block(x, memory)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    words = batch["tokens"]
    return functional.cross_entropy(output.flatten(0, 1), words.roll(-1, 1).flatten(), reduction="sum"), words.numel()


def agrees(make: Callable[[], nn.Module], plan: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    generator = torch.Generator().manual_seed(3)
    batches = [{"tokens": torch.randint(0, WORDS, (4, 6), generator=generator)} for _ in range(2)]
    report = verify(build, loss, batches, plan)
    assert report.ok, str(report)


ATTENTIONS = (
    *(ResidualInDecorator, GatedByInput, SizesThroughAlias, SizesInFunction, Fused, FusedInEachHead),
    EveryThirdFeature,
)


# With the tokens split too, what is not refused finds its features the same way.
@pytest.mark.grid(
    Grid(
        {"attention": ATTENTIONS, "plan": ("tp=2", "tp=2 sequence_parallel=1")},
        heavy=lambda cell: "sequence" in cell["plan"] and cell["attention"] not in (GatedByInput, FusedInEachHead),
    )
)
def test_an_attention_is_that_of_one_process(attention: type[nn.Module], plan: str) -> None:
    if attention is GatedByInput and "sequence" in plan:
        with pytest.raises(ValueError, match=r"blocks\.0\.attention\.q\.weight .*in a trial, "):
            assign_roles(Model(attention), plan=Plan.parse(plan))
    else:
        agrees(lambda: Model(attention), plan)


def test_an_mlp_with_a_gate_beside_each_value_is_that_of_one_process() -> None:
    agrees(lambda: Model(mlp=GateBesideValue), "tp=2")


def test_an_attention_may_read_its_input_or_another_tensor() -> None:
    """The gradient of the other tensor had the heads of one rank alone."""
    agrees(Decoder, "tp=2")
    with pytest.raises(ValueError, match=r"reads 6 tokens, and this rank has 3 of .* 6: .*Use sequence_parallel=0"):
        agrees(Decoder, "tp=2 sequence_parallel=1")


def test_a_norm_between_matrices_of_a_sequential_is_split() -> None:
    agrees(lambda: Model(mlp=sequential), "tp=2")


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, WIDTH))


REFUSED: dict[str, dict[str, Any]] = {
    "heads innermost": {"attention": HeadsInnermost},
    "norms in a list": {"attention": functools.partial(NormOfEachHead, nn.ModuleList)},
    "norms in a Sequential": {"attention": functools.partial(NormOfEachHead, lambda norms: nn.Sequential(*norms))},
    "a gate over heads": {"attention": GateOverHeads},
    "a mean over heads": {"attention": MeanOfHeads},
    "tiled keys": {"attention": TiledKeys},
    "a softmax": {"mlp": SoftmaxOfFeatures},
    "a length": {"mlp": LengthOfFeatures},
    "a shift": {"mlp": Rolled},
    "a gate from the input": {"mlp": MlpGatedByInput},
}


@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1", "tp=4 tp_mode=2d"])
def test_a_split_that_computes_something_else_is_refused(form: str, plan: str) -> None:
    with pytest.raises(ValueError, match=r"in a trial, ") as raised:
        assign_roles(Model(**REFUSED[form]), plan=Plan.parse(plan))
    [kept] = REFUSED[form]
    assert f'{{"blocks.*.{kept}": "whole"}}' in str(raised.value)
    assign_roles(Model(**REFUSED[form]), plan=Plan(tp=2), rules={f"blocks.*.{kept}": "whole"})


def test_a_trial_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = Model()
    before, state = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    assign_roles(model, plan=Plan(tp=2))
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert torch.get_rng_state().equal(state)
