"""House rules of docs/architecture.md: each is a function that yields the lines of a source tree that break it."""

import ast
import builtins
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the source: its dotted name, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool = False

    @property
    def part(self) -> str:
        return part_of(self.name)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of its syntax tree, in no order."""
        return tuple(ast.walk(self.tree))

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


def part_of(name: str) -> str:
    """Return the part that holds `name`: `comm.api` for meshwise.comm.api.world, "" for the package itself."""
    path = name.split(".")[1:]
    nested = ".".join(path[:2])
    return nested if nested in FLOOR_OF else ".".join(path[:1])


Source = Mapping[str, Module]
Rule = Callable[[Source], Iterator[str]]


def read(folder: Path) -> Source:
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, text, ast.parse(text), is_package=parts[-1] == "__init__")
    return modules


# ---- imports -----------------------------------------------------------------------------------------------------

# The house from the roof down: each floor maps its parts to what they are for. A part is a folder or a file, or
# a sub-folder that is named here. A part imports lower floors and itself, never a neighbour. docs/architecture.md shows
# it.
HOUSE: tuple[Mapping[str, str], ...] = (
    {"__main__": "`python -m meshwise`"},
    {"cli": "the commands"},
    {"view": "pictures: timelines, memory, meshes; terminal, PNG, SVG, HTML, Chrome trace"},
    {"verify": "compares a plan with one process: loss, every gradient, every parameter"},
    {
        "train": "the job, its data, the loop, its events",
        "testing": "run N ranks, `agree`, `count`, the reference run",
        "bench": "measures links and collectives; examines the machine",
    },
    {"planner": "searches the plans of a job: bounds first, then rehearsals"},
    {"simulate": "rehearses a plan without values: memory and time"},
    {"engine": "`parallelize`, the trainer, the step, micro-batches, stages: where the parts meet"},
    {"checkpoint": "logical tensors as rectangles: saved under one plan, loaded under another"},
    {"sync": "how replicas agree across steps: schemes, graphs, rounds; parameter servers; modules on other ranks"},
    {
        "data_parallel": "units, buckets, ZeRO 0-3",
        "tensor": "one sharded matmul, a page of layouts per scheme",
        "expert": "mixtures of experts: finds them, divides their experts, exchanges tokens",
        "pipeline": "schedules and cuts as tables, and what runs them",
        "attention": "attention over split tokens, and under patterns",
        "optim": "optimizers over the slices that a rank owns",
    },
    {"memory": "recomputation, and tiers of state between its uses"},
    {"model": "a model seen from outside: parameter table, blocks, deferred initialization, random draws"},
    {"comm.launch": "starts ranks and joins them"},
    {"comm.health": "hang reports: which rank waits for which"},
    {"comm.network": "worlds over gloo and NCCL"},
    {
        "comm.shared_memory": "the world of ranks on one host",
        "comm.in_process": "the worlds of threads and of traces",
    },
    {
        "comm.api": "the World, collectives with backward, streams, the flight recorder",
        "precision": "the dtypes that are kept, computed, summed",
    },
    {"plan": "the user's choices, as one value", "layout": "the layout of a tensor on a mesh"},
    {
        "base": "meshes, trees of tensors, timelines, text tables, tables beside the source, files replaced whole",
        "reference": "plain models that know no rank",
    },
)

FLOOR_OF = {part: -floor for floor, parts in enumerate(HOUSE) for part in parts}


def picture() -> str:
    """Return the table of the house as Markdown, one row per floor from the roof down."""
    rows = ["| floor | parts |", "|--:|---|"]
    for floor, parts in enumerate(HOUSE):
        cell = "<br>".join(f"`{part.replace('.', '/')}` {what}" for part, what in parts.items())
        rows.append(f"| {len(HOUSE) - 1 - floor} | {cell} |")
    return "\n".join(rows)


EXTRAS = (
    "matplotlib",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers",
    "peft",
    "torch.distributed.checkpoint",
)
"""What an optional extra installs: imported where it is used, so that the package works without it. And what takes a
second to import."""


def imported(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Every import with the full name of what it imports: `from torch import nn` imports torch.nn."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node, f"{prefix}.{alias.name}") for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports_go_down(source: Source) -> Iterator[str]:
    """Yield imports of a part that is not on a lower floor."""
    for module in source.values():
        if not module.part or (module.is_package and len(module.tree.body) == 1):  # a docstring alone
            continue
        if module.part not in FLOOR_OF:
            yield f"{module.name}: the part {module.part!r} is on no floor; add it to HOUSE"
            continue
        for node, name in imported(module):
            part = part_of(name)
            if within(name, "meshwise") and part != module.part:
                if part not in FLOOR_OF:
                    yield module.at(node, f"{name} is imported from the package; import it from where it is defined")
                elif FLOOR_OF[part] >= FLOOR_OF[module.part]:
                    yield module.at(node, f"{module.part} imports {name}, which is not on a lower floor")


def no_circles(source: Source) -> Iterator[str]:
    """Yield files that import each other, directly or through others."""
    graph = {
        module.name: {home for _, name in imported(module) if (home := _home(source, name)) not in (None, module.name)}
        for module in source.values()
    }
    finished: dict[str, bool] = {}

    def visit(name: str, trail: tuple[str, ...]) -> Iterator[str]:
        if name in trail:
            yield f"{name}: a circle of imports: {' -> '.join((*trail[trail.index(name) :], name))}"
        elif name not in finished:
            for other in sorted(graph.get(name, ())):
                yield from visit(other, (*trail, name))
            finished[name] = True

    for name in sorted(graph):
        yield from visit(name, ())


def _home(source: Source, name: str) -> str | None:
    """Return the file that `name`, a dotted path, lies in."""
    while name and name not in source:
        name = name.rpartition(".")[0]
    return name or None


def imports_stand_at_the_top(source: Source) -> Iterator[str]:
    for module in source.values():
        inner = {node for function in module.nodes if isinstance(function, FUNCTION) for node in ast.walk(function)}
        for node, name in imported(module):
            if node in inner and not any(within(name, extra) for extra in EXTRAS):
                yield module.at(node, f"{name} is imported inside a function")


def only_comm_imports_torch_distributed(source: Source) -> Iterator[str]:
    for module in source.values():
        if within(module.name, "meshwise.comm"):
            continue
        for node, name in imported(module):
            if within(name, "torch.distributed"):
                yield module.at(node, f"{name} is imported outside comm")
        for used in module.nodes:
            if isinstance(used, ast.Attribute) and used.attr == "distributed" and ast.unparse(used.value) == "torch":
                yield module.at(used, "torch.distributed is used outside comm")


def only_streams_use_torch_cuda(source: Source) -> Iterator[str]:
    """Yield uses of torch.cuda outside of comm/api/streams, whose protocol other devices share."""
    for module in source.values():
        if module.name == "meshwise.comm.api.streams":
            continue
        for node, name in imported(module):
            if within(name, "torch.cuda"):
                yield module.at(node, f"{name} is imported outside comm/api/streams")
        for used in module.nodes:
            if isinstance(used, ast.Attribute) and used.attr == "cuda" and ast.unparse(used.value) == "torch":
                yield module.at(used, "torch.cuda is used outside comm/api/streams")


def only_plans_name_the_replica_axis(source: Source) -> Iterator[str]:
    """Yield literals "dp" outside of plan and planner: the plan says which axes split rows, tokens or the loss."""
    for module in source.values():
        if module.part in ("plan", "planner"):
            continue
        for node in module.nodes:
            if isinstance(node, ast.Constant) and node.value == "dp":
                yield module.at(node, "'dp' is written out; use row_axes, token_axes, loss_axes or replica_axes")


# ---- waits for the device ---------------------------------------------------------------------------------------

IN_A_STEP = (
    "data_parallel",
    "tensor",
    "expert",
    "pipeline",
    "attention",
    "optim",
    "memory",
    "precision",
    "engine",
    "sync",
    "model",
)
WAITING_METHODS = frozenset({"item", "tolist", "nonzero", "masked_select", "cpu", "numpy"})
REDUCTIONS = frozenset({"any", "all", "sum", "max", "min", "mean"})
MAY_WAIT: Mapping[str, str] = {
    # Between steps, or once: checkpoints, trials at the begin, errors, measurements.
    "meshwise.data_parallel.checkpoint_slices": "a checkpoint is read",
    "meshwise.engine.step_result": "the batch of the first step is compared; a gradient that is not finite is named",
    "meshwise.engine.staged_runner._absent": "predictions, not steps",
    "meshwise.memory.swap_file": "memory of the host",
    "meshwise.optim.build_optimizer": "settings that are tensors; the optimizer is tried before the first step",
    "meshwise.optim.one_bit_optimizers": "ratios that a checkpoint had, in the first step after it",
    "meshwise.tensor.split_trial": "a split is tried before the first step",
    "meshwise.sync.diverging_replicas.Replicas._values": "the state that a job which joins copies",
    "meshwise.sync.diverging_replicas.Replicas.load_state": "a checkpoint is read",
    # In a step, where sizes or the work to do depend on values.
    "meshwise.engine.microbatch_runner": "the number of rows of each rank",
    "meshwise.engine.open_step": "the loss of each backward is compared between ranks",
    "meshwise.data_parallel.batch_norm_statistics": "for a batch of one value, which is refused",
    "meshwise.expert.expert_parallel": "which experts have tokens; figures between steps",
    "meshwise.expert.token_exchange": "tokens for each expert",
    "meshwise.attention.cp_attention": "whether a batch is packed; a mask on the CPU",
    "meshwise.attention.token_interception._row_of_all": "whether a row and a column are positions of tokens",
    "meshwise.attention.mask_pattern": "which tiles of documents and padding are empty",
    "meshwise.sync.parameter_servers": "what a server receives depends on the numbers of a message; rows that are sent",
    # On the CPU; for the last one CUDA has a check on the device (torch._assert_async).
    "meshwise.model.random_draws.RandomDraws.reseed": "positions of tokens, which are made on the CPU",
    "meshwise.model.meta_tensor_values": "values of masks in a run on meta tensors, on the CPU",
    "meshwise.tensor.core.vocab_parallel.require_valid": "classes and tokens are checked",
}
"""Files and functions that may let the host wait for the device, and for what; a step reads its totals in `World`."""


def steps_do_not_wait_for_the_device(source: Source) -> Iterator[str]:
    """Yield calls for which the host waits until a GPU has done its work: reads of values, and copies from lists."""
    for module in source.values():
        if module.part.split(".")[0] not in IN_A_STEP:
            continue
        for function in _functions(module.tree, module.name):
            place, body = function
            if any(within(place, allowed) for allowed in MAY_WAIT):
                continue
            for node in body:
                if isinstance(node, ast.Call) and _waits(node):
                    yield module.at(node, f"{ast.unparse(node)[:60]} waits for the device; see MAY_WAIT")


def _functions(tree: ast.AST, name: str) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each scope's dotted name, and its nodes without those of inner functions and classes."""
    body, waiting = [], list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, FUNCTION | ast.ClassDef):
            yield from _functions(node, f"{name}.{node.name}")
        else:
            body.append(node)
            waiting += ast.iter_child_nodes(node)
    yield name, body


