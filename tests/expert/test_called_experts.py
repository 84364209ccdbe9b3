"""Test that experts which a block calls one by one are divided by a rule, and give the numbers of one process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from expert.test_agreement import VOCABULARY, batches
from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError
from meshwise.plan import Plan, PlanError
from meshwise.reference import next_token_loss
from meshwise.testing import agree, run
from meshwise.verify import verify

WIDTH, EXPERTS = 8, 5


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH))


class Masked(nn.Module):
    """A block of experts as transformers 4 wrote Mixtral: each expert gets the rows of its tokens, also none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.view(-1, WIDTH)
        logits = self.gate(tokens)
        weights, index = logits.softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        chosen = functional.one_hot(index, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            choice, row = torch.where(chosen[number])
            mixed.index_add_(0, row, self.experts[number](tokens[row]) * weights[row, choice, None])
        return mixed.view_as(x), logits


class Conditional(nn.Module):
    """A block that calls an expert only if it has tokens, weights them before, and adds an expert for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.routed = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.shared = nn.ModuleList([expert()])
        self.noise = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.noise(self.router(x))
        weights, index = logits.sigmoid().topk(2, dim=-1)
        mixed = self.shared[0](x)
        for choice in range(2):
            for number, each in enumerate(self.routed):
                mask = index[..., choice] == number
                if mask.any():
                    mixed[mask] += each(x[mask] * weights[..., choice][mask].unsqueeze(-1))
        return mixed, logits


class Block(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.moe = kind()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(x)))
        mixed: Tensor = self.moe(self.norm(x))[0]
        return x + mixed


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


KINDS: Mapping[str, tuple[type[nn.Module], Mapping[str, str]]] = {
    "masked": (Masked, {"blocks.*.moe": "experts"}),
    "conditional": (Conditional, {"blocks.*.moe.routed": "experts"}),
}


def build(kind: str) -> nn.Module:
    """A model whose values are from a generator of its own: ranks that are threads share torch's."""
    model, generator = Model(KINDS[kind][0]).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def training(kind: str, rules: Mapping[str, str] | None = None) -> dict[str, Any]:
    options = Options(clip_norm=0.5, tensor_rules=rules or KINDS[kind][1], example=batches()[0])
    return {"loss": next_token_loss, "options": options, "lr": 1e-2}


LAYOUTS = Grid(
    {
        "kind": tuple(KINDS),
        "plan": ("dp=2 ep=2", "dp=4 ep=2", "tp=2 ep=2", "dp=2 tp=2 ep=4", "tp=2", "pp=2 dp=2 ep=2"),
        "zero": (0, 1, 2, 3),
        "rest": ("", "microbatches=3", "recompute=full"),
    },
    cost=lambda cell: ranks_of(cell["plan"]),
    strength=1,
)


@pytest.mark.grid(LAYOUTS)
def test_experts_that_a_block_calls_are_those_of_one_process(kind: str, plan: str, zero: int, rest: str) -> None:
    plan = f"{plan} zero={zero} {rest}"

    def main(world: World) -> Any:
        trainer = parallelize(build(kind), plan, world=world, **training(kind))
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    expected = alone(build(kind), batches=batches(), **training(kind))
    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, expected, bound=1e-9)


def held(world: World) -> int:
    """Return the elements of the experts on this rank."""
    trainer = parallelize(build("masked"), "dp=2 ep=2", world=world, **training("masked"))
    size = sum(p.numel() for name, p in trainer.model.named_parameters() if ".experts." in name and p.stride()[-1])
    trainer.close()
    return size


def test_a_rank_holds_its_experts_alone() -> None:
    one = sum(p.numel() for p in expert().parameters())
    assert run(2, held) == [2 * 3 * one, 2 * 2 * one]  # two blocks; 5 experts on 2 ranks


class Chained(Masked):
    """A block whose second expert gets rows that depend on the results of the first one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.experts[0](x)
        return self.experts[1](first[first.sum(-1) > -1e9]).sum() + first, self.gate(x)


class TwoInputs(Masked):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts[0](x, x), self.gate(x)


REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "two lists": (Conditional, "blocks.*.moe", "dp=2 ep=2", r"has 2 ModuleLists.*{'blocks.0.moe.routed': 'experts'}"),
    "no list": (Masked, "blocks.*.moe.gate", "dp=2 ep=2", "has 0 ModuleLists.*Name a module with one list"),
    "too few": (Masked, "blocks.*.moe", "dp=6 ep=6", "has only 5 experts. Nearest that works: 'ep=5'"),
    "no match": (
        Masked,
        "blocks.*.mo",
        "dp=2 ep=2",
        r"'blocks.\*.mo' matches no module and no parameter; near names: blocks.\*.moe",
    ),
    "etp": (Masked, "blocks.*.moe", "tp=2 etp=2", "so etp cannot split it"),
    "chain": (Chained, "blocks.*.moe", "dp=2 ep=2", r"expert 1 got rows .* in the second run"),
    "arguments": (TwoInputs, "blocks.*.moe", "dp=2 ep=2", "called with 2 positional arguments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_list_that_cannot_be_divided_is_refused(case: str) -> None:
    kind, pattern, plan, message = REFUSED[case]

    def main(world: World) -> None:
        rules = {pattern: "experts"}
        trainer = parallelize(Model(kind).double(), plan, world=world, **training("masked", rules))
        trainer.step(batches()[0])

    size = Plan.parse(plan).mesh().size
    with pytest.raises(ValueError if case in ("chain", "arguments") else PlanError, match=message):
        run(size, main)


class Summed(Masked):
    """A block whose second expert gets the results of the first one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts[1](self.experts[0](x)), self.gate(x)


def test_rows_that_depend_on_results_are_not_finite() -> None:
    def main(world: World) -> None:
        parallelize(Model(Summed).double(), "dp=2 ep=2", world=world, **training("masked")).step(batches()[0])

    with pytest.raises(NonFiniteError):
        run(2, main)


def test_verify_compares_a_block_that_calls_experts() -> None:
    options = Options(tensor_rules={"blocks.*.moe": "experts"})
    report = verify(build("masked"), next_token_loss, batches(), "dp=2 ep=2", lr=1e-3, options=options)
    assert report.ok, report.verdict
