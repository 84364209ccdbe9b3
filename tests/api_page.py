"""Write docs/api.md from the code (`make docs`): every public name, its docstring, and an example that runs."""

import contextlib
import inspect
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshwise as mw

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

HEAD = """# The Python API

Look up a public name: `import meshwise as mw`. Every example runs after this one, in the order of the page:

```python
{preamble}```

Every rank calls the methods. `make docs` makes this page from the code, and a test runs the examples.
"""

PREAMBLE = """import torch
import meshwise as mw


def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


batch = torch.randn(8, 4), torch.randint(2, (8,))
"""

EXAMPLES: Mapping[str, str] = {
    "parallelize": 'trainer = mw.parallelize(build, "dp=auto zero=1", loss=loss, optimizer=torch.optim.AdamW, lr=1e-3)',
    "Trainer": """result = trainer.step(batch)
trainer.evaluate([batch]).loss
trainer.predict(batch, split=True)
state = trainer.state_dict()""",
    "StepResult": 'print(f"loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}, {result.tokens} terms")',
    "OpenStep": """with trainer.open_step() as step:
    inputs, labels = step.rows(batch)
    output = step.forward(inputs)
    step.backward(step.mean(torch.nn.functional.cross_entropy(output, labels, reduction="sum"), len(labels)))
    step.clip(1.0)
    result = step.update()""",
    "ParameterAverage": """average = trainer.average(0.999)
trainer.step(batch)
with average.applied():
    validation = trainer.evaluate([batch]).loss""",
    "EvalResult": "loss_and_terms = trainer.evaluate([batch]).loss, trainer.evaluate([batch]).tokens",
    "Options": """options = mw.Options(clip_norm=1.0, nonfinite="skip:3", parameter_options=lambda name, parameter: {})
mw.parallelize(build, "dp=1", loss=loss, lr=1e-3, options=options).step(batch)""",
    "Plan": """plan = mw.Plan.parse("dp=2 tp=2 zero=1")
assert plan == mw.Plan(dp=2, tp=2, zero=1) and plan.mesh().size == 4""",
    "PlanError": """try:
    mw.Plan(tp=3).resolve(4)
except mw.PlanError as error:
    print(error)""",
    "Mesh": 'assert mw.Mesh.of(dp=2, tp=2).group(1, axes=["dp"]) == (1, 3)',
    "Layout": 'assert mw.Layout((("tp",), ())).local_shape((8, 4), mesh=mw.Mesh.of(tp=2), rank=0) == (4, 4)',
    "World": """world = trainer.world
assert world.exchange(world.rank) == list(range(world.size))""",
    "connect": "world = mw.connect()",
    "run": """def main(world):
    return mw.parallelize(build, "dp=2", loss=loss, lr=1e-3, world=world).step(batch).loss


if __name__ == "__main__":
    losses = mw.run(2, main)  # two processes""",
    "remote": """def two_ranks(world):
    head = mw.remote(torch.nn.Linear, args=(4, 2), world=world, rank=1, optimizer=torch.optim.Adam)
    if head.here:
        return head.serve()
    logits = head(batch[0])
    torch.nn.functional.cross_entropy(logits, batch[1]).backward()  # runs on rank 1
    head.step()
    head.close()


if __name__ == "__main__":
    mw.run(2, two_ranks)""",
    "RemoteModule": """def both(world):
    heads = [mw.remote(torch.nn.Linear, args=(4, 2), world=world, rank=rank) for rank in (1, 2)]
    if world.rank:
        return heads[world.rank - 1].serve()
    calls = [head.begin(batch[0]) for head in heads]  # both ranks compute
    total = sum(call.wait().sum() for call in calls)
    for head in heads:
        head.close()


if __name__ == "__main__":
    mw.run(3, both)""",
    "PendingSave": """saving = trainer.save("run/step-1", wait=False)  # training may continue
saving.wait()
trainer.load("run/step-1")""",
    "SaveError": """try:
    trainer.save("/proc/nowhere/step-1")
except mw.SaveError as error:
    print(error)""",
    "DamageError": """with open("run/step-1/rank-00000.safetensors", "r+b") as file:
    file.seek(-1, 2)
    file.write(b"?")
try:
    trainer.load("run/step-1")
except mw.DamageError as error:
    print(error)
trainer.save("run/step-2")""",
    "export": """import meshwise.reference as reference

shape = reference.GPTConfig(vocabulary=16, context=8, layers=1, heads=1, width=8)
gpt = mw.parallelize(lambda: reference.GPT(shape), "dp=1", loss=reference.next_token_loss, lr=1e-3)
gpt.save("run/gpt")
files = mw.export("run/gpt", into="run/exported", build=lambda: reference.GPT(shape)).files""",
    "export_dcp": 'files = mw.export_dcp("run/step-2", into="run/dcp")',
    "import_dcp": """mw.import_dcp("run/dcp", into="run/imported")
steps = trainer.load("run/imported")["steps"]""",
    "ExportError": """try:
    mw.export("run/gpt", into="run/other", build=lambda: reference.GPT(shape))
except mw.ExportError as error:
    print(error)""",
    "verify": """report = mw.verify(build, loss, [(batch[0].double(), batch[1])], "dp=2 zero=3", lr=1e-3)
assert report.ok""",
    "Report": "print(report)",
    "needs": 'print(mw.needs(build, "dp=1", loss=loss, batch=batch))',
    "measure": """with mw.measure(trainer) as measurement:
    trainer.step(batch)""",
    "CutOptions": 'options = mw.Options(cut=mw.CutOptions(at=("1",)), example=batch)  # with pp',
    "SwapConfig": "options = mw.Options(swap=mw.SwapConfig())  # with offload=…:disk",
    "LossScale": "options = mw.Options(loss_scale=mw.LossScale(2.0**10))  # with precision=fp16",
    "LossError": """try:
    mw.parallelize(build, "dp=1", loss=lambda output, batch: output.mean(), lr=1e-3).step(batch)
except mw.LossError as error:
    print(error)""",
    "NonFiniteError": """try:
    trainer.step((batch[0] * float("nan"), batch[1]))
except mw.NonFiniteError as error:
    print(error)""",
    "RanksDisagree": """def different(world):
    own = torch.full((4, 4), float(world.rank)), batch[1][:4]
    mw.parallelize(build, "dp=2", loss=loss, lr=1e-3, world=world).step(own)


try:
    mw.run(2, different)
except mw.RanksDisagree as error:
    print(error)""",
    "RankLostError": """def lost(world):
    if world.rank == 1:
        raise SystemExit(3)
    world.barrier()


try:
    mw.run(2, lost)
except (mw.RankLostError, SystemExit) as error:
    print(error)""",
}
"""The example of each public name, in the order of the page."""