def _waits(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        given = call.args[0] if call.func.id in ("bool", "int", "float") and call.args else None
        return isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr in REDUCTIONS
    if not isinstance(call.func, ast.Attribute):
        return False
    made = ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor")
    return call.func.attr in WAITING_METHODS or (made and any(each.arg == "device" for each in call.keywords))


# ---- state -------------------------------------------------------------------------------------------------------

MUTABLE = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
MAKERS = """
    list dict set bytearray defaultdict deque Counter OrderedDict WeakKeyDictionary WeakValueDictionary WeakSet
    ContextVar local Lock RLock Condition Event Queue SimpleQueue count Generator
"""
READ_ONLY = ("Mapping", "Sequence", "Collection", "Set", "AbstractSet", "Iterable")
MEANT_TO_BE_SET = (
    "sys.excepthook",
    # for one call, in comm/launch/fork_server.py: multiprocessing does not ask how its server is to start
    "util.spawnv_passfds",
)
OWN_OF_A_TENSOR = frozenset({"data", "grad", "requires_grad"})


def no_global_state(source: Source) -> Iterator[str]:
    """No `global`, and no mutable value bound by a module or a class; one typed read-only is a constant."""
    for module in source.values():
        scopes: list[ast.Module | ast.ClassDef] = [module.tree]
        scopes += [node for node in module.nodes if isinstance(node, ast.ClassDef)]
        for scope in scopes:
            for bound in scope.body:
                if isinstance(bound, ast.Assign | ast.AnnAssign) and bound.value is not None and _mutable(bound):
                    yield module.at(bound, f"mutable state in a module or a class: {ast.unparse(bound)[:60]}")
        for node in module.nodes:
            if isinstance(node, ast.Global):
                yield module.at(node, f"global {' '.join(node.names)}")


def _mutable(node: ast.Assign | ast.AnnAssign) -> bool:
    if isinstance(node, ast.AnnAssign):
        if ast.unparse(node.annotation).split("[")[0].split(".")[-1] in READ_ONLY:
            return False
    elif [ast.unparse(target) for target in node.targets] == ["__all__"]:
        return False
    if isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).split(".")[-1] in MAKERS.split()
    return isinstance(node.value, MUTABLE)


