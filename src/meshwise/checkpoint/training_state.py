"""Save and load the state of a training (`TrainingState`): all that the next step depends on, except the batch.

docs/checkpoints.md has the names of the tensors ("What is in the folder"). Under a `sync` across steps there are also
names such as `replica/2/parameter`, of the state of replica 2; the other names then hold the mean of all replicas.
`extra` is JSON: the plan, the optimizer's hyperparameters by parameter, and values of the caller, such as the job."""

import itertools
import math
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from meshwise.checkpoint.checkpoint_folder import CheckpointReader, fill, newest_valid, on_all_ranks
from meshwise.checkpoint.checkpoint_format import CheckpointIndex, Damage, DamageError, dtype_name, read_index
from meshwise.checkpoint.hugging_face import is_pretrained, read_pretrained, with_model_names
from meshwise.checkpoint.save_state import PendingSave
from meshwise.comm.api.streams import generator_states, restore_generators
from meshwise.data_parallel.checkpoint_slices import (
    OPTIMIZER_KINDS,
    WHOLE,
    CheckpointRefill,
    SavedTensorSpec,
    StoredSlice,
    buffers,
    slices_to_save,
)
from meshwise.data_parallel.stage_engines import Engine
from meshwise.expert.router_losses import SHARES
from meshwise.memory.chunked_update import ChunkedUpdate
from meshwise.optim.build_optimizer import describe_groups, optimizer_name, restore_groups, saved_groups
from meshwise.plan import Plan
from meshwise.sync.diverging_replicas import Replicas
from meshwise.sync.parameter_servers import ParameterServers


@dataclass(frozen=True)
class RestoredState:
    """Result of a restore: the loaded checkpoint, its `extra`, and the damage found in skipped checkpoints."""

    path: Path
    extra: Mapping[str, Any]
    damaged: tuple[Damage, ...]


