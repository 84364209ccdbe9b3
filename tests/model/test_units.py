"""How models of all kinds are divided into units. Each test draws the division: unit, its modules, its elements."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.comm.api.world import World
from meshwise.model.parameter_table import parameter_table
from meshwise.model.parameter_units import partition
from meshwise.reference import GPT, MLP, GPTConfig, MLPConfig
from meshwise.testing import run


class Silent(nn.Module):
    """A module whose forward is never called here: only its structure matters."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def units(model: nn.Module) -> list[list[str]]:
    table = parameter_table(model)
    names = [name for unit in table.units for row in unit.rows for name in (row.name, *row.aliases)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    return [[unit.name, ",".join(m or "." for m in unit.modules), str(unit.numel)] for unit in table.units]


def drawn(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def tiny_gpt(*, tied: bool = False, rotary: bool = False) -> GPT:
    config = GPTConfig(vocabulary=32, context=8, layers=3, heads=2, width=16, tied=tied)
    return GPT(replace(config, positions="rotary") if rotary else config)


def test_a_gpt_is_its_embeddings_its_blocks_and_its_head() -> None:
    assert units(tiny_gpt()) == drawn("""
        embedding+positions  embedding,positions   640
        blocks.0             blocks.0             3104
        blocks.1             blocks.1             3104
        blocks.2             blocks.2             3104
        norm+head            norm,head             528
    """)


def test_a_bucket_joins_neighbours_up_to_its_bytes() -> None:
    """An opened module with parameters of its own stays alone, because they are in use until its forward ends.

    Without a number of bytes a unit has at most an eighth of the model."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(16)))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.blocks(x) * self.scale
            return result

    block = 2 * 20 * 4
    for bucket, sizes in ((0, [1] * 16), (3 * block, [3, 3, 3, 3, 3, 1]), (20 * block, [16]), (None, [2] * 8)):
        found = {unit.name: unit.numel * 4 / block for unit in parameter_table(Scaled(), bucket=bucket).units}
        assert [size for name, size in found.items() if name != "(root)"] == sizes
        assert found["(root)"] == 0.1


def test_units_of_a_stage_are_joined_as_those_of_the_whole_model() -> None:
    def stage(world: World) -> list[int]:
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(16)]
        options = mw.Options(example=torch.zeros(2, 4))
        plan = "pp=2 microbatches=2 partition=params"
        trainer = mw.parallelize(nn.Sequential(*blocks), plan, loss=squares, world=world, options=options)
        return [unit.spec.numel for unit in trainer.units]

    assert run(2, stage) == [[2 * 40] * 4] * 2


def squares(output: Tensor, _batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def test_a_tied_head_joins_the_embedding_and_takes_the_final_norm_along() -> None:
    assert units(tiny_gpt(tied=True, rotary=True)) == drawn("""
        embedding+norm  embedding,norm,head   528
        blocks.0        blocks.0             3104
        blocks.1        blocks.1             3104
        blocks.2        blocks.2             3104
    """)


def test_layers_of_an_mlp_share_a_unit_while_it_stays_near_the_largest_layer() -> None:
    assert units(MLP(MLPConfig(widths=(8, 16, 16, 2), bias=False))) == drawn("""
        layers.0           layers.0           128
        layers.1+layers.2  layers.1,layers.2  288
    """)


def test_a_sequential_is_opened() -> None:
    assert units(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))) == drawn("""
        0  0  16
        2  2  12
    """)


def test_a_bare_linear_is_one_unit() -> None:
    assert units(nn.Linear(3, 2)) == drawn("(root)  .  8")


def test_layers_of_torchs_transformer_encoder_are_blocks() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert units(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))) == drawn("""
        layers.0  layers.0  600
        layers.1  layers.1  600
        norm      norm       16
    """)


class TiedByUse(nn.Module):
    """Computes its logits with the embedding's weight, in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.body(self.embedding(tokens)))

    def logits(self, x: Tensor) -> Tensor:
        return x.to(self.head.weight.dtype).view(-1, self.head.weight.size(1)) @ self.embedding.weight.T

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.body.get_parameter("0.weight"))


def test_a_childs_weight_that_the_forward_reads_itself_spans_the_forward() -> None:
    assert units(TiedByUse()) == drawn("""
        (root)         .,embedding        16
        body.0         body.0             16
        body.1         body.1             16
        head           head               16
    """)


def test_torchs_attention_owns_the_projection_that_it_never_calls() -> None:
    assert units(nn.MultiheadAttention(8, 2)) == drawn("(root)  .,out_proj  288")
    assert units(nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 20)})) == drawn("""
        attention  attention  288
        head       head       180
    """)


