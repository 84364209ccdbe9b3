"""Blocks under compile=blocks: the same bits with the eager backend, one compilation for all blocks of one shape."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model import compiled_blocks
from meshwise.model.compiled_blocks import CompiledBlocks, compiles_on
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.reference.mixture_gpt import MixtureConfig, MixtureGPT
from meshwise.simulate.rehearsal import rehearse
from meshwise.testing import agree, alone, outcome, run
from meshwise.verify import verify
from simulate.subjects import gpt_subject
from warm_processes import Processes

# torch.compile itself reads `.grad` of tensors that are no leaves.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="torch 2.11 crashes when two threads compile; ranks are threads"
    ),
]

PLANS = (
    "dp=2 zero=0 microbatches=2",
    "dp=2 zero=2",
    "dp=2 zero=2 overlap_gather=1",
    "dp=2 zero=1 precision=bf16",
    "dp=2 zero=3 recompute=full",
    "pp=2 microbatches=2 recompute=full",
)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tokens(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def model(**changes: Any) -> nn.Module:
    return GPT(GPTConfig(**{"vocabulary": 32, "context": 8, "layers": 4, "heads": 2, "width": 16, **changes})).double()


def mixture() -> nn.Module:
    return MixtureGPT(MixtureConfig(vocabulary=32, context=8, layers=2, heads=2, width=16, experts=4)).double()


def trained(world: World, plan: str, changes: dict[str, Any]) -> tuple[list[Any], list[Tensor], CompiledBlocks]:
    """Losses and norms of three steps, the parameters after them, and the counts."""
    options = Options(compiler="eager", example=tokens(0))
    trainer = parallelize(lambda: model(**changes), plan, world=world, loss=next_token_loss, options=options, lr=1e-2)
    results = [trainer.step(tokens(number)) for number in range(3)]
    numbers = [(result.loss, result.grad_norm) for result in results]
    return numbers, [value.clone() for _, value in trainer.full_parameters()], trainer.compiled


# Other tests here have stages and micro-batches, and one on processes has bf16; gathers that overlap have ZeRO 2.
@pytest.mark.grid(
    Grid({"plan": PLANS}, heavy=lambda cell: cell["plan"] not in ("dp=2 zero=2 overlap_gather=1", PLANS[4]))
)
def test_the_eager_backend_gives_the_same_bits(plan: str) -> None:
    ranks = Plan.parse(plan).mesh().size
    expected, values, none = run(ranks, trained, args=(plan, {}))[0]
    found, others, counts = run(ranks, trained, args=(f"{plan} compile=blocks", {}))[0]
    assert found == expected
    assert all(map(torch.equal, others, values))
    assert none.blocks == 0
    assert counts.blocks > 0
    assert (counts.graph_breaks, counts.recompilations, counts.drawing) == (0, 0, [])


@pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # of inductor itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_agrees_with_one_process() -> None:
    def main(world: World, plan: str) -> tuple[list[float], list[Tensor], int]:
        trainer = parallelize(model, plan, world=world, loss=next_token_loss, lr=1e-2)
        losses = [trainer.step(tokens(number)).loss for number in range(3)]
        return losses, [value.clone() for _, value in trainer.full_parameters()], trainer.compiled.graphs

    expected, values, none = run(1, main, args=("dp=1",))[0]
    losses, compiled, graphs = run(1, main, args=("dp=1 compile=blocks",))[0]
    assert (none, graphs) == (0, 1)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(compiled, values, rtol=0, atol=1e-9)


ALIKE = {"dp=2": False, "tp=2": True, "tp=2 sequence_parallel=1": True}


@pytest.mark.grid(Grid({"plan": tuple(ALIKE)}, heavy=lambda cell: "sequence" in cell["plan"]))
def test_ranks_that_split_layers_compile_the_same_kernels(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank takes the kernels that it finds fastest, values that tp ranks share get other last bits."""
    asked: list[bool] = []

    def compiled(graph: torch.fx.GraphModule, _: Any, **settings: Any) -> Any:
        asked.append(settings == {"config_patches": {"deterministic": True}})
        return graph.forward

    monkeypatch.setattr(compiled_blocks, "compiler_backend", lambda _: compiled)
    compiled_blocks._counting.cache_clear()

    def main(world: World) -> None:
        build = partial(model, layers=1)
        trainer = parallelize(build, f"{plan} compile=blocks", world=world, loss=next_token_loss, lr=1e-2)
        for step in range(2):  # the first one finds out which blocks draw, and compiles nothing
            trainer.step(tokens(step))

    run(2, main)
    compiled_blocks._counting.cache_clear()
    assert set(asked) == {ALIKE[plan]}