class TrainingState:
    """Saves and loads the state of an engine and its optimizer (in `update`). One save at a time is in progress."""

    def __init__(self, engine: Engine, *, update: ChunkedUpdate, plan: Plan) -> None:
        self.replicas: Replicas | None = None
        """The replicas that differ between agreements, under a `sync` across steps."""
        self.servers: ParameterServers | None = None
        """Servers to which workers push gradients, under `staleness`."""
        self._engine = engine
        self._update = update
        self._optimizer = update.optimizer
        self._plan = str(plan)
        self._saving: PendingSave | None = None
        self._hook: RemovableHandle | None = None

    def wait_staged(self) -> None:
        """Wait for updated parameters, and until a save in progress has copied its tensors; then they may change."""
        self._engine.wait_updated()
        if self._saving is not None:
            self._saving.wait_staged()

    def save(self, folder: Path, *, extra: Mapping[str, Any], keep_last: int | None = None) -> PendingSave:
        """Wait for the previous save, then begin to save in the background; see `Trainer.save`. Raises TierError after
        a failed update."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            if not saving.finished:
                saving.wait()
        self._update.check()
        engine = self._engine
        engine.wait_updated()
        own = {
            "plan": self._plan,
            "ranks": engine.world.size,
            "optimizer": optimizer_name(self._optimizer),
            "dtypes": {row.name: dtype_name(row.dtype) for row in engine.table.rows if row.dtype.itemsize < 4},
            "complex": [row.name for row in engine.table.rows if row.dtype.is_complex],
            "groups": describe_groups(self._optimizer, names=self._groups()),
            **extra,
        }
        slices = slices_to_save(engine, optimizer=self._optimizer)
        if self.servers is not None:
            self.servers.pull()
            own["servers"] = self.servers.state()
        if self.replicas is not None:
            own["sync"] = self.replicas.state()
            slices = self.replicas.slices_to_save(slices)
        aliases = {alias: row.name for row in engine.table.rows for alias in row.aliases}
        holdings = itertools.chain(slices, self._generators())
        if self._hook is None:
            self._hook = self._optimizer.register_step_pre_hook(lambda *_: self.wait_staged())
        self._saving = PendingSave(
            folder, holdings=holdings, aliases=aliases, extra=own, world=engine.world, keep_last=keep_last
        )
        return self._saving

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Load the state of a checkpoint and return its `extra`; see `Trainer.load`.

        For a Hugging Face folder, reset the optimizer's state; the result then has 0 `steps` and `skips`, and the names
        of unused tensors at `["user"]["unused"]`. After a DamageError the state may be partly overwritten."""
        self.wait_staged()
        world = self._engine.world
        pretrained = on_all_ranks(lambda: is_pretrained(folder), world=world)
        read = self._read_pretrained if pretrained else read_index
        index = on_all_ranks(lambda: read(folder), world=world)
        if self.replicas is not None:
            self.replicas.settle()
            index = replace(index, tensors=self.replicas.own_tensors(index.tensors, extra=index.extra))
        generators = self._generators()
        others: set[str] = set().union(*world.exchange({held.name for held in buffers(self._engine.modules)}))
        others.update(alias for row in self._engine.table.rows for alias in row.aliases)
        refill, needed = on_all_ranks(
            lambda: self._refill(index, generators, others=others, pretrained=pretrained), world=world
        )
        fill(index, needed=needed, world=world)
        on_all_ranks(lambda: self._warn_of_errors(index) if world.rank == 0 else None, world=world)
        on_all_ranks(lambda: self._finish_load(index, refill, generators), world=world)
        self._update.broken = False
        self._engine.publish()
        return index.extra

    def restore(self, root: Path) -> RestoredState | None:
        """Load the newest valid checkpoint of a root; see `Trainer.restore`. If a checkpoint proves damaged while it is
        loaded, load the next older one. Raises ValueError as `load` does."""
        world = self._engine.world
        passed: list[Damage] = []
        tried: set[Path] = set()
        while True:
            found = on_all_ranks(lambda: newest_valid(root, without=tried) if world.rank == 0 else None, world=world)
            path, damaged = world.exchange(found)[0]
            if path is None:
                if passed or damaged:
                    raise DamageError(list(dict.fromkeys([*passed, *damaged])))
                return None
            try:
                extra = self.load(path)
            except DamageError as error:
                passed += error.damages
                tried.add(path)
                continue
            return RestoredState(path, extra, tuple(dict.fromkeys([*passed, *damaged])))

    def _read_pretrained(self, folder: Path) -> CheckpointIndex:
        """Return an index of a Hugging Face folder with the tensors of this model, whose `extra` is for the caller."""
        engine = self._engine
        parameters = {row.name: (row.name, *row.aliases) for row in engine.table.rows}
        others: dict[str, tuple[str, ...]] = {buffer.name: (buffer.name,) for buffer in buffers(engine.modules)}
        base = str(getattr(engine.module, "base_model_prefix", ""))
        index, unused = with_model_names(read_pretrained(folder), names=parameters | others, base=base)
        own = [f"parameter/{name}" for name in parameters] + [f"buffer/{name}" for name in others]
        tensors = {key: index.tensors[key] for key in own if key in index.tensors}
        return replace(index, tensors=tensors, extra={"steps": 0, "skips": 0, "user": {"unused": unused}})

    def _refill(
        self, index: CheckpointIndex, generators: list[StoredSlice], *, others: Set[str], pretrained: bool
    ) -> tuple[CheckpointRefill, list[StoredSlice]]:
        """Return the engine's refill and the slices it needs; `others`: see `_slots`. ValueError for another model."""
        engine, own, saved = self._engine, optimizer_name(self._optimizer), index.extra.get("optimizer")
        if saved not in (own, None):
            raise ValueError(f"{index.folder} was saved with the optimizer {saved}, but this one is {own}; use {saved}")
        refill = CheckpointRefill(engine, update=self._update, slots=_slots(index, engine, others=others))
        if pretrained:  # its files may lack buffers
            return refill, [part for part in refill.needed() if part.slot != "buffer" or part.key in index.tensors]
        self._saved_groups(index)
        # Routers may have had no losses, and so no shares, when the checkpoint was saved.
        needed = [part for part in refill.needed() if part.key in index.tensors or not part.key.endswith(f".{SHARES}")]
        if (index.extra.get("plan"), index.extra.get("ranks")) == (self._plan, engine.world.size):
            needed += (state for state in generators if state.key in index.tensors)
        return refill, needed

    def _warn_of_errors(self, index: CheckpointIndex) -> None:
        """Warn if a checkpoint has errors of a codec that this plan does not keep, and so never sends."""
        reduction, squares = self._engine.units[0].buckets[0].storage.reduction, 0.0
        for key, stored in index.tensors.items():
            kind, _, name = key.removeprefix("reduction/").partition("/")
            if kind in {"error", "outer_error"} - {*reduction.owned_state, *reduction.summed_state}:
                value = torch.empty(stored.shape, dtype=stored.dtype)
                CheckpointReader(index).fill([StoredSlice.of_full(value, name=name, slot=f"reduction/{kind}")])
                squares += float(value.double().square().sum())
        if squares:
            warnings.warn(
                f"{index.folder} has errors of a codec, of norm {math.sqrt(squares):.3g}, which '{self._plan}' drops. "
                f"Resume with the codec of '{index.extra['plan']}' to send them",
                stacklevel=4,
            )

    def close(self) -> None:
        """Remove the hook from the optimizer, and let an unfinished save end in its thread (`PendingSave.detach`)."""
        if self._hook is not None:
            self._hook.remove()
        if self._saving is not None:
            self._saving.detach()

    def _groups(self) -> list[list[str]]:
        """Return the names of the parameters in each group of the optimizer."""
        rows = [row for row in self._engine.table.rows if row.trainable]
        return [[row.name for row in rows if row.options == options] for options in self._engine.slices()]

    def _saved_groups(self, index: CheckpointIndex) -> list[Mapping[str, Any]]:
        """Return the saved hyperparameters of each group. Raises ValueError if they differ within a group."""
        return saved_groups(names=self._groups(), saved=index.extra.get("groups", []))

    def _generators(self) -> list[StoredSlice]:
        """Return copies of the states of torch's generators, as `generator_states` returns them."""
        slot, names = f"rank/{self._engine.world.rank}", ("random", "random.cuda")
        named = zip(names, generator_states(), strict=False)
        return [StoredSlice.of_full(state, name=name, slot=slot) for name, state in named]

    def _finish_load(self, index: CheckpointIndex, refill: CheckpointRefill, generators: list[StoredSlice]) -> None:
        refill.finish()
        restore_groups(self._optimizer, values=self._saved_groups(index))
        restore_generators([state.tensor for state in generators])


def _slots(index: CheckpointIndex, engine: Engine, *, others: Set[str]) -> dict[str, dict[str, SavedTensorSpec]]:
    """Return the slots to load, by parameter name. A tied parameter gets its name in this model; a parameter that the
    model does not have keeps its name in the file. `others`: names of buffers and further names of parameters."""
    found: dict[str, dict[str, SavedTensorSpec]] = {}
    for key, stored in index.tensors.items():
        kind, _, rest = key.partition("/")
        if kind in (*OPTIMIZER_KINDS, "reduction", WHOLE):
            key, _, rest = rest.partition("/")
            found.setdefault(rest, {})[f"{kind}/{key}"] = SavedTensorSpec(stored.dtype, stored.shape)
        elif kind == "parameter":
            found.setdefault(rest, {})[kind] = SavedTensorSpec(stored.dtype, stored.shape)
    first = {row.name: index.aliases.get(row.name, row.name) for row in engine.table.rows}
    here = {name: found[other] for name, other in first.items() if other in found}
    unknown = {name: slots for name, slots in found.items() if name not in first.values()}
    return here | {name: slots for name, slots in unknown.items() if name not in others or len(slots) > 1}
