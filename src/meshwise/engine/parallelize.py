"""Build a trainer from a model and a plan: `parallelize` creates each component of a run, in a fixed order.

| once         plan → world over its mesh → model, built or given → roles of modules under tp → cut into stages (pp)
| each stage   dtype → parameter table → modules split by tp → units and buckets → random draws
| once         optimizer over the slices that this rank updates → trainer"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwise.attention.context_parallel import ContextParallel, use_attend
from meshwise.comm.api.streams import use_deterministic_kernels
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import ThreadWorld
from meshwise.comm.launch.connect import connect
from meshwise.data_parallel.batch_norm_statistics import (
    BatchStatistics,
    batch_norms,
    disable_sync_batch_norm,
    refuse_renormed,
    running_norms,
)
from meshwise.data_parallel.bucket import StorageConfig
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.data_parallel.gradient_reduction import CODECS, ZERO, Reduction, compressed
from meshwise.data_parallel.stage_engines import Engine
from meshwise.data_parallel.whole_parameter_functions import LogicalSlices
from meshwise.engine.first_rank import on_first_rank, place_buffers, share_parameters
from meshwise.engine.microbatch_runner import LiveModel, MicrobatchTask, WholeModelRunner
from meshwise.engine.schedule_and_cut import cut_source, cutter, plan_schedule
from meshwise.engine.staged_runner import LiveStage, MicrobatchRunner, StagedRunner
from meshwise.engine.step_result import SkipPolicy, UpdateRecipe
from meshwise.engine.trainer import Trainer
from meshwise.expert.expert_capacity import check_experts, limit_experts
from meshwise.expert.expert_parallel import expert_parallel
from meshwise.expert.router_losses import RouterLosses
from meshwise.expert.router_updates import RouterUpdates
from meshwise.memory.activation_offload import ActivationTransfers, activation_tier
from meshwise.memory.activation_policy import ActivationPolicy, RecomputedBlocks
from meshwise.memory.malloc_options import memory_errors_explained
from meshwise.memory.swap_file import SwapConfig
from meshwise.memory.tiers import Tiers
from meshwise.model.compiled_blocks import CompiledBlocks, compiles_on
from meshwise.model.deferred_init import ParameterSource, build_with_values, set_quantized_aside, shapes_of
from meshwise.model.find_mixtures import Mixture, planned_mixtures
from meshwise.model.forward import (
    Forward,
    ForwardReplay,
    Loss,
    LossError,
    add_advice,
    call_with,
    default_forward,
    no_loss,
)
from meshwise.model.parameter_table import ParameterOptions, bucket_bytes, check_trains, parameter_table
from meshwise.model.parameter_units import Patterns, partition
from meshwise.model.random_draws import RandomDraws
from meshwise.optim.build_optimizer import OptimizerClass, build_optimizer, default_options, needs_of
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.pipeline.run.stage_forward import PieceForward, make_stage
from meshwise.pipeline.schedules.named_schedules import naive
from meshwise.pipeline.schedules.schedule_table import in_flight
from meshwise.plan import Plan, PlanError
from meshwise.plan.compatibility import MOMENTUM_EXCHANGE
from meshwise.plan.plan_keys import is_path
from meshwise.precision.dtype_policy import LossScale, ModelCasts, Precision, convert, precision_of, widen_for_loss
from meshwise.sync.sync_scheme import SyncScheme, sync_scheme
from meshwise.tensor.core.activation_slices import activation_regions, parts_of_stage
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.split_context import ShardSizes, SplitContext
from meshwise.tensor.detect.assign_tp_roles import Rules, planned_roles
from meshwise.tensor.tensor_parallel import tensor_parallel
from meshwise.tensor.tp_schemes import mesh_with_kv_replicas, scheme_on


@dataclass(frozen=True)
class Options:
    """Settings of a run besides its plan. No setting depends on the number of ranks."""

    clip_norm: float | None = None
    """Scale the gradient down to this 2-norm when it is larger. None: never."""
    seed: int = 0
    """Seed of the initial values, if the model is given as a function that builds it, and of dropout."""
    nonfinite: str = "raise"
    """Action when the loss or the gradient is not finite. `raise` raises NonFiniteError, and the state stays as it was.
    `skip:n` skips at most n such steps in a row."""
    expert_bias_rate: float = 0.0
    """Rate at which each step moves the biases of routers (buffers `e_score_correction_bias`) towards an even load, as
    in DeepSeek-V3, which took 0.001. 0: they keep their values."""
    expert_capacity: float | None = None
    """Most tokens of a sample that an expert takes, as a multiple of the even share; the rest is dropped. **Another
    number is another model.** None: no token is dropped. See `meshwise.expert.expert_capacity`."""
    router_losses: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Losses of routers that `Trainer.step` adds to the loss, `{"balance": 0.01, "z": 0.001, "over": "sequence"}`: sums
    over the tokens, so `loss` should count tokens. See `meshwise.expert.router_losses`."""
    expert_imbalance: float = 1.0
    """In a rehearsal of a plan with `ep`, tokens of the busiest rank's experts, as a multiple of the even share."""
    noise: bool = False
    """Measure the gradient noise scale in each step, as `StepResult.noise`. The plan must give a step two or more
    micro-batches, over all replicas; see `meshwise.engine.noise_scale`."""
    forward: Forward | None = None
    """`forward(model, batch) -> output`; by default `meshwise.model.forward.default_forward`."""
    parameter_options: ParameterOptions | None = None
    """`(name, parameter) -> optimizer options`; by default vectors (biases, norms) have no weight decay."""
    tensor_rules: Rules | None = None
    """With tp, the roles of modules whose names match a pattern: `{"blocks.*.up": "colwise"}`; see
    `meshwise.tensor.detect.assign_tp_roles.Rules`. None: from the model's `_tp_plan` and structure. Under every plan,
    `"attention pattern=window:1024"` gives attentions a pattern; with cp, `"tokens whole"` gives modules all tokens."""
    parts: Mapping[str, Part] | None = None
    """With tp, the role of each module. None: `assign_roles` finds them for this model and plan."""
    example: Any = None
    """With pp, a batch like those of the training, with one row or more: the model runs on it once to be cut into
    stages. A model given as a function runs on the meta device, and `partition=time` counts its operations."""
    cut: CutOptions = dataclasses.field(default_factory=CutOptions)
    """With pp, where stages may begin: by hand, `CutOptions(at=("blocks.3", "head"))`. By default where the stages are
    most even, between pieces or inside of blocks."""
    recomputed: Patterns = ()
    """With `recompute` or `budget`, patterns over the names of the modules that are each recomputed as a whole:
    `("encoder.layers.*", "decoder.layers.*")`. By default the model's blocks."""
    compiler: str = "inductor"
    """With `compile=blocks`, the backend of torch.compile: `inductor`, or `eager`, which gives the same bits."""
    precision: Precision | None = None
    """Dtypes in place of the plan's `precision` and `wire`. None: the plan's."""
    loss_scale: LossScale = dataclasses.field(default_factory=LossScale)
    """Loss scale of the first step; used only with a precision that needs one (fp16)."""
    saving: ActivationTransfers = dataclasses.field(default_factory=ActivationTransfers)
    """With `offload=activations:…`, which activations are moved to the tier, and how early they are fetched back."""
    swap: SwapConfig = dataclasses.field(default_factory=SwapConfig)
    """With `offload=…:disk`, the folder of the swap file and its buffers: `SwapConfig(folder=Path("/nvme"))`."""
    sync: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """With a `sync` across steps in the plan, changed fields of its row: `{"outer_lr": 0.5}`; see
    `meshwise.sync.sync_scheme.SyncScheme`."""
    keep_gathered: bool = False
    """With tp, keep gathered operands of matmuls for the backward, in place of a second gather; it takes memory."""


