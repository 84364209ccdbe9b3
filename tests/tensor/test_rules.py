"""The part of each module is found, or stated by a rule; a module without a part is named."""

import re
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import MLP, MLPConfig
from meshwise.tensor.core.module_role import Norm, Part
from meshwise.tensor.detect.assign_tp_roles import Rules, assign_roles
from tensor.plain import Block, gpt, shown, stack


def drawn(module: nn.Module, *, plan: str = "dp=1", rules: Rules | None = None) -> str:
    """The parts as a table, the blocks after the first left out."""
    parts = assign_roles(module, plan=Plan.parse(plan), rules=rules)
    lines = [f"{name or '(root)':34} {_words(part)}".rstrip() for name, part in sorted(parts.items())]
    return "\n".join(line for line in lines if not re.match(r"\S*(blocks|layers|h)\.[1-9]", line))


def _words(part: Part) -> str:
    flags = [name for name in ("transposed", "gathered", "whole_tokens") if getattr(part, name)]
    counts = [f"{name}/{grain}" for name, grain in part.counts]
    return " ".join([part.role, *([str(part.cut)] if str(part.cut) else []), *counts, *flags])


def table(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in textwrap.dedent(text).strip().splitlines())


def check(module: nn.Module, expected: str, *, plan: str = "dp=1", rules: Rules | None = None) -> None:
    assert table(drawn(module, plan=plan, rules=rules)) == table(expected)


# ---- what structure shows --------------------------------------------------------------------------------------------


def test_the_reference_gpt() -> None:
    check(
        gpt(),
        """
        blocks.0                         block
        blocks.0.attention               attention heads/1
        blocks.0.attention.projection    rowwise [:4]
        blocks.0.attention.qkv           colwise [16|16|16:4]
        blocks.0.attention_norm          norm
        blocks.0.mlp.expansion           colwise
        blocks.0.mlp.projection          rowwise
        blocks.0.mlp_norm                norm
        embedding                        embedding
        head                             head
        norm                             norm
        positions                        positions
        """,
    )


def test_shared_keys_are_sections_of_their_own_size() -> None:
    parts = assign_roles(gpt(kv_heads=2, positions="rotary", tied=True), plan=Plan())
    assert str(parts["blocks.1.attention.qkv"].cut) == "[16|8|8:4]"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    check(
        nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16)),
        """
        (root)                             pair
        layers.0                           block
        layers.0.linear1                   colwise
        layers.0.linear2                   rowwise
        layers.0.norm1                     norm
        layers.0.norm2                     norm
        layers.0.self_attn                 attention num_heads/1
        layers.0.self_attn.in_proj_bias    inner [16|16|16:4]
        layers.0.self_attn.in_proj_weight  colwise [16|16|16:4]
        layers.0.self_attn.out_proj        rowwise [:4]
        norm                               norm
        """,
    )


@pytest.mark.parametrize("hidden", [48, 16])
def test_square_matrices_have_roles_by_their_order(hidden: int) -> None:
    parts = assign_roles(stack(hidden=hidden), plan=Plan())
    roles = {name: part.role for name, part in parts.items() if name.startswith("1.") and part.role != "norm"}
    firsts = ["attention.q", "attention.k", "attention.v", "up"]
    seconds = ["attention.out", "down"]
    expected = dict.fromkeys((f"1.{n}" for n in firsts), "colwise") | dict.fromkeys(
        (f"1.{n}" for n in seconds), "rowwise"
    )
    assert roles == {**expected, "1.attention": "attention"}
    assert (parts["0"].role, parts["3"].role) == ("embedding", "head")


