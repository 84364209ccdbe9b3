"""Deferred initialization gives the same values everywhere, and never has the whole model in memory."""

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import tensors
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.model.deferred_init import ParameterSource, build_with_values, install
from meshwise.model.parameter_table import parameter_table
from meshwise.model.torch_private import TorchDispatchMode
from meshwise.reference import GPT, GPTConfig
from meshwise.testing import run
from warm_processes import Processes


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=32, context=8, layers=2, heads=2, width=16, tied=True, positions="rotary"))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


class Initialisers(nn.Module):
    """One parameter for every initialiser of torch.nn.init that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("normal_", "uniform_", "trunc_normal_", "xavier_normal_", "xavier_uniform_"):
            self.new(name)
        for name in ("kaiming_normal_", "kaiming_uniform_", "orthogonal_"):
            self.new(name)
        nn.init.sparse_(self.new("sparse"), 0.5)
        nn.init.trunc_normal_(self.new("tail"), std=0.1, a=0.2, b=0.4)
        nn.init.trunc_normal_(self.new("part")[:, :3], std=0.1)
        nn.init.zeros_(self.get_parameter("part")[:, 3:])

    def new(self, name: str) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(12, 10))
        self.register_parameter(name.rstrip("_"), parameter)
        if name.endswith("_"):
            getattr(nn.init, name)(parameter)
        return parameter


class Factories(nn.Module):
    """One buffer for every factory and in-place operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.full((40,), 0.5)
        generator = torch.Generator()
        generator.seed()
        made = {
            "rand": torch.rand(40),
            "randn": torch.randn(40, generator=generator),
            "randint": torch.randint(1000, (40,)),
            "randint_low": torch.randint(10, 1000, (40,)),
            "randperm": torch.randperm(40),
            "rand_like": torch.rand_like(base),
            "randn_like": torch.randn_like(base),
            "randint_like": torch.randint_like(base, 1000),
            "randint_like_tensor": torch.randint_like(base, torch.tensor(1000)),
            "normal": torch.normal(base, 1.0),
            "normal_float": torch.normal(0.0, 1.0, (40,)),
            "bernoulli": torch.bernoulli(base),
            "multinomial": torch.multinomial(torch.rand(40), 20),
            "poisson": torch.poisson(base * 20),
            "dropout": nn.functional.dropout(base, 0.5),
            "gamma": torch.distributions.Gamma(base, base).sample(),
            "dirichlet": torch.distributions.Dirichlet(base).sample(),
            "binomial": torch.binomial(base * 20, base),
        }
        for name in ("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_"):
            made[name] = getattr(torch.empty(40), name)()
        made["bernoulli_"] = torch.empty(40).bernoulli_(0.5)
        made["geometric_"] = torch.empty(40).geometric_(0.1)
        for name, value in made.items():
            self.register_buffer(name, value)
        self.weight = nn.Parameter(torch.zeros(1))


ZOO: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "encoder": encoder,
    "initialisers": Initialisers,
    "factories": Factories,
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2),
    "convolutional": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3).half()),
}


def values(source: ParameterSource, *, backwards: bool = False) -> dict[str, Tensor]:
    names = [name for name, _ in source.module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in source.module.named_buffers(remove_duplicate=False)]
    return {name: source.full(name) for name in (reversed(names) if backwards else names)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)
def test_a_seed_gives_the_same_values_in_any_order_of_requests(build: Callable[[], nn.Module]) -> None:
    source = build_with_values(build, seed=7)
    assert source.deferred
    assert all(parameter.is_meta for parameter in source.module.parameters())
    assert same(values(source), values(source, backwards=True))
    assert same(values(source), values(build_with_values(build, seed=7), backwards=True))


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)
def test_another_seed_gives_other_values_to_everything_random(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    one, two = (build().state_dict() for _ in range(2))
    ours, theirs = values(build_with_values(build, seed=7)), values(build_with_values(build, seed=8))
    for name, value in ours.items():
        if name in one:
            assert torch.equal(value, theirs[name]) == torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)
