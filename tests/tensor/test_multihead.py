"""torch's own attention and encoder on the heads of each rank: masks, layouts of the batch, evaluation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan, PlanError
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from meshwise.testing import run
from tensor.plain import shown
from tensor.splitting import split_agrees

WIDTH, HEADS, TOKENS = 12, 4, 5
PLANS = ("tp=3", "tp=2 sequence_parallel=1", "tp=4 tp_mode=2d")
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


class Encoder(nn.Module):
    """Rows of vectors in, of which some tokens are padding, classes out."""

    def __init__(self, *, batch_first: bool, norm_first: bool, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 20, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.embedding = nn.Embedding(11, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        self.classes = nn.Linear(WIDTH, 3)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=tokens == 0, is_causal=self.causal)
        classes: Tensor = self.classes(x if self.batch_first else x.transpose(0, 1))
        return classes


def encoder(**choices: bool) -> Encoder:
    torch.manual_seed(1)
    module = Encoder(**choices).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return module


def rows(count: int) -> Tensor:
    tokens = torch.randint(1, 11, (count, TOKENS), generator=torch.Generator().manual_seed(3))
    tokens[0, 3:] = 0
    return tokens


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "choices",
    [
        {"batch_first": True, "norm_first": False, "causal": False},
        {"batch_first": True, "norm_first": True, "causal": True},
        {"batch_first": False, "norm_first": True, "causal": False},
        {"batch_first": False, "norm_first": False, "causal": True},
    ],
    ids=lambda choices: " ".join(name for name, chosen in choices.items() if chosen) or "neither",
)
def test_an_encoder_is_that_of_one_process(choices: dict[str, bool], plan: str) -> None:
    model = encoder(**choices)
    split_agrees(
        model,
        plan=plan,
        parts=assign_roles(model, plan=Plan.parse(plan)),
        batch=([rows(5)], lambda module, inputs: module(*inputs).square().sum()),
        bound=1e-10,
    )


class Translator(nn.Module):
    """An encoder and a decoder of torch's, each made by itself or both together."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        layer = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 20, "dropout": 0.0, "batch_first": True}
        self.embedding = nn.Embedding(11, WIDTH)
        if together:
            self.both = nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **layer)  # type: ignore[arg-type]
        else:
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)  # type: ignore[arg-type]
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 2)  # type: ignore[arg-type]
        self.classes = nn.Linear(WIDTH, 3)
        self.together = together

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embedding(source), self.embedding(target)
        classes: Tensor = self.classes(self.both(x, y) if self.together else self.decoder(y, self.encoder(x)))
        return classes


@pytest.mark.parametrize("together", [False, True])
def test_a_decoder_works_under_sequence_parallelism_by_the_rule_that_is_shown(together: bool) -> None:
    """The encoder's layers have parts of the tokens, the decoder's are whole."""
    model, plan = Translator(together=together).double(), Plan.parse("tp=2 sequence_parallel=1")
    with pytest.raises(
        PlanError, match=r"TransformerDecoderLayer\) uses one matrix for the encoder's output"
    ) as raised:
        assign_roles(model, plan=plan)
    parts = assign_roles(model, plan=plan, rules=shown(raised.value))
    assert {parts[name].role for name in parts if name.endswith("encoder.layers.1")} == {"block"}
    batch = ([rows(5), rows(5)[:, :3]], lambda module, inputs: module(*inputs).square().sum())
    split_agrees(model, plan=str(plan), parts=parts, batch=batch, bound=1e-10)


def test_masks_follow_the_rows_under_3d() -> None:
    model, plan = encoder(batch_first=True, norm_first=True, causal=True), "tp=8 tp_mode=3d"
    split_agrees(
        model,
        plan=plan,
        parts=assign_roles(model, plan=Plan.parse(plan)),
        batch=([rows(5)], lambda module, inputs: module(*inputs).square().sum()),
        bound=1e-10,
    )


