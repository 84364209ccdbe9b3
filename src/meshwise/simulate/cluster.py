"""Define a cluster as data (devices, links, hosts) and read it from a TOML file.

Its constants are measured (`meshwise bench calibrate`) or from data sheets; docs/simulation.md has their formulas."""

import dataclasses
import difflib
import itertools
import math
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch

from meshwise.plan.plan_keys import LARGEST_COUNT, is_path

T = TypeVar("T")


class ClusterError(ValueError):
    """Error in the description of a cluster; the message names the file, the key and what to change."""


DTYPES = tuple(sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)))
"""Dtypes that may be keys of `Device.peak`."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "send_recv")
"""Collectives that may be keys of `Link.collectives`."""

Curve = tuple[tuple[float, float], ...]
"""Points (size in bytes, bytes per second), sizes ascending. Between two points log(rate) is linear in log(size)."""


@dataclass(frozen=True)
class MatmulEfficiency:
    """Fraction of the peak that a matrix product reaches, as a function of its shape."""

    best: float = 0.8
    """Efficiency of a very large product, at most 1. Flops that causal attention skips do not count."""
    inner: float = 0.0
    """Length of the summed dim at which the efficiency is half of `best`."""
    outputs: float = 0.0
    """Number of results (batch·m·n) at which the efficiency is half of `best`; fewer do not fill the device."""

    def efficiency(self, *, inner: float, outputs: float) -> float:
        """Return the fraction of the peak for a matrix product of `outputs` results, each a sum of `inner` terms."""
        return self.best * inner / (inner + self.inner) * outputs / (outputs + self.outputs)


@dataclass(frozen=True)
class Device:
    """Device of a rank: a GPU, or a core of a CPU while all cores compute."""

    name: str = ""
    """Name of the device, for tables."""
    kind: str = "cuda"
    """`cuda` or `cpu`; decides which kernels torch would choose."""
    memory: float = math.inf
    """Bytes of the device's memory per rank; infinite if the file does not give them."""
    own: float = 0.0
    """Bytes of `memory` that libraries use (the CUDA context, NCCL), and tensors cannot use."""
    peak: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations per second by dtype, as in `bfloat16 = 312e12`. `peak_of` handles missing dtypes."""
    products: MatmulEfficiency = field(default_factory=MatmulEfficiency)
    """Fraction of the peak that matrix products reach."""
    attention: MatmulEfficiency = field(default_factory=MatmulEfficiency)
    """Fraction of the peak that fused attention reaches: `outputs` counts queries of all heads, `inner` counts keys."""
    bandwidth: Curve = ()
    """Bytes per second that an operation reads and writes, as a function of its total bytes."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second, by name, of operations that `bandwidth` does not describe: `gelu = 1.5e9`."""
    launch: float = 0.0
    """Seconds that the host takes to start an operation. A GPU computes earlier operations during this time."""
    kernel: float = 0.0
    """Minimum seconds of an operation on the device, without `launch`."""
    step: float = 0.0
    """Seconds of a step that belong neither to an operation nor to a collective."""
    action: float = 0.0
    """Seconds that the host takes for each forward and each backward of a micro-batch, in addition to `launch`."""
    fused: float = 1.0
    """Fraction of their bytes that elementwise operations still move when kernels are fused; 1 without fusion."""

    def peak_of(self, dtype: str) -> float:
        """Return the flops per second of a dtype; if unknown, of the narrowest wider known dtype, or of the widest."""
        if dtype in self.peak or not dtype:
            return self.peak.get(dtype, max(self.peak.values()))
        widths = {name: getattr(torch, name).itemsize for name in (*self.peak, dtype)}
        wider = [width for name, width in widths.items() if width > widths[dtype]]
        at_hand = min(wider, default=max(widths[name] for name in self.peak))
        return max(rate for name, rate in self.peak.items() if widths[name] == at_hand)


