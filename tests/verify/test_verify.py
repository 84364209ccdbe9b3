"""A sound plan passes, and the report says so; what cannot be compared is refused in words."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.gradient_reduction import CodecReduction, ReducingRanks
from meshwise.engine.parallelize import Options
from meshwise.plan import PlanError
from meshwise.reference import GPT, MLP, GPTConfig, MLPConfig, next_token_loss
from meshwise.testing import run
from meshwise.verify import Report, verify
from warm_processes import Processes

TRAINING: dict[str, Any] = {"lr": 1e-2, "options": Options(clip_norm=0.5)}


def gpt(**changes: Any) -> GPT:
    shape: dict[str, Any] = {"vocabulary": 16, "context": 4, "layers": 2, "heads": 2, "width": 8, "mlp_ratio": 2}
    return GPT(GPTConfig(**shape | changes))


def tokens(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(16, (size, 5), generator=generator) for size in sizes]
    return [(text[:, :-1], text[:, 1:]) for text in drawn]


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def check(model: Any = gpt, plan: str = "dp=2 zero=1", **changes: Any) -> Report:
    return verify(model, next_token_loss, tokens(5, 3), plan, **TRAINING | changes)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=3 zero=1 microbatches=2", "dp=2 zero=2", "dp=4 zero=3"])
def test_a_sound_plan_is_the_same_model(plan: str) -> None:
    report = check(plan=plan)
    assert report.ok, str(report)
    assert report.first is None
    assert len(report.steps) == 2
    assert "is the same model as one process" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_narrower_dtype_a_sound_plan_stays_within_what_rounding_explains(dtype: torch.dtype) -> None:
    report = check(plan="dp=4 zero=2", dtype=dtype)
    assert report.ok, str(report)
    assert max(line.gradient.difference for line in report.parameters if line.gradient is not None) > 1e-9
    assert str(dtype).removeprefix("torch.") in report.setting


def test_the_report_has_a_line_for_every_step_and_parameter() -> None:
    report = check(lambda: gpt(tied=True, bias=True))
    names = [name for name, _ in gpt(tied=True, bias=True).named_parameters()]
    assert sorted(line.name for line in report.parameters) == sorted(names)
    assert [step.loss_apart.step for step in report.steps] == [1, 2]
    assert all(f"\n{name} " in str(report) for name in names)


def test_a_module_is_compared_as_it_is_and_left_as_it_was() -> None:
    model = gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert verify(model, next_token_loss, tokens(3), "dp=2 zero=3", **TRAINING).ok
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert next(model.parameters()).dtype == torch.float32


class WithClosure(nn.Module):
    """Runs its matrices in a lambda that closes over them, as the MLP of minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = up, down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.run_mlp = lambda x, *, scale=0.5: down(up(x).tanh() * scale)

    def forward(self, x: Tensor) -> Any:
        return self.run_mlp(x)


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=2 precision=bf16", "pp=2 microbatches=2 schedule=zb-h1"])
@pytest.mark.parametrize("given", ["a module", "a function"])
def test_a_module_with_functions_that_close_over_its_modules_is_compared(plan: str, given: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(WithClosure(), WithClosure())

    batches = [torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]
    model = build() if given == "a module" else build
    assert verify(model, squares, batches, plan, **TRAINING | {"options": Options(example=batches[0])}).ok


def test_frozen_parameters_are_compared_by_value() -> None:
    def build() -> GPT:
        model = gpt()
        model.get_submodule("positions").requires_grad_(False)
        return model

    report = check(build)
    assert report.ok
    assert {line.name for line in report.parameters if line.gradient is None} == {"positions.weight"}


def test_other_optimizers_and_options_are_those_of_parallelize() -> None:
    def decay(name: str, parameter: Tensor) -> dict[str, float]:
        return {"weight_decay": 0.3 if "head" in name else 0.0}

    options = Options(parameter_options=decay)
    assert verify(gpt, next_token_loss, tokens(5), "dp=2", optimizer=torch.optim.SGD, lr=0.1, options=options).ok


@pytest.mark.parametrize("plan", ["dp=2", "dp=4 microbatches=2", "dp=3 zero=3"])
def test_dropout_takes_part_in_the_comparison(plan: str) -> None:
    report = verify(lambda: gpt(dropout=0.5), next_token_loss, tokens(7, 5, 6), plan, **TRAINING)
    assert report.ok, str(report)
    assert report.notes == ()


def test_dropout_of_each_ranks_own_is_compared_in_eval_mode_and_the_report_says_so() -> None:
    report = verify(lambda: gpt(dropout=0.5), next_token_loss, tokens(4), "dp=2 random=local", **TRAINING)
    assert report.ok
    assert "random=local" in report.notes[0]
    assert "compared in eval mode" in str(report)
    assert verify(gpt, next_token_loss, tokens(4), "dp=2 random=local", **TRAINING).notes == ()


def test_numbers_drawn_from_torchs_own_generator_are_named_and_left_out() -> None:
    class Shuffling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x[:, torch.randperm(3)] if self.training else x)

    with pytest.warns(UserWarning, match=r"aten.randperm.default in the model draws from torch's own generator"):
        report = verify(Shuffling, squares, [torch.randn(6, 3)], "dp=3", lr=1e-2)
    assert report.ok, str(report)
    assert "(aten.randperm.default in the model)" in report.notes[0]


