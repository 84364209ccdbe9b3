"""The job: all settings of a training run, as one typed tree of frozen dataclasses.

Each field is declared once, here: its type, default and meaning. The TOML file, the flags, the help text and the job
written beside a run all follow this declaration (`job_toml`). A field that may be None defaults to None, because TOML
has no null.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from meshwise.engine.step_result import SkipPolicy
from meshwise.memory.staging_buffers import SwapConfig
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan


class JobError(ValueError):
    """Raised for a wrong job; the message names the key, its value and what to change."""


def _least(key: str, value: int, least: int) -> None:
    if value < least:
        raise JobError(f"{key} = {value} has to be at least {least}")


def _parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return keyword arguments from `layers=4 widths=[64,64] tied=True position=rotary`.

    A value is TOML, `True` or `False`, or else a string.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not KEY=VALUE; write it as in layers=4")
        try:
            arguments[key] = tomllib.loads(f"value = {value.lower() if value in ('True', 'False') else value}")["value"]
        except tomllib.TOMLDecodeError:
            arguments[key] = value
    return arguments


Arguments: TypeAlias = Annotated[
    Mapping[str, Any],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE",
        instance_from_str=_parse_arguments,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [f"{key}={item}" for key, item in value.items()],
    ),
]
"""Keyword arguments of a function that the job names."""

DTYPES = ("float32", "float64")

PlanLine: TypeAlias = Annotated[
    Plan,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PLAN",
        instance_from_str=lambda words: Plan.parse(words[0]),
        is_instance=lambda value: isinstance(value, Plan),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""A plan written as one line of text."""


@dataclass(frozen=True)
class ModelJob:
    """The model: one of the reference models, or your own."""

    name: str = "gpt"
    """`gpt`, `mlp`, or your own function (or nn.Module class) that builds the model: `package.module:function` or
    `path/to/file.py:function`."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of that function by keyword, as in `layers=4 heads=4`. For `gpt`, the vocabulary (256) and the context
    (`data.context`) are filled in when absent."""
    tensor_rules: Arguments = field(default_factory=dict)
    """With tp, the role of modules whose names match a pattern, where detection does not find it:
    `blocks.*.up=colwise blocks.*.down=rowwise`. See docs/tensor.md."""
    cut: Literal["auto", "blocks"] = "auto"
    """With pp, where the model is cut: between its blocks, or inside of them too where that is more even."""
    cut_at: tuple[str, ...] = ()
    """With pp, the blocks at which each stage but the first begins, as in `["blocks.3", "head"]`. Default: as even as
    possible, by the plan's `partition`. `meshwise draw cut` shows it."""

    @property
    def cut_options(self) -> CutOptions:
        """Cut options of the model."""
        return CutOptions(at=self.cut_at, how=self.cut)

    def __post_init__(self) -> None:
        for pattern, part in self.tensor_rules.items():
            if not isinstance(part, str):
                raise JobError(f'model.tensor_rules: {pattern!r} = {part!r} is not a role such as "colwise"')


@dataclass(frozen=True)
class DataJob:
    """The data: text read as bytes, or a dataset of your own."""

    files: tuple[str, ...] = ("python-stdlib",)
    """Text files, folders (all files below) and globs, read as bytes, one token each. `python-stdlib` stands for the
    source text of Python's own standard library, which is on every machine that has Python."""
    dataset: str | None = None
    """In place of `files`: `package.module:function` or `path/to/file.py:function` that returns a map-style
    torch Dataset, or a pair of them, (training, validation)."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the `dataset` function, by keyword."""
    context: int = 256
    """Tokens of text in one sample."""
    validation: float = 0.05
    """Fraction of the data kept for validation: the last bytes of text, samples drawn by seed from a dataset."""
    workers: int = 0
    """Processes per rank that read ahead; 0 reads in the rank itself, which suits text."""
    cache: str | None = None
    """Folder where text is kept as one memory-mapped file of tokens. Default: `meshwise` in $XDG_CACHE_HOME or in
    ~/.cache."""

    def __post_init__(self) -> None:
        _least("data.context", self.context, 1)
        _least("data.workers", self.workers, 0)
        if not 0 <= self.validation < 1:
            raise JobError(f"data.validation = {self.validation} is a fraction of the data: from 0 up to below 1")
        if not self.files and self.dataset is None:
            raise JobError("data.files is empty: name at least one file, folder or glob, or python-stdlib")