@dataclass(frozen=True)
class Link:
    """Link between ranks. Rates are per rank and direction, as the bus bandwidth of nccl-tests."""

    latency: float = 0.0
    """Seconds before the first byte arrives, for each step. A collective has ⌈log2(ranks)⌉ steps, a message one."""
    hop: float = 0.0
    """Seconds from one rank to the next in a ring. Over several nodes an all-gather and a reduce-scatter take at least
    the hops of all ranks, because NCCL has no tree for them."""
    bandwidth: Curve = ()
    """Bytes per second, by the bytes of the whole collective. Between nodes: of one adapter, by the adapter's bytes."""
    collectives: Mapping[str, Curve] = field(default_factory=dict)
    """Bytes per second, by name, of collectives that do not follow `bandwidth`."""


@dataclass(frozen=True)
class NodeHost:
    """Host of a node: rates in bytes per second. A missing rate is infinite, so its transfers take no time."""

    link: float = math.inf
    """Rate between one GPU and the host's memory; bytes of both directions add up."""
    memory: float = math.inf
    """Rate of the host's memory, shared by the optimizers of all ranks of the node."""
    disk: float = math.inf
    """Rate of the node's disks, shared by all ranks of the node."""


@dataclass(frozen=True)
class Cluster:
    """Cluster of identical nodes: device, number of ranks, links and hosts."""

    device: Device = field(default_factory=Device)
    """Device of each rank."""
    ranks_per_node: int = 8
    """Ranks that share a node."""
    nodes: int = 1
    """Number of nodes."""
    inside: Link = field(default_factory=Link)
    """Link between ranks of a node."""
    between: Link = field(default_factory=Link)
    """Link between nodes, through one network adapter."""
    host: NodeHost = field(default_factory=NodeHost)
    """Host of each node, where offloaded state is stored."""
    adapters: int = 8
    """Network adapters of a node. If a node has more ranks than adapters, ranks share them."""
    overlap: bool = True
    """True if collectives run at the same time as computations; False if the rank waits for each collective."""

    @property
    def ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.nodes * self.ranks_per_node

    @property
    def shared(self) -> bool:
        """True if all ranks are processes of one host, on its CPUs, and so share memory."""
        return self.device.kind == "cpu" and self.nodes == 1


def rate_at(curve: Curve, *, size: float) -> float:
    """Return a curve's bytes per second at `size` bytes; beyond its ends the rate at the end. Empty: infinity."""
    if not curve or size <= curve[0][0]:
        return curve[0][1] if curve else math.inf
    for (low, slow), (high, fast) in itertools.pairwise(curve):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            rate: float = slow * (fast / slow) ** part
            return rate
    return curve[-1][1]


