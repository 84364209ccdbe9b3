"""What cannot be split, under any plan or under this one, is refused with the nearest that works."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.plan import Plan, PlanError
from meshwise.reference import next_token_loss
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from meshwise.tensor.tp_schemes import mesh_with_kv_replicas
from meshwise.testing import run
from tensor.plain import Attention, Block, gpt, stack


class Mlp(nn.Module):
    """An MLP with any module between its matrices."""

    def __init__(self, between: nn.Module, *, fused: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(16, 96 if fused else 48)
        self.between = between
        self.fused = fused
        self.down = nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.up(x).chunk(2, dim=-1)
            y = functional.silu(gate) * up
        else:
            y = self.up(x)
        output: Tensor = self.down(self.between(y))
        return output


def with_mlp(mlp: nn.Module) -> nn.Module:
    """Blocks that share one MLP."""
    model = stack()
    for block in (model[1], model[2]):
        block.mlp = mlp
        del block.up, block.down
    return model


def test_a_norm_between_two_matrices_is_split() -> None:
    """As in the SwiGLU of EVA-02 (timm): its statistics are over all hidden features."""
    parts = assign_roles(with_mlp(Mlp(nn.LayerNorm(48))), plan=Plan())
    assert (parts["1.mlp.up"].role, parts["1.mlp.between"].role) == ("colwise", "norm")
    assert parts["1.mlp.between"].inner


@pytest.mark.parametrize(
    "mlp",
    [
        Mlp(nn.GELU()),
        Mlp(nn.Dropout(0.5)),
        Mlp(nn.Softmax(dim=-2)),
        Mlp(nn.SiLU(inplace=True)),
        Mlp(nn.Tanh(), fused=True),
    ],
)
def test_what_goes_feature_by_feature_is_shared_out(mlp: nn.Module) -> None:
    parts = assign_roles(with_mlp(mlp), plan=Plan())
    assert (parts["1.mlp.up"].role, parts["1.mlp.down"].role) == ("colwise", "rowwise")


class Sloped(Attention):
    """Biases that go by the number of a head, of as many as there are."""

    def between(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes, places = torch.arange(q.size(1), dtype=q.dtype), torch.arange(q.size(2), dtype=q.dtype)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=slopes[:, None, None] * places)

    def forward(self, x: Tensor) -> Tensor:
        heads = [linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for linear in (self.q, self.k, self.v)]
        output: Tensor = self.out(self.between(*heads).transpose(1, 2).flatten(2))
        return output


class Scaled(Sloped):
    """A temperature for every head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, kv_heads=heads)
        self.temperature = nn.Parameter(torch.zeros(heads, 1, 1))

    def between(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q * self.temperature, k, v)


def test_what_has_a_part_of_every_head_may_be_counted() -> None:
    model = stack()
    model[1].attention = Scaled(16, 4)
    assert assign_roles(model, plan=Plan())["1.attention.temperature"].role == "inner"