def test_ranks_as_threads_get_the_same_values_at_the_same_time(build: Callable[[], nn.Module]) -> None:
    expected = values(build_with_values(build, seed=7))
    shared = build_with_values(build, seed=7)
    agreed: list[bool] = []

    def rank(index: int) -> None:
        own = values(build_with_values(build, seed=7), backwards=index % 2 == 1)
        agreed.append(same(expected, own) and same(expected, values(shared, backwards=index % 2 == 0)))

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [True] * 4


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)
def test_no_global_generator_is_touched(build: Callable[[], nn.Module]) -> None:
    before = torch.get_rng_state()
    values(build_with_values(build, seed=7))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)
def test_shapes_types_and_ties_are_those_of_the_model_itself(build: Callable[[], nn.Module]) -> None:
    source, plain = build_with_values(build, seed=7), build()
    source.fill_buffers()
    for row in parameter_table(source.module).rows:
        install(source.module, row=row, tensor=source.full(row.name))
    assert parameter_table(source.module) == parameter_table(plain)
    ours, theirs = source.module.state_dict(), plain.state_dict()
    assert {k: (v.shape, v.dtype, v.device) for k, v in ours.items()} == {
        k: (v.shape, v.dtype, v.device) for k, v in theirs.items()
    }


def digest(_world: World | None = None) -> str:
    torch.randn(3)
    source = build_with_values(gpt, seed=7)
    data = b"".join(source.full(name).numpy().tobytes() for name, _ in source.module.named_parameters())
    return hashlib.sha256(data).hexdigest()


def of_a_string(_world: World) -> int:
    return hash("a string")


@pytest.mark.processes
def test_another_process_gets_the_same_values(processes: Processes) -> None:
    assert hash("a string") not in run(2, of_a_string, on=processes), "it has another seed for its hashes"
    assert run(2, digest, on=processes) == [digest()] * 2


def test_a_parameters_values_do_not_depend_on_the_rest_of_the_model() -> None:
    alone = build_with_values(lambda: nn.ModuleDict({"m": Initialisers()}), seed=7)
    among = build_with_values(
        lambda: nn.ModuleDict({"before": Initialisers(), "m": Initialisers(), "after": gpt()}), seed=7
    )
    for name, _ in alone.module.named_parameters():
        assert torch.equal(alone.full(name), among.full(name)), name
        assert not torch.equal(among.full(name), among.full(name.replace("m.", "before."))), "each its own"


def test_random_numbers_have_the_distribution_asked_for() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normal = nn.Parameter(torch.empty(500, 400).normal_(3.0, 2.0))
            self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(500, 400), std=1.0, a=-1.0, b=1.0))
            self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(40, 30)))
            self.permutation = nn.Buffer(torch.randperm(1000))

    source = build_with_values(Large, seed=0)
    normal, truncated, orthogonal = (source.full(name) for name in ("normal", "truncated", "orthogonal"))
    assert (normal.mean().item(), normal.std().item()) == pytest.approx((3.0, 2.0), rel=0.01)
    assert truncated.abs().max() <= 1.0
    assert truncated.std().item() == pytest.approx(0.5396, rel=0.01)
    torch.testing.assert_close(orthogonal.T @ orthogonal, torch.eye(30), atol=1e-5, rtol=0)
    assert torch.equal(source.full("permutation").sort().values, torch.arange(1000))


class Truncated(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)