def parallelize(
    model: nn.Module | Callable[[], nn.Module] | ParameterSource,
    plan: Plan | str,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerClass | None = torch.optim.AdamW,
    world: World | None = None,
    options: Options | None = None,
    **optimizer_arguments: Any,
) -> Trainer:
    """Return a trainer that runs a plain model under a plan. Every rank calls it.

    | model       a module (all ranks get the first rank's values), or a function that builds a module. With a function
    |             no rank holds more of the model than its plan says, and one seed gives equal values under every plan.
    |             A `ParameterSource` is a built model, or one without values for a rehearsal (`shapes_of`)
    | loss        `loss(output, batch)` returns (sum of the loss, count). None: for open steps and predictions alone
    | optimizer   a class; its own arguments follow by keyword: `lr=3e-4`. None: the model is frozen (a teacher, a
    |             reference model); it evaluates and predicts
    | world       connection of the ranks. None: the ranks that torchrun started, or one rank
    | options     settings besides the plan. None: `Options()`

    A given module is used, not copied; with pp, its parameters become NaN, because the stages hold the values.

    Raises PlanError if the plan does not fit world or model, ValueError for a wrong model, optimizer or option."""
    options = options or Options()
    plan = Plan.of(plan)
    world = world or connect()
    plan = plan.resolve(world.size, compiles=plan.compile == "auto" and all(world.exchange(compiles_on(world.device))))
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise ValueError(f"clip_norm={options.clip_norm}; give a norm above 0, or None to leave gradients as they are")
    nonfinite = SkipPolicy.parse(options.nonfinite)
    if plan.deterministic:
        use_deterministic_kernels(world.device)

    source = model if isinstance(model, ParameterSource) else build_with_values(model, seed=options.seed)
    check_trains(source.module)
    if optimizer is None:
        source.module.requires_grad_(requires_grad=False)
    else:
        rule = options.parameter_options or default_options(optimizer, module=source.module)
        options = dataclasses.replace(options, parameter_options=rule)
    setting = _setting(source.module, plan=plan, world=world, options=options, loss=loss)
    tiers, policy, precision = setting.storage.tiers, setting.policy, setting.storage.precision
    with contextlib.ExitStack() as on_error:
        on_error.callback(tiers.close)
        on_error.callback(policy.close)
        with memory_errors_explained(plan):
            build = _in_stages if plan.pp > 1 else _whole
            engine, runner = build(source, setting=_with_roles(setting.for_optimizer(optimizer), source.module))
        _connect(engine, runner, setting.context)
        update = _optimizer(optimizer, engine=engine, plan=plan, arguments=optimizer_arguments)
        scale = options.loss_scale if precision.needs_loss_scale else None
        setting.routers.counting = lambda: runner.counts
        recipe = UpdateRecipe(options.clip_norm, nonfinite, precision, setting.routers, scale, options.noise)
        trainer = Trainer(
            engine, runner=runner, plan=plan, recipe=recipe, optimizer=update, policy=policy, scheme=setting.scheme
        )
        on_error.pop_all()
    return trainer


