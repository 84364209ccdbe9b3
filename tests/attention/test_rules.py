"""Rules about tokens: attention under a pattern, modules that get all tokens; what mixes tokens is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from last_outcome import alone, outcome
from meshwise import Options, World, parallelize
from meshwise.attention import attend, causal, documents, padding, parse_pattern, window
from meshwise.reference import GPT, GPTConfig
from meshwise.reference.gpt import next_token_loss
from meshwise.testing import agree, run

WIDTH, TOKENS, WORDS = 16, 11, 29


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(WORDS, (2, 4, TOKENS + 1), generator=draw)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]


def compare(model: Callable[[], nn.Module], plan: str, *, ranks: int, loss: Any = next_token_loss, **more: Any) -> None:
    options = Options(**more)

    def main(world: World) -> Any:
        return outcome(parallelize(model, plan, loss=loss, world=world, lr=1e-2, options=options), batches=batches())

    agree(run(ranks, main)[0], alone(model, loss=loss, batches=batches(), lr=1e-2, options=options), bound=1e-9)


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary=WORDS, context=16, layers=2, heads=4, width=WIDTH, dropout=0.1)).double()


@pytest.mark.filterwarnings("ignore:.*this changes the model")
@pytest.mark.grid(
    Grid(
        {"plan": ("dp=2", "cp=2", "cp=2 context=window", "cp=2 recompute=full", "tp=2", "cp=2 pp=2")},
        heavy=lambda cell: cell["plan"] in ("dp=2", "cp=2"),
    )
)
def test_a_pattern_by_rule_equals_dense_attention_under_the_same_mask(plan: str) -> None:
    rules = {"blocks.*.attention": "attention pattern=window:3+global:2"}
    more = {"example": batches()[0]} if "pp" in plan else {}
    compare(gpt, plan, ranks=4 if "pp" in plan else 2, tensor_rules=rules, **more)


@pytest.mark.threads("reads the warning of a rank")
def test_a_pattern_by_rule_warns_that_the_model_is_another() -> None:
    rules = {"blocks.*.attention": "attention pattern=window:3"}
    with pytest.warns(UserWarning, match="this changes the model"):
        run(
            1,
            lambda world: parallelize(
                gpt, "dp=1", loss=next_token_loss, world=world, options=Options(tensor_rules=rules)
            ),
        )


def test_texts_of_patterns_print_as_they_parse() -> None:
    for text in ("window:1024+global:64", "causal&dilated:64:2", "blocks:64:1+random:64:3:7", "fixed:8:2"):
        assert str(parse_pattern(text)) == text
    with pytest.raises(ValueError, match="is not one of full causal"):
        parse_pattern("windw:3")
    with pytest.raises(ValueError, match="whole numbers"):
        parse_pattern("window")


class Tagger(nn.Module):
    """Embeds tokens, attends with `mixing`, and scores words."""

    def __init__(self, mixing: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mixing = mixing()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        output: Tensor = self.head(x + self.mixing(x))
        return output


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.convolution(x.transpose(1, 2)).transpose(1, 2))
        return output


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Attend(nn.Module):
    """Attention by hand over heads, in an inner module as in x-transformers."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class ByEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (4, -1)).transpose(1, 2)
        output: Tensor = self.attend(q, q, q)
        return output.transpose(1, 2).flatten(2)


class LinearAttention(nn.Module):
    """A sum over all tokens by einsum, as in linear attention and in RWKV 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("...nd,...ne->...d", x, x.tanh()).unsqueeze(1)


class FirstToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1]


@pytest.mark.parametrize("mixing", [Convolved, Pooled, ByHand, ByEinsum, LinearAttention, FirstToken])
def test_a_module_that_mixes_tokens_is_refused_and_works_by_the_rule_of_the_message(
    mixing: Callable[[], nn.Module],
) -> None:
    def model() -> nn.Module:
        return Tagger(mixing).double()

    with pytest.raises(ValueError, match="mixes tokens") as refused:
        compare(model, "cp=2", ranks=2)
    compare(model, "cp=2", ranks=2, tensor_rules=shown_rule(refused.value))


class Rotated(nn.Module):
    """A table of all positions viewed by the size of the input, as in torchtitan's DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, TOKENS * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.view(1, x.size(1), x.size(2))  # type: ignore[operator]


def test_a_shape_error_of_a_part_of_the_tokens_shows_a_rule_that_works() -> None:
    def model() -> nn.Module:
        return Tagger(Rotated).double()

    with pytest.raises(RuntimeError, match="invalid for input of size") as refused:
        compare(model, "cp=2", ranks=2)
    compare(model, "cp=2", ranks=2, tensor_rules=shown_rule(refused.value))