# ---- what cannot work under a plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, kv_heads, plan, message",
    [
        (4, 4, "tp=8", "4 heads over 4 KV heads, .*evenly over 8 ranks. Nearest that works: tp=3 or tp=4"),
        (4, 2, "tp=4", "Nearest that works: tp=1 or tp=2"),
        (6, 3, "tp=2", "neither divide nor replicate evenly over 2 ranks. Nearest that works: tp=1 or tp=3"),
        (4, 1, "tp=4 tp_mode=2d", "evenly over 2 ranks. Nearest that works: tp=1"),
        (4, 1, "tp=8 tp_mode=3d", "over 2 ranks.*Nearest that works: tp=1"),
    ],
)
def test_fewer_heads_than_ranks_name_the_nearest_degrees(heads: int, kv_heads: int, plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        assign_roles(gpt(width=24, heads=heads, kv_heads=kv_heads), plan=Plan.parse(plan))


def test_uneven_heads_are_allowed_where_every_rank_has_one() -> None:
    assign_roles(gpt(width=24, heads=6), plan=Plan.parse("tp=4"))


def test_fewer_key_heads_than_ranks_are_held_by_several() -> None:
    plan = Plan.parse("dp=2 tp=4")
    parts = assign_roles(stack(kv_heads=2), plan=plan)
    assert [name for name in ("q", "k", "v", "out") if parts[f"1.attention.{name}"].shared] == ["k", "v"]
    assert [parts[f"1.attention.{name}"].grain for name in ("q", "k", "v", "out")] == [4, 4, 4, 4]
    assert str(mesh_with_kv_replicas(plan, parts=parts.values())) == "pp=1 dp=2 cp=1 tp=2 kv=2"


def test_shared_key_heads_need_numbers_that_divide() -> None:
    attention = Attention(24, 6, kv_heads=2)
    model = nn.ModuleList([Block(attention, width=24, hidden=48)])
    assert assign_roles(model, plan=Plan.parse("tp=6"))["0.attention"].kv_replicas == 3
    with pytest.raises(PlanError, match=r"6 heads over 2 KV heads.*Nearest that works: tp=2 or tp=6"):
        assign_roles(model, plan=Plan.parse("tp=4"))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    "options, plan, message",
    [
        ({}, "tp=8 tp_mode=3d", "batch_first=False puts the rows of the batch into dim 1.*Nearest.*tp_mode=1d"),
        ({"kdim": 7, "vdim": 7}, "tp=4 tp_mode=2d", "keys and values have another width than the hidden states"),
    ],
)
def test_a_part_that_a_scheme_does_not_have_is_refused(options: dict[str, int], plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        assign_roles(nn.MultiheadAttention(16, 4, **options), plan=Plan.parse(plan))


def test_a_model_without_a_head_has_all_features_outside_of_its_blocks() -> None:
    model = gpt()
    model.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 24))  # type: ignore[assignment]
    for rules, role in (({"head": "whole"}, "whole"), ({}, "norm")):
        assert assign_roles(model, plan=Plan.parse("tp=4 tp_mode=2d"), rules=rules)["norm"].role == role
        assert assign_roles(model, plan=Plan.parse("tp=2"), rules=rules)["norm"].role == "norm"


def test_a_model_without_blocks_cannot_split_hidden_states() -> None:
    model = Block(Attention(16, 4, kv_heads=4), width=16, hidden=48)
    assign_roles(model, plan=Plan.parse("tp=2"))
    with pytest.raises(
        PlanError, match=r"takes and returns 16 features.*no repeated blocks.*Nearest that works: tp_mode=1d"
    ):
        assign_roles(model, plan=Plan.parse("tp=4 tp_mode=2d"))


def test_what_is_kept_whole_in_a_block_sees_all_tokens() -> None:
    with pytest.raises(PlanError, match=r"1.attention \(Attention\) is kept whole inside a block.*sequence_parallel=0"):
        assign_roles(stack(), plan=Plan.parse("tp=2 sequence_parallel=1"), rules={"*.attention": "whole"})


class Counting(Attention):
    """Its first matrices alone read the input, which it asks for its sizes."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.n_head, -1)) for y in (self.q(x), self.k(x), self.v(x)))
        output: Tensor = self.out((q + k + v).reshape(*x.shape[:-1], -1))
        return output


class Residual(Counting):
    """Adds its input itself."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.n_head, -1)) for y in (self.q(x), self.k(x), self.v(x)))
        output: Tensor = x + self.out((q + k + v).reshape(*x.shape[:-1], -1))
        return output


def test_an_attention_that_asks_for_the_number_of_its_tokens_is_given_them_or_refused() -> None:
    model, plan = stack(), Plan.parse("tp=2 sequence_parallel=1")
    model[1].attention = Counting(16, 4, kv_heads=4)
    assert assign_roles(model, plan=plan)["1.attention.q"].gathered
    model[1].attention = Residual(16, 4, kv_heads=4)
    with pytest.raises(
        ValueError, match=r"(?s)1\.attention\.q\.weight.*or reads sizes.*and take tp_mode=1d sequence_parallel=0"
    ):
        assign_roles(model, plan=plan)


def test_heads_kept_whole_need_not_be_shared_out() -> None:
    with pytest.raises(
        PlanError, match=r"or keep it whole on every rank, by the rules 'blocks\.\*\.attention': 'whole'"
    ):
        assign_roles(gpt(kv_heads=1), plan=Plan.parse("tp=2"))
    assign_roles(gpt(kv_heads=1), plan=Plan.parse("tp=2"), rules={"blocks.*.attention": "whole"})


