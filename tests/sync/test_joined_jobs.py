"""Test that separate jobs which join are replicas of one training, also when one is lost, late or starts again."""

import copy
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from free_port import free_port
from grid import Grid
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import Work, World
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.comm.network.job_store import loopback_store, store_of
from meshwise.comm.network.joined_jobs import JobEntry, JoinedJobs
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import next_token_loss
from meshwise.testing import build_whole, run
from meshwise.verify import verify
from sync.plain_replay import Replay
from sync.test_fragments_and_groups import streaming
from sync.test_replay import SCHEMES, STEPS, batch, build, made, plain, rates, replayed, require_equal
from warm_command import WarmCommand

Parameters = dict[str, Tensor]
BOUND = 1e-9
SECONDS = 3.0
"""Patience of the tests in which a job does not come."""


@pytest.fixture
def meeting() -> tuple[str, Store]:
    """Return the address of a store for jobs that join, and its keys of the jobs."""
    store = loopback_store()
    return f"127.0.0.1:{store.port}", PrefixStore("meshwise/jobs", store)


def rows_of(number: int, *, replicas: range, of: int) -> tuple[Tensor, ...]:
    """Return the rows that some of the replicas have of a batch, split as one job splits it."""
    return tuple(torch.cat([x.tensor_split(of)[replica] for replica in replicas]) for x in batch(number))


def values(trainer: Trainer) -> Parameters:
    return {name: value.clone() for name, value in trainer.full_parameters()}


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run each job in a thread, and return their results."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [one.result(timeout=120) for one in [pool.submit(job) for job in jobs]]


def job(main: Callable[..., Any], *args: Any, ranks: int = 1) -> Callable[[], Any]:
    """Return a job of some ranks; its result is that of its first rank."""
    return lambda: run(ranks, main, args=args)[0]


def joined(address: str, *, least: int, patience: float = 30, **settings: Any) -> Mapping[str, Any]:
    return {"join": address, "least": least, "patience": patience, **settings}


def train(trainer: Trainer, *, steps: Sequence[int], replicas: range, of: int) -> None:
    for number in steps:
        rates(trainer.optimizer, step=number)
        trainer.step(rows_of(number, replicas=replicas, of=of))


def whole(world: World, plan: str, settings: Mapping[str, Any], replicas: range, of: int) -> Parameters:
    """Train from the first step to the last, and return the mean of this job's replicas."""
    trainer = made(world, plan, settings=settings)
    train(trainer, steps=range(STEPS), replicas=replicas, of=of)
    found = values(trainer)
    trainer.close()
    return found


def mean(found: Sequence[Parameters], *, weights: Sequence[float] = ()) -> Parameters:
    weights = weights or [1 / len(found)] * len(found)
    return {name: sum(w * one[name] for w, one in zip(weights, found, strict=True)) for name in found[0]}  # type: ignore[misc]


JOINED = ("local", "kept_state", "reset_state", "post_local", "slowmo", "diloco")


@pytest.mark.grid(Grid({"scheme": JOINED, "size": (2, 3)}, cost=lambda cell: cell["size"], strength=1))
def test_jobs_that_join_are_the_replicas_of_one_job(meeting: tuple[str, Store], scheme: str, size: int) -> None:
    name, changed, _ = SCHEMES[scheme]
    settings = joined(meeting[0], least=size, **changed)
    plan = f"dp=1 sync={name} every=3"
    found = together(*(job(whole, plan, settings, range(n, n + 1), size) for n in range(size)))
    require_equal(mean(found), replayed(scheme, size=size, every=3, rows=10), bound=BOUND)


SHAPES = (("dp=2", "dp=1"), ("dp=1 tp=2", "dp=1 tp=2"), ("dp=1 pp=2 microbatches=2",) * 2)