def shown_rule(error: Exception) -> dict[str, str]:
    """Return the rule that the message, or a note of it, shows."""
    shown = re.search(r'\{"([^"]+)": "(tokens whole)"\}', "\n".join([str(error), *getattr(error, "__notes__", ())]))
    assert shown is not None, error
    return {shown[1]: shown[2]}


class Encoder(nn.Module):
    """torch's encoder, with a causal mask made from the length, or with padding."""

    def __init__(self, *, masked: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.masked = masked
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.masked:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), x.device, x.dtype)
            x = self.encoder(x, mask=mask)
        else:
            x = self.encoder(x, src_key_padding_mask=tokens < 4)
        output: Tensor = self.head(x)
        return output


@pytest.mark.grid(
    Grid({"plan": ("cp=2", "cp=2 context=ulysses", "cp=3 context=striped zero=3"), "masked": (True, False)}, strength=1)
)
def test_torchs_multihead_attention_is_over_all_tokens(masked: bool, plan: str) -> None:
    compare(lambda: Encoder(masked=masked).double(), plan, ranks=int(plan[3]))


class Biased(nn.Module):
    """Attends with a bias by distance (ALiBi, arXiv 2108.12409), and a mask; both are made of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.7, 4))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1), device=x.device)
        distance = places[None, :] - places.unsqueeze(1)
        bias = (self.slopes.view(-1, 1, 1) * distance).masked_fill(places[:, None] < places, -torch.inf)
        q = x.unflatten(2, (4, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q, bias[None]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("plan", ["cp=2", "cp=3 context=ring", "cp=2 context=ulysses", "cp=4 context=usp cp_heads=2"])
def test_a_bias_and_a_mask_made_of_positions_are_of_all_keys(plan: str) -> None:
    compare(lambda: Tagger(Biased).double(), plan, ranks=int(plan[3]))


class CrossAttention(nn.Module):
    """Attends to a fixed memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.expand(x.size(0), -1, -1).unflatten(2, (2, -1)).transpose(1, 2)
        q = x.unflatten(2, (2, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, memory, memory, dropout_p=0.3).transpose(1, 2).flatten(2)


class Documented(nn.Module):
    """Attends inside documents, which end at word 0, and to tokens other than word 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: Any) -> Tensor:
        tokens, ids = batch
        x = self.embedding(tokens)
        q = x.unflatten(2, (4, -1)).transpose(1, 2)
        inside = documents(ids) if ids.size(1) != BORDERS else documents(cu_seqlens=ids)
        pattern = causal() & inside & (padding(tokens != 1) | window(1))
        x = x + attend(q, q[:, :2], q[:, :2], pattern=pattern, dropout=0.2).transpose(1, 2).flatten(2)
        output: Tensor = self.head(x)
        return output


def test_cross_attention_to_keys_of_another_length() -> None:
    compare(lambda: Tagger(CrossAttention).double(), "cp=3", ranks=3)


BORDERS = 4


def borders(tokens: Tensor) -> Tensor:
    """Return cu_seqlens (samples, BORDERS) of documents that begin at words below 5; at most two after the first."""
    places = torch.arange(TOKENS).expand_as(tokens)
    begins = torch.where((tokens < 5) & (places > 0), places, TOKENS).sort(1).values[:, : BORDERS - 2]
    return functional.pad(functional.pad(begins, (1, 0)), (0, 1), value=TOKENS)


@pytest.mark.parametrize("given", [lambda tokens: (tokens < 4).cumsum(1), borders])
@pytest.mark.parametrize("context", ["ring", "ulysses", "striped", "auto"])
def test_documents_of_the_batch_are_of_all_tokens(context: str, given: Callable[[Tensor], Tensor]) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(output: Tensor, batch: Any) -> Any:
        return next_token_loss(output, (batch[0][0], batch[1]))

    def packed() -> list[Any]:
        return [((tokens, given(tokens)), targets) for tokens, targets in batches()]

    options = Options(forward=forward)

    def main(world: World) -> Any:
        trainer = parallelize(
            lambda: Documented().double(), f"cp=2 context={context}", loss=loss, world=world, options=options
        )
        return outcome(trainer, batches=packed())

    single = alone(lambda: Documented().double(), loss=loss, batches=packed(), options=options)
    agree(run(2, main)[0], single, bound=1e-9)