class Residual(Silent):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, bias=False)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))


class ResNet(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.stage1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.stage2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.fc = nn.Linear(8, 2, bias=False)


RESNET = """
    {0}stem.0+{0}stem.1  {0}stem.0,{0}stem.1   116
    {0}stage1.0          {0}stage1.0           312
    {0}stage1.1          {0}stage1.1           312
    {0}stage2.0          {0}stage2.0           912
    {0}stage2.1          {0}stage2.1          1232
"""


def test_a_resnet_of_nested_sequentials_is_its_residual_blocks() -> None:
    assert units(ResNet()) == drawn(RESNET.format("") + "    fc  fc  16")


def test_a_network_in_stages_inside_one_sequential_is_its_blocks_too() -> None:
    stages = nn.Sequential(*ResNet().children())
    names = [name for name, _, _ in units(nn.Sequential(stages, nn.Linear(8, 2)))]
    assert names == ["0.0", "0.1.0", "0.1.1", "0.2.0", "0.2.1", "0.3+1"]


class Lookalike(Silent):
    """The shape of a Hugging Face causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Silent()
        self.model.embed_tokens = nn.Embedding(32, 8)
        self.model.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.model.norm = nn.LayerNorm(8, bias=False)
        self.lm_head = nn.Linear(8, 32, bias=False)

    @staticmethod
    def layer() -> nn.Module:
        layer = Silent()
        layer.self_attn = Silent()
        layer.self_attn.projections = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        layer.mlp = nn.Sequential(nn.Linear(8, 32, bias=False), nn.SiLU(), nn.Linear(32, 8, bias=False))
        return layer


def test_a_stack_of_blocks_is_found_inside_a_child() -> None:
    assert units(Lookalike()) == drawn("""
        model.embed_tokens  model.embed_tokens    256
        model.layers.0      model.layers.0        768
        model.layers.1      model.layers.1        768
        model.norm+lm_head  model.norm,lm_head    264
    """)


class WithOwn(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(5))
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.gains = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3))})
        self.body = ResNet()


def test_parameters_of_the_root_itself_and_of_lists_without_a_forward_span_the_root() -> None:
    assert units(WithOwn()) == drawn("(root)  .  12" + RESNET.format("body.") + "    body.fc  body.fc  16")


class Mixture(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))


def test_experts_chosen_by_data_are_not_separated_from_their_block() -> None:
    assert units(nn.ModuleDict({"blocks": nn.ModuleList(Mixture() for _ in range(2))})) == drawn("""
        blocks.0  blocks.0  88
        blocks.1  blocks.1  88
    """)


def test_one_module_under_two_names_is_one_unit_and_named_once() -> None:
    block = Residual(4, 4)
    assert units(nn.Sequential(block, nn.ReLU(), block)) == drawn("0  0  312")


def test_a_parameter_shared_by_two_blocks_belongs_to_the_first_and_lists_both() -> None:
    first, second = Residual(4, 4), Residual(4, 4)
    second.first.weight = first.first.weight
    assert units(nn.Sequential(first, second)) == drawn("""
        0  0,1  312
        1  1    168
    """)


def test_a_choice_of_units_overrides_the_rules() -> None:
    chosen = [[piece.module for piece in unit] for unit in partition(tiny_gpt(), units=("blocks.2.mlp*", "positions"))]
    assert chosen == [
        ["embedding"],
        ["positions"],
        ["blocks.0"],
        ["blocks.1"],
        ["blocks.2.attention_norm", "blocks.2.attention"],
        ["blocks.2.mlp_norm"],
        ["blocks.2.mlp"],
        ["norm", "head"],
    ]


def test_the_whole_model_can_be_chosen_as_one_unit() -> None:
    assert [[piece.module for piece in unit] for unit in partition(tiny_gpt(), units=("",))] == [[""]]


def test_a_pattern_that_names_nothing_lists_near_misses() -> None:
    with pytest.raises(ValueError, match=r"'block\.\*' matches no module with parameters; did you mean .*'blocks\.\d'"):
        partition(tiny_gpt(), units=("block.*",))


def test_a_module_chosen_inside_another_chosen_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks.0.mlp' lies inside 'blocks.0'"):
        partition(tiny_gpt(), units=("blocks.*", "blocks.0.mlp"))