def test_a_cast_to_float32_inside_the_model_sets_the_bound_and_the_report_says_so() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).float().double()

    batch = torch.randn(6, 3)
    report = verify(Narrow, squares, [batch], "dp=3", lr=1e-2)
    assert report.ok, str(report)
    assert "note: the forward computes in float32" in str(report)
    assert "float32" in report.setting


def test_a_narrow_tensor_that_no_parameter_enters_does_not_widen_the_bound() -> None:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.ones(len(batch), dtype=torch.float32)
        return output.square().sum() * torch.tensor(0.5), weights.sum()

    rows = torch.randn(6, 3, dtype=torch.float64)
    report = verify(lambda: nn.Linear(3, 2), loss, [rows], "dp=2", lr=1e-2)
    assert report.ok, str(report)
    assert "bound 1e-09" in report.setting
    assert not report.notes


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_batch_norms_are_compared_and_with_micro_batches_in_eval_mode() -> None:
    rows = [torch.randn(8, 3, dtype=torch.float64) for _ in range(2)]
    report = verify(normed, squares, rows, "dp=4 zero=2", lr=1e-2)
    assert report.ok, str(report)
    assert not report.notes
    report = verify(normed, squares, rows, "dp=2 microbatches=2", lr=1e-2)
    assert report.ok, str(report)
    assert "note: 1 computes statistics of each micro-batch, and the plan cuts a batch into 2" in report.notes[0]