PROCESSES = ("run", "remote", "RemoteModule", "RanksDisagree", "RankLostError")
"""Examples that start processes: a test of processes runs them, as a script."""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD.format(preamble=PREAMBLE)]
    for name, example in EXAMPLES.items():
        value = getattr(mw, name)
        signature = "" if _is_error(value) else _signature(value)
        lines = [f"## {name}", "", *_summary(value), "", "```python", f"{example}", "```"]
        if signature:
            lines[2:2] = ["```text", f"mw.{name}{signature}", "```", ""]
        methods = list(_methods(value)) if inspect.isclass(value) and not _is_error(value) else []
        if methods:
            lines += ["", "| | |", "|---|---|", *methods]
        parts.append("\n".join(lines) + "\n")
    parts.append("## Limits\n\nNames that are not on this page may change at any time.\n")
    return "\n".join(parts)


def run_examples(names: tuple[str, ...]) -> None:
    """Run the examples of these names in one namespace, in a temporary folder."""
    found: dict[str, Any] = {"__name__": "examples"}
    exec(PREAMBLE, found)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for name in names:
            try:
                exec(EXAMPLES[name], found)
            except Exception as error:
                error.add_note(f"in the example of {name}")
                raise


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _signature(value: Any) -> str:
    parameters = inspect.signature(value).parameters.values()
    shown = [str(p.replace(annotation=p.empty)) for p in parameters]
    first = next((at for at, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if first is not None:
        shown.insert(first, "*")
    text = f"({', '.join(shown)})"
    return "" if len(text) > 600 or "<factory>" in text or " at 0x" in text else text


def _summary(value: Any) -> list[str]:
    text = inspect.getdoc(value) or ""
    return [" ".join(text.split("\n\n")[0].split()).replace("|", "·")]


def _methods(value: type) -> list[str]:
    rows = []
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        what = f"`{name}`" if isinstance(member, property) else f"`{name}({_names(function)})`"
        rows.append(f"| {what} | {_summary(function)[0]} |")
    return rows


def _names(function: Any) -> str:
    names = list(inspect.signature(function).parameters)
    return ", ".join(name for name in names if name not in ("self", "cls"))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PAGE.write_text(page(), encoding="utf-8")