@pytest.mark.grid(Grid({"shapes": SHAPES, "scheme": ("local", "diloco")}, strength=1))
def test_a_job_may_have_several_ranks(meeting: tuple[str, Store], shapes: tuple[str, ...], scheme: str) -> None:
    name, changed, _ = SCHEMES[scheme]
    counts = [int(shape[3]) for shape in shapes]
    settings = joined(meeting[0], least=2, **changed)
    jobs, first = [], 0
    for shape, count in zip(shapes, counts, strict=True):
        given = f"{shape} sync={name} every=3", settings, range(first, first + count), sum(counts)
        jobs.append(job(whole, *given, ranks=count * (1 + ("2" in shape[4:]))))
        first += count
    found = mean(together(*jobs), weights=[count / sum(counts) for count in counts])
    require_equal(found, replayed(scheme, size=sum(counts), every=3, rows=10), bound=BOUND)


def test_fragments_agree_over_jobs(meeting: tuple[str, Store]) -> None:
    settings = joined(meeting[0], least=2, fragments=2)

    def main(world: World, number: int) -> Parameters:
        trainer = made(world, "dp=1 sync=diloco every=4", settings=settings)
        for step in range(11):
            trainer.step(rows_of(step, replicas=range(number, number + 1), of=2))
        return values(trainer)

    replay = plain(2)
    streaming(replay, steps=11, fragments=2, delay=0, blend=0.0)
    require_equal(mean(together(job(main, 0), job(main, 1))), replay.mean(), bound=BOUND)


def agreed(replay: Replay, scheme: str, *, steps: Sequence[int], of: Sequence[int] = (0, 1, 2)) -> None:
    """Train the replicas, and let the replicas `of` agree every 3 steps; the others take over what they agree about."""
    for number in steps:
        for optimizer in replay.optimizers:
            rates(optimizer, step=number)
        replay.local_step(batch(number))
        if replay.steps % 3 == 0:
            replay.counts = [count * (replica in of) for replica, count in enumerate(replay.counts)]
            SCHEMES[scheme][2](replay, every=3)


def require_replica(found: Parameters, replay: Replay, replica: int) -> None:
    names = [name for name, _ in replay.model.named_parameters()]
    require_equal(found, dict(zip(names, replay.parameters()[replica], strict=True)), bound=BOUND)