@dataclass(frozen=True)
class OptimizerJob:
    """The optimizer: any class of torch.optim."""

    name: str = "AdamW"
    """Name of the class in torch.optim."""
    lr: float = 1e-3
    """Peak learning rate; the schedule scales it."""
    weight_decay: float | None = None
    """Weight decay of parameters with two or more dims; the others get none. Default: the class's own."""
    betas: tuple[float, float] | None = None
    """Decay rates of the running averages, for the Adam family. Default: the class's own."""
    arguments: Arguments = field(default_factory=dict)
    """Other arguments of the class, as in `momentum=0.9`."""


@dataclass(frozen=True)
class ScheduleJob:
    """The learning rate over the steps of the run."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant; a straight line or half a cosine down to the floor; or wsd (warm-up, stable, decay):
    constant, then a straight line down to the floor."""
    warmup: int = 0
    """Steps over which the rate rises from 0 in a straight line."""
    floor: float = 0.1
    """The final rate, as a fraction of the peak."""
    decay: float = 0.2
    """For wsd: the fraction of all steps that the decay takes, at the end."""

    def __post_init__(self) -> None:
        _least("schedule.warmup", self.warmup, 0)
        for key in ("floor", "decay"):
            if not 0 <= (value := getattr(self, key)) <= 1:
                raise JobError(f"schedule.{key} = {value} is a fraction: from 0 to 1")


@dataclass(frozen=True)
class TrainJob:
    """The training loop: its length, batches, numbers and files."""

    steps: int = 1000
    """Steps of the run, each with one global batch."""
    batch: int = 32
    """Samples in the global batch, whatever the plan."""
    seed: int = 0
    """Seed of the parameters and of the order of samples."""
    clip_norm: float | None = None
    """Scale gradients down to this norm (over all parameters). Default: never."""
    nonfinite: str = "raise"
    """If a gradient is not finite: `raise` ends the run; `skip:N` skips the step, at most N in a row; `end`
    ends the run too, and lets parameters on CPU or disk tiers be updated during the backward (docs/memory.md)."""
    dtype: str | None = None
    """`float32` or `float64`: the element type of parameters and floating-point data. Default: that of the model and
    the data. For half precision see the plan's `precision`."""
    log_every: int = 10
    """Steps between progress lines on a terminal that is not interactive; metrics.jsonl has every step."""
    validate_every: int = 0
    """Steps between validations; 0 validates at the end only."""
    validate_batches: int | None = None
    """Global batches of a validation. Default: all the validation data."""
    output: str = "runs/train"
    """Folder of the run. An existing one is not changed: `-2`, `-3` … is appended to the name; with
    `resume = "auto"` the run in it is resumed."""
    save_every: int = 0
    """Steps between checkpoints, which are written to `checkpoints` in the run's folder during training, and at
    the end; 0 writes none."""
    keep_last: int = 3
    """Checkpoints to keep; older ones are removed when a newer one is complete."""
    resume: str | None = None
    """Resume from a checkpoint: `auto` from the newest valid one in `output` (from the start without one); or the
    folder of a run or of one of its checkpoints, to begin a new run there. Default: from the start. Ranks that their
    launcher has started again resume by themselves."""
    accept: tuple[str, ...] = ()
    """Keys of the job that may differ from the checkpoint's although they change the results, as in `optimizer.lr`.
    Without this, resuming with another learning rate, data, model or seed is refused."""
    timeline: int = 0
    """Steps to measure action by action, after two steps of warm-up. Their times are printed and written to
    `timeline.json` in the run's folder, for `meshwise draw timeline`. 0 measures none."""
    tensorboard: bool = False
    """Write TensorBoard files too; needs the extra `tensorboard`."""

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "log_every", "keep_last"):
            _least(f"train.{key}", getattr(self, key), 1)
        for key in ("validate_every", "save_every", "timeline"):
            _least(f"train.{key}", getattr(self, key), 0)
        if self.validate_batches is not None:
            _least("train.validate_batches", self.validate_batches, 1)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise JobError(f"train.clip_norm = {self.clip_norm} has to be above 0; leave it out for no clipping")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise JobError(
                f"train.dtype = {self.dtype!r} is none of {', '.join(DTYPES)}; for half precision use the plan: "
                "precision=bf16 or precision=fp16"
            )
        SkipPolicy.parse(self.nonfinite)


