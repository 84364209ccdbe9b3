"""The parts besides pairs: norms, embeddings, single linears, and what does not fit a scheme."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise import parallelize
from meshwise.comm.api.world import World
from meshwise.plan import Plan
from meshwise.reference.gpt import GPT, GPTConfig, next_token_loss
from meshwise.tensor.core.module_role import Norm, Part
from meshwise.tensor.core.sharded_layers import ShardedLinear
from meshwise.testing import run
from tensor.splitting import SCHEMES, install, split_agrees

VOCABULARY, WIDTH, CLASSES = 11, 7, 3
FIRST = {"first": Part("colwise"), "second": Part("rowwise")}


class Rms(nn.Module):
    """RMSNorm as transformers models have it: statistics in float32 whatever comes in."""

    def __init__(self, *, widen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.widen = widen

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.widen else x
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * normalised.to(x.dtype)


class Scaled(nn.Module):
    """RMSNorm with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.g = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.g + self.shift


class Around(nn.Module):
    """An embedding, one module over the hidden states, a pair, and a classifier."""

    def __init__(self, middle: nn.Module, *, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.scale = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.middle = middle
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.middle(self.embedding(numbers) * self.scale)
        output: Tensor = self.classifier(x + self.second(functional.gelu(self.first(x))))
        return output


class Waves(Around):
    """The same over complex numbers, from the embedding on."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__(middle)
        self.double()
        for module in (self.middle, self.first, self.second, self.classifier):
            for parameter in module.parameters():
                parameter.data = torch.complex(parameter.data, parameter.data.flip(0))

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers) * self.scale
        x = self.middle(torch.complex(x, x))
        output: Tensor = self.classifier(x + self.second(self.first(x).conj() * 1j))
        return output


class Transposed(nn.Module):
    """A linear stored (in, out), as GPT-2 has it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / 4)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def parts(middle: Part, **others: Part) -> dict[str, Part]:
    around = {"embedding": Part("embedding"), "scale": Part("vector"), "classifier": Part("whole")}
    return {**around, **FIRST, "middle": middle, **others}


def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    total: Tensor = module(batch[0]).square().sum()
    return total


def numbers() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (5, 6), generator=torch.Generator().manual_seed(5))]


def agrees(model: nn.Module, plan: str, chosen: dict[str, Part], bound: float = 1e-11) -> None:
    split_agrees(model.double(), plan=plan, parts=chosen, batch=(numbers(), loss), bound=bound)


EVERY_SCHEME = pytest.mark.parametrize("plan", SCHEMES.values(), ids=SCHEMES)


@EVERY_SCHEME
@pytest.mark.parametrize(
    "norm, part",
    [
        (nn.LayerNorm(WIDTH, eps=1e-3), Norm(centred=True, epsilon=1e-3)),
        (nn.LayerNorm(WIDTH, elementwise_affine=False), Norm(centred=True, epsilon=1e-5)),
        (nn.RMSNorm(WIDTH), Norm(centred=False, epsilon=None)),
        (Rms(widen=False), Norm(centred=False, epsilon=1e-6)),
        (Scaled(), Norm(centred=False, epsilon=1e-6, gain="g", bias="shift")),
    ],
    ids=["layer", "layer without weight", "torch's rms", "rms", "rms of other names"],
)
def test_a_norm_has_the_statistics_of_all_features(plan: str, norm: nn.Module, part: Norm) -> None:
    agrees(Around(norm), plan, parts(Part("norm", norm=part)))


def test_a_norm_that_computes_in_float32_still_does() -> None:
    chosen = parts(Part("norm", norm=Norm(centred=False, epsilon=1e-6, statistics=torch.float32)))
    agrees(Around(Rms(widen=True)), "tp=4 tp_mode=2d", chosen, bound=1e-5)


