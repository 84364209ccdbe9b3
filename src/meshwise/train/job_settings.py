"""Declare the settings of a training run: `Job`, a tree of frozen dataclasses.

Each field is declared here once, with its type, default and meaning. The TOML file, the flags, the help text and the
job.toml in a run's folder follow from this (`flags_and_toml`). The docstrings are the help text. A field that may be
None has the default None, because TOML has no null."""

import contextlib
import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from meshwise.comm.api.world import EmulatedLink
from meshwise.engine.step_result import SkipPolicy
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan


class JobError(ValueError):
    """Error for a wrong job or a wrong flag; the message names the key, its value and what to change."""


@contextlib.contextmanager
def as_job_error(kind: type[Exception] = ValueError, *, of: str = "") -> Iterator[None]:
    """Turn a ValueError or a `kind` inside into a JobError, whose message is `of` and the error's message."""
    try:
        yield
    except (ValueError, kind) as error:
        raise JobError(f"{of}{error}") from error


def check_least(flags: object, *, least: int, names: str, table: str = "") -> None:
    """Raise JobError if a field of `flags` is below `least`; None is allowed.

    `names`: names of the fields, separated by blanks; `table`: prefix of their keys for the message, as `train.`."""
    for name in names.split():
        if (value := getattr(flags, name)) is not None and value < least:
            raise JobError(f"{table}{name} = {value} has to be at least {least}")


def _parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return a dict of keyword arguments from words such as `layers=4 widths=[64,64] tied=True position=rotary`.

    A value is read as TOML, or as `True` or `False`; any other text is a string."""
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
"""Keyword arguments by name, for a function that the job names; as a flag `name=value name=value …`."""

HUB = "hf:"
"""Prefix of a name that means a folder of Hugging Face, or a name of its hub."""
ROW_KINDS = ("json:", "parquet:", "datasets:")
"""Prefixes of `data.dataset` for records that a tokenizer turns into rows of tokens."""
DTYPES = ("float32", "float64")
"""Values of `train.dtype`: element types of the parameters."""

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
    """`gpt`, `mixture`, `mlp`, or your own function (or nn.Module class) that builds the model:
    `package.module:function` or `path/to/file.py:function`. `hf:FOLDER_OR_NAME`: a causal language model of
    transformers, with its weights."""
    arguments: Arguments = field(default_factory=dict)
    """Keyword arguments of the model's function, as in `layers=4 heads=4`. Defaults for `gpt` and `mixture`: a
    vocabulary of 256 and a context of `data.context`. With `hf:` keys of its configuration; `dtype` is float32."""
    lora: Arguments = field(default_factory=dict)
    """With `hf:`, settings of peft.LoraConfig, as in `r=8 lora_alpha=16`: only these adapters are trained."""
    quantization: Literal["nf4", "int8", "torchao-int8"] | None = None
    """With `lora`: the other matrices are kept in 4 or 8 bits, by bitsandbytes or torchao. For dp, zero and cp."""
    tensor_rules: Arguments = field(default_factory=dict)
    """With tp: the role in tensor parallelism of modules whose names match a pattern, where it is not detected:
    `blocks.*.up=colwise blocks.*.down=rowwise`. See docs/tensor.md."""
    cut: Literal["auto", "blocks"] = "auto"
    """With pp: a stage begins at a block (`blocks`), or also inside one where stages are then more even (`auto`)."""
    cut_at: tuple[str, ...] = ()
    """With pp: the module at which each stage but the first begins, as in `["blocks.3", "head"]`. Default: stages as
    even as possible, by the plan's `partition`. `meshwise draw cut` shows the stages."""

    @property
    def cut_options(self) -> CutOptions:
        """The fields `cut_at` and `cut` as CutOptions, for `parallelize`."""
        return CutOptions(at=self.cut_at, how=self.cut)

    def __post_init__(self) -> None:
        if self.quantization and not self.lora:
            raise JobError(f'model.quantization = "{self.quantization}" trains adapters alone; add lora = {{r = 8}}')
        for pattern, part in self.tensor_rules.items():
            if not isinstance(part, str):
                raise JobError(f'model.tensor_rules: {pattern!r} = {part!r} is not a role such as "colwise"')