class InTwoSteps(Attention):
    """A method of its own asks for the number of tokens."""

    def heads_of(self, x: Tensor) -> list[Tensor]:
        rows, tokens, _ = x.shape
        return [linear(x).view(rows, tokens, -1, self.head_width) for linear in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        output: Tensor = self.out((q + k + v).flatten(2))
        return output


def test_a_method_that_gets_the_input_may_ask_for_sizes() -> None:
    model = stack()
    model[1].attention = InTwoSteps(16, 4, kv_heads=4)
    assert assign_roles(model, plan=Plan.parse("tp=2 sequence_parallel=1"))["1.attention.q"].gathered
    assert assign_roles(model, plan=Plan.parse("tp=8 tp_mode=3d"))["1.attention"].even_rows


def test_what_is_compiled_is_refused() -> None:
    """What torch.compile gives, without its start."""
    model = stack()
    model[1] = nn.Module()
    model[1].add_module("_orig_mod", stack()[1])
    with pytest.raises(PlanError, match=r"1 is compiled.*leave torch\.compile out.*compile=blocks"):
        assign_roles(model, plan=Plan.parse("tp=2"))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.both(self.words(words), self.words(words)))
        return output


@pytest.mark.parametrize(
    "plan, message",
    [
        ("tp=2 sequence_parallel=1", "the encoder's output.*keep it whole on every rank, as in .*, or take seq"),
        ("tp=4 tp_mode=2d", "asks for all features of its input.*Nearest that works: tp_mode=1d"),
    ],
)
def test_torchs_encoder_and_decoder_together_need_1d(plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        assign_roles(Translator(), plan=Plan.parse(plan))


def test_a_decoder_alone_has_no_rule_that_splits_the_rest() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
    with pytest.raises(PlanError, match=r"the encoder's output.*Nearest that works: sequence_parallel=0"):
        assign_roles(model, plan=Plan.parse("tp=2 sequence_parallel=1"))


def test_a_matrix_that_is_made_of_parameters_under_other_names_is_named() -> None:
    def build() -> nn.Module:
        model = gpt()
        prune.identity(model.head, "weight")
        return model

    with pytest.raises(PlanError, match=r"head \(Linear\) has no matrix named weight"):
        run(2, lambda world: parallelize(build, "tp=2", loss=lambda _y, _x: (_y, 1), world=world))


def test_a_model_without_a_pair_is_refused_with_the_place_of_rules() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    with pytest.raises(ValueError, match=r"no matrix is the first .*Options\(tensor_rules=…\), model\.tensor_rules"):
        run(2, lambda world: parallelize(model, "tp=2", loss=lambda y, _: (y.sum(), 1), world=world))


class Constant(Attention):
    """Knows by heart that there are four heads, four wide."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).view(*x.shape[:2], 4, 4).flatten(2) + self.k(x) * self.v(x)
        output: Tensor = self.out(y)
        return output


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Constant(16, 4, kv_heads=4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(x)
        return output


class Direct(nn.Module):
    """Calls `forward`, and not the module, as llama2.c and the LLaMA of Meta."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(16, 4, kv_heads=4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention.forward(x)
        return output


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1"])
def test_an_attention_whose_forward_is_called_without_its_hooks_is_refused(plan: str) -> None:
    model = nn.Sequential(nn.Embedding(24, 16), Direct(), Direct(), nn.Linear(16, 24))
    with pytest.raises(PlanError, match=r"1 calls self.attention.forward.*Call self.attention\(…\) there"):
        assign_roles(model, plan=Plan.parse(plan))


def test_a_constant_where_a_rank_has_a_part_is_refused_with_what_to_change() -> None:
    model = nn.Sequential(nn.Embedding(24, 16), Around(), Around(), nn.Linear(16, 24))
    with pytest.raises(ValueError, match=r"on a rank's part it fails.*invalid for input of size") as raised:
        assign_roles(model, plan=Plan.parse("tp=2"))
    assert '{"*.attention": "whole"}' in str(raised.value)


class Masked(Around):
    """Its attention needs a mask of a shape that no trial guesses."""

    def __init__(self) -> None:
        super().__init__()
        vars(self.attention)["forward"] = self.masked

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = mask.shape
        output: Tensor = Constant.forward(self.attention, x) * mask.view(rows, tokens, 1)
        return output

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(x, torch.ones(*x.shape[:2], 1))
        return output


def test_a_constant_in_a_module_that_cannot_be_tried_is_named_in_the_forward() -> None:
    def main(world: World) -> None:
        model = nn.Sequential(nn.Embedding(24, 16), Masked(), Masked(), nn.Linear(16, 24))
        parallelize(model, "tp=2", loss=next_token_loss, world=world).step((torch.zeros(2, 3, dtype=torch.long),) * 2)

    with pytest.raises(RuntimeError, match="invalid for input of size") as raised:
        run(2, main)
    notes = "\n".join(raised.value.__notes__)
    assert "use -1, x.size(…) or an attribute" in notes
    assert '{"*.attention": "whole"}' in notes
