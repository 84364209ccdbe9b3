"""Test that the examples run and print the results that they describe."""

import difflib
import functools
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from torch.multiprocessing.spawn import start_processes
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from free_port import free_port
from meshwise.cli.main import main
from meshwise.comm.launch.fork_server import start_context
from meshwise.engine.step_result import StepResult
from meshwise.plan import Plan
from meshwise.testing import run

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "plan", ["pp=2 tp=2 microbatches=4 schedule=1f1b", "pp=4 microbatches=8 schedule=zb-v virtual_stages=2"]
)
def test_the_split_backward_has_the_gradients_of_one_process(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan in (EXAMPLES / "split_backward.py").read_text()
    assert max(run(Plan.parse(plan).mesh().size, loaded("split_backward").main, args=(plan,))) < 1e-12
    output = capsys.readouterr().out
    assert "48 gradients, the largest relative difference from one process:" in output
    assert "bubble" in output


@pytest.mark.processes
def test_the_split_backward_is_a_program(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Under the plan that it names first. Its status says that the gradients are those of one process."""
    path = EXAMPLES / "split_backward.py"
    program = ModuleType("__main__")
    program.__file__ = str(path)
    for name in ("__main__", "__mp_main__"):  # by the second multiprocessing knows it
        monkeypatch.setitem(sys.modules, name, program)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        exec(compile(path.read_text(), path, "exec"), vars(program))
    assert not ended.value.code
    assert "48 gradients" in capfd.readouterr().out


def test_two_towers_on_two_ranks_learn(capsys: pytest.CaptureFixture[str]) -> None:
    run(3, loaded("two_towers").main)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[-1] < 2.5 < 3.5 < losses[0]


# ---- scripts in two versions -----------------------------------------------------------------------------------------

SCRIPTS = {"ddp_classifier": 16, "finetune": 13, "lora": 11, "gan": 20, "dpo": 16}
"""Lines of our version that the plain one has not; blank lines are not counted."""

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"


@pytest.mark.parametrize("name", SCRIPTS)
def test_few_lines_of_a_script_are_new(name: str) -> None:
    plain, ours = ((EXAMPLES / name / f"{one}.py").read_text().splitlines() for one in ("plain", "ours"))
    found = difflib.SequenceMatcher(None, plain, ours, autojunk=False).get_opcodes()
    new = [line for tag, _, _, start, stop in found if tag != "equal" for line in ours[start:stop] if line.strip()]
    assert len(new) == SCRIPTS[name] <= 20
    assert f"[{name}](../examples/{name}) | {len(plain)} | {len(new)} |" in PAGE.read_text()


@functools.cache
def plain_losses(name: str) -> list[float]:
    """In the working directory of the test that asks first."""
    losses: list[float] = loaded(f"{name}/plain").main()
    return losses


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
@pytest.mark.parametrize(
    "name, plan",
    [
        ("finetune", "dp=2 zero=3"),
        ("finetune", "dp=2 tp=2 zero=1"),
        ("finetune", "pp=2 microbatches=2"),
        ("lora", "dp=2 zero=3"),
        ("lora", "dp=2 tp=2"),
        ("lora", "pp=2 microbatches=2"),
        ("gan", "dp=2 zero=3"),
        ("dpo", "dp=3 zero=3"),
        ("dpo", "tp=2"),
    ],
)
def test_a_script_has_the_losses_of_its_plain_version(
    name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in {"finetune": ["transformers"], "lora": ["transformers", "peft"]}.get(name, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    expected = plain_losses(name)
    for losses in run(Plan.parse(plan).mesh().size, loaded(f"{name}/ours").main, args=(plan,)):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


def ddp(rank: int, port: int, folder: str) -> None:
    """One of two ranks, as torchrun starts them.

    Its model is never freed: that joins a thread of gloo, which may wait for the lock of the interpreter for ever."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()})
    os.chdir(folder)
    plain, models = loaded("ddp_classifier/plain"), list[Module]()

    def kept(model: Module) -> Module:
        models.append(DistributedDataParallel(model))
        return models[-1]

    vars(plain)["DistributedDataParallel"] = kept
    Path(f"{rank}.json").write_text(json.dumps(plain.main()))
    os._exit(0)


@functools.cache
def losses_of_ddp() -> list[float]:
    """Of each epoch's last step."""
    start_context()  # its server blocks Ctrl-C, for later tests of this process too
    with tempfile.TemporaryDirectory() as folder:
        start_processes(ddp, args=(free_port(), folder), nprocs=2, start_method="forkserver")
        losses: list[float] = json.loads((Path(folder) / "0.json").read_text())
    assert len(losses) == 12
    return losses[3::4]


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "ignore:the model drew random numbers"
)  # ranks that are threads share the data loaders' draws
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
def test_the_classifier_has_the_losses_of_ddp(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for losses in run(2, loaded("ddp_classifier/ours").main, args=(plan,)):
        assert losses[3::4] == pytest.approx(losses_of_ddp(), rel=1e-5)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, object] = {}
    exec(first, found)
    result = found["result"]
    assert isinstance(result, StepResult)
    assert result.tokens == 8
    exec(second, found)
    assert isinstance(found["unfrozen"], StepResult)


@pytest.mark.processes
def test_the_job_with_a_mixture_trains_on_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ("--model.arguments", "layers=1", "width=8", "heads=1", "positions=rotary", "experts=4", "routing=biased")
    small = ("--data.files", __file__, "--data.cache", str(tmp_path / "cache"), "--data.context", "16")
    steps = ("--train.steps", "2", "--train.log-every", "1", "--train.output", str(tmp_path / "run"))
    assert main(["train", str(EXAMPLES / "mixture.toml"), *sizes, *small, *steps]) == 0
    said = capfd.readouterr().out
    assert "plan     dp=2 ep=2 zero=1" in said
    assert "experts  the busiest one got" in said