@dataclass(frozen=True)
class DataJob:
    """The data: text read as bytes, or a dataset of your own."""

    files: tuple[str, ...] = ("python-stdlib",)
    """Text files, folders (with all files in them) and globs. Each byte is a token. `python-stdlib` is the source text
    of Python's standard library, which every machine with Python has."""
    dataset: str | None = None
    """In place of `files`: a function `package.module:function` or `path/to/file.py:function`. It returns a list, a
    torch Dataset or IterableDataset, or a pair (training, validation): docs/data.md. `json:FILES`, `parquet:FILES` with
    globs, or `datasets:FOLDER`: records with `text`, `prompt` and `completion`, or `messages`: docs/fine_tuning.md."""
    arguments: Arguments = field(default_factory=dict)
    """Keyword arguments of the `dataset` function. With records, other names of their fields: `text=content`."""
    tokenizer: str | None = None
    """With records: the folder or hub name of a tokenizer, `hf:FOLDER_OR_NAME`. Default: of the `hf:` model."""
    pack: bool = False
    """With records: fill rows of `context` tokens with several records, which do not attend to each other; otherwise
    each record is a row, padded to `context` tokens."""
    collator: str | None = None
    """With `dataset`: how samples of different lengths become a batch. `pad` (also for records), `pack` (rows of
    `context` tokens), `hf:CLASS` of transformers, or your own `module:function`, from a list of samples to a batch."""
    collator_arguments: Arguments = field(default_factory=dict)
    """Keyword arguments of the collator, as in `multiple=8` for `pad`."""
    bucket_by_length: int = 0
    """With `collator`: number of global batches that are read at once and sorted by length; the seed shuffles them."""
    overlong: Literal["truncate", "drop", "split"] = "truncate"
    """What happens to a record of more than `context` tokens; `split` makes several parts of it."""
    context: int = 256
    """Tokens of text in one sample."""
    validation: float = 0.05
    """Fraction of the data kept for validation: the last bytes of a text, or random samples of a single dataset."""
    workers: int = 0
    """Processes per rank that read ahead, not for a stream; 0: the rank itself reads, which is fast enough for text."""
    cache: str | None = None
    """Folder for the file of tokens, made from the text. Default: `meshwise` in $XDG_CACHE_HOME or in ~/.cache."""

    @property
    def has_records(self) -> bool:
        """True if `dataset` names records that a tokenizer turns into rows of tokens."""
        return (self.dataset or "").startswith(ROW_KINDS)

    def __post_init__(self) -> None:
        check_least(self, least=1, names="context", table="data.")
        check_least(self, least=0, names="workers bucket_by_length", table="data.")
        if self.collator is None and (self.bucket_by_length or self.collator_arguments):
            raise JobError('bucket_by_length and collator_arguments need a collator; add data.collator = "pad"')
        if self.collator is not None and (self.dataset is None or (self.has_records and self.collator != "pad")):
            raise JobError(f'data.collator = {self.collator!r} needs data.dataset; for records it is "pad"')
        if not 0 <= self.validation < 1:
            raise JobError(f"data.validation = {self.validation} is a fraction of the data: from 0 up to below 1")
        if not self.files and self.dataset is None:
            raise JobError("data.files is empty: name at least one file, folder or glob, or python-stdlib")


@dataclass(frozen=True)
class OptimizerJob:
    """The optimizer: any class of torch.optim or meshwise.optim, or your own."""

    name: str = "AdamW"
    """Name of the class in torch.optim; `Muon`, `LAMB` or `LARS` of meshwise.optim; or `package.module:Class` or
    `path/to/file.py:Class`. `Muon` needs `rest`. `whole:` before a name runs the class on whole tensors, each on one
    rank: `whole:Adafactor`, `whole:pytorch_optimizer:SOAP`."""
    lr: float = 1e-3
    """Peak learning rate; the schedule scales it."""
    weight_decay: float | None = None
    """Weight decay of parameters with two or more dims; the other parameters get none. Default: of the class."""
    betas: tuple[float, float] | None = None
    """Decay rates of the running averages, for the Adam family. Default: of the class."""
    arguments: Arguments = field(default_factory=dict)
    """Other keyword arguments of the class, as in `momentum=0.9`."""
    rest: Arguments = field(default_factory=dict)
    """A second optimizer, `name=AdamW lr=3e-4`, for all parameters except the matrices of the blocks: for embeddings,
    the head and vectors. The learning rate of both follows the schedule. Default: one optimizer for all."""
    groups: Arguments = field(default_factory=dict)
    """Options of the parameters whose names match a pattern: `*.bias={lr=1e-4}`, in TOML `"*.bias" = {lr = 1e-4}`. `*`
    matches any text, and later patterns win. `optimizer="rest"` means the second optimizer, `"hidden"` the first."""
    layer_decay: float | None = None
    """Factor of the learning rate from block to block, away from the output: the head has the full rate, the last block
    its rate times `layer_decay`, and so on. Default: one rate."""

    def __post_init__(self) -> None:
        for pattern, options in self.groups.items():
            if not isinstance(options, Mapping):
                raise JobError(f"optimizer.groups: {pattern!r} = {options!r} is no table; write {{lr = {self.lr}}}")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise JobError(f"optimizer.layer_decay = {self.layer_decay} is a factor: above 0, at most 1")


