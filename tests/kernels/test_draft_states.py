"""State kernels in steps with drafts: a state after each token, of which any may be gone on from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayk.kernels.segments import NO_SLOT, Segments
from tests.kernels.state_cases import OPS, Op, World
from tests.kernels.test_gated_delta_rule import DELTA
from tests.markers import gpu, interpreted, sweep

IMPLS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", marks=interpreted, id="interpreter"),
    pytest.param("triton", "cuda", marks=gpu, id="gpu"),
]
each_impl = pytest.mark.parametrize(("impl", "device"), IMPLS)
each_op = pytest.mark.parametrize("op", [*OPS, DELTA], ids=lambda op: op.name)
WHOLE_VECTORS = tuple(replace(op, unit_shape=(16, 16, op.unit_shape[2])) for op in (*OPS, DELTA))
"""A CPU computes the last numbers of a tensor, if they fill no vector, by functions that round otherwise."""
each_exact_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def run_with_drafts(world: World) -> None:
    """Unlike numbers of drafts, none and all of which count; beside prompts, single tokens, and alone."""
    world.step([(0, 4), (1, 1)])
    world.step([(0, 4), (1, 3), (2, 1)], count={0: 2, 1: 1})
    world.step([(2, 3), (0, 3), (1, 1)], count={2: 3, 0: 1})
    world.step([(1, 4), (0, 2), (2, 4)], count={1: 2, 0: 2, 2: 1})
    world.step([(2, 1), (1, 1)])
    world.finish(tight=world.device == "cpu")


@each_op
@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_that_do_not_count_leave_nothing(
    impl: str, device: str, op: Op, dtype: torch.dtype, poisoned_empty: None
) -> None:
    """They are NaN."""
    run_with_drafts(World(op, [9, 6, 6], 2, dtype, impl, device))


@each_exact_op
@each_impl
def test_every_state_is_exact(impl: str, device: str, op: Op) -> None:
    run_with_drafts(World(op, [9, 6, 6], 2, impl=impl, device=device, whole=True))


@sweep(5)
@pytest.mark.parametrize("op", WHOLE_VECTORS, ids=lambda op: op.name)
@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_bit_for_bit_those_of_single_tokens(
    impl: str, device: str, op: Op, dtype: torch.dtype
) -> None:
    """Of three requests with 4, 1 and 3 tokens, whoever still has one takes it in the same call."""
    lengths = [6, 2, 5]
    at_once, single = (World(op, lengths, 1, dtype, impl, device) for _ in range(2))
    for world in (at_once, single):
        world.step([(0, 2), (1, 1), (2, 2)])
    at_once.step([(0, 4), (1, 1), (2, 3)], count={0: 4, 1: 1, 2: 3})
    for work in ([(0, 1), (1, 1), (2, 1)], [(0, 1), (2, 1)], [(0, 1), (2, 1)], [(0, 1)]):
        single.step(work)
    found, expected = ({(s, t): state for s, t, state in world.states} for world in (at_once, single))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@each_op
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted, id="interpreter"), pytest.param("cuda", marks=gpu, id="gpu")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_which_rows_are_one_requests_is_for_the_device_alone(op: Op, device: str, dtype: torch.dtype) -> None:
    """A recorded step of 8 rows and requests: three requests have six of them, each padding row is one, and
    three have none."""
    counts, slots, read_slots = [3, 1, 2], [[4, 0, 6], [7], [9, 2]], [5, NO_SLOT, 3]
    outs = []
    for is_recorded in (False, True):
        world = World(op, [*counts, 1, 1], 1, dtype, "triton", device)
        world.pool[5], world.pool[3] = 0.25, -0.5
        tokens = {k: torch.cat([ts[k] for ts in world.tokens]).to(device) for k in world.tokens[0]}
        constants = {k: v.to(device) for k, v in world.constants.items()}
        segments = Segments.from_host(
            query_lens=[*counts, 1, 1],
            read_slots=[*read_slots, NO_SLOT, NO_SLOT],
            ends=[range(1, n + 1) for n in (*counts, 1, 1)],
            write_slots=[*slots, [NO_SLOT], [NO_SLOT]],
            device=device,
        )
        if is_recorded:
            starts = torch.tensor([0, 3, 4, 6, 7, 8, 8, 8, 8], dtype=torch.int32, device=device)
            reads = torch.tensor([*read_slots] + [NO_SLOT] * 5, device=device)
            segments = replace(
                segments,
                query_start_loc=starts,
                segment_start_loc=starts,
                read_slots=reads,
                **{name: () for name in vars(segments) if name.endswith("_cpu")},
            )
        outs.append((op.call(tokens, constants, world.pool, segments, "triton"), world.buffer))
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


@each_op
def test_a_host_that_does_not_know_the_rows_computes_nothing(op: Op) -> None:
    world = World(op, [2], 1)
    segments = Segments.from_host(query_lens=[2], read_slots=[NO_SLOT], ends=[[1, 2]], write_slots=[[0, 1]])
    blind = replace(segments, **{name: () for name in vars(segments) if name.endswith("_cpu")})
    with pytest.raises(AssertionError, match="does not know"):
        op.call(world.tokens[0], world.constants, world.pool, blind, "torch")
