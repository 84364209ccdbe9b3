"""Checkpoints that know no plan: logical tensors by name, saved and loaded as rectangles.

A checkpoint is a folder of safetensors files and one index. It says nothing of ranks: whoever loads it reads the
rectangles that it needs, under any plan and any number of ranks. docs/checkpoints.md is the format.

    runs/demo/checkpoints/                 a root: checkpoints of one run
        latest                             the name of the newest one, for people and scripts
        step-100/                          published: complete, with a checksum for every MiB
            checkpoint.json                the index
            rank-00000.safetensors …       the data
        step-200.partial-3f2a…/            being written, or what a save that failed has left

What every rank calls, together:

    save(folder, content=, world=) -> Saving        returns when whatever may change soon is staged; the rest is read
                                                    and written while training goes on
        Saving.staged()                             this rank: returns when live tensors may change again
        Saving.wait() -> Path                       all ranks: published, or SaveError on every rank alike
    load(folder, needed=, world=) -> Index          fills the tensors of `needed(index)`; DamageError on every rank alike

What one process calls:

    newest_valid(root) -> Search                    Search.path (None: no valid one), Search.damaged: what was passed over
    read_index(folder) -> Index                     checked against its own checksum and the sizes of the files
    damages(folder) -> Iterator[Damage]             every byte against its checksum: file, tensor, expected, found
    prune(root, keep_last=) -> list[Path]           removes older checkpoints, and what failed saves have left

A trainer has all of it in two methods:

    trainer.save(folder, extra=None, wait=True) -> Saving     extra: JSON values, the same on every rank
    trainer.load(folder) -> Mapping[str, Any]                 the extra; DamageError, SaveError, ValueError on all ranks alike
    trainer.restore(root) -> Restored | None                  the newest valid one, passing over damaged ones
                                                              Restored.path .extra .damaged; None: there is none at all
"""
