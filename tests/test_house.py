"""Test that the source keeps the house rules, and that each rule finds code that breaks it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import house_rules
from house_rules import RULES, Module, Rule, Source, within

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def house() -> Source:
    return house_rules.read(ROOT / "src")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule, house: Source) -> None:
    broken = list(rule(house))
    assert not broken, "\n".join(broken)


def test_test_files_and_programs_are_bounded_as_well() -> None:
    trees = [house_rules.read(ROOT / folder) for folder in ("tests", "examples", "benchmarks")]
    broken = [line for tree in trees for line in house_rules.sizes_are_bounded(tree)]
    assert not broken, "\n".join(broken)


def test_every_exception_to_named_arguments_is_still_needed(monkeypatch: pytest.MonkeyPatch, house: Source) -> None:
    allowed = house_rules.POSITIONS
    monkeypatch.setattr(house_rules, "POSITIONS", {})
    broken = list(house_rules.parameters_are_named(house))
    assert len(broken) == len(allowed), "\n".join([*broken, *allowed])


def test_every_place_that_may_wait_still_does(monkeypatch: pytest.MonkeyPatch, house: Source) -> None:
    allowed = dict(house_rules.MAY_WAIT)
    for place in allowed:
        monkeypatch.setattr(house_rules, "MAY_WAIT", {other: allowed[other] for other in allowed if other != place})
        around = {name: module for name, module in house.items() if within(place, name) or within(name, place)}
        assert list(house_rules.steps_do_not_wait_for_the_device(around)), f"{place} waits for nothing any more"


def test_importing_the_package_stays_light() -> None:
    heavy = {"matplotlib", "tensorboard", "tyro", "rich", "IPython", "torch._dynamo"}
    code = f"import sys, meshwise; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


def source(name: str, text: str) -> Source:
    return {name: Module(name, text, ast.parse(text), is_package=name == "meshwise")}


BROKEN = [
    ("imports_go_down", "meshwise.base.mesh", "from meshwise.plan import Plan"),
    ("imports_go_down", "meshwise.comm.api.world", "import meshwise.train.loop"),
    ("imports_go_down", "meshwise.layout.layout", "from meshwise.plan import Plan"),
    ("imports_go_down", "meshwise.train.loop", "from meshwise import Mesh"),
    ("imports_go_down", "meshwise.comm.api.world", "from ..train import loop"),
    ("imports_go_down", "meshwise.newcomer", "import math"),
    ("imports_go_down", "meshwise.comm.api.world", "if TYPE_CHECKING:\n    from meshwise.train import loop"),
    ("imports_go_down", "meshwise.comm.api.world", "from meshwise.comm.network import gloo_world"),
    ("imports_go_down", "meshwise.comm.network.gloo_world", "from meshwise.comm.launch.launch import run"),
    ("imports_stand_at_the_top", "meshwise.base.a", "def f():\n    import math"),
    ("imports_stand_at_the_top", "meshwise.base.a", "class A:\n    def f(self):\n        if 1:\n            import a"),
    ("only_comm_imports_torch_distributed", "meshwise.engine.a", "import torch.distributed as dist"),
    ("only_comm_imports_torch_distributed", "meshwise.engine.a", "from torch import distributed"),
    ("only_comm_imports_torch_distributed", "meshwise.engine.a", "from torch.distributed.tensor import DTensor"),
    ("only_comm_imports_torch_distributed", "meshwise.engine.a", "import torch\ntorch.distributed.barrier()"),
    ("only_streams_use_torch_cuda", "meshwise.memory.tiers", "import torch\nstream = torch.cuda.Stream()"),
    ("only_streams_use_torch_cuda", "meshwise.comm.network.nccl_world", "from torch.cuda import Event"),
    ("only_plans_name_the_replica_axis", "meshwise.engine.a", "axes = (\"pp\", \"dp\")"),
    ("steps_do_not_wait_for_the_device", "meshwise.optim.a", "def f(x):\n    return x.item()"),
    ("steps_do_not_wait_for_the_device", "meshwise.tensor.core.a", "x = torch.tensor([1], device=y.device)"),
    ("steps_do_not_wait_for_the_device", "meshwise.engine.step", "def f(x):\n    if bool(x.any()): 1"),
    ("no_global_state", "meshwise.base.a", "def f():\n    global x\n    x = 1"),
    ("no_global_state", "meshwise.base.a", "CACHE = {}"),
    ("no_global_state", "meshwise.base.a", "SEEN: set[int] = set()"),
    ("no_global_state", "meshwise.base.a", "import collections\nSEEN = collections.defaultdict(list)"),
    ("no_global_state", "meshwise.base.a", "class A:\n    instances = []"),
    ("nothing_hung_on_tensors", "meshwise.engine.a", "def f(x: Tensor):\n    x.shard = 1"),
    ("nothing_hung_on_tensors", "meshwise.engine.a", "for w in model.parameters():\n    w.owner = 1"),
    ("nothing_hung_on_tensors", "meshwise.engine.a", "for name, w in m.named_parameters():\n    setattr(w, name, 1)"),
    ("nothing_hung_on_tensors", "meshwise.engine.a", "layer.weight.allreduce = False"),
    ("nothing_patched", "meshwise.engine.a", "import torch\ntorch.empty = None"),
    ("nothing_patched", "meshwise.engine.a", "from torch import nn\nnn.Module.__init__ = None"),
    ("nothing_patched", "meshwise.engine.a", "import torch.nn as n\nsetattr(n.Module, 'forward', None)"),
    ("sizes_are_bounded", "meshwise.base.a", "x = 1\n" * 601),
    ("sizes_are_bounded", "meshwise.base.a", "def f():\n" + "    x = 1\n" * 60),
    ("sizes_are_bounded", "meshwise.base.a", "def f(a, *, b, c, d, e, f, g, h, i): ..."),
    ("parameters_are_named", "meshwise.base.a", "def f(a, b): ..."),
    ("parameters_are_named", "meshwise.base.a", "class A:\n    def f(self, a, b=1): ..."),
    ("parameters_are_named", "meshwise.base.a", "class A:\n    def __init__(self, a, b): ..."),
    ("parameters_are_named", "meshwise.base.a", "import ast\nclass A(ast.NodeVisitor):\n    def more(self, a, b): ..."),
    ("parameters_are_named", "meshwise.base.a", "import ast\nclass A(ast.AST):\n    def __init__(self, a, b): ..."),
    ("names_say_something", "meshwise.comm.utils", ""),
    ("names_say_something", "meshwise.helpers.grid", ""),
    ("names_say_something", "meshwise.comm.stream_utils", ""),
    ("no_hasattr", "meshwise.base.a", "def f(x):\n    return hasattr(x, 'shape')"),
]  # fmt: skip


@pytest.mark.parametrize("rule, name, text", BROKEN)
def test_a_planted_fault_is_caught(rule: str, name: str, text: str) -> None:
    assert list(getattr(house_rules, rule)(source(name, text)))


def test_a_circle_of_imports_is_caught() -> None:
    tree = {
        **source("meshwise.base.a", "from meshwise.base import b"),
        **source("meshwise.base.b", "from meshwise.base.c import C"),
        **source("meshwise.base.c", "import meshwise.base.a"),
    }
    assert list(house_rules.no_circles(tree))


def test_the_page_shows_the_house() -> None:
    assert house_rules.picture() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


SOUND = [
    ("meshwise.train.loop", "from meshwise.comm.api.world import World\nfrom meshwise.train.data_loading import Data"),
    ("meshwise.train.loop", "from . import data\nimport torch.nn"),
    ("meshwise.view.plot", "def f():\n    import matplotlib.pyplot as plt\n    return plt"),
    ("meshwise.comm.network.choose_world", "import torch.distributed as dist"),
    ("meshwise.base.a", "__all__ = ['a']\nNAMES = ('a', 'b')\nTABLE: Mapping[str, int] = {'a': 1}\nSIZE: int = 3"),
    ("meshwise.base.a", "class A:\n    def __init__(self):\n        self.seen = []\n        self.weight = None"),
    ("meshwise.engine.a", "for p in m.parameters():\n    p.grad = None\n    p.data = x\n    p.requires_grad = False"),
    ("meshwise.base.a", "def f(a, *, b): ...\ndef _g(a, b): ...\nclass A:\n    def f(self, a, *rest, **more): ..."),
    ("meshwise.base.a", "from torch import nn\nclass A(nn.Module):\n    def forward(self, a, b): ..."),
    ("meshwise.base.a", "from torch.autograd import Function\nclass A(Function):\n    def backward(ctx, a, b): ..."),
    ("meshwise.base.tensor_tree", "def map_tensors(fn, tree): ..."),
]  # fmt: skip


@pytest.mark.parametrize("name, text", SOUND)
def test_sound_code_passes_every_rule(name: str, text: str) -> None:
    rules = [rule for rule in RULES if rule is not house_rules.public_names_are_one_list]
    assert [line for rule in rules for line in rule(source(name, text))] == []


MESH = "class Mesh:\n    '''Axes.'''"
LIST = "from meshwise.base.mesh import Mesh\n__all__ = ['Mesh']"


@pytest.mark.parametrize(
    "roof, mesh, is_broken",
    [
        (LIST, MESH, False),
        ("from meshwise.base.mesh import Mesh\n__all__ = []", MESH, True),
        ("__all__ = ['Mesh']", MESH, True),
        (LIST, "class Mesh: ...", True),
        (LIST, "Mesh = 1", True),
    ],
)
def test_public_names_are_listed_and_documented(roof: str, mesh: str, is_broken: bool) -> None:
    tree = {**source("meshwise", roof), **source("meshwise.base.mesh", mesh)}
    assert bool(list(house_rules.public_names_are_one_list(tree))) == is_broken