SPLIT = (
    "tp=2",
    "tp=2 dp=2 zero=3 recompute=full",
    "tp=2 sequence_parallel=1",
    "tp=4 tp_mode=2d",
    "pp=2 tp=2 microbatches=2",
)


# Other tests here have ZeRO 3 with recomputation, and stages, around blocks that are whole. A test on processes has
# the bits of tp=2.
@pytest.mark.grid(
    Grid({"plan": SPLIT}, heavy=lambda cell: cell["plan"] not in ("tp=2 sequence_parallel=1", "tp=4 tp_mode=2d"))
)
def test_a_split_block_is_one_graph_but_for_split_norms(plan: str) -> None:
    ranks = Plan.parse(plan).mesh().size
    expected, values, _ = run(ranks, trained, args=(plan, {"layers": 2}))[0]
    compiled = run(ranks, trained, args=(f"{plan} compile=blocks", {"layers": 2}))
    assert compiled[0][0] == expected
    assert all(map(torch.equal, compiled[0][1], values))
    assert sum(counts.graphs for _, _, counts in compiled) > 0
    assert "2d" in plan or not any(counts.graph_breaks for _, _, counts in compiled)


class Gated(nn.Module):
    """Block whose two linears read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        result: Tensor = x + self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


@pytest.mark.parametrize("frozen", ["nothing", "gate_proj.weight"])
def test_a_compiled_block_makes_the_collectives_of_the_block(frozen: str) -> None:
    """The linears share the gather of their input, in the backward too."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Gated(), Gated()).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(frozen))
        return model

    def main(world: World, compiled: str) -> tuple[list[float], list[Tensor], Counter[str], int]:
        options = Options(compiler="aot_eager")
        trainer = parallelize(
            build, f"tp=2 sequence_parallel=1 {compiled}", world=world, loss=squares, options=options, lr=1e-2
        )
        batch = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        losses = [trainer.step(batch).loss for _ in range(2)]
        with world.record() as calls:
            losses.append(trainer.step(batch).loss)
        values = [value.clone() for _, value in trainer.full_parameters()]
        return losses, values, Counter(call.kind for call in calls), trainer.compiled.graph_breaks

    expected, found = run(2, main, args=("",)), run(2, main, args=("compile=blocks",))
    for (losses, values, calls, _), (others, compiled, made, _) in zip(expected, found, strict=True):
        assert others == losses
        assert all(map(torch.equal, compiled, values))
        assert made == calls
    assert [breaks for *_, breaks in found] == [0, 0]