def site(world: World, scheme: str, settings: Mapping[str, Any], replica: int, steps: int = 8) -> Parameters:
    """Train as one of three jobs for some steps, and leave."""
    trainer = made(world, f"dp=1 sync={SCHEMES[scheme][0]} every=3", settings={**SCHEMES[scheme][1], **settings})
    train(trainer, steps=range(steps), replicas=range(replica, replica + 1), of=3)
    found = values(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("scheme", ["local", "slowmo", "diloco"])
def test_the_others_go_on_without_a_job_that_is_lost(
    meeting: tuple[str, Store], scheme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = joined(meeting[0], least=3, patience=SECONDS)
    jobs = [job(site, scheme, settings, replica, 4 if replica == 2 else 8) for replica in range(3)]
    found = together(*jobs)
    replay = plain(3)
    agreed(replay, scheme, steps=range(4))
    require_replica(found[2], replay, 2)
    agreed(replay, scheme, steps=range(4, 8), of=(0, 1))
    for replica in range(2):
        require_replica(found[replica], replay, replica)
    assert capfd.readouterr().err.count("meshwise: round 2 continues without job") == 2


@pytest.mark.grid(Grid({"after": (False, True), "ends": (False, True)}, strength=1))
def test_nobody_applies_half_of_a_round(
    meeting: tuple[str, Store], monkeypatch: pytest.MonkeyPatch, after: bool, ends: bool
) -> None:
    failing, failed, connect = list[JoinedJobs](), list[str](), JoinedJobs._connect

    def connected(self: JoinedJobs, members: Sequence[JobEntry], own: JobEntry, name: str) -> World:
        """Let the second round of one job fail, before its first sum or after its last, of weights and rates."""
        world = connect(self, members, own, name)
        if self not in failing or name != "2/sums":
            return world
        real = world.all_reduce

        def all_reduce(x: Tensor, **given: Any) -> Work:
            if after:
                real(x, **given).wait()
            if x.numel() == 2 or not after:
                failed.append(name)
                raise ZeroDivisionError if ends else RankLostError("the cable is pulled")
            return Work()

        world.all_reduce = all_reduce  # type: ignore[method-assign]
        return world

    monkeypatch.setattr(JoinedJobs, "_connect", connected)
    settings = joined(meeting[0], least=3, patience=SECONDS)

    def main(world: World, replica: int) -> Parameters | None:
        trainer = made(world, "dp=1 sync=diloco every=3", settings={**settings, "outer_lr": 0.5})
        if replica == 2:
            assert trainer.agreements is not None
            assert trainer.agreements.jobs is not None
            failing.append(trainer.agreements.jobs)
        try:
            train(trainer, steps=range(8), replicas=range(replica, replica + 1), of=3)
        except ZeroDivisionError:
            trainer.close()
            return None
        return values(trainer)

    found = together(*(job(main, replica) for replica in range(3)))
    assert failed == ["2/sums"]
    assert meeting[1].get("2/decision") == b"retry"
    assert meeting[1].get("3/decision") == b"commit"
    replay = plain(3)
    agreed(replay, "diloco", steps=range(5))
    agreed(replay, "diloco", steps=range(5, 8), of=(0, 1) if ends else (0, 1, 2))
    for replica in (0, 1) if ends else (0, 1, 2):
        require_replica(found[replica], replay, replica)
    assert (found[2] is None) == ends


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.grid(Grid({"scheme": ("local", "slowmo", "diloco"), "late": (False, True)}, strength=1))
def test_a_job_that_starts_later_or_is_late_takes_the_others_state(
    meeting: tuple[str, Store], scheme: str, late: bool
) -> None:
    """Attempts: 0 opens the training, 1 to 4 end with steps 3, 6, 9 and 12. The third job joins in attempt 2 or 3."""
    store, joins, least = meeting[1], 2 + late, 2 + late
    settings = {**SCHEMES[scheme][1], **joined(meeting[0], least=least, patience=SECONDS)}
    plan = f"dp=1 sync={SCHEMES[scheme][0]} every=3"

    def regular(world: World, replica: int) -> list[Parameters]:
        trainer = made(world, plan, settings=settings)
        given: dict[str, Any] = {"replicas": range(replica, replica + 1), "of": 3}
        train(trainer, steps=range(3 * joins - 1), **given)
        wait_until(lambda: store.add(f"{joins}/count", 0))
        train(trainer, steps=range(3 * joins - 1, 3 * joins), **given)
        then = values(trainer)
        train(trainer, steps=range(3 * joins, 12), **given)
        assert trainer.join() == 0
        return [then, values(trainer)]

    def third(world: World) -> list[Parameters]:
        trainer = made(world, plan, settings=settings)
        given: dict[str, Any] = {"replicas": range(2, 3), "of": 3}
        if late:
            train(trainer, steps=range(5), **given)
            wait_until(lambda: store.check(["2/decision"]))
            train(trainer, steps=range(5, 6), **given)
            assert trainer.join() == 3
        else:
            wait_until(lambda: store.check(["1/decision"]))
            assert trainer.join() == 6
        then = values(trainer)
        train(trainer, steps=range(3 * joins, 12), **given)
        return [then, values(trainer)]

    found = together(job(regular, 0), job(regular, 1), job(third))
    for one in found:
        for name, value in found[0][0].items():
            assert torch.equal(value, one[0][name]), name
    replay = plain(3)
    agreed(replay, scheme, steps=range(3), of=(0, 1, 2) if late else (0, 1))
    agreed(replay, scheme, steps=range(3, 3 * joins), of=(0, 1))
    replay.optimizers[2].load_state_dict(copy.deepcopy(replay.optimizers[0].state_dict()))  # of the heaviest job
    agreed(replay, scheme, steps=range(3 * joins, 12))
    for replica, one in enumerate(found):
        require_replica(one[1], replay, replica)


def test_a_long_round_and_a_long_transfer_are_waited_for(
    meeting: tuple[str, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job computes, and later sums, for longer than `patience`, while another one waits for it."""
    store, connect, patience = meeting[1], JoinedJobs._connect, 1.0
    settings = joined(meeting[0], least=1, patience=patience)

    def connected(self: JoinedJobs, members: Sequence[JobEntry], own: JobEntry, name: str) -> World:
        world = connect(self, members, own, name)
        if name == "2/sums" and own == members[0]:
            real = world.all_reduce

            def all_reduce(x: Tensor, **given: Any) -> Work:
                real(x, **given).wait()
                time.sleep(2.5 * patience * (x.numel() == 1))  # the sum of the weights is the last one
                return Work()

            world.all_reduce = all_reduce  # type: ignore[method-assign]
        return world

    monkeypatch.setattr(JoinedJobs, "_connect", connected)

    def first(world: World) -> Parameters:
        trainer = made(world, "dp=1 sync=diloco every=2", settings=settings)
        train(trainer, steps=range(1), replicas=range(1), of=2)
        wait_until(lambda: store.add("1/count", 0))
        time.sleep(2.5 * patience)
        train(trainer, steps=range(1, 4), replicas=range(1), of=2)
        found = values(trainer)
        trainer.close()
        return found

    def second(world: World) -> Parameters:
        wait_until(lambda: store.check(["0/decision"]))
        trainer = made(world, "dp=1 sync=diloco every=2", settings=settings)
        assert trainer.join() == 2
        train(trainer, steps=range(2, 4), replicas=range(1, 2), of=2)
        found = values(trainer)
        trainer.close()
        return found

    one, other = together(job(first), job(second))
    assert [store.get(f"{attempt}/decision") for attempt in range(3)] == [b"commit"] * 3
    assert not store.check(["3/decision"])
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_jobs_begin_alike_whatever_their_seeds_and_frozen_parameters(meeting: tuple[str, Store]) -> None:
    def main(world: World, seed: int) -> Parameters:
        options = Options(seed=seed, sync=joined(meeting[0], least=2))
        model = build_whole(build, seed=seed)
        model.get_parameter("positions.weight").requires_grad_(False)
        trainer = parallelize(model, "dp=1 sync=local", world=world, loss=next_token_loss, lr=0.1, options=options)
        trainer.join()
        found = values(trainer)
        trainer.step(batch(seed))  # another batch in each job, then a round
        return {**found, **{f"{name} then": value for name, value in values(trainer).items()}}

    first, second = together(job(main, 1), job(main, 2))
    assert not torch.equal(first["embedding.weight"], first["embedding.weight then"])
    assert torch.equal(first["positions.weight"], first["positions.weight then"])
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_training_begins_with_as_many_jobs_as_asked_for(meeting: tuple[str, Store]) -> None:
    def main(world: World, waits: float) -> float:
        trainer = made(world, "dp=1 sync=local", settings=joined(meeting[0], least=2, patience=0.5))
        time.sleep(waits)
        trainer.join()
        return time.monotonic()

    began = time.monotonic()
    assert min(together(job(main, 0.0), job(main, 1.5))) - began > 1.5


def test_jobs_that_have_all_been_lost_go_on_from_the_one_with_the_most_steps(
    meeting: tuple[str, Store], tmp_path: Path
) -> None:
    settings = joined(meeting[0], least=2, patience=SECONDS)

    def begin(world: World, number: int) -> None:
        trainer = made(world, "dp=1 sync=diloco every=3", settings=settings)
        train(trainer, steps=range(4), replicas=range(number, number + 1), of=2)
        if number:
            trainer.save(tmp_path / "four")
        trainer.close()

    def go_on(world: World, number: int) -> tuple[int, Parameters]:
        trainer = made(world, "dp=1 sync=diloco every=3", settings=settings)
        if number:
            trainer.load(tmp_path / "four")
        return trainer.join(), values(trainer)

    together(job(begin, 0), job(begin, 1))
    (moved, fresh), (same, resumed) = together(job(go_on, 0), job(go_on, 1))
    assert (moved, same) == (4, 0)
    for name, value in resumed.items():
        assert torch.equal(fresh[name], value), name


def test_a_job_that_is_late_when_the_others_have_ended_trains_on_alone(meeting: tuple[str, Store]) -> None:
    settings = joined(meeting[0], least=2, patience=1)

    def main(world: World, number: int) -> Parameters:
        trainer = made(world, "dp=1 sync=diloco every=3", settings=settings)
        train(trainer, steps=range(5), replicas=range(number, number + 1), of=2)
        if number:
            wait_until(lambda: meeting[1].check(["2/decision"]))
        train(trainer, steps=range(5, 9 if number else 6), replicas=range(number, number + 1), of=2)
        found = values(trainer)
        trainer.close()
        return found

    together(job(main, 0), job(main, 1))
    assert meeting[1].get("4/decision") == b"commit"  # the late job began again in attempt 3, and agreed with itself


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dp=1 sync=local", {"join": "here"}, "join='here' patience=60.0; write join=HOST:29400 patience=60"),
    ("dp=1 sync=local", {"join": "a:1", "patience": 0}, "write join=HOST:29400 patience=60"),
    ("dp=1 sync=local", {"join": "a:1", "least": 0}, "least=0 is no whole number of at least 1"),
    ("dp=2 sync=gossip", {"join": "a:1"}, "at once and whole; write sync=local, slowmo or diloco"),
    ("dp=2 sync=easgd", {"join": "a:1"}, "write sync=local, slowmo or diloco"),
    ("dp=2 sync=local every=4", {"join": "a:1", "group": 2}, "and delay=0 group=0"),
    ("dp=2 sync=diloco every=4", {"join": "a:1", "delay": 1}, "and delay=0 group=0"),
    ("dp=1 sync=local", {}, "only replicas agree across steps, of this job or of jobs that join (dp=1 sync!=step)"),
]  # fmt: skip


@pytest.mark.parametrize("plan, settings, message", REFUSED)
def test_settings_that_cannot_work_are_refused(plan: str, settings: dict[str, Any], message: str) -> None:
    def main(world: World) -> None:
        with pytest.raises(PlanError, match=re.escape(message)):
            made(world, plan, settings=settings)

    run(int(plan[3]), main)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal values of every: this job has 3, the first one 2. Change": ("dp=1 sync=local every=3", {}),
    "equal values of state: this job has keep, the first one mean. ": ("dp=1 sync=local every=2", {"state": "keep"}),
    "the split: this job has pp=1 cp=1 tp=2, the first one pp=1 cp=1 tp=1": ("dp=1 tp=2 sync=local every=2", {}),
}


@pytest.mark.parametrize("message", OTHERS)
def test_jobs_that_do_not_fit_are_told_what_differs(meeting: tuple[str, Store], message: str) -> None:
    def main(world: World, plan: str, settings: dict[str, Any]) -> None:
        made(world, plan, settings={**settings, **joined(meeting[0], least=1)}).join()

    plan, settings = OTHERS[message]
    job(main, "dp=1 sync=local every=2", {})()
    with pytest.raises(PlanError, match=re.escape(message)):
        job(main, plan, settings, ranks=1 + ("tp=2" in plan))()


def test_jobs_of_another_model_are_refused(meeting: tuple[str, Store]) -> None:
    def main(world: World, width: int) -> None:
        options = Options(sync=joined(meeting[0], least=1))
        parallelize(torch.nn.Linear(width, 2), "dp=1 sync=local", world=world, lr=0.1, options=options).join()

    job(main, 3)()
    with pytest.raises(PlanError, match=r"of the parameters: this job has 2 of digest \w+, the first one 2 "):
        job(main, 4)()


def test_a_store_that_is_lost_ends_the_job_with_a_command() -> None:
    store = loopback_store()
    address = f"127.0.0.1:{store.port}"

    def main(world: World, steps: int) -> None:
        nonlocal store
        trainer = made(world, "dp=1 sync=local", settings=joined(address, least=1, patience=1))
        train(trainer, steps=range(steps), replicas=range(1), of=1)
        del store
        train(trainer, steps=range(1), replicas=range(1), of=1)

    with pytest.raises(RankLostError, match=f"no store of joined jobs at {address} .*; start meshwise meet there"):
        job(main, 2)()
    store = None  # type: ignore[assignment]
    with pytest.raises(RankLostError, match=f"no store of joined jobs at {address} .*; start meshwise meet there"):
        job(main, 0)()


@pytest.mark.parametrize("scheme", ["local", "diloco"])
def test_a_rehearsal_and_verify_run_the_job_alone(scheme: str) -> None:
    plan = Plan.parse(f"dp=1 sync={scheme} every=2")
    settings = joined("127.0.0.1:1", least=1, patience=0.1)
    made(TraceWorld(rank=0, mesh=plan.mesh(), device="cpu"), str(plan), settings=settings).step(batch(0))
    options = Options(sync=settings)
    report = verify(build, next_token_loss, [batch(n) for n in range(5)], f"{plan} tp=2", lr=1e-2, options=options)
    assert report.ok, str(report)


MODEL = """
import os, pathlib, signal, time
from torch import nn

class Own(nn.Module):
    '''Predicts the next byte from this one. In the step of a variable, it kills its process or waits for a file.'''

    def __init__(self):
        super().__init__()
        self.calls, self.embedding, self.head = 0, nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        self.calls += 1
        if str(self.calls) == os.environ.get("DIES"):
            os.kill(os.getpid(), signal.SIGKILL)
        while str(self.calls) == os.environ.get("WAITS") and not pathlib.Path("go").exists():
            time.sleep(0.01)
        return self.head(self.embedding(tokens))
"""
JOB = """
plan = "dp=1 sync=diloco every=10"
[model]
name = "own.py:Own"
[data]
files = ["text.txt"]
context = 16
validation = 0.0
[train]
steps = 40
batch = 4
save_every = 4
resume = "auto"
[sample]
length = 0
"""


@pytest.mark.processes
def test_a_killed_job_starts_again_and_rejoins_while_the_others_train(tmp_path: Path) -> None:
    """Rounds end with steps 10 to 40. One job is killed in step 15; the others wait in step 25 until it is back."""
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    port = free_port()
    processes: list[WarmCommand] = []

    def started(*words: str, **variables: str) -> WarmCommand:
        processes.append(WarmCommand("meshwise", *words, folder=tmp_path, variables=variables))
        return processes[-1]

    def site(number: int, **variables: str) -> WarmCommand:
        words = [f"--train.seed={number}", f"--train.output=site-{number}", "--train.sync", f"join=127.0.0.1:{port}"]
        return started("train", "job.toml", *words, "least=3", "patience=6", **variables)

    try:
        meeting = started("meet", "--port", str(port), "--host", "127.0.0.1")
        assert f"port {port}" in meeting.stdout.readline()
        store = PrefixStore("meshwise/jobs", store_of("127.0.0.1", port=port, opens=False))
        stay = [site(1, WAITS="25"), site(2, WAITS="25")]
        assert site(3, DIES="15").wait(200) != 0
        again = site(3)
        wait_until(lambda: store.check(["3/count"]))
        (tmp_path / "go").touch()
        for one in (*stay, again):
            said = "".join(one.communicate(timeout=200))
            assert one.process.exitcode == 0, said
        [joined] = re.findall(r"round (\d) is joined by job 4", said)  # the second, if it was back within `patience`
    finally:
        for one in processes:
            one.kill()
    written = [(tmp_path / f"site-{number}" / "parameters.safetensors").read_bytes() for number in (1, 2, 3)]
    assert written[0] == written[1] == written[2]
    lines = (tmp_path / "site-3" / "metrics.jsonl").read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert joined in "23"
    assert steps == [*range(1, 15), *range(int(joined) * 10 + 1, 41)]
