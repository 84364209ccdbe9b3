"""Save the state of a training under one plan, and load it under any other plan.

A checkpoint holds logical tensors by name, each as rectangles. It is a folder of safetensors files and one index
(docs/checkpoints.md has the format).

    | runs/demo/checkpoints/                 a root: the checkpoints of one run
    |     latest                             a file with the name of the newest one
    |     step-100/                          complete, with a checksum for every MiB
    |         checkpoint.json                the index
    |         rank-00000.safetensors …       the data
    |     step-200.partial-3f2a…/            a save in progress, or the rest of a failed save

Every rank calls `save`, `PendingSave.wait`, `load`, and `save`, `load` and `restore` of `TrainingState`. Each of these
calls succeeds on every rank, or raises an error on every rank. A single process calls `newest_valid`, `read_index`,
`damages` (which compares every byte with its checksum) and `prune`."""