@dataclass(frozen=True)
class SwapJob:
    """The disk tier, with `offload=…:disk` in the plan."""

    folder: str | None = None
    """Folder of a fast disk, where each rank makes an unnamed file. Default: the folder of temporary files."""
    buffers: int = 3
    """Staging buffers of the update: one is read ahead, one updated, one written back."""
    megabytes: int = 64
    """Size of a staging buffer, in MiB."""

    @property
    def config(self) -> SwapConfig:
        """Swap configuration for `parallelize`."""
        return SwapConfig(None if self.folder is None else Path(self.folder), self.buffers, self.megabytes * 2**20)

    def __post_init__(self) -> None:
        _least("swap.buffers", self.buffers, 2)
        _least("swap.megabytes", self.megabytes, 1)


@dataclass(frozen=True)
class SampleJob:
    """Text that a byte-level model generates at the end of the run."""

    length: int = 0
    """Bytes to generate; 0 for none."""
    temperature: float = 0.8
    """Divisor of the logits before sampling; 0 always takes the most likely byte."""
    prompt: str = ""
    """Beginning of the text. Empty: the start of a file."""

    def __post_init__(self) -> None:
        _least("sample.length", self.length, 0)
        if self.temperature < 0:
            raise JobError(f"sample.temperature = {self.temperature} has to be 0 or above")


@dataclass(frozen=True)
class PredictedJob:
    """Predictions of `meshwise plan --write` for its plan; a run compares them with its measurements at the end."""

    plan: str = ""
    """The plan; under another plan the predictions are ignored."""
    on: str = ""
    """The cluster of the prediction."""
    seconds: float = 0.0
    """Seconds of a step."""
    memory: int = 0
    """Bytes on the fullest rank, libraries included."""


@dataclass(frozen=True)
class Job:
    """A training job, from a TOML file and dotted flags (a flag wins)."""

    ignored_keys: ClassVar[frozenset[tuple[str, ...]]] = frozenset()
    """Keys that a TOML file may have although this command ignores them."""
    model: ModelJob = ModelJob()
    data: DataJob = DataJob()
    optimizer: OptimizerJob = OptimizerJob()
    schedule: ScheduleJob = ScheduleJob()
    train: TrainJob = TrainJob()
    sample: SampleJob = SampleJob()
    swap: SwapJob = SwapJob()
    predicted: PredictedJob = PredictedJob()
    plan: PlanLine = Plan(dp=None)  # noqa: RUF009 -- a frozen value
    """The split of the model over the ranks, as in "dp=2 zero=1"; `dp=auto` uses all ranks."""
    loss: str = "cross-entropy"
    """`cross-entropy`, `mse`, or your own function (`package.module:function`, `path/to/file.py:function`):
    loss(output, batch) returns the sum of the losses and their number."""
    ranks: int | None = None
    """Local processes to start when not under torchrun. Default: what the plan needs; with `dp=auto`, the cores that
    this process may use, at most 4."""
    comm: Literal["auto", "local", "gloo"] = "auto"
    """How ranks on CPUs of one host communicate: `local`, through shared memory; `gloo`, by messages; `auto`, through
    shared memory where possible, unless MESHWISE_COMM names another way."""
    restarts: int = 0
    """How often the local ranks are started again after one fails; they resume from the newest checkpoint
    (`train.save_every`). Under torchrun its --max-restarts counts instead."""

    def __post_init__(self) -> None:
        if self.ranks is not None:
            _least("ranks", self.ranks, 1)
        _least("restarts", self.restarts, 0)
        if self.restarts and not self.train.save_every:
            raise JobError(
                f"restarts = {self.restarts} with train.save_every = 0: restarted ranks would begin from step 0; "
                "set train.save_every to the steps you can afford to lose"
            )


@dataclass(frozen=True)
class StudiedJob(Job):
    """A training job for a command that does not train it: fields that only a run needs are hidden and ignored."""

    restarts: tyro.conf.Suppress[int] = 0
    ignored_keys: ClassVar[frozenset[tuple[str, ...]]] = frozenset({("restarts",)})