def assigned_attributes(module: Module) -> Iterator[tuple[ast.AST, ast.expr, str]]:
    """Every attribute that is assigned, deleted or set by name: (where, of what, which)."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node, node.value, node.attr
        if isinstance(node, ast.Call) and _last_name(node.func) in ("setattr", "delattr", "__setattr__"):
            attribute = node.args[1]
            yield node, node.args[0], str(attribute.value) if isinstance(attribute, ast.Constant) else "?"


def _last_name(node: ast.expr) -> str:
    """The name of a function, without what it belongs to."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def nothing_hung_on_tensors(source: Source) -> Iterator[str]:
    """No attribute of our own on a parameter or a tensor: a name typed, called or looped over as one."""
    for module in source.values():
        tensors = {"p", "param", "parameter", "tensor", "weight", "bias"}
        for node in module.nodes:
            if isinstance(node, ast.arg | ast.AnnAssign) and _is_tensor(node.annotation):
                tensors.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
            if isinstance(node, ast.For | ast.comprehension) and "parameters()" in ast.unparse(node.iter):
                tensors |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        for node, owner, attribute in assigned_attributes(module):
            if ast.unparse(owner).split(".")[-1] in tensors - {"self"} and attribute not in OWN_OF_A_TENSOR:
                yield module.at(node, f"{attribute} is hung on the tensor {ast.unparse(owner)}")