def load(name: str | Path) -> Cluster:
    """Return a shipped cluster (`h100`) or the cluster of a TOML file. Raises ClusterError if the file is not valid."""
    path = Path(name)
    shipped = resources.files("meshwise.simulate") / "clusters"
    known = sorted(entry.name.removesuffix(".toml") for entry in shipped.iterdir() if entry.name.endswith(".toml"))
    try:
        is_known = str(name).lower() in known and not path.is_file()
        table = tomllib.loads((shipped / f"{str(name).lower()}.toml" if is_known else path).read_text("utf-8"))
    except ValueError as error:  # of UTF-8 or TOML; tomllib raises ValueError for a number with too many digits
        raise ClusterError(f"{name} is not TOML: {error}") from error
    except OSError as error:
        if path.exists():
            raise ClusterError(f"{name} cannot be read: {error.strerror}; name a TOML file") from error
        near = difflib.get_close_matches(str(name).lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known clusters: {', '.join(known)}"
        raise ClusterError(f"no cluster {str(name)!r}, and no file of that name; {hint}") from error
    cluster = _read(Cluster, table, at=str(name))
    device = cluster.device
    if device.kind not in ("cuda", "cpu"):
        raise ClusterError(f"{name}: device: kind = {device.kind!r} has to be 'cuda' or 'cpu'")
    _require_known(device.peak, known=DTYPES, at=f"{name}: device: peak")
    parts = {"products: best": device.products.best, "attention: best": device.attention.best, "fused": device.fused}
    for at, part in parts.items():
        if part > 1:
            raise ClusterError(f"{name}: device: {at} = {part} has to be at most 1: it is a fraction")
    for at, link in (("inside", cluster.inside), ("between", cluster.between)):
        _require_known(link.collectives, known=COLLECTIVES, at=f"{name}: {at}: collectives")
    if not device.peak:
        raise ClusterError(f"{name}: device: peak is missing; add flops per second, as in peak = {{bfloat16 = 312e12}}")
    return cluster


def _require_known(table: Mapping[str, object], *, known: Sequence[str], at: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ClusterError(f"{at}: unknown key {key}; did you mean {near}?")


def parse_cluster(text: str) -> Cluster:
    """Return the cluster of a text like `64x8 h100`: nodes, ranks of a node, and a name or file for `load`.

    `8 h100` is one node of 8 ranks. `mine.toml` keeps the nodes and ranks of the file. Raises ClusterError for a text
    of another form, for no ranks, and for more than `LARGEST_COUNT` ranks."""
    found = re.fullmatch(r"(?:(?:(\d+)\s*[xX×]\s*)?(\d+)\s+)?(\S.*)", text.strip())
    if found is None or (" " in found[3] and not is_path(found[3])):
        raise ClusterError(f"{text!r} is not a cluster; write nodes x ranks and a name, as in '64x8 h100'")
    nodes, each, name = found.groups()
    if re.fullmatch(r"[\dxX×]+", name) and not Path(name).is_file():
        raise ClusterError(f"{text!r} names no device; write nodes x ranks and a name, as in '64x8 h100'")
    cluster = load(name)
    ranks = int(each) if each else cluster.ranks_per_node
    count = int(nodes) if nodes else 1 if each else cluster.nodes
    if not 0 < ranks * count <= LARGEST_COUNT:
        wrong = f"more ranks than {LARGEST_COUNT}" if ranks * count else "no ranks"
        raise ClusterError(f"{text!r} has {wrong}; write nodes x ranks and a name, as in '64x8 h100'")
    return dataclasses.replace(cluster, nodes=count, ranks_per_node=ranks)


def _read(kind: type[T], table: Mapping[str, Any], *, at: str) -> T:
    """Return a dataclass made from a TOML table. Raises ClusterError for an unknown key or an invalid value."""
    hints = typing.get_type_hints(kind)
    _require_known(table, known=list(hints), at=at)
    zeros = {item.name for item in dataclasses.fields(kind) if item.default == 0}  # type: ignore[arg-type]
    return kind(**{key: _value(hints[key], one, at=f"{at}: {key}", zero=key in zeros) for key, one in table.items()})


def _value(hint: Any, value: Any, *, at: str, zero: bool = False) -> Any:
    """Return the checked value of a key as type `hint`. `zero`: the value may be 0."""
    if dataclasses.is_dataclass(hint) or typing.get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise ClusterError(f"{at} = {value!r} has to be a table of keys")
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return _read(hint, value, at=at)
        kind = typing.get_args(hint)[1]
        return {name: _value(kind, one, at=f"{at}.{name}") for name, one in value.items()}
    if hint == Curve:
        return _curve(value, at=at)
    if type(value) not in ((int, float) if hint is float else (hint,)):
        raise ClusterError(f"{at} = {value!r} has to be of type {hint.__name__}")
    if hint in (int, float) and not (value > 0 or (zero and value == 0)):
        raise ClusterError(f"{at} = {value} has to be {'at least' if zero else 'above'} 0")
    return float(value) if hint is float else value


def _curve(rows: Any, *, at: str) -> Curve:
    pairs = isinstance(rows, list) and all(isinstance(row, list) and len(row) == 2 for row in rows)
    if not pairs or not all(type(number) in (int, float) for row in rows for number in row):
        raise ClusterError(f"{at} has to be a list of [bytes, bytes per second]")
    curve = tuple((float(size), float(rate)) for size, rate in rows)
    ascends = all(low < high for (low, _), (high, _) in itertools.pairwise(curve))
    if not ascends or not all(0 < size < math.inf and 0 < rate < math.inf for size, rate in curve):
        raise ClusterError(f"{at}: sizes and rates have to be above 0 and finite, and sizes have to ascend")
    return curve
