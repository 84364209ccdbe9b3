"""A model cut into stages, one run after the other in one process, is the model: output and every gradient."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, cut_model, cut_pieces
from meshwise.pipeline.cut.probe_result import CutError
from meshwise.pipeline.run.stage_forward import StageError, make_stage
from meshwise.reference import next_token_loss
from pipeline.oracle import TARGETS, TOKENS, gpt, is_the_model, lm
from reference.convolutional import ResNet, UNet

pytestmark = pytest.mark.usefixtures("float64")

MASK = torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.tensor([10, 11]), 0)


# ---- pieces: the model's own forward -----------------------------------------------------------------------------


CONFIGS: tuple[dict[str, Any], ...] = ({}, {"tied": True}, {"positions": "rotary", "kv_heads": 1})


@pytest.mark.grid(Grid({"config": CONFIGS, "stages": (1, 2, 3, 4, 7)}, strength=1))
def test_a_gpt_is_cut(config: dict[str, Any], stages: int) -> None:
    model = gpt(**config)
    is_the_model(model, lm, cut_model(model, stages=stages, call=lm, request=CutRequest("params")))


@pytest.mark.parametrize("by", ["time", "params", "memory"])
def test_every_balance(by: Any) -> None:
    model = gpt()
    cut = cut_model(model, stages=3, call=lm, request=CutRequest(by))
    is_the_model(model, lm, cut)
    assert cut.by == by
    assert cut.imbalance >= 1


@pytest.mark.parametrize("at", [("blocks.0", "norm"), ("blocks.2",)], ids=str)
def test_a_cut_at_some_of_the_places_of_another(at: tuple[str, ...]) -> None:
    model = gpt(tied=True)
    finest = cut_pieces(model, call=lm)
    assert finest.stages == len(finest.keys)
    made = cut_model(model, stages=len(at) + 1, call=lm, request=CutRequest("params", options=CutOptions(at=at)))
    assert finest.coarser(at, model=model) == made


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra with Hugging Face's models is not installed")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.double()


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra with Hugging Face's models is not installed")
    config = transformers.T5Config(
        vocab_size=31, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model.double()


@pytest.mark.parametrize("stages", [2, 3, 7])
def test_a_llama_of_hugging_face_with_a_padding_mask(stages: int) -> None:
    def call(model: nn.Module) -> Tensor:
        logits: Tensor = model(input_ids=TOKENS, attention_mask=MASK).logits
        return next_token_loss(logits, (TOKENS, TARGETS))[0]

    model = llama()
    is_the_model(model, call, cut_model(model, stages=stages, call=call, request=CutRequest("params")))


@pytest.mark.grid(Grid({"stages": (2, 3, 4, 5, 9)}, heavy=lambda cell: cell["stages"] in (2, 4, 5)))
def test_a_t5_is_cut_anywhere_in_its_encoder_and_decoder(stages: int) -> None:
    def call(model: nn.Module) -> Tensor:
        logits = model(input_ids=TOKENS, attention_mask=MASK, decoder_input_ids=TARGETS[:, :9]).logits
        return next_token_loss(logits, (TOKENS, TARGETS[:, :9]))[0]

    model = t5()
    cut = cut_model(model, stages=stages, call=call, request=CutRequest("params"))
    is_the_model(model, call, cut)
    assert len(cut.ties["shared.weight"]) > 1


IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin().double()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_skips_of_a_unet_are_carried_along(stages: int) -> None:
    model = UNet(norm=nn.BatchNorm2d)

    def call(model: nn.Module) -> Tensor:
        squares: Tensor = model(IMAGES).square().sum()
        return squares

    is_the_model(model, call, cut_model(model, stages=stages, call=call, request=CutRequest("params")))


def test_arguments_by_keyword_and_flags() -> None:
    model = UNet(norm=nn.BatchNorm2d)

    def call(model: nn.Module) -> Tensor:
        squares: Tensor = model(IMAGES, flip=True, mask=IMAGES.flip(-1)).square().sum()
        return squares

    is_the_model(model, call, cut_model(model, stages=3, call=call, request=CutRequest("params")))


def classify(model: nn.Module) -> Tensor:
    loss: Tensor = functional.cross_entropy(model(IMAGES), torch.tensor([1, 3]), reduction="sum")
    return loss


@pytest.mark.parametrize("how, stages", [("blocks", 3), ("auto", 4), ("auto", 12)])
def test_a_resnet_is_cut(how: Any, stages: int) -> None:
    model = ResNet(norm=nn.BatchNorm2d)
    cut = cut_model(model, stages=stages, call=classify, request=CutRequest("params", options=CutOptions(how=how)))
    is_the_model(model, classify, cut)


# ---- what the forward reads of its pieces ------------------------------------------------------------------------


class Reaching(nn.Module):
    """Its forward computes with the weight of a block that it does not call there."""

    def __init__(self, block: int, *, named: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.block = block
        if named:
            self.shared = self.blocks[block].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        weight: Any = self.shared if hasattr(self, "shared") else self.blocks[self.block].weight
        return self.head(x @ weight / weight.shape[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_of_another_stage_is_not_computed_with(device: str) -> None:
    """torch multiplies by a matrix without values on the CPU, and makes of it whatever lies in memory."""
    model = Reaching(0).to(device)
    message = (
        r"head, on stage 1, needs what the model computes with blocks\.0\.weight .* on stage 0\. Give it a second name"
    )
    with pytest.raises(CutError, match=message):
        cut_model(model, stages=2, call=lambda model: model(TOKENS), request=CutRequest("params"))


@pytest.mark.parametrize("model", [Reaching(3), Reaching(0, named=True)], ids=["its own", "named"])
def test_a_parameter_of_the_same_stage_is_computed_with(model: Reaching) -> None:
    def call(model: nn.Module) -> Any:
        return next_token_loss(model(TOKENS), (TOKENS, TARGETS))[0]

    is_the_model(model.double(), call, cut_model(model, stages=2, call=call, request=CutRequest("params")))


def test_a_remote_parameter_has_a_shape_and_is_not_computed_with() -> None:
    """Also where the example did not show it: in a branch, or in a loss."""
    model = Reaching(3)
    cut = cut_model(model, stages=2, call=lambda model: model(TOKENS), request=CutRequest("params"))
    weight: Any = make_stage(model, cut=cut, index=1).module.get_submodule("blocks.0").weight
    assert (weight.shape, weight.dtype) == ((8, 8), torch.float64)
    assert weight.size(0) == weight.T[0].numel() == 8
    assert copy.deepcopy(weight) is weight
    plain = torch.ones(8, dtype=torch.float32)
    assert torch.equal(plain.expand_as(weight), torch.ones(8, 8))
    assert torch.equal(weight.new_zeros(3, device="cpu") + torch.ones_like(weight[0, :3], device="cpu"), torch.ones(3))
    for compute in (
        lambda: torch.zeros(2, 8) @ weight,
        lambda: functional.linear(torch.zeros(2, 8), weight.t()),
        lambda: torch.zeros(8, 8).add_(weight * 2),
        lambda: torch.cat([torch.zeros(1, 8), weight[:1]]),
        lambda: torch.zeros(2, 8) @ weight.type_as(torch.zeros(1)),
    ):
        with pytest.raises(StageError, match=r"computes with blocks\.0\.weight, which another stage holds"):
            compute()


class Shaping(Reaching):
    """Its forward begins with a state that is made as the first parameter is, and asks another one for its dtype."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).type_as(self.blocks[3].weight)
        state = next(self.parameters()).new_zeros(1, *x.shape[1:])
        for block in self.blocks:
            x = block(x + state).tanh()
        return self.head(x + self.blocks[0].weight.new_ones(8, device=x.device))  # type: ignore[no-any-return, operator]


def test_a_parameter_that_is_asked_for_a_shape_or_a_dtype_may_be_on_another_stage() -> None:
    def call(model: nn.Module) -> Any:
        return next_token_loss(model(TOKENS), (TOKENS, TARGETS))[0]

    model = Shaping(0).double()
    is_the_model(model, call, cut_model(model, stages=2, call=call, request=CutRequest("params")))