def _is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).split(".")[-1] in ("Tensor", "Parameter")


def nothing_patched(source: Source) -> Iterator[str]:
    """No attribute of an imported module, or of what is imported from outside the house, is assigned."""
    for module in source.values():
        foreign = {}
        for node in module.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    foreign[alias.asname or alias.name.split(".")[0]] = getattr(node, "module", None) or alias.name
        for node, owner, attribute in assigned_attributes(module):
            if f"{ast.unparse(owner)}.{attribute}" in MEANT_TO_BE_SET:
                continue
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in foreign:
                yield module.at(node, f"{ast.unparse(owner)}.{attribute} is patched")


# ---- size and shape ----------------------------------------------------------------------------------------------

LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS = 600, 60, 8
SAYS_NOTHING = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})
POSITIONS: Mapping[str, int] = {
    # The verbs a user writes: what, and by which plan or on how many ranks.
    "meshwise.engine.parallelize.parallelize": 2,
    "meshwise.simulate.predicted_memory.needs": 2,
    "meshwise.verify.verification.verify": 4,
    "meshwise.attention.split_attention.attend": 3,  # as torch's scaled_dot_product_attention
    "meshwise.comm.launch.launch.run": 2,
    "meshwise.comm.in_process.thread_and_trace_worlds.run_threads": 2,
    "meshwise.testing.run": 2,
    "meshwise.engine.open_step.OpenStep.mean": 2,
    # Two things of one kind, or a function and what it maps: the order is the one everybody expects.
    "meshwise.base.mesh.even_split": 2,
    "meshwise.testing.agree": 2,
    "meshwise.testing.difference": 2,
    "meshwise.base.tensor_tree.map_tensors": 2,
    "meshwise.comm.launch.launch.torchrun_line": 2,
    "meshwise.comm.api.split_and_reduce.split": 2,
    # What is called back: loss(output, batch), forward(model, batch), parameter_options(name, parameter),
    # on_gradient(row, gradient); and what torch's launcher calls in a rank.
    "meshwise.comm.launch.rank_process.rank_main": 5,
    "meshwise.data_parallel.data_parallel_engine.discard_gradient": 2,
    "meshwise.model.forward.call_loss": 2,
    "meshwise.verify.rounding_bounds.OutputMeanSquares.forward": 2,
    "meshwise.model.forward.default_forward": 2,
    "meshwise.model.forward.call_with": 2,
    "meshwise.model.forward.no_loss": 2,
    "meshwise.model.parameter_table.matrices_decay": 2,
    "meshwise.reference.gpt.next_token_loss": 2,
    "meshwise.train.objects_by_name.answer_loss": 2,
    "meshwise.train.streams_and_collators.without_targets": 2,
    "meshwise.train.objects_by_name.mean_squared_error": 2,
}
"""How many arguments a public function may take by position, where it is more than one, and why."""


def sizes_are_bounded(source: Source) -> Iterator[str]:
    for module in source.values():
        if (lines := len(module.text.splitlines())) > LONGEST_FILE:
            yield f"{module.name}: {lines} lines"
        for node in module.nodes:
            if isinstance(node, FUNCTION):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                parameters = [*_positions(node), *node.args.kwonlyargs]
                if lines > LONGEST_FUNCTION:
                    yield module.at(node, f"{node.name} has {lines} lines")
                if len(parameters) > MOST_PARAMETERS:
                    yield module.at(node, f"{node.name} has {len(parameters)} parameters")