@dataclass(frozen=True)
class ScheduleJob:
    """The learning rate over the steps of the run."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """The rate after the warm-up. `constant`: the peak; `linear`: a straight line down to the floor; `cosine`: half a
    cosine down to the floor; `wsd` (warm-up, stable, decay): the peak, then a straight line down to the floor."""
    warmup: int = 0
    """Number of warm-up steps, in which the rate rises from peak/warmup to the peak in a straight line."""
    warmup_samples: int = 0
    """In place of `warmup`: number of samples in which the rate rises. It multiplies the rate of `shape`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor of the rate for the global batch: batch / base_batch (`linear`, Goyal et al., arXiv 1706.02677), or its
    square root (`sqrt`, for Adam: Malladi et al., arXiv 2205.10287). It follows a batch that grows."""
    base_batch: int = 32
    """Batch for which `optimizer.lr` was found; used with `lr_scaling`."""
    floor: float = 0.1
    """The rate of the last step, as a fraction of the peak; ignored by `constant`."""
    decay: float = 0.2
    """For `wsd`: the fraction of all steps, at the end of the run, in which the rate falls."""
    name: str | None = None
    """In place of all keys above: a class of torch.optim.lr_scheduler, as `OneCycleLR`, or a function or class
    `package.module:Class` or `path/to/file.py:Class` that takes the optimizer. It makes one step for each update."""
    arguments: Arguments = field(default_factory=dict)
    """Keyword arguments of the class `name`, as in `max_lr=0.01 total_steps=1000`."""

    def __post_init__(self) -> None:
        if self.name is not None and dataclasses.replace(self, name=None, arguments={}) != ScheduleJob():
            raise JobError(f"schedule.name = {self.name!r} sets the rate alone; of [schedule] leave only arguments")
        if self.name is None and self.arguments:
            raise JobError('schedule.arguments belong to a class; add schedule.name = "OneCycleLR"')
        check_least(self, least=0, names="warmup warmup_samples", table="schedule.")
        check_least(self, least=1, names="base_batch", table="schedule.")
        if self.warmup and self.warmup_samples:
            raise JobError(f"schedule.warmup = {self.warmup} and schedule.warmup_samples are given; leave out one")
        for key in ("floor", "decay"):
            if not 0 <= (value := getattr(self, key)) <= 1:
                raise JobError(f"schedule.{key} = {value} is a fraction: from 0 to 1")


@dataclass(frozen=True)
class TrainJob:
    """The training loop: number of steps, batch size, seed, data type, output files and checkpoints."""

    steps: int = 1000
    """Steps of the run, each with one global batch."""
    batch: int = 32
    """Samples in the global batch, the same under every plan."""
    ramp: tuple[int, int, int] | None = None
    """Growth of the batch, as start, increment, samples: `[8, 8, 4000]` begins with 8 samples and adds 8 at even
    distances, so that after 4000 samples the batch is `train.batch`. Default: the batch is fixed."""
    noise: bool = False
    """Measure the gradient noise scale in every step, and report the critical batch that it implies. A micro-batch of a
    replica is the small batch; there must be two or more in a step, all of one size."""
    auto_batch: tuple[int, int] | None = None
    """Let the batch follow the noise scale between these bounds, in place of `batch`. It begins with the lower bound,
    and doubles or halves at most every 20 steps. Default: the batch is fixed."""
    shares: Literal["even", "auto"] = "even"
    """Rows of each batch that a replica gets. `auto`: every 20 steps slow replicas get fewer rows, if that saves 5 % of
    a step. The samples and the result are the same. Only for ranks on CPUs."""
    seed: int = 0
    """Seed of the initial parameters and of the order of samples."""
    clip_norm: float | None = None
    """Gradients with a larger norm over all parameters are scaled down to this norm. Default: no clipping."""
    average: float | None = None
    """Decay of an average of the parameters (EMA), as 0.999. Validations, and so `keep_best`, use the average."""
    expert_bias_rate: float = 0.0
    """Rate at which each step moves the biases of routers towards an even load of the experts (docs/experts.md)."""
    expert_capacity: float | None = None
    """Most tokens of a sample that an expert takes, as a multiple of the even share; it drops the rest, which changes
    the model (docs/experts.md). Default: no token is dropped."""
    router_losses: Arguments = field(default_factory=dict)
    """Weights of losses that keep the load of the experts even and the routers' scores small, as `balance=0.01 z=0.001
    over=sequence` (docs/experts.md)."""
    nonfinite: str = "raise"
    """If the loss or gradient is not finite: `raise` ends the run; `skip:N` skips up to N steps in a row."""
    sync: Arguments = field(default_factory=dict)
    """With a `sync` across steps: other settings of its scheme, as `outer_lr=0.5 fragments=4` (docs/local_steps.md)."""
    dtype: str | None = None
    """`float32` or `float64`: the element type of parameters and floating-point data. Default: the types of the model
    and of the data. For half precision see the plan's `precision`."""
    log_every: int = 10
    """Steps between progress lines on a terminal that is not interactive; metrics.jsonl has every step."""
    validate_every: int = 0
    """Steps between validations; 0: one validation, at the end."""
    validate_batches: int | None = None
    """Most global batches in a validation. Default: all the validation data."""
    output: str = "runs/train"
    """Folder of the run. If the folder exists, the run gets a new folder, with `-2`, `-3` … appended to the name; but
    with `resume = "auto"` the run in the folder continues."""
    save_every: int = 0
    """Steps between checkpoints, which are written into the folder `checkpoints` of the run. The last step writes a
    checkpoint too. A run with checkpoints saves and ends after Ctrl-C, SIGTERM, SIGUSR1, or, looked for each
    `log_every` steps, a file `stop` in its folder. 0: no checkpoints."""
    keep_last: int = 3
    """Number of checkpoints to keep; older checkpoints are removed when a new checkpoint is complete."""
    keep_best: bool = False
    """Keep a checkpoint of the lowest validation loss too, in `checkpoints/best`, whatever `save_every` is."""
    resume: str | None = None
    """Where the run begins. `auto`: at the newest valid checkpoint in `output`, or at the start without a checkpoint.
    The folder of a run or of a checkpoint: a new run begins at that checkpoint. Default: at the start. Ranks that their
    launcher starts again always resume."""
    accept: tuple[str, ...] = ()
    """Keys of the job that may differ from the job of the checkpoint although they change the results, as in
    `optimizer.lr`. Without them, resuming with another learning rate, data, model or seed is refused."""
    timeline: int = 0
    """Number of steps to measure action by action, after two steps of warm-up. The times are printed and written to
    `timeline.json` in the run's folder, for `meshwise draw timeline`. 0: no measurement."""
    profile: int = 0
    """Number of the step that torch's profiler traces on every rank, into `profile/rank-N.json` of the run's folder
    (for https://ui.perfetto.dev). Actions, collectives and operations are ranges. 0: no trace."""
    loggers: tuple[str, ...] = ()
    """Trackers that get the numbers of the run: `tensorboard`, `wandb`, `mlflow`, `aim` (each an extra), or a class of
    your own that gets every event: `my_module:Callback`, made with (folder, job), with write(event) and close()."""

    def __post_init__(self) -> None:
        check_least(self, least=1, names="steps batch log_every keep_last validate_batches", table="train.")
        check_least(self, least=0, names="validate_every save_every timeline profile", table="train.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise JobError(f"train.clip_norm = {self.clip_norm} has to be above 0; leave it out for no clipping")
        if self.dtype is not None and self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise JobError(f"train.dtype = {self.dtype!r} is none of {known}; or give the plan precision=bf16 or fp16")
        if self.shares == "auto" and (self.noise or self.auto_batch):
            raise JobError('train.shares = "auto" gives uneven micro-batches, and noise needs even ones; leave one out')
        SkipPolicy.parse(self.nonfinite)
        if self.ramp is not None:
            start, step, samples = self.ramp
            if not (1 <= start < self.batch and step > 0 and samples > 0) or (self.batch - start) % step:
                raise JobError(
                    f"train.ramp = {list(self.ramp)} does not lead to train.batch = {self.batch}; write "
                    f"[{(self.batch + 1) // 2}, {self.batch // 2}, 1000], or another start and increment"
                )
        if self.auto_batch is not None and (self.ramp or not 1 <= self.auto_batch[0] <= self.auto_batch[1]):
            given = list(self.auto_batch)
            raise JobError(f"train.auto_batch = {given} has to be a lower and an upper bound, without train.ramp")


@dataclass(frozen=True)
class SwapJob:
    """The disk tier: where state on disk is stored, and the buffers of its update. For plans with `offload=…:disk`."""

    folder: str | None = None
    """Folder on a fast disk, in which each rank makes an unnamed file. Default: the folder of temporary files."""
    buffers: int = 3
    """Number of staging buffers in a rank: one is read ahead, one is updated, one is written back."""
    megabytes: int = 64
    """Size of a staging buffer in MiB."""

    def __post_init__(self) -> None:
        check_least(self, least=2, names="buffers", table="swap.")
        check_least(self, least=1, names="megabytes", table="swap.")


@dataclass(frozen=True)
class SampleJob:
    """Text that a byte-level model generates at the end of the run."""

    length: int = 0
    """Number of bytes to generate; 0: no text."""
    temperature: float = 0.8
    """Divisor of the logits before sampling; 0: always the most likely byte."""
    prompt: str = ""
    """Text that the model continues. Empty: the model begins a new file."""

    def __post_init__(self) -> None:
        check_least(self, least=0, names="length temperature", table="sample.")


@dataclass(frozen=True)
class Job:
    """A training job, read from a TOML file and dotted flags; a flag overrides the file."""

    model: ModelJob = ModelJob()
    data: DataJob = DataJob()
    optimizer: OptimizerJob = OptimizerJob()
    schedule: ScheduleJob = ScheduleJob()
    train: TrainJob = TrainJob()
    sample: SampleJob = SampleJob()
    swap: SwapJob = SwapJob()
    plan: PlanLine = Plan(dp=None)  # noqa: RUF009 -- a frozen value
    """How the model is split over the ranks, as in "dp=2 zero=1"; `dp=auto` uses all ranks."""
    loss: str = "cross-entropy"
    """`cross-entropy`, `mse`, or your own function (`package.module:function`, `path/to/file.py:function`):
    loss(output, batch) returns the sum of the losses and their number."""
    ranks: int | None = None
    """Local processes to start; ignored under torchrun. Default: the number that the plan needs; with `dp=auto`, the
    number of cores that this process may use, at most 4."""
    comm: Literal["auto", "local", "gloo"] = "auto"
    """How ranks on CPUs of one host communicate: `local`, through shared memory; `gloo`, by messages; `auto`, through
    shared memory where possible, unless MESHWISE_COMM names another way."""
    emulate: str | None = None
    """Slow down the messages between ranks on CPUs as a network would: `1Gbit 2ms`, or `100Mbit 20ms dp` for messages
    along the axis dp alone. It shows what another plan saves there; see docs/local_steps.md. Default: no emulation."""
    restarts: int = 0
    """How many times the local ranks are started again after a rank fails; they resume from the newest checkpoint, so
    `train.save_every` must be set. Under torchrun its --max-restarts decides."""

    def __post_init__(self) -> None:
        check_least(self, least=1, names="ranks")
        check_least(self, least=0, names="restarts")
        if self.emulate is not None:
            with as_job_error():
                EmulatedLink.parse(self.emulate)
        if self.restarts and not self.train.save_every:
            raise JobError(
                f"restarts = {self.restarts} with train.save_every = 0 begin from step 0; set train.save_every"
            )

    def changed(self, **tables: Mapping[str, Any]) -> Self:
        """Return the job with other values in its tables, as in `job.changed(train={"steps": 3})`."""
        new = {name: dataclasses.replace(getattr(self, name), **values) for name, values in tables.items()}
        return dataclasses.replace(self, **new)


@dataclass(frozen=True)
class StudiedJob(Job):
    """A training job for a command that does not train it; the key `restarts`, which only `train` uses, is ignored."""

    restarts: tyro.conf.Suppress[int] = 0