def test_the_variance_of_a_large_mean_is_not_lost() -> None:
    model = Around(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        model.embedding.weight.add_(1000.0)
        model.scale.fill_(1.0)
    norm = Part("norm", norm=Norm(centred=True, epsilon=1e-5))
    split_agrees(model, plan="tp=4 tp_mode=2d", parts=parts(norm), batch=(numbers(), loss), bound=1e-2)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1", "tp=4 tp_mode=2d"])
def test_numbers_may_be_complex(plan: str) -> None:
    def power(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        total: Tensor = module(batch[0]).abs().square().sum()
        return total

    split_agrees(Waves(nn.Linear(WIDTH, WIDTH)), plan=plan, parts=parts(Part("single")), batch=(numbers(), power))


class Written(Around):
    """What the embedding returns is written to."""

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers)
        x *= 4.0
        output: Tensor = self.classifier(x + self.second(functional.gelu(self.first(x))))
        return output


@EVERY_SCHEME
def test_what_an_embedding_returns_may_be_written_to(plan: str) -> None:
    agrees(Written(nn.Identity()), plan, parts(Part("whole")))


@EVERY_SCHEME
def test_an_embedding_keeps_its_padding_row_without_gradient(plan: str) -> None:
    agrees(Around(nn.Linear(WIDTH, WIDTH), padding=3), plan, parts(Part("single")))


@EVERY_SCHEME
def test_a_matrix_may_be_stored_in_out(plan: str) -> None:
    model = Around(Transposed(WIDTH, WIDTH))
    model.first, model.second = Transposed(WIDTH, 5), Transposed(5, WIDTH)  # type: ignore[assignment]
    pair = {"first": Part("colwise", transposed=True), "second": Part("rowwise", transposed=True)}
    agrees(model, plan, parts(Part("single", transposed=True), **pair))


class Pair(nn.Module):
    """Two linears that read one input, gathered for both at the entry."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 5, bias=False), nn.Linear(WIDTH, 5, bias=False)
        self.down = nn.Linear(5, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.down(functional.silu(self.gate(hidden_states)) * self.up(hidden_states))
        return output


@EVERY_SCHEME
def test_a_pair_may_gather_its_input_once(plan: str) -> None:
    inside = {"middle.gate": Part("colwise", gathered=True), "middle.up": Part("colwise", gathered=True)}
    agrees(Around(Pair()), plan, parts(Part("attention"), **inside, **{"middle.down": Part("rowwise")}))


def test_an_embedding_that_rescales_its_rows_is_refused() -> None:
    model = Around(nn.Identity())
    model.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
    refused(model, parts(Part("block")), "an embedding with max_norm cannot be split")


def test_one_matrix_in_two_places_is_stored_in_one_way() -> None:
    model = Around(nn.Linear(WIDTH, WIDTH))
    model.classifier.weight = model.embedding.weight
    refused(model, parts(Part("single")), "are one parameter.*as by the rules .*.embedding.: .whole.")


def refused(model: nn.Module, chosen: dict[str, Part], message: str) -> None:
    def main(world: World) -> None:
        over = world.over(Plan.parse("tp=2").mesh())
        with pytest.raises(ValueError, match=message):
            install(copy.deepcopy(model), plan="tp=2", world=over, parts=chosen)

    run(2, main)


def test_numbers_outside_of_the_vocabulary_are_an_error() -> None:
    def main(world: World) -> None:
        over, model = world.over(Plan.parse("tp=2").mesh()), Around(nn.Linear(WIDTH, WIDTH))
        install(model, plan="tp=2", world=over, parts=parts(Part("single")))
        with pytest.raises(IndexError, match="number 11 is not in a vocabulary of 11"):
            model(torch.tensor([[0, 11]]))

    run(2, main)


def test_a_split_module_is_still_what_it_was() -> None:
    def main(world: World) -> Any:
        over, model = world.over(Plan.parse("tp=2").mesh()), Around(nn.LayerNorm(WIDTH))
        names = list(model.state_dict())
        install(model, plan="tp=2", world=over, parts=parts(Part("norm", norm=Norm(centred=True, epsilon=1e-5))))
        assert isinstance(model.first, nn.Linear)
        assert type(model.first).__name__ == "Linear"
        assert isinstance(model.embedding, nn.Embedding)
        assert list(model.state_dict()) == names
        return model.first.weight.shape

    assert run(2, main) == [(3, WIDTH), (2, WIDTH)]


def test_modules_of_one_class_and_part_share_one_sharded_class() -> None:
    def main(world: World) -> None:
        model = GPT(GPTConfig(vocabulary=8, context=4, layers=2, width=8, heads=2))
        parallelize(model, "tp=2", loss=next_token_loss, world=world, lr=0.1)
        first, second = model.get_submodule("blocks.0.attention.qkv"), model.get_submodule("blocks.1.attention.qkv")
        assert isinstance(first, ShardedLinear)
        assert isinstance(second, ShardedLinear)
        assert type(first) is type(second)
        assert first.sharding is not second.sharding
        assert copy.deepcopy(first.sharding) is first.sharding

    run(2, main)