def parameters_are_named(source: Source) -> Iterator[str]:
    """Public functions and methods, and `__init__`, take one argument by position; an override takes its base's."""
    for module in source.values():
        for owner, function in public_functions(module):
            path = [module.name, *([owner.name] if owner else []), function.name]
            most = POSITIONS.get(".".join(path), 1)
            if len(_positions(function)) > most and not (owner and _overrides(module, owner, function.name)):
                yield module.at(function, f"{function.name} takes {len(_positions(function))} arguments by position")


def public_functions(module: Module) -> Iterator[tuple[ast.ClassDef | None, FUNCTION]]:
    scopes: list[tuple[ast.ClassDef | None, list[ast.stmt]]] = [(None, module.tree.body)]
    scopes += [(node, node.body) for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    for owner, body in scopes:
        for node in body:
            if isinstance(node, FUNCTION) and (node.name[0] != "_" or node.name == "__init__"):
                yield owner, node


def _positions(function: FUNCTION) -> list[ast.arg]:
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[1:] if parameters and parameters[0].arg in ("self", "cls", "ctx") else parameters


def _overrides(module: Module, owner: ast.ClassDef, method: str) -> bool:
    """Whether a base class from outside the house has this method (not counting what every object has)."""
    origin = {}
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                origin[alias.asname or alias.name] = full
    for base in owner.bases:
        root, _, rest = ast.unparse(base).split("[")[0].partition(".")
        path = [*origin.get(root, f"builtins.{root}").split("."), *filter(None, rest.split("."))]
        if path[0] == "meshwise" or (path[0] == "builtins" and path[1] not in vars(builtins)):
            continue
        if method in dir(_resolve(path)) and method != "__init__":
            return True
    return False


def _resolve(path: list[str]) -> object:
    """The object with this dotted path: the longest importable module, then attributes."""
    try:
        return importlib.import_module(".".join(path))
    except ModuleNotFoundError:
        return getattr(_resolve(path[:-1]), path[-1])


def names_say_something(source: Source) -> Iterator[str]:
    for module in source.values():
        if SAYS_NOTHING & set(module.name.lower().strip("_").replace("_", ".").split(".")):
            yield f"{module.name}: a name that says nothing"


def no_hasattr(source: Source) -> Iterator[str]:
    for module in source.values():
        for node in module.nodes:
            if isinstance(node, ast.Call) and _last_name(node.func) == "hasattr":
                yield module.at(node, f"{ast.unparse(node)}: a value's kind is known")


# ---- the public names --------------------------------------------------------------------------------------------


def public_names_are_one_list(source: Source) -> Iterator[str]:
    """What the package imports is what it lists, sorted, and each has a docstring where it is defined."""
    roof = source["meshwise"]
    listed = next(
        (ast.literal_eval(node.value) for node in roof.tree.body if isinstance(node, ast.Assign)), "no list __all__"
    )
    names = [name.rsplit(".", 1)[1] for _, name in imported(roof)]
    if sorted(listed) != sorted(names) or listed != sorted(listed):
        yield f"meshwise: __all__ is {listed}, what it imports, sorted, is {sorted(names)}"
    for node, name in imported(roof):
        home, definition = _definition(source, name)
        if name.endswith(".__version__"):
            continue
        if definition is None:
            yield roof.at(node, f"{name} is not a class or function defined in {home}")
        elif not ast.get_docstring(definition):
            yield roof.at(node, f"{name} has no docstring")


def _definition(source: Source, name: str) -> tuple[str, ast.ClassDef | FUNCTION | None]:
    """Follow a name through the packages that re-export it to the module that defines it."""
    home, _, own = name.rpartition(".")
    for node in source[home].tree.body:
        if isinstance(node, ast.ClassDef | FUNCTION) and node.name == own:
            return home, node
    for _, origin in imported(source[home]):
        if origin.rpartition(".")[2] == own and origin != name:
            return _definition(source, origin)
    return home, None


RULES: tuple[Rule, ...] = (
    imports_go_down,
    no_circles,
    imports_stand_at_the_top,
    only_comm_imports_torch_distributed,
    only_streams_use_torch_cuda,
    only_plans_name_the_replica_axis,
    steps_do_not_wait_for_the_device,
    no_global_state,
    nothing_hung_on_tensors,
    nothing_patched,
    sizes_are_bounded,
    parameters_are_named,
    names_say_something,
    no_hasattr,
    public_names_are_one_list,
)
