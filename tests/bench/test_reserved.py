"""nanotron's memory: the rules of torch's allocator, and what a rank there holds."""

from __future__ import annotations

import math

import torch

from meshwise.plan import Plan
from meshwise.simulate.rehearsal import rehearse
from nanotron import CONTEXT, MODELS, VOCABULARY, Llama, begins, build, held_at_most, parameters, subject
from reserved import Allocator, Held

MIB = 2**20


def test_a_tensor_of_less_than_10_mib_reserves_20_and_one_of_more_its_own_size_in_whole_2_mib() -> None:
    allocator = Allocator()
    allocator.take([5 * MIB])
    assert allocator.reserved == 20 * MIB
    allocator.take([12 * MIB + 1])  # what is left of the 20 holds 15
    assert allocator.reserved == 20 * MIB
    allocator.take([12 * MIB + 1])
    assert allocator.reserved == 34 * MIB


def test_what_was_freed_is_used_again_within_a_segment_and_never_over_two() -> None:
    allocator = Allocator()
    first, second = allocator.take([30 * MIB, 30 * MIB])
    allocator.give(first)
    allocator.give(second)
    halves = allocator.take([15 * MIB, 15 * MIB])
    assert allocator.reserved == 60 * MIB
    for half in halves:
        allocator.give(half)
    (whole,) = allocator.take([30 * MIB])  # the halves are one again
    assert allocator.reserved == 60 * MIB
    allocator.give(whole)
    allocator.take([40 * MIB])
    assert allocator.reserved == 100 * MIB


def test_where_there_is_no_room_free_segments_are_given_back_and_streams_waited_for() -> None:
    allocator = Allocator(room=100 * MIB)
    allocator.give(*allocator.take([30 * MIB]))
    allocator.late = allocator.take([40 * MIB])
    used, free = allocator.take([10 * MIB, 20 * MIB])
    assert allocator.reserved == 70 * MIB  # the two share the first segment
    allocator.give(free)
    allocator.take([60 * MIB])
    assert not allocator.late
    assert allocator.reserved == 90 * MIB  # the first segment stays, for a part of it is used
    allocator.give(used)
    allocator.take([50 * MIB])
    assert allocator.reserved == 110 * MIB  # as much as there has to be, whatever room there is


def test_zero_1_holds_a_part_of_masters_and_states_and_gathers_into_two_copies_of_the_parameters() -> None:
    words = (3 * MIB, MIB)
    whole, parts = Held(words, dp=4, zero=0), Held(words, dp=4, zero=1)
    assert sum(whole.built) == (2 + 4 + 4 + 2) * 4 * MIB  # DDP's buckets are another copy
    assert sum(parts.built) == (2 + 4 + 1) * 4 * MIB
    assert (sum(whole.states), sum(parts.states)) == (8 * 4 * MIB, 2 * 4 * MIB)
    assert (sum(whole.gathered), sum(parts.gathered)) == (0, (2 * 2 + 2 // 2) * 4 * MIB - 2 * MIB)
    assert whole.gradients == [2 * MIB, 6 * MIB]


def test_what_comes_to_a_stages_share_ends_it() -> None:
    assert begins(MODELS["1.34"], 2) == ("blocks.10",)
    assert begins(MODELS["1.34"], 4) == ("blocks.5", "blocks.10", "blocks.15")
    assert begins(MODELS["8.86"], 2) == ("blocks.18",)


def test_the_parameters_of_all_stages_are_those_of_the_model() -> None:
    for tied in (True, False):
        model = Llama(4, 128, 4, 256, tied=tied)
        with torch.device("meta"):
            own = sum(parameter.numel() for parameter in build(model).parameters())
        assert sum(map(sum, parameters(model, Plan(dp=1)))) == own
    for name, again in (("3.57", VOCABULARY * MODELS["3.57"].width), ("8.86", 0)):  # a tied embedding is on two stages
        (whole,), stages = (parameters(MODELS[name], Plan(dp=1, pp=pp)) for pp in (1, 2))
        assert sum(map(sum, stages)) == sum(whole) + again


def test_a_run_reserves_more_than_it_keeps() -> None:
    model = Llama(4, 256, 4, 512, tied=True)
    plan = Plan.parse("dp=2 tp=2 zero=1 microbatches=128 sequence_parallel=1 precision=bf16 wire=fp32")
    rehearsal = rehearse(subject(model), plan=plan, ranks=4, device="cuda")
    held = Held(parameters(model, plan)[0], dp=2, zero=1)
    scores = 4 * CONTEXT * VOCABULARY // 2
    assert held_at_most(model, rehearsal, room=math.inf) > sum(held.built) + sum(held.states) + scores