@pytest.mark.parametrize("together", [False, True])
def test_a_decoder_trains_as_on_one_process(together: bool) -> None:
    """Its attention to the encoder's output takes the three matrices of its weight one by one."""
    torch.manual_seed(2)
    model = Translator(together=together).double()
    expected = copy.deepcopy(model)
    source, target = rows(6), rows(6)[:, :3]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (squares(expected(source, target), source)[0] / len(source)).backward()
        optimizer.step()

    def main(world: World) -> dict[str, Tensor]:
        options = Options(forward=lambda module, batch: module(*batch))
        trainer = parallelize(
            copy.deepcopy(model),
            "tp=2",
            world=world,
            loss=lambda output, _: squares(output, source),
            options=options,
            optimizer=torch.optim.SGD,
            lr=0.1,
        )
        for _ in range(2):
            trainer.step((source, target))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    found = run(2, main)[0]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_in_evaluation_no_fused_kernel_reads_split_weights() -> None:
    model = encoder(batch_first=True, norm_first=False, causal=False).eval()
    tokens = rows(4)
    with torch.no_grad():
        expected = model(tokens)

    def main(world: World) -> Tensor:
        trainer = parallelize(copy.deepcopy(model), "tp=2", world=world, loss=squares, lr=0.1)
        with torch.no_grad():
            found: Tensor = trainer.model(tokens.to(world.device))
        return found

    for found in run(2, main):
        kept = tokens != 0  # what torch makes of padding differs between its own kernels
        torch.testing.assert_close(found[kept], expected[kept], rtol=1e-12, atol=1e-12)


def masks(rows: int, device: torch.device) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    of_heads = torch.randn(rows * HEADS, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
    padding = torch.zeros(rows, TOKENS, dtype=torch.float64)
    padding[:, -1] = float("-inf")
    return {"attn_mask": of_heads.to(device), "key_padding_mask": padding.to(device)}


class Crossed(nn.Module):
    """Attention from one sequence to another, with everything torch's attention can do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.average = True

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        given = masks(len(query), query.device)
        y, weights = self.attention(query, memory, memory, **given, average_attn_weights=self.average)
        total: Tensor = y.square().sum() + (weights * weights.detach().cos()).sum()
        return total


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("plan", ["tp=2", "tp=3"])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 7, "vdim": 7}], ids=["", "appended", "dims"]
)
def test_attention_alone_is_that_of_one_process(options: dict[str, Any], plan: str, average: bool) -> None:
    torch.manual_seed(1)
    model = Crossed(**options).double()
    model.average = average
    memory = torch.randn(3, TOKENS, options.get("kdim", WIDTH), dtype=torch.float64)
    split_agrees(
        model,
        plan=plan,
        parts=assign_roles(model, plan=Plan.parse(plan)),
        batch=([torch.randn(3, TOKENS, WIDTH, dtype=torch.float64), memory], lambda module, inputs: module(*inputs)),
    )


class Weighed(nn.Module):
    """A block that returns where it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(x, x, x)
        return x + y + self.down(self.up(x + y).tanh()), weights


@pytest.mark.parametrize("plan", ["tp=4 tp_mode=2d", "tp=8 tp_mode=3d"])
def test_attention_weights_are_those_of_the_rows_that_a_rank_has(plan: str) -> None:
    torch.manual_seed(1)
    model: Any = nn.ModuleDict(
        {"embedding": nn.Embedding(11, WIDTH), "blocks": nn.ModuleList([Weighed()]), "head": nn.Linear(WIDTH, 11)}
    ).double()

    def loss(module: Any, inputs: Any) -> Tensor:
        x, weights = module.blocks[0](module.embedding(inputs[0]))
        total: Tensor = module.head(x).square().sum() + (weights.square() * inputs[0][:, None]).sum()
        return total

    parts = assign_roles(model, plan=Plan.parse(plan))
    split_agrees(model, plan=plan, parts=parts, batch=([rows(8)], loss), bound=1e-10)