def _setting(module: nn.Module, *, plan: Plan, world: World, options: Options, loss: Loss | None) -> "ParallelSetting":
    """Return the dtypes, tiers, policies and functions of a run; its tiers and policy have to be closed."""
    if plan.asynchronous and world.device.type == "cuda":
        raise PlanError(f"staleness={plan.staleness} needs ranks on CPUs: GPUs cannot wait for any of several messages")
    losses = RouterLosses.of(options.router_losses)
    check_experts(module, capacity=options.expert_capacity, losses=losses, plan=plan, rules=options.tensor_rules)
    routers = RouterUpdates(rate=options.expert_bias_rate, device=world.device, losses=losses)
    routers.prepare(module)
    precision, scheme = options.precision or precision_of(plan), _scheme(plan, options, module=module, routers=routers)
    tiers = Tiers(plan.tiers, streams=world.streams, swap=options.swap)
    tier = activation_tier(plan.tiers.activations, streams=world.streams, swap=options.swap, transfers=options.saving)
    recomputed = RecomputedBlocks(plan, world=world, patterns=options.recomputed)
    backend, splits = options.compiler if plan.compile == "blocks" else None, max(plan.tp, plan.ep) > 1
    policy = ActivationPolicy(recomputed, tier, CompiledBlocks(backend=backend, splits=splits))
    policy.undo.callback(routers.close)
    policy.undo.callback(set_quantized_aside(module, plan=plan))
    casts = ModelCasts(precision, device=world.device)
    forward, call = (
        policy.with_offload(_computed(called, plan=plan, precision=precision, casts=casts))
        for called in (options.forward or default_forward, call_with)
    )
    context = ContextParallel.of(plan, world=world, rules=options.tensor_rules)
    if context is not None:
        policy.undo.callback(context.install(module))
    elif world.device.type == "cpu" or plan.pp > 1:
        # torch's FlexAttention has no backward on CPUs, and cannot run on the meta device when a model is cut.
        policy.undo.callback(use_attend(module, flex_only=True))
    reduction = ZERO[plan.zero]
    if plan.server:
        reduction = Reduction(shards_updates=True, servers=plan.server, keeps_own_gradients=plan.asynchronous)
    if scheme is not None:
        reduction = dataclasses.replace(reduction, owned_state=scheme.state_names)
    else:
        reduction = compressed(reduction, wire=plan.wire, feedback=bool(plan.feedback))
    gather = None if plan.gather == "exact" else CODECS[plan.gather](0)
    outer, node = (plan.mesh().expand([axis]) for axis in ("outer", "node"))
    axes = (plan.sync_axes if plan.sync == "momenta" else outer), plan.sync_axes, node
    storage = StorageConfig(reduction, precision, tiers, *axes, gather, plan.prefetch, plan.overlap_gather > 0)
    task = MicrobatchTask(forward, loss or no_loss, call)
    policy.undo.push(casts.hook(module))
    return ParallelSetting(plan, world, options, task, storage, policy, context, scheme, routers)