def squares(output: Tensor, _batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def test_a_mixture_is_compiled_around_its_experts() -> None:
    def trained_mixture(world: World, more: str) -> tuple[list[float], int]:
        options = Options(compiler="eager")
        trainer = parallelize(mixture, f"dp=2 ep=2 {more}", world=world, loss=next_token_loss, options=options, lr=1e-2)
        return [trainer.step(tokens(number)).loss for number in range(3)], trainer.compiled.graphs

    expected = run(2, trained_mixture, args=("",))
    found = run(2, trained_mixture, args=("compile=blocks",))
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    assert sum(graphs for _, graphs in found) > 0


def uneven() -> list[tuple[Tensor, Tensor]]:
    """Batches whose rows and tokens most plans do not divide; the last has fewer rows than some plans have ranks."""
    drawn = torch.randint(32, (19, 8), generator=torch.Generator().manual_seed(1))
    return [(rows[:, :-1], rows[:, 1:]) for rows in drawn.split((12, 5, 2))]


UNEVEN = (
    "dp=3 zero=1",
    "dp=3 zero=3 microbatches=2",
    "pp=2 microbatches=3 schedule=zb-h1",
    "pp=2 dp=2 zero=2 microbatches=2",
    "tp=2 sequence_parallel=1",
)


@pytest.mark.grid(Grid({"plan": UNEVEN}, heavy=lambda cell: cell["plan"] in (UNEVEN[0], *UNEVEN[3:])))
def test_compiled_plans_agree_with_one_process(plan: str) -> None:
    """A part of the cells of the other grids of agreement."""

    def main(world: World) -> Any:
        options = Options(compiler="eager", example=tokens(0))
        named = f"{plan} compile=blocks"
        trainer = parallelize(model, named, world=world, loss=next_token_loss, options=options, lr=1e-2)
        return outcome(trainer, batches=uneven()), trainer.compiled.graphs

    expected = alone(model, batches=uneven(), loss=next_token_loss, lr=1e-2)
    found = run(Plan.parse(plan).mesh().size, main)
    assert sum(graphs for _, graphs in found) > 0
    for steps, _ in found:
        agree(steps, expected, bound=1e-9)


def transformer(kind: str, *, layers: int = 2, cache: bool = False) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    more = {"vocab_size": 32, "num_key_value_heads": 2, "use_cache": cache, "num_local_experts": 4}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # GPT-2's
    no_dropout |= dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)  # BERT's and ViT's
    pictures = {"image_size": 8, "patch_size": 4, "num_labels": 32}
    model = {"bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}.get(kind, AutoModelForCausalLM)
    built: nn.Module = model.from_config(AutoConfig.for_model(kind, **sizes, **more, **no_dropout, **pictures))
    return built


def pictures(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(32, (4,), generator=generator)


def logits_loss(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    targets = batch[1].flatten()
    return functional.cross_entropy(output.logits.view(targets.numel(), -1), targets, reduction="sum"), len(targets)


def test_a_cache_that_differs_in_each_layer_is_told() -> None:
    """Without a cache the layers share their code."""
    for cache, recompilations in ((False, 0), (True, 3)):
        torch.compiler.reset()
        build, options = partial(transformer, "llama", layers=4, cache=cache), Options(compiler="eager")
        trainer = parallelize(build, "dp=1 compile=blocks", loss=logits_loss, options=options, lr=1e-2)
        trainer.step(tokens(0))
        said = pytest.warns(UserWarning, match="4 times, .* set use_cache=False") if cache else nullcontext()
        with said:
            trainer.step(tokens(1))
        assert trainer.compiled.recompilations == recompilations


def steps_of(
    world: World, kind: str, plan: str, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[list[tuple[float, float]], list[Tensor], tuple[int, int, int]]:
    """Losses and norms of three steps, the parameters after them, and numbers of blocks, graphs and graph breaks."""
    build, options, batch = partial(transformer, kind), Options(compiler="eager"), pictures if kind == "vit" else tokens
    trainer = parallelize(build, plan, world=world, loss=logits_loss, options=options, optimizer=optimizer, lr=1e-2)
    results = [trainer.step(batch(number)) for number in range(3)]
    numbers, counts = [(result.loss, result.grad_norm) for result in results], trainer.compiled
    values = [value.clone() for _, value in trainer.full_parameters()]
    return numbers, values, (counts.blocks, counts.graphs, counts.graph_breaks)


# A test on processes has tp=2.
@pytest.mark.grid(
    Grid(
        {"kind": ("llama", "mixtral"), "plan": ("tp=2", "tp=2 sequence_parallel=1", "dp=2 ep=2")},
        exists=lambda cell: (cell["kind"], cell["plan"]) != ("llama", "dp=2 ep=2"),
        heavy=lambda cell: cell["plan"] == "tp=2",
    )
)
def test_blocks_of_transformers_are_compiled_around_split_layers(kind: str, plan: str) -> None:
    """Compare losses alone, and with SGD: while a thread compiles, `torch.compiler.is_compiling()` holds in all
    threads, and Adam then computes by other formulas."""
    sgd = torch.optim.SGD
    expected = run(2, steps_of, args=(kind, plan, sgd))
    found = run(2, steps_of, args=(kind, f"{plan} compile=blocks", sgd))
    assert [[loss for loss, _ in each[0]] for each in found] == [[loss for loss, _ in each[0]] for each in expected]
    assert sum(graphs for _, _, (_, graphs, _) in found) > 0
    assert kind == "mixtral" or not any(breaks for *_, (_, _, breaks) in found)


EACH = Grid(
    {
        "kind": ("llama", "qwen2", "qwen3", "gpt2", "bert", "vit"),
        "plan": ("dp=1", "dp=1 microbatches=2", "dp=1 recompute=full", "dp=1 precision=bf16"),
    },
    exists=lambda cell: (
        cell["plan"] == "dp=1"
        or (cell["kind"], cell["plan"].split()[1])
        in (("qwen2", "microbatches=2"), ("qwen3", "precision=bf16"), ("bert", "recompute=full"))
    ),
    # those like Llama are in tests of a cache and on processes, bf16 too
    heavy=lambda cell: cell["kind"] in ("llama", "qwen2", "qwen3") or (cell["kind"], cell["plan"]) == ("bert", "dp=1"),
)


@pytest.mark.grid(EACH)
def test_each_family_of_transformers_keeps_its_bits(kind: str, plan: str) -> None:
    [(expected, values, _)] = run(1, steps_of, args=(kind, plan))
    [(found, others, (blocks, graphs, breaks))] = run(1, steps_of, args=(kind, f"{plan} compile=blocks"))
    assert found == expected
    assert all(map(torch.equal, others, values))
    assert (blocks, breaks) == (2, 0)
    assert graphs > 0


@pytest.mark.parametrize("kind, plan", [("qwen2", "tp=2"), ("qwen3", "dp=2 zero=3 precision=bf16")])
def test_processes_that_compile_keep_the_bits(kind: str, plan: str, processes: Processes) -> None:
    expected = run(2, steps_of, args=(kind, plan), on=processes)
    found = run(2, steps_of, args=(kind, f"{plan} compile=blocks"), on=processes)
    for (numbers, values, _), (others, compiled, (_, graphs, breaks)) in zip(expected, found, strict=True):
        assert others == numbers
        assert all(map(torch.equal, compiled, values))
        assert (graphs > 0, breaks) == (True, 0)


def test_blocks_of_one_shape_are_compiled_once() -> None:
    counts = run(1, trained, args=("dp=1 compile=blocks", {}))[0][2]
    assert (counts.blocks, counts.graphs) == (4, 1)
    assert str(counts).startswith("4 blocks, 1 graphs compiled, 0 graph breaks, 0 recompilations")


def test_a_block_that_draws_runs_as_it_is_and_says_so() -> None:
    plain = run(1, trained, args=("dp=1", {"dropout": 0.1}))[0]
    with pytest.warns(UserWarning, match=r"blocks\.0 draws random numbers, so compile=blocks runs it uncompiled"):
        numbers, _, counts = run(1, trained, args=("dp=1 compile=blocks", {"dropout": 0.1}))[0]
    assert numbers == plain[0]
    assert (counts.graphs, len(counts.drawing)) == (0, 4)


def test_blocks_are_compiled_where_torch_draws() -> None:
    plain, values, _ = run(1, trained, args=("dp=1 random=local", {"dropout": 0.1}))[0]
    for more in ("compile=blocks", "compile=blocks recompute=full", "recompute=selective"):
        torch.compiler.reset()
        numbers, others, counts = run(1, trained, args=(f"dp=1 random=local {more}", {"dropout": 0.1}))[0]
        assert numbers == plain, "the masks are equal, and a backward repeats them"
        assert all(map(torch.equal, others, values))
        assert counts.drawing == []
        assert (counts.graphs > 0) == ("compile" in more)


class Broken(nn.Module):
    """A residual block whose forward torch.compile cuts in two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        result: Tensor = x + self.second(y.tanh())
        return result


def test_a_graph_break_is_counted_and_named() -> None:
    broken = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Broken()) for _ in range(2)))
    options = Options(compiler="eager")

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.square().sum(), len(batch)

    trainer = parallelize(broken, "dp=1 compile=blocks", loss=loss, options=options, lr=1e-2)
    trainer.step(torch.ones(2, 4))
    with pytest.warns(UserWarning, match="cut the forward of .* into 2 graphs; TORCH_LOGS=graph_breaks"):
        trainer.step(torch.ones(2, 4))
    assert trainer.compiled.graph_breaks == 1


def test_blocks_compile_by_themselves_on_gpus_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton: dict[str, object] = {}
    monkeypatch.setattr(compiled_blocks, "find_spec", triton.get)
    monkeypatch.setattr(compiled_blocks, "gpu_properties", lambda device: SimpleNamespace(major=device.index))
    cpu, old, new = torch.device("cpu"), torch.device("cuda", 6), torch.device("cuda", 7)
    assert not any(map(compiles_on, (cpu, old, new)))
    triton["triton"] = object()
    assert list(map(compiles_on, (cpu, old, new))) == [False, False, True]


@pytest.mark.parametrize("there", [False, True])
def test_a_trainer_shows_whether_its_blocks_are_compiled(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.engine.parallelize.compiles_on", lambda _device: there)
    options = Options(compiler="eager")
    trainer = parallelize(model, "dp=1 compile=auto", loss=next_token_loss, options=options, lr=1e-2)
    trainer.step(tokens(0))
    trainer.step(tokens(1))
    assert str(trainer.plan) == ("compile=blocks" if there else "dp=1")
    assert trainer.compiled.graphs == there


def test_verify_compares_a_plan_with_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(compiler="eager")
    monkeypatch.setattr("meshwise.engine.parallelize.compiles_on", lambda _device: True)
    for asked in ("blocks", "auto"):
        plan = f"dp=2 zero=1 compile={asked}"
        report = verify(model, next_token_loss, [tokens(0), tokens(1)], plan, lr=1e-2, options=options)
        assert report.ok, str(report)
        assert report.plan == "dp=2 zero=1 compile=blocks"


def test_a_rehearsal_takes_a_plan_with_compiled_blocks() -> None:
    """It runs uncompiled: it has the operations of the same plan without compiled blocks."""
    subject = gpt_subject()
    compiled, plain = (rehearse(subject, plan=f"dp=2 {more}", ranks=2) for more in ("compile=blocks", ""))
    assert compiled.tapes == plain.tapes
    assert str(rehearse(subject, plan="dp=2 compile=auto", ranks=2, device="cpu").plan) == "dp=2"
    assert str(rehearse(subject, plan="dp=2 compile=auto", ranks=2, device="cuda").plan) == "dp=2 compile=blocks"


@pytest.mark.parametrize("plan", ["cp=2", "recompute=selective", "budget=1G"])
def test_what_compiled_blocks_cannot_do_is_refused(plan: str) -> None:
    with pytest.raises(PlanError, match="compile=blocks"):
        Plan.parse(f"{plan} compile=blocks")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compiler='nothing' is no backend of torch\.compile; there are .*inductor"):
        parallelize(model, "dp=1 compile=blocks", loss=next_token_loss, options=Options(compiler="nothing"), lr=1e-2)