class TensorBytes(TorchDispatchMode):
    """Mode that counts the bytes of the tensors that operations have made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors(result) if not tensor.is_meta):
            if "counted" not in vars(storage):
                vars(storage)["counted"] = weakref.finalize(storage, self._freed, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return result

    def _freed(self, count: int) -> None:
        self.now -= count


def bytes_in_memory(kind: type[nn.Linear]) -> tuple[int, int]:
    """Return the peak bytes of tensors while a deep model is built, and while its values are computed."""
    with TensorBytes() as building:
        source = build_with_values(lambda: nn.Sequential(*(kind(1024, 1024, bias=False) for _ in range(40))), seed=0)
    with TensorBytes() as replaying:
        for name, _ in source.module.named_parameters():
            source.full(name)
    return building.most, replaying.most


def test_at_most_one_parameter_and_its_inputs_are_in_memory() -> None:
    one = 1024 * 1024 * 4
    built, replayed = bytes_in_memory(nn.Linear)
    built_truncated, replayed_truncated = bytes_in_memory(Truncated)
    assert built == built_truncated == 0
    assert one <= replayed < 1.1 * one
    assert replayed_truncated < 2 * one, "torch's truncated normal holds new candidates, their mask and the selection"


def test_elements_that_are_never_initialised_are_nan() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 5))
            self.weight.data[1:].zero_()

    source = build_with_values(Careless, seed=0)
    assert source.full("weight").isnan().sum(1).tolist() == [5, 0, 0, 0]


def test_a_model_with_its_values_is_accepted_as_it_is() -> None:
    model = gpt()
    source = build_with_values(model, seed=7)
    assert not source.deferred
    assert source.module is model
    source.fill_buffers()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert source.full(name).data_ptr() == tensor.data_ptr()


def test_a_model_on_the_meta_device_is_refused_with_the_way_out() -> None:
    with torch.device("meta"):
        model = gpt()
    with pytest.raises(
        ValueError, match=r"embedding\.weight is on the meta device .* pass the function that builds GPT"
    ):
        build_with_values(model, seed=0)
    with pytest.raises(ValueError, match="embedding.weight is on the meta device".replace(".", r"\.")):
        build_with_values(lambda: model, seed=0)


def test_a_function_that_returns_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="the model function returned Tensor"):
        build_with_values(lambda: torch.zeros(3), seed=0)  # type: ignore[arg-type,return-value]


def test_install_replaces_a_parameter_under_all_its_names() -> None:
    source = build_with_values(gpt, seed=7)
    source.module.get_parameter("embedding.weight").requires_grad_(False).label = "mine"  # type: ignore[attr-defined]
    row = next(one for one in parameter_table(source.module).rows if one.name == "embedding.weight")
    data = source.full(row.name)
    new = install(source.module, row=row, tensor=data)
    assert new is source.module.get_parameter("embedding.weight")
    assert new is source.module.get_parameter("head.weight")
    assert new.data_ptr() == data.data_ptr()
    assert (new.requires_grad, vars(new)) == (False, {"label": "mine"})


def test_a_recurrent_network_runs_after_its_parameters_were_installed() -> None:
    source = build_with_values(lambda: nn.LSTM(3, 4), seed=7)
    for row in parameter_table(source.module).rows:
        install(source.module, row=row, tensor=source.full(row.name))
    assert source.module(torch.zeros(5, 3))[0].shape == (5, 4)


class TwoNames(nn.Module):
    """A buffer under two names of one module, and under a third of another."""

    one: Tensor
    two: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        buffer = torch.arange(3.0)
        self.register_buffer("one", buffer)
        self.register_buffer("two", buffer)
        self.linear.register_buffer("three", buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.one += 1
        output: Tensor = self.linear(x) + self.two.sum()
        return output


def test_a_buffer_under_two_names_stays_one() -> None:
    def main(world: World) -> None:
        for given in (TwoNames, TwoNames()):
            trainer = parallelize(given, "dp=2", loss=lambda y, x: (y.sum(), len(x)), world=world)
            trainer.step(torch.ones(4, 2))
            one, two, three = (trainer.model.get_buffer(name) for name in ("one", "two", "linear.three"))
            assert one is two is three
            assert one.tolist() == [1.0, 2.0, 3.0]

    run(2, main)
