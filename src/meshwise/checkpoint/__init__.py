"""Checkpoints that know no plan: logical tensors by name, saved and loaded as rectangles.

A checkpoint is a folder of safetensors files and one index. It is independent of ranks: each loading rank reads the
rectangles that it needs, under any plan and any number of ranks. docs/checkpoints.md is the format.

    | runs/demo/checkpoints/                 a root: checkpoints of one run
    |     latest                             the name of the newest one, for people and scripts
    |     step-100/                          published: complete, with a checksum for every MiB
    |         checkpoint.json                the index
    |         rank-00000.safetensors …       the data
    |     step-200.partial-3f2a…/            being written, or what a save that failed has left

What every rank calls, together:

    | save(folder, content=, world=) -> Saving        returns when whatever may change soon is staged; the rest is read
    |                                                 and written while training goes on
    |     Saving.staged()                             this rank: returns when live tensors may change again
    |     Saving.wait() -> Path                       all ranks: published, or SaveError on every rank alike
    | load(folder, needed=, world=) -> Index          fills the tensors of `needed(index)`; or DamageError on every rank

What one process calls:

    | newest_valid(root) -> Search                    its path (None: there is none), and what is wrong with newer ones
    | read_index(folder) -> Index                     checked against its own checksum and the sizes of the files
    | damages(folder) -> Iterator[Damage]             every byte against its checksum: file, tensor, expected, found
    | prune(root, keep_last=) -> list[Path]           removes older checkpoints, and what failed saves have left

A trainer offers all of it in three methods, which every rank calls and which end in the same way on every rank:

    trainer.save(folder, extra=None, wait=True, keep_last=None) -> Saving
    trainer.load(folder) -> Mapping[str, Any]       the `extra` it was saved with: JSON values
    trainer.restore(root) -> Restored | None        the newest valid one, passing over damaged ones, with its `extra`
"""

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError, SaveError
from meshwise.checkpoint.checkpoint_folder import newest_valid, prune
from meshwise.checkpoint.checkpoint_index import CheckpointIndex, read_index
from meshwise.checkpoint.damage_check import damages, differences
from meshwise.checkpoint.load_state import CheckpointReader, load
from meshwise.checkpoint.save_state import PendingSave, SaveContent, save
from meshwise.checkpoint.training_state import RestoredState, TrainingState

__all__ = [
    "CheckpointIndex",
    "CheckpointReader",
    "Damage",
    "DamageError",
    "PendingSave",
    "RestoredState",
    "SaveContent",
    "SaveError",
    "TrainingState",
    "damages",
    "differences",
    "load",
    "newest_valid",
    "prune",
    "read_index",
    "save",
]
