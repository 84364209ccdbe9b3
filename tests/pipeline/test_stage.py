"""Stages give the results of the model, refuse what they cannot run, and print their cut."""

import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwise.model.deferred_init import build_with_values, install
from meshwise.model.parameter_table import parameter_table
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, cut_model
from meshwise.pipeline.cut.probe_result import CutError
from meshwise.pipeline.run.schedule_interpreter import pack, tensor_specs, unpack
from meshwise.pipeline.run.stage_backward import enter
from meshwise.pipeline.run.stage_forward import StageError, make_stage, nan_like, signature
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.reference import GPT, MLP, GPTConfig, MLPConfig
from pipeline.oracle import TOKENS, gpt, is_the_model, lm, run_stages

pytestmark = pytest.mark.usefixtures("float64")

PARAMS = CutRequest("params")


def total(model: nn.Module) -> Tensor:
    out: Tensor = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum()
    return out


def mlp() -> MLP:
    return MLP(MLPConfig(widths=(4, 6, 6, 5)))


# ---- the stage ---------------------------------------------------------------------------------------------------


def test_stages_hold_the_models_own_parameters_under_their_names_and_each_somewhere() -> None:
    model = gpt()
    cut = cut_model(model, stages=3, call=lm, request=PARAMS)
    stages = [make_stage(model, cut=cut, index=index) for index in range(3)]
    parameters = [dict(stage.module.named_parameters()) for stage in stages]
    assert {name for names in parameters for name in names} == {name for name, _ in model.named_parameters()}
    assert sum(map(len, parameters)) == len(list(model.parameters()))
    assert all(parameter is model.get_parameter(name) for names in parameters for name, parameter in names.items())
    assert [sum(p.numel() for p in names.values()) for names in parameters] == list(cut.parameters)


def test_a_tied_parameter_is_on_both_stages_and_named_in_the_cut() -> None:
    model = gpt(tied=True)
    cut = cut_model(model, stages=3, call=lm, request=PARAMS)
    assert cut.ties == {"embedding.weight": (0, 2)}
    last = make_stage(model, cut=cut, index=2)
    assert last.module.get_parameter("head.weight") is model.embedding.weight
    assert "embedding.weight is on stages 0, 2: one parameter" in str(cut)