class Gated(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(16, hidden), nn.Linear(hidden, 16), nn.Linear(16, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


@pytest.mark.parametrize("hidden", [48, 16])
def test_a_gate_may_be_registered_behind_what_closes_its_pair(hidden: int) -> None:
    """Of square matrices, the forward shows which one does not read its input."""
    model = stack()
    for block in ("1", "2"):
        model.get_submodule(block).add_module("mlp", Gated(hidden))
    parts = assign_roles(model, plan=Plan())
    assert [parts[f"1.mlp.{name}"].role for name in ("w1", "w2", "w3")] == ["colwise", "rowwise", "colwise"]
    assert [parts[f"1.mlp.{name}"].readers for name in ("w1", "w3")] == [2, 2]
    assert (parts["1.up"].role, parts["1.down"].role) == ("colwise", "rowwise")


def test_queries_of_one_key_stay_together() -> None:
    parts = assign_roles(stack(kv_heads=2), plan=Plan())
    assert [parts[f"1.attention.{name}"].grain for name in ("q", "k", "v", "out")] == [8, 4, 4, 8]


def test_a_model_on_the_meta_device_has_the_same_parts() -> None:
    expected = drawn(gpt())
    with torch.device("meta"):
        assert drawn(gpt()) == expected


class CentredByHand(nn.Module):
    """A LayerNorm by another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.small = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.small).sqrt() * self.weight + self.bias


def test_a_norm_is_known_by_what_it_computes() -> None:
    model = stack()
    model.append(CentredByHand(16))
    norm = assign_roles(model, plan=Plan())["4"].norm
    assert norm is not None
    assert (norm.centred, norm.epsilon, norm.statistics) == (True, 1e-3, torch.float32)


class OtherNames(nn.Module):
    """Other names for the gain and the bias, and no epsilon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.g = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = functional.normalize(x, dim=-1) * x.size(-1) ** 0.5
        return normal * self.g + self.shift


def test_a_norm_may_call_its_parameters_anything() -> None:
    norm = assign_roles(stack().append(OtherNames(16)), plan=Plan())["4"].norm
    assert norm == Norm(centred=False, epsilon=1e-30, gain="g", bias="shift")


class OffsetRMSNorm(nn.Module):
    """Stores how far its gain is from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Centre(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * self.gamma


def test_a_scale_is_a_vector_and_what_mixes_features_is_left_to_the_rules() -> None:
    model = stack().extend([OffsetRMSNorm(16), Scale(16)])
    parts = assign_roles(model, plan=Plan())
    assert parts["4"].norm == Norm(centred=False, epsilon=1e-6, offset=1.0)
    assert parts["5.gamma"].role == "vector"
    model.append(Centre(16))
    assert assign_roles(model, plan=Plan.parse("tp=2"))["6"].role == "whole", "a rank has all features"
    with pytest.raises(ValueError, match=r"6.gamma .*Centre is no known norm, and it may mix features"):
        assign_roles(model, plan=Plan.parse("tp=4 tp_mode=2d"))


def test_a_parameter_without_dims_is_left_to_the_rules() -> None:
    model = gpt()
    model.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r'temperature  \(\)\n.*\{"temperature": "whole"\}'):
        assign_roles(model, plan=Plan())
    assert assign_roles(model, plan=Plan(), rules={"temperature": "whole"})["temperature"].role == "whole"


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_a_rule_takes_precedence_over_structure() -> None:
    parts = assign_roles(gpt(), plan=Plan(), rules={"head": "whole", "positions": "embedding"})
    assert (parts["head"].role, parts["positions"].role) == ("whole", "embedding")


def test_rules_alone_split_a_model_without_blocks() -> None:
    model = MLP(MLPConfig(widths=(8, 32, 8)))
    check(
        model,
        """
        layers.0  colwise
        """,
        rules={"layers.0": "colwise", "layers.1": "rowwise"},
    )
    assert (
        assign_roles(model, plan=Plan(), rules={"layers.0": "colwise", "layers.1": "rowwise"})["layers.1"].role
        == "rowwise"
    )


class Fused(nn.Module):
    """A fused matrix whose order does not show."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, self.heads // 2, -1)).movedim(-3, 0).flatten(-3, -2)
        y = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


def test_an_order_that_does_not_show_is_asked_for() -> None:
    model = nn.ModuleList(Block(Fused(16, 4), width=16, hidden=48) for _ in range(2))
    with pytest.raises(ValueError, match=r"looks like 3 fused matrices.*'colwise sections=3' if they follow") as caught:
        assign_roles(model, plan=Plan())
    assert "follow each other, 'colwise grain=12' if they do so in each head" in str(caught.value)
    assert 'as in {"*.attention": "whole"}' in str(caught.value), "its order is unknown, so only this is sure"
    with pytest.raises(ValueError, match=r"0\.attention\.qkv\.weight .*in a trial, .* takes them in another order"):
        assign_roles(model, plan=Plan(), rules={"*.attention.qkv": "colwise sections=3"})


def test_a_pair_in_a_module_kept_whole_is_whole_too() -> None:
    parts = assign_roles(stack(), plan=Plan(tp=2), rules={"1.attention": "whole"})
    assert parts["1.attention"].role == "whole"
    assert not [name for name in parts if name.startswith("1.attention.")]
    assert parts["2.attention.q"].role == "colwise"


def test_the_rule_to_copy_is_one_that_the_module_can_have() -> None:
    model = nn.Sequential(stack(), nn.InstanceNorm1d(16, affine=True))
    with pytest.raises(ValueError, match="InstanceNorm1d") as caught:
        assign_roles(model, plan=Plan())
    assert 'as in {"1": "whole"}' in str(caught.value)
    assert assign_roles(model, plan=Plan(), rules={"1": "whole"})["1"].role == "whole"


def test_heads_that_nothing_counts_are_asked_for() -> None:
    model = stack()
    for module in model.modules():
        vars(module).pop("n_head", None)
    with pytest.raises(
        ValueError, match=r"1\.attention\.q\.weight.*no heads that fit; state the number of heads"
    ) as caught:
        assign_roles(model, plan=Plan())
    assert assign_roles(model, plan=Plan(), rules=shown(caught.value))["1.attention"].role == "whole"
    parts = assign_roles(model, plan=Plan(), rules={"*.attention": "attention heads=4"})
    assert parts["1.attention.q"].grain == 4


def test_what_lies_in_a_module_that_the_rule_keeps_whole_needs_none() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(16, 4), nn.Linear(4, base.out_features)

    model = stack()
    for block in ("1", "2"):
        attention = model.get_submodule(f"{block}.attention")
        attention.q = Adapted(attention.q)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"found no role(.|\n)*Options\(tensor_rules=…\).*model\.tensor_rules"
    ) as caught:
        assign_roles(model, plan=Plan())
    assert 'as in {"*.attention": "whole"}' in str(caught.value)


def test_an_attention_with_matrices_of_its_own_kind_is_kept_whole_by_the_rule_that_is_shown() -> None:
    model = stack()
    for block in ("1", "2"):
        model.get_submodule(f"{block}.attention").add_module("places", nn.Linear(16, 16))  # as DeBERTa has
    with pytest.raises(ValueError, match=r"1\.attention\.places ") as caught:
        assign_roles(model, plan=Plan())
    assert 'as in {"*.attention": "whole"}' in str(caught.value)
    parts = assign_roles(model, plan=Plan(), rules={"*.attention": "whole"})
    assert parts["1.attention"].role == "whole"
    assert (parts["1.up"].role, parts["1.down"].role) == ("colwise", "rowwise")


class Scaled(nn.Embedding):
    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) * 4.0