class KeyBias(nn.Module):
    """An attention, whose keys have a bias that its softmax does not see: the gradient of that is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        nn.init.zeros_(self.k.bias)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        output: Tensor = scores.softmax(-1) @ self.v(x)
        return output


def test_a_step_that_rounding_alone_decided_is_not_compared() -> None:
    batches = [torch.randn(rows, 6, 8, dtype=torch.float64) for rows in (5, 3)]
    report = verify(KeyBias, squares, batches, "dp=2 zero=1", lr=1e-2, eps=1e-20)
    assert report.ok, str(report)
    [bias] = [line for line in report.parameters if line.name == "k.bias"]
    assert bias.gradient is not None


def test_a_buffer_that_sees_only_a_ranks_own_rows_is_a_difference() -> None:
    class Centred(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Any:
            self.mean.lerp_(x.detach().mean(0), 0.5)
            return self.layer(x)

    report = verify(Centred, squares, [torch.randn(6, 3)], "dp=3", lr=1e-2)
    assert report.first is not None
    assert report.first.what.startswith("the value of mean")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x - x.mean(0),
        lambda x: x.cumsum(0),
        lambda x: x * x.argsort(0),
        lambda x: x + x.topk(1, 0).values,
        lambda x: x * x.flip(0),
        lambda x: x @ x.T @ x,
    ],
)
@pytest.mark.parametrize("plan", ["dp=2", "microbatches=2"])
def test_a_module_that_mixes_rows_is_named_though_the_gradients_of_others_differ_as_well(mixed: Any, plan: str) -> None:
    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = mixed(x)
            return output

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Mix(), nn.Linear(3, 3))
    report = verify(model, squares, [torch.randn(6, 3)], plan, lr=1e-2)
    assert report.first is not None
    assert (report.first.what, report.first.step, report.first.module) == ("the loss", 1, "2")


def main_of_a_rank(world: World, plan: str) -> Report:
    return check(plan=plan, world=world)


@pytest.mark.processes
def test_every_process_gets_the_report(processes: Processes) -> None:
    reports = run(4, main_of_a_rank, on=processes, args=("dp=4 zero=3 microbatches=2",))
    assert all(report.ok for report in reports)
    assert len(set(map(str, reports))) == 1


# ---- what cannot be compared ---------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_the_world_is_refused() -> None:
    with pytest.raises(PlanError):
        run(2, main_of_a_rank, args=("dp=3",))


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batches is empty"):
        verify(gpt, next_token_loss, [], "dp=2")


def test_a_loss_that_returns_a_mean_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"loss returned a float64 tensor of shape \(\); it must return \(sum, count\)"
    ):
        verify(nn.Linear(2, 1), lambda output, _: output.mean(), [torch.randn(4, 2)], "dp=2")


def test_a_loss_that_counts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="counted nothing"):
        verify(nn.Linear(2, 1), lambda output, _: (output.sum(), 0), [torch.randn(4, 2)], "dp=2")


def test_a_loss_that_is_no_function_of_the_batch_is_refused() -> None:
    def noisy(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return (output + torch.rand(()).double()).sum(), len(batch)

    with pytest.raises(ValueError, match="the same batch gives two different losses"):
        verify(nn.Linear(2, 1), noisy, [torch.randn(4, 2)], "dp=2")


def test_an_error_of_the_model_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        verify(nn.Linear(2, 1), squares, [torch.randn(4, 3)], "dp=2")


class InFloat(nn.Linear):
    """Makes a tensor of float32 and multiplies it by its weight, as RWKV 1 and nanochat."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), self.in_features) @ self.weight.T


def test_the_error_of_a_model_that_needs_float32_names_the_argument_that_works() -> None:
    batches = [torch.randn(4, 2, generator=torch.Generator().manual_seed(0))]
    with pytest.raises(RuntimeError, match="dtype") as raised:
        verify(lambda: InFloat(2, 1), squares, batches, "dp=2", **TRAINING)
    assert any("dtype=torch.float32" in note for note in raised.value.__notes__)
    assert verify(lambda: InFloat(2, 1), squares, batches, "dp=2", dtype=torch.float32, **TRAINING).ok


def test_an_mlp_with_a_scalar_output_passes_in_many_seeds_in_float32() -> None:
    for seed in range(5):
        batch = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
        model = MLP(MLPConfig(widths=(3, 5, 1)))
        report = verify(model, squares, [batch] * 3, "dp=2 microbatches=2", dtype=torch.float32, lr=1e-2)
        assert report.ok, str(report)


@pytest.mark.parametrize("plan", ["dp=3 wire=1bit", "dp=2 zero=2 wire=topk:0.1", "dp=2 pp=2 wire=powersgd:1"])
def test_of_a_codec_the_report_states_what_was_checked(plan: str) -> None:
    report = check(plan=plan)
    assert report.ok, str(report)
    assert "compared with wire=auto; the codec's gradient and errors add up to the true gradient" in str(report)


def test_of_a_codec_that_keeps_no_errors_no_contract_is_checked() -> None:
    assert "no contract of the codec was checked" in str(check(plan="dp=3 wire=1bit feedback=0"))


def test_a_codec_that_loses_its_errors_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "summed_state", lambda bucket, _name: torch.zeros_like(bucket.owned_gradient()))
    report = check(plan="dp=2 wire=int4")
    assert not report.ok
    assert "first to differ: the sum of the codec's gradient and errors, in step 2" in str(report)


def test_a_codec_that_sends_its_errors_in_no_later_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, what it sends and its error add up; over two they do not."""
    encode = CodecReduction._encoded

    def forgetful(self: CodecReduction, values: torch.Tensor, peers: ReducingRanks, **how: Any) -> torch.Tensor:
        if (error := peers.state.get(how["name"])) is not None:
            error.zero_()
        return encode(self, values, peers, **how)

    monkeypatch.setattr(CodecReduction, "_encoded", forgetful)
    assert "the sum of the codec's gradient and errors, in step 2" in str(check(plan="dp=2 wire=int4"))