def _scheme(plan: Plan, options: Options, *, module: nn.Module, routers: RouterUpdates) -> SyncScheme | None:
    """Return how the replicas of a plan agree; None under `sync=step`. Raises PlanError if the model excludes it."""
    if plan.sync in ("step", "momenta") and options.sync:
        raise PlanError(f"sync={plan.sync} has no settings such as {dict(options.sync)}; write sync=local in the plan")
    if plan.sync == "step" and not plan.server:
        return None
    key, by = ("server", plan.server) if plan.server else ("sync", plan.sync)
    if options.noise:
        raise PlanError(
            f"{key}={by} does not sum gradients over all replicas, as the noise of gradients needs; leave noise out of "
            "the job, or use Options(noise=False)"
        )
    for name, _, (bias, *_) in routers.routers(module):
        raise PlanError(
            f"{bias} of the router beside {name} is updated in each step from the tokens of all replicas, which "
            f"{key}={by} does not combine in each step; use {key}={Plan().to_toml()[key]}"
        )
    for norm in running_norms(module):
        raise PlanError(
            f"{norm} has running statistics, which replicas do not exchange under {key}={by}; use GroupNorm or "
            f"LayerNorm, or {key}={Plan().to_toml()[key]}"
        )
    if plan.server:
        return None
    with _as_plan_error():
        return sync_scheme(plan, settings=options.sync)


def _connect(engine: Engine, runner: MicrobatchRunner, context: ContextParallel | None) -> None:
    """Open the connections of all groups and messages of a step (collective).

    If ranks opened them one by one in the middle of a step, they could deadlock."""
    world = engine.world
    joint = [axes for _, axes in world.mesh.joint]
    groups = [world.group(axes) for axes in (world.mesh.names, *world.mesh.names, *joint)]
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    groups += [world.group(axes) for bucket in buckets for axes in (bucket.axes, bucket.near)]
    stages = world.group("pp").ranks if runner.lines else ()
    lines = [(stages[source], stages[target]) for source, target in runner.lines]
    if context is not None:
        more, between = context.attention.connections()
        groups, lines = groups + more, [*lines, *between]
    world.prepare(groups=groups, lines=lines)