class Normed(nn.Embedding):
    def forward(self, numbers: Tensor) -> Tensor:
        return functional.normalize(super().forward(numbers), dim=-1)


def test_what_a_derived_class_computes_is_not_replaced() -> None:
    model = stack()
    model[0] = Scaled(24, 16)
    assert assign_roles(model, plan=Plan())["0"].role == "embedding"  # part by part what it gives is scaled as well
    model[0] = Normed(24, 16)
    assert assign_roles(model, plan=Plan())["0"].role == "positions"  # which keeps the forward of the module
    with pytest.raises(ValueError, match="'0' the role 'embedding', which would replace the forward of Normed"):
        assign_roles(model, plan=Plan(), rules={"0": "embedding"})


# ---- what is wrong with rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules, message",
    [
        (
            {"blocks.*.mpl.expansion": "colwise"},
            r"'blocks.\*.mpl.expansion' matches no .* near names: blocks.\*.mlp.exp",
        ),
        ({"heads": "head"}, r"'heads' matches no module and no parameter; near names: head"),
        ({"head": "hed"}, "'hed' is not a role; did you mean 'head'"),
        ({"head": "head grain=2"}, "'grain=2' in 'head grain=2'; the role 'head' takes no options"),
        ({"blocks.*.attention": "attention heeds=2"}, "takes heads=number and kv_heads=number"),
        ({"blocks.*.attention": "attention heads=3"}, "heads has to divide them"),
        ({"blocks.*.attention.qkv": "colwise sections=5"}, "does not divide it"),
        ({"blocks.*.attention": "attention heads=4 kv_heads=8"}, "heads has to divide them, and kv_heads the heads"),
        ({"norm": "attention"}, "'norm' the role 'attention', but no pair"),
        ({"blocks.*.mlp": "norm"}, "computes neither LayerNorm nor RMSNorm"),
        ({"embedding": "head"}, "'embedding' the role 'head', which would replace the forward of Embedding"),
        ({"head": "colwise"}, "'head' the role 'colwise', but no pair of matrices was found with it in that role"),
    ],
)
def test_a_rule_that_cannot_be_meant_says_so(rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_roles(gpt(), plan=Plan(), rules=rules)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=3", "pp=2", "cp=2"])
def test_a_rule_that_matches_nothing_is_refused_under_every_plan(plan: str) -> None:
    given: Any = {"loss": lambda output, _batch: (output.sum(), 1), "lr": 1e-3}
    near = "matches no module and no parameter; near names: blocks.*.mlp"
    cases = {("mpl", "experts"): near, ("mpl", "tokens whole"): near, ("mlp", "tokens"): "'tokens' is not a role"}
    for (name, role), message in cases.items():
        options = Options(tensor_rules={f"blocks.*.{name}": role}, example=torch.zeros(1, 4, dtype=torch.int64))
        world = TraceWorld(rank=0, mesh=Plan.parse(plan).mesh())
        with pytest.raises(ValueError, match=re.escape(message)):
            parallelize(gpt, plan, world=world, options=options, **given)


def test_a_parameter_without_a_part_is_an_error_that_shows_how_to_give_it_one() -> None:
    model = gpt()
    for block in model.blocks:
        block.gate = nn.Linear(16, 3)
    with pytest.raises(ValueError, match=r"blocks\.0\.gate\.weight .*forms no pair") as raised:
        assign_roles(model, plan=Plan())
    assert 'as in {"blocks.*.gate": "whole"}' in str(raised.value)
    assert "blocks.1.gate" not in str(raised.value)


class Coder(nn.Module):
    """A variational autoencoder: its two matrices that read the same input look like those of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.spread = nn.Linear(16, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.fc3, self.fc4 = nn.Linear(4, 12), nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x).relu()
        decoded: Tensor = self.fc4(self.fc3(self.mean(hidden) + self.spread(hidden)).relu())
        return decoded


def test_the_model_itself_is_named_where_it_counts_no_heads() -> None:
    with pytest.raises(ValueError, match="but the model counts no heads that fit"):
        assign_roles(Coder(), plan=Plan.parse("tp=2"))