def test_the_model_itself_is_left_as_it_was() -> None:
    model = gpt(dropout=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    cut = cut_model(model, stages=3, call=lm)
    make_stage(model, cut=cut, index=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert lm(model).isfinite()


def test_running_statistics_are_not_touched_by_the_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    cut_model(model, stages=2, call=total)
    assert not model.get_buffer("1.running_mean").any()


def test_micro_batches_may_differ_in_shape_and_be_in_flight_together() -> None:
    model = gpt()
    cut = cut_model(model, stages=2, call=lm, request=PARAMS)
    first, last = (make_stage(model, cut=cut, index=index) for index in range(2))
    calls = [lambda model, part=TOKENS[:, :size]: model(part) for size in (12, 7, 3)]
    sent = [first.run(call, received={}) for call in calls]
    for call, values in zip(calls, sent, strict=True):
        torch.testing.assert_close(last.run(call, received=values), call(model), rtol=1e-12, atol=1e-15)


def test_a_frozen_beginning_sends_no_gradient_back() -> None:
    model = gpt()
    model.embedding.requires_grad_(requires_grad=False)
    assert model.positions is not None
    model.positions.requires_grad_(requires_grad=False)
    cut = cut_model(model, stages=7, call=lm, request=PARAMS)
    stages = is_the_model(model, lm, cut)
    skeleton, _ = pack(stages[0].run(lm, received={}))
    assert [spec.requires_grad for spec in tensor_specs(skeleton)] == [False]


class Recomputing(nn.Module):
    """Blocks under activation checkpoints, a head that uses the embedding's matrix, and one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.again = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.again(self.embedding(tokens))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return functional.linear(self.again(x), self.embedding.weight)


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_checkpoints_ties_by_use_and_layers_that_run_twice(stages: int) -> None:
    model = Recomputing()
    cut = cut_model(model, stages=stages, call=lm, request=PARAMS)
    is_the_model(model, lm, cut)
    assert cut.keys == ("embedding", "again", "blocks.0", "blocks.1", "blocks.2", "again:2")
    assert cut.ties["embedding.weight"] == tuple(range(stages))
    assert cut.ties["again.weight"] == (0 if stages == 2 else 1, stages - 1)


class Collecting(nn.Module):
    """Returns what every layer has made, or the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, *, every: bool = True) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return torch.stack(kept) if every else x


def test_whatever_is_used_later_crosses() -> None:
    model = Collecting()
    cut = cut_model(model, stages=4, call=total, request=PARAMS)
    assert cut.sends[2] == ("layers.0", "layers.1", "layers.2")
    is_the_model(model, total, cut)


def test_an_output_that_does_not_cross_is_nan() -> None:
    """The example used the last layer alone; a run that uses all of them gets no made-up values."""
    model = Collecting()
    cut = cut_model(model, stages=2, call=lambda model: model(torch.ones(1, 4), every=False), request=PARAMS)
    first, last = (make_stage(model, cut=cut, index=index) for index in range(2))
    out = last.run(lambda model: model(torch.ones(3, 4)), received=first.run(total, received={}))
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def test_pieces_of_other_stages_in_a_row_return_one_nan() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    cut = cut_model(model, stages=2, call=total, request=PARAMS)
    stages = [make_stage(model, cut=cut, index=index) for index in range(2)]
    outputs: list[Tensor] = []
    for layer in list(stages[1].module)[:2]:  # type: ignore[call-overload]
        layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    sent = stages[0].run(total, received={})
    loss = stages[1].run(total, received=sent, shapes=stages[0].state.shapes)
    first, second = outputs
    assert first is second
    assert first.isnan().all()
    assert torch.equal(loss, total(model))


def test_nan_that_was_written_to_is_nan_again_the_next_time() -> None:
    nan = partial(nan_like, torch.empty(2, 3), device=torch.device("cpu"))
    first = nan(fresh=False)
    assert first.untyped_storage().nbytes() == first.itemsize
    assert nan(fresh=False).data_ptr() == first.data_ptr()
    first.zero_()
    own = nan(fresh=True)
    assert own.isnan().all()
    assert not own.zero_().any()
    assert nan(fresh=False).isnan().all()


class Wayward(nn.Module):
    """Runs its layers in another order if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, swapped: bool = False) -> Tensor:
        out: Tensor = self.a(self.b(x)) if swapped else self.b(self.a(x))
        return out


def test_another_order_than_the_example_is_an_error_that_names_it() -> None:
    model = Wayward()
    cut = cut_model(model, stages=2, call=total, request=PARAMS)
    stage = make_stage(model, cut=cut, index=0)
    with pytest.raises(StageError, match="b runs where a was due"):
        stage.run(lambda model: model(torch.ones(1, 4), swapped=True), received={})
    assert set(stage.run(total, received={})) == {"a"}


def test_an_exception_of_the_model_passes_and_the_stage_can_run_again() -> None:
    model = gpt()
    stage = make_stage(model, cut=cut_model(model, stages=2, call=lm, request=PARAMS), index=0)
    with pytest.raises(ValueError, match="do not fit the context"):
        stage.run(lambda model: model(TOKENS.repeat(1, 2)), received={})
    assert set(stage.run(lm, received={})) == set(stage.state.sends)


def test_forward_hooks_of_other_stages_modules_run() -> None:
    model = gpt()
    stage = make_stage(model, cut=cut_model(model, stages=2, call=lm, request=PARAMS), index=0)
    ended = []
    for name, module in stage.module.named_modules():
        if name in ("", "blocks.0", "blocks.1"):
            module.register_forward_hook(lambda *_, name=name: ended.append(name), always_call=True)
    stage.run(lm, received={})
    assert ended == ["blocks.0", "blocks.1", ""]


def test_the_table_of_a_stage_has_its_parameters_under_their_names() -> None:
    model = gpt(tied=True)
    cut = cut_model(model, stages=4, call=lm, request=PARAMS)
    for index in range(4):
        module = make_stage(model, cut=cut, index=index).module
        rows = {row.name for row in parameter_table(module).rows}
        assert rows == {name for name, stages in cut.holders.items() if index in stages}


# ---- the cut -----------------------------------------------------------------------------------------------------


def test_stages_begin_at_the_given_names() -> None:
    model = gpt()
    cut = cut_model(model, stages=3, call=lm, request=CutRequest("params", options=CutOptions(at=("blocks.1", "norm"))))
    assert [cut.keys[bound] for bound in cut.bounds[1:-1]] == ["blocks.1", "norm"]
    is_the_model(model, lm, cut)


@pytest.mark.parametrize(
    "at, message",
    [
        (("blocks.1",), "3 stages need 2 names to begin at, not 1: blocks.1"),
        (("block.1", "norm"), "a stage cannot begin at 'block.1'; it can at, for example, blocks.1"),
        (("embedding", "norm"), "a stage cannot begin at 'embedding'"),
        (("norm", "blocks.1"), "the model runs blocks.1, norm in this order, not norm, blocks.1"),
        (("norm", "norm"), "the model runs norm, norm in this order"),
    ],
)
def test_names_that_cannot_be_cut_at_are_refused(at: tuple[str, ...], message: str) -> None:
    with pytest.raises(CutError, match=message.replace(".", r"\.")):
        cut_model(gpt(), stages=3, call=lm, request=CutRequest("params", options=CutOptions(at=at)))


def test_more_stages_than_pieces_is_refused_with_how_many_fit() -> None:
    with pytest.raises(CutError, match=r"9 stages do not fit: .* at most pp·virtual_stages=8"):
        cut_model(gpt(), stages=9, call=lm, request=CutRequest("params", options=CutOptions(how="blocks")))
    with pytest.raises(CutError, match=r"MLP has 3 pieces, so at most pp·virtual_stages=3"):
        cut_model(mlp(), stages=4, call=total, request=PARAMS)


def test_a_model_without_values_is_cut_by_operations_for_want_of_time() -> None:
    with torch.device("meta"):
        model = gpt()
    call = lambda model: model(TOKENS.to("meta"))  # noqa: E731
    by_memory = CutRequest("memory", options=CutOptions(how="blocks"))
    cut = cut_model(model, stages=3, call=call, request=by_memory)
    assert cut.bounds == cut_model(gpt(), stages=3, call=lm, request=by_memory).bounds
    by_work = cut_model(model, stages=3, call=call)
    assert by_work.by == "operations"
    assert "FLOP" in str(by_work)
    products = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "position" not in name)
    assert sum(by_work.loads) > 3 * 2 * TOKENS.numel() * products, "of a forward, and twice that of the backward"
    assert max(by_work.loads) < 0.5 * sum(by_work.loads)


def test_memory_weighs_the_micro_batches_that_a_stage_holds() -> None:
    """1F1B holds more on early stages, so they get fewer blocks."""
    model = GPT(GPTConfig(vocabulary=31, context=12, layers=12, heads=2, width=8))
    even = cut_model(model, stages=2, call=lm, request=CutRequest("memory"))
    two, three = (make_schedule("1f1b", pp=pp, microbatches=4) for pp in (2, 3))
    early = cut_model(model, stages=2, call=lm, request=CutRequest("memory", schedule=two))
    assert early.bounds[1] < even.bounds[1]
    with pytest.raises(CutError, match="the schedule has 3 stages, the cut 2"):
        cut_model(model, stages=2, call=lm, request=CutRequest("memory", schedule=three))


class Slow(nn.Module):
    """A layer that works much, and has as many parameters as any other."""

    def __init__(self, *, rounds: int) -> None:
        super().__init__()
        self.linear, self.rounds = nn.Linear(64, 64), rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = self.linear(x).tanh()
        return x


def test_time_is_measured() -> None:
    model = nn.Sequential(*(Slow(rounds=rounds) for rounds in (200, 1, 1, 1)))
    call = lambda model: model(torch.ones(16, 64)).sum()  # noqa: E731
    assert cut_model(model, stages=2, call=call).bounds == (0, 1, 4)
    assert cut_model(model, stages=2, call=call, request=PARAMS).bounds == (0, 2, 4)


def test_a_cut_prints_as_a_table_and_pickles() -> None:
    cut = cut_model(gpt(tied=True), stages=3, call=lm, request=CutRequest("params", options=CutOptions(how="blocks")))
    assert pickle.loads(pickle.dumps(cut)) == cut
    assert str(cut).splitlines() == [
        "stage  runs                      parameters  params  part    then sends",
        "0      embedding … blocks.0 (3)  1,128       1,128   30.2 %  blocks.0",
        "1      blocks.1 … blocks.2 (2)   1,568       1,568   42.0 %  blocks.2",
        "2      blocks.3 … head (3)       1,040       1,040   27.8 %",
        "by params, the largest stage is 1.26 times the mean",
        "embedding.weight is on stages 0, 2: one parameter",
    ]


# ---- parcels -----------------------------------------------------------------------------------------------------


def test_any_tree_is_packed_and_unpacked() -> None:
    shared = torch.ones(2, requires_grad=True)
    values = {"a": (shared, None, 3), "b": [{"c": shared, "d": torch.arange(3)}]}
    skeleton, parts = pack(values)
    assert [tuple(tensor.shape) for tensor in parts] == [(2,), (3,)]
    skeleton = pickle.loads(pickle.dumps(skeleton))
    assert [(spec.dtype, spec.requires_grad) for spec in tensor_specs(skeleton)] == [
        (torch.float64, True),
        (torch.int64, False),
    ]
    back = unpack(skeleton, arrived=parts)
    assert back["a"][0] is back["b"][0]["c"] is shared
    assert back["a"][1:] == (None, 3)


@dataclass
class Inputs:
    x: Tensor
    name: str = ""


def test_signatures_of_dataclasses_differ_by_shape() -> None:
    one, other = Inputs(torch.zeros(2, 3)), Inputs(torch.zeros(3, 3))
    assert signature(one) == signature(Inputs(torch.ones(2, 3)))
    assert len({signature(one) for one in (one, other, Inputs(one.x, "a"), Inputs(one.x.int()))}) == 4


def test_nan_has_one_signature() -> None:
    assert signature([float("nan"), 1.0]) == signature([float("nan"), 1.0]) != signature([0.0, 1.0])


def test_a_model_may_change_in_place_what_it_was_given() -> None:
    leaf = torch.ones(3, requires_grad=True)
    inside = enter({"x": leaf})["x"]
    inside.mul_(2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_one_stage_is_the_whole_model() -> None:
    model = mlp()
    cut = cut_model(model, stages=1, call=total, request=PARAMS)
    assert cut.sends == ()
    stage = make_stage(model, cut=cut, index=0)
    torch.testing.assert_close(run_stages([stage], total), total(model).detach(), rtol=0, atol=0)


def test_a_model_without_values_is_cut_and_initialized_stage_by_stage() -> None:
    source = build_with_values(gpt, seed=3)
    cut = cut_model(source.module, stages=2, call=lambda model: model(TOKENS.to("meta")), request=PARAMS)
    stages = [make_stage(source.module, cut=cut, index=index) for index in range(2)]
    for stage in stages:
        for row in parameter_table(stage.module).rows:
            install(stage.module, row=row, tensor=source.full(row.name))
    whole = gpt()
    whole.load_state_dict({name: source.full(name) for name in whole.state_dict()})
    torch.testing.assert_close(run_stages(stages, lm), lm(whole).detach(), rtol=1e-12, atol=0)


def test_a_gradient_that_a_stage_passes_on_is_not_copied() -> None:
    leaf, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
    (enter({"x": leaf})["x"] + 1).backward(gradient)
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == gradient.data_ptr()