def _optimizer(
    optimizer: OptimizerClass | None, *, engine: Engine, plan: Plan, arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Build the optimizer over this rank's slices; for a frozen model, an optimizer without parameters.

    Raises PlanError if it cannot update parameters in chunks, ValueError if every parameter is frozen."""
    if optimizer is None:
        return torch.optim.SGD([{"params": []}], lr=0.0)
    if not any(row.trainable for row in engine.table.rows):
        raise ValueError(
            "every parameter is frozen; set requires_grad=True on those that should train, or pass optimizer=None for "
            "a model that is not trained"
        )
    if needs_of(optimizer) and plan.server:
        raise PlanError(f"{optimizer.__name__} needs whole parameters, and servers hold shards; use server=0")
    if needs_of(optimizer) and plan.tiers.state_tiers != {"device"}:
        raise PlanError(
            f"{optimizer.__name__} needs whole parameters, but offload={plan.offload} updates chunks; use offload=none"
        )
    in_blocks = plan.codec is not None and plan.codec[0] != "powersgd"  # blocks around a tied weight differ by stage
    if engine.tied and (in_blocks or needs_of(optimizer) == "replicas"):
        what = f"wire={plan.wire}" if in_blocks else optimizer.__name__
        raise PlanError(f"{what} would let copies of {min(engine.tied)} in two stages differ; use pp=1, or untie them")
    moves = {f"sync={plan.sync}": plan.sync != "step", f"server={plan.server}": plan.server}
    moves[getattr(optimizer, "__name__", "")] = needs_of(optimizer) == "replicas"
    engine.fixed_by = next((what for what, moved in moves.items() if moved), "")
    groups = []
    for options, owned in engine.slices().items():
        names = [row.name for row in engine.table.rows if row.trainable and row.options == options]
        groups.append({"params": owned, **dict(options), **({"names": names} if needs_of(optimizer) else {})})
    logical = LogicalSlices(engine, sync_axes=plan.sync_axes, every=plan.every * (plan.sync == "momenta"))
    built = build_optimizer(optimizer, groups=groups, logical=logical, **arguments)
    if engine.owned and plan.sync != "step":
        raise PlanError(f"sync={plan.sync} averages state of slices, but whole() keeps whole tensors; use sync=step")
    return built


@dataclass(frozen=True)
class ParallelSetting:
    """Everything besides the model that `parallelize` builds engines and runners from, for the model or for a stage."""

    plan: Plan
    world: World
    """World over the plan's mesh; after `_with_roles` with an axis `kv` if ranks share KV heads."""
    options: Options
    task: MicrobatchTask
    storage: StorageConfig
    policy: ActivationPolicy
    context: ContextParallel | None
    """Tokens of this rank, and the attention over all tokens; None if neither cp nor a rule changes the attention."""
    scheme: SyncScheme | None
    """How replicas agree across steps; None under `sync=step`, and with servers."""
    routers: RouterUpdates
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    """Role in tensor parallelism of each module, by name; empty without tp."""
    mixtures: Mapping[str, Mixture] = dataclasses.field(default_factory=dict)
    """Modules that hold experts, by name; empty if the plan does not divide them."""
    joined: bool = False
    """True if batch norms take their statistics over the rows of several ranks."""
    absent: frozenset[str] = frozenset()
    """Pieces of the model that this stage does not compute."""
    extents: ShardSizes = dataclasses.field(default_factory=ShardSizes)
    """Sizes of the current activations' shards on the ranks of tp."""

    @property
    def shares_rows(self) -> bool:
        """True if ranks split the rows of one matmul or exchange tokens; then all run every micro-batch."""
        return _splits_rows(self.plan, self.world) or bool(self.mixtures and self.plan.ep > 1)

    def for_optimizer(self, optimizer: OptimizerClass | None) -> "ParallelSetting":
        """Return the setting with the reduction state of `optimizer`. Raises PlanError if they do not go together."""
        if self.plan.sync == "momenta" and not getattr(optimizer, "takes_local_steps", False):
            raise PlanError("sync=momenta is for an optimizer that takes local steps: use ZeroOneAdam, or sync=step")
        if optimizer is None or needs_of(optimizer) != "replicas":
            return self
        self.plan.check(MOMENTUM_EXCHANGE, by=optimizer.__name__)
        if self.options.noise:
            raise PlanError(f"{optimizer.__name__} sums no gradients to measure their noise; use Options(noise=False)")
        errors = ("error",) if self.plan.sync == "step" else ()  # else they are state of the optimizer
        reduction = dataclasses.replace(self.storage.reduction, summed_state=errors, owner_state=errors)
        return dataclasses.replace(self, storage=dataclasses.replace(self.storage, reduction=reduction))

    @property
    def token_task(self) -> MicrobatchTask:
        """The task; under cp its forward and loss get this rank's tokens only."""
        context = self.context
        if context is None:
            return self.task
        task = self.task  # `task.call` is left: in an open step every rank of cp computes all tokens
        return MicrobatchTask(context.on_own_tokens(task.forward), context.on_own_tokens(task.loss), task.call)

    def compile(self, module: nn.Module, *, draws: RandomDraws) -> None:
        """Compile the blocks of `module` that this rank runs as a whole, if the plan says so; never on meta."""
        if self.plan.compile == "off" or self.world.device.type == "meta":
            return
        modules = dict(module.named_modules())
        for name in [piece.module for unit in partition(module) for piece in unit if piece.block]:
            block = modules[name]
            piece = vars(block).get("forward")
            forward = self.policy.compiled.wrap(block, name=name, draws=draws)
            if isinstance(piece, PieceForward):
                piece.compiled = forward
            elif piece is None:
                block.forward = forward
                self.policy.undo.callback(delattr, block, "forward")


def _computed(forward: Forward, *, plan: Plan, precision: Precision, casts: ModelCasts) -> Forward:
    """Return the forward in the compute dtype, with its output converted to a dtype that is exact enough for a loss.

    Under tp and cp, an error of the forward gets a note on what to change in the model."""

    def run(model: nn.Module, batch: Any) -> Any:
        try:
            with casts.forward(model, batch=batch):
                output = forward(model, batch)
        except (RuntimeError, ValueError) as error:
            if type(error) in (RuntimeError, ValueError):
                add_advice(error, model=model, plan=plan)
            raise
        return output if precision.compute_dtype is None else widen_for_loss(output)

    return forward if plan.tp == plan.cp == 1 and precision.compute_dtype is None else run


def _with_roles(setting: ParallelSetting, module: nn.Module) -> ParallelSetting:
    """Add the roles of the model's modules and the world of their axes."""
    plan = setting.plan
    with _as_plan_error():
        parts = setting.options.parts
        if parts is None:
            parts = planned_roles(module, plan=plan, rules=setting.options.tensor_rules)
        mixtures = planned_mixtures(module, plan=plan, rules=setting.options.tensor_rules)
    world = setting.world.over(mesh_with_kv_replicas(plan, parts=parts.values()))
    refuse_renormed(module, plan=plan, world=world, storage=setting.storage)
    if parts:  # a rule may keep experts whole
        mixtures = {name: each for name, each in mixtures.items() if name in parts and parts[name].role == "experts"}
        if mixtures and plan.tp_mode != "1d":
            which = f"tp_mode={plan.tp_mode} splits hidden states, and {next(iter(mixtures))} needs them whole"
            raise PlanError(f"{which}. Nearest that works: tp_mode=1d")
    joined = _batch_norms_join(module, setting, world)
    return dataclasses.replace(setting, world=world, parts=parts, mixtures=mixtures, joined=joined)


@contextlib.contextmanager
def _as_plan_error() -> Iterator[None]:
    """Raise PlanError in place of a ValueError within the block."""
    try:
        yield
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(str(error)).with_traceback(error.__traceback__) from None


def _build_engine(
    source: ParameterSource, setting: ParallelSetting, *, recall: ForwardReplay, earlier: frozenset[str] | None = None
) -> LiveModel:
    """Build the engine, random draws and batch statistics of the model or of a stage on this rank.

    earlier: names of a stage's parameters that an earlier stage also holds; None for the whole model."""
    plan, world, options, context, module = setting.plan, setting.world, setting.options, setting.context, source.module
    convert(module, precision=setting.storage.precision)
    over_tokens = context.over_tokens if context else None
    setting.routers.follow(module, over_tokens=over_tokens)
    limit_experts(module, capacity=options.expert_capacity, over_tokens=over_tokens, routers=setting.routers)
    table = parameter_table(module, options=options.parameter_options, replicas=plan.replica_axes, bucket=plan.bucket)
    if earlier is not None:
        table = table.held_at(("pp", world.group("pp").index), counted_elsewhere=earlier)
    scheme = scheme_on(world.mesh, plan=plan, blocks=False)
    outside = SplitContext(world, scheme, setting.extents, keeps=options.keep_gathered, recall=recall)
    if setting.parts:
        with _as_plan_error():
            table = table.placed(tensor_parallel(module, plan=plan, parts=setting.parts, outside=outside))
    if setting.mixtures:
        placed = expert_parallel(
            module, mixtures=setting.mixtures, world=world, plan=plan, recall=recall, imbalance=options.expert_imbalance
        )
        table = table.placed(placed)
    engine = DataParallel(source, table=table, world=world, storage=setting.storage, by_module=earlier is None)
    draws = _draws(module, setting, outside)
    recall.remember(draws)
    if context is not None:
        recall.remember(context.mode)
    setting.compile(module, draws=draws)
    return LiveModel(engine, draws, BatchStatistics(module, world=world, axes=plan.loss_axes, joined=setting.joined))


def _whole(source: ParameterSource, *, setting: ParallelSetting) -> tuple[Engine, MicrobatchRunner]:
    """Build the engine and runner of a plan without pp, under which every rank runs all layers."""
    recall, blocks = ForwardReplay(), setting.policy.blocks.names(source.module)
    place_buffers(source, world=setting.world, precision=setting.storage.precision)
    live = _build_engine(source, setting, recall=recall)
    setting.policy.blocks.install(source.module, names=blocks, recall=recall)
    if not source.deferred:
        rank, mesh = setting.world.rank, setting.world.mesh
        absent = [row.name for row in live.engine.table.rows if not row.is_on(mesh, rank=rank)]
        _release(source.module.get_parameter(name) for name in absent)
    task, schedule = setting.token_task, naive(1, microbatches=setting.plan.microbatches)
    overlaps = setting.plan.overlap_microbatches > 0 and setting.world.device.type != "meta"
    runner = WholeModelRunner(live, task=task, schedule=schedule, shares_rows=setting.shares_rows, overlaps=overlaps)
    return Engine({0: live.engine}, ranks=[0], world=setting.world), runner


def _in_stages(source: ParameterSource, *, setting: ParallelSetting) -> tuple[Engine, MicrobatchRunner]:
    """Cut the model on rank 0, and build the engine and runner of this rank's stages; free a given model's values."""
    plan, options, world, parts = setting.plan, setting.options, setting.world, setting.parts
    schedule = plan_schedule(plan)
    if is_path(plan.schedule) and len(set(world.exchange(str(schedule)))) > 1:
        raise PlanError(f"the ranks have different tables in schedule={plan.schedule}; give all hosts the same file")
    place = partial(place_buffers, source, world=world, precision=setting.storage.precision)
    if source.deferred:
        place()
    else:
        share_parameters(source, world=world)
    make = cutter(source.module, plan=plan, schedule=schedule, where=options.cut, parts=parts)
    run = partial(cut_source, source, plan=plan, make=make, forward=setting.task.forward, loss=setting.task.loss)
    run = partial(run, example=options.example, device=world.device)
    cut = on_first_rank(run, world=world, shared=(PlanError, LossError))
    if not source.deferred:  # the cut has run the model where the user put it, buffers beside parameters
        place()
    blocks = setting.policy.blocks.names(source.module)
    like = shapes_of(source.module, seed=options.seed).module
    convert(like, precision=setting.storage.precision)
    joined = dataclasses.replace(plan, bucket=bucket_bytes(like, bucket=plan.bucket))
    stages: dict[int, LiveStage] = {}
    for index in schedule.stages_of(world.group("pp").index):
        stage, recall = make_stage(source.module, cut=cut, index=index, like=like), ForwardReplay()
        recall.remember(stage.state)
        earlier = frozenset(name for name, holders in cut.holders.items() if holders[0] < index)
        here = parts_of_stage(parts, module=stage.module, model=source.module, last=index + 1 == cut.stages)
        contents = cut.contents(index)
        absent = frozenset(contents.modules) - frozenset(contents.modules[contents.start : contents.stop])
        own = dataclasses.replace(setting, plan=joined, parts=here, absent=absent, extents=ShardSizes())
        live = _build_engine(source.for_module(stage.module), own, recall=recall, earlier=earlier)
        stages[index] = LiveStage(**vars(live), stage=stage)
        kept = in_flight(schedule)[index]
        halves = {name: f"{name} of stage {index}" for name in contents.split_blocks}
        setting.policy.blocks.install(stage.module, names=blocks, recall=recall, in_flight=kept, parts=halves)
    given = [] if source.deferred else [(name, p, p.requires_grad) for name, p in source.module.named_parameters()]
    _release(parameter for _, parameter, _ in given)
    whole = Engine({index: live.engine for index, live in stages.items()}, ranks=schedule.rank_of, world=world)
    whole.given = given
    runner = StagedRunner(
        whole, stages=stages, task=setting.token_task, schedule=schedule, cut=cut, shares_rows=setting.shares_rows
    )
    return whole, runner


def _splits_rows(plan: Plan, world: World) -> bool:
    """Return whether several ranks split the rows of one matmul."""
    split = [axis for axis in plan.row_axes if axis not in (*plan.replica_axes, *plan.sync_axes)]
    return world.group(split).size > 1 if split else False


def _release(parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of parameters of the user's module that are held elsewhere; they become NaN (integers: 0)."""
    for parameter in parameters:
        value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        parameter.data = torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _draws(module: nn.Module, setting: ParallelSetting, outside: SplitContext) -> RandomDraws:
    parts, local = setting.parts, setting.plan.random == "local"
    threads = isinstance(setting.world, ThreadWorld) and setting.world.size > 1
    if local and parts and threads:
        raise ValueError("random=local draws from torch's own generator, which threads share; give random=global")
    before, after = activation_regions(module, plan=setting.plan, parts=parts, outside=outside, absent=setting.absent)
    tokens = None if setting.context is None else setting.context.mode
    seed, alone = setting.options.seed, not threads
    draws = RandomDraws(module, seed=seed, before=before, after=after, local=local, tokens=tokens, alone=alone)
    if setting.context is not None:
        setting.context.attention.draws = draws
    return draws


def _batch_norms_join(module: nn.Module, setting: ParallelSetting, world: World) -> bool:
    """Return whether batch norms take statistics over several ranks. Raises PlanError if the plan does not allow it."""
    norms = list(running_norms(module))
    setting.policy.undo.push(disable_sync_batch_norm(module))
    is_split = world.group(setting.plan.loss_axes).size > 1
    if is_split and (without := [name for name in norms if name not in batch_norms(module)]):
        raise PlanError(
            f"{without[0]} is an instance norm with running statistics over samples, which replicas do not exchange; "
            "build it with track_running_stats=False, use GroupNorm, or train without replicas (dp=1)"
        )
    if norms and _splits_rows(setting.plan, world):
        raise PlanError(
            f"{norms[0]} takes statistics over the batch for each feature, and tp_mode={setting.plan.tp_mode} splits "
            "features and rows; use tp_mode=1d, or GroupNorm or LayerNorm"
        )
    if norms and is_split and setting.plan.overlap_microbatches:
        raise PlanError(
            f"{norms[0]} takes statistics over the rows of several ranks, which cannot wait beside a backward; use "
            "overlap_microbatches=0, or GroupNorm or LayerNorm"
        )
    return bool(norms) and is_split
