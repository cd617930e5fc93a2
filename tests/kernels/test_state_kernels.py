"""Kernels that carry a state from token to token: any schedule of steps gives what the recurrence gives."""

from __future__ import annotations

import functools
import mmap
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayk.kernels.segments import NO_SLOT, Segments
from tests.each import each
from tests.kernels import state_cases
from tests.kernels.state_cases import CONV, OPS, SELECTIVE, SSD, WIDE, Op, World
from tests.markers import gpu, interpreted

CPU = ("reference", "torch")
IMPLS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", marks=interpreted, id="interpreter"),
    pytest.param("triton", "cuda", marks=gpu, id="gpu"),
]
each_op = pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
each_wide_op = pytest.mark.parametrize("op", WIDE, ids=[op.name for op in WIDE])
each_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted, id="interpreter"), pytest.param("cuda", marks=gpu, id="gpu")],
)
each_impl = pytest.mark.parametrize(("impl", "device"), IMPLS)


def splits(n: int) -> Iterator[list[int]]:
    """Every way of writing n as a sum."""
    for marks in range(1 << (n - 1)):
        parts = [1]
        for i in range(n - 1):
            if marks >> i & 1:
                parts.append(1)
            else:
                parts[-1] += 1
        yield parts


@each_op
@each("impl", CPU)
@each("block_size", [1, 2, 3, 100])
def test_every_split_of_a_sequence_gives_the_same(impl: str, op: Op, block_size: int) -> None:
    """Whole numbers, so that the same means equal, and a wrong slot or token cannot hide."""
    for parts in splits(6):
        world = World(op, [6], block_size, impl=impl, whole=True)
        for n in parts:
            world.step([(0, n)])
        world.finish()


@each_op
@each_impl
@each(("parts", "block_size"), [((5,), 2), ((1, 2, 1, 1), 3), ((2, 3), 1), ((1, 4), 100)])
def test_splits_across_borders(
    impl: str, device: str, op: Op, parts: tuple[int, ...], block_size: int, poisoned_empty: None
) -> None:
    world = World(op, [sum(parts)], block_size, impl=impl, device=device, whole=True)
    for n in parts:
        world.step([(0, n)])
    world.finish()


def run_at_random(world: World, most: int, **options: Any) -> None:
    """Steps of some sequences, each with some tokens, prefills and decodes mixed."""
    rng = random.Random(world.seed)
    while left := [s for s, n in enumerate(world.lengths) if world.done[s] < n]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        # Now and then everybody takes a single step.
        limit = rng.choice([1, most])
        sizes = [min(rng.randint(1, limit), world.lengths[s] - world.done[s]) for s in chosen]
        world.step(list(zip(chosen, sizes, strict=True)), **options)
    world.finish()


@each_wide_op
@each("impl", CPU)
@each("seed", range(6))
def test_mixed_batches_at_random(impl: str, op: Op, seed: int, poisoned_empty: None) -> None:
    """Of every kind: in place and forked, with states at borders kept or not."""
    options = {"fork": seed % 2 == 1, "keep": "last" if seed % 3 == 2 else "all"}
    world = World(op, [40, 1, 17, 9], (3, 8, 100)[seed % 3], impl=impl, seed=seed)
    run_at_random(world, 12, **options)
    exact = World(op, [40, 1, 17, 9], (4, 7, 1)[seed % 3], impl=impl, seed=seed, whole=True)
    run_at_random(exact, 12, **options)


@each_op
@each_device
@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mixed_batches_in_triton(
    op: Op, device: str, dtype: torch.dtype, fork: bool, poisoned_empty: None
) -> None:
    """New requests; then one that goes on over two borders, a new one and a decode; then all decode."""
    for whole in (True, False):
        world = World(op, [4, 8, 4], 3, dtype, "triton", device, whole=whole)
        world.step([(1, 2), (2, 3)], fork=fork)
        world.step([(0, 3), (1, 5), (2, 1)], fork=fork, keep="last" if fork else "all")
        world.step([(1, 1), (0, 1)], fork=fork)
        world.finish(tight=device == "cpu")


@each_op
@each_impl
@each("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_are_rounded_once(
    impl: str, device: str, op: Op, dtype: torch.dtype, poisoned_empty: None
) -> None:
    world = World(op, [19, 5], 8, dtype, impl, device, seed=1)
    world.step([(0, 17), (1, 4)])
    world.step([(0, 1), (1, 1)])
    world.step([(0, 1)])
    world.finish(tight=device == "cpu")


@each_wide_op
@each("impl", CPU)
@each("time_scale", [0.01, 1.0, 30.0])
def test_long_sequences(impl: str, op: Op, time_scale: float) -> None:
    """Several chunks, with next to nothing, or nearly everything, forgotten in each."""
    world = World(op, [300, 131], 1000, impl=impl, time_scale=time_scale)
    world.step([(0, 193), (1, 130)])
    world.step([(0, 107), (1, 1)])
    world.finish()


@pytest.mark.parametrize("op", [CONV, SELECTIVE], ids=["causal_conv1d", "selective_scan"])
@pytest.mark.parametrize("tile", [1, 5])
def test_tiles_of_tokens_join(op: Op, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the CPU form, whose tiles are longer than these sequences."""
    units, channels, state_size = op.unit_shape
    elements = tile * units * channels * (1 if op is CONV else state_size)
    monkeypatch.setattr(f"rayk.kernels.{op.name}.torch_cpu.TILE_ELEMENTS", elements)
    world = World(op, [23, 11], 7, impl="torch", whole=True)
    world.step([(0, 18), (1, 1)])
    world.step([(0, 5), (1, 10)])
    world.finish()


@each_op
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_several_tiles_of_channels(op: Op, device: str, dtype: torch.dtype, poisoned_empty: None) -> None:
    """Which end inside a unit, the last of them with less than a tile."""
    shape = {"causal_conv1d": (3, 50, 1), "selective_scan": (3, 15, 16), "ssd_scan": (1, 40, 128)}[op.name]
    world = World(replace(op, unit_shape=shape), [3], 2, dtype, "triton", device, whole=True)
    world.step([(0, 2)])
    world.step([(0, 1)])
    world.finish()


@each_impl
@pytest.mark.parametrize("taps", [1, 2, 6])
def test_convolutions_of_any_width(impl: str, device: str, taps: int) -> None:
    world = World(replace(CONV, unit_shape=(2, 3, taps)), [6, 3], 4, impl=impl, device=device, whole=True)
    world.step([(0, 1), (1, 1)])
    world.step([(0, 5), (1, 1)])
    world.step([(1, 1)])
    world.finish()


@each_device
@pytest.mark.parametrize("time_scale", [0.01, 30.0])
def test_chunks_in_triton(device: str, time_scale: float, poisoned_empty: None) -> None:
    """Two chunks, the second with one token."""
    op = replace(SSD, unit_shape=(2, 32, 16))
    world = World(op, [65], 1000, torch.float16, "triton", device, time_scale=time_scale)
    world.step([(0, 65)])
    world.finish(tight=device == "cpu")


@each_device
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("time_scale", [0.01, 30.0])
def test_chunks_of_channels_in_triton(
    device: str, time_scale: float, whole: bool, monkeypatch: pytest.MonkeyPatch, poisoned_empty: None
) -> None:
    """Of 8 tokens, cut by borders, beside a request with one token; then a walk."""
    from rayk.kernels.selective_scan.launch import selective_scan_triton

    own = functools.partial(selective_scan_triton, chunk_tokens=8)
    monkeypatch.setattr(state_cases, "selective_scan", lambda *arguments, impl: own(*arguments))
    world = World(SELECTIVE, [24, 2, 9], 13, impl="triton", device=device, whole=whole, time_scale=time_scale)
    world.step([(0, 20), (1, 1), (2, 9)])
    world.step([(0, 4), (1, 1)])
    world.finish()


@each_op
@each_impl
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)], ids=["step", "mixed"])
def test_a_state_that_nobody_keeps_is_not_written(
    impl: str, device: str, op: Op, sizes: tuple[int, int]
) -> None:
    """Padding of a captured batch: it starts from nothing and leaves nothing, whatever slots hold."""
    world = World(op, sizes, 100, impl=impl, device=device, whole=True)
    world.step(list(enumerate(sizes)), keep="none")
    assert not world.states
    assert bool((world.buffer == -1).all())
    for own, (expected, _) in zip(world.outs, world.exact, strict=True):
        assert torch.equal(own[0].double(), expected.round())


@each_op
@each_device
def test_a_step_of_single_tokens_asks_nothing_of_the_host(op: Op, device: str) -> None:
    """A CUDA graph replays it for other slots, and its grid may depend on nothing but shapes."""
    outs = []
    for blind in (False, True):
        world = World(op, [1, 1, 1], 100, impl="triton", device=device)
        segments = Segments.from_host(
            query_lens=[1, 1, 1],
            read_slots=[NO_SLOT] * 3,
            ends=[[1]] * 3,
            write_slots=[[4], [NO_SLOT], [2]],
            device=device,
        )
        if blind:
            segments = replace(segments, **{name: None for name in vars(segments) if name.endswith("_cpu")})
        tokens = {k: torch.cat([ts[k] for ts in world.tokens]).to(device) for k in world.tokens[0]}
        constants = {k: v.to(device) for k, v in world.constants.items()}
        outs.append((op.call(tokens, constants, world.pool, segments, "triton"), world.buffer))
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


@each_impl
@pytest.mark.parametrize(("op", "name"), [(CONV, "bias"), (CONV, "silu"), (SELECTIVE, "z")])
def test_what_a_family_lacks_may_be_left_out(impl: str, device: str, op: Op, name: str) -> None:
    world = World(op, [5, 1], 100, impl=impl, device=device, without=[name])
    world.step([(0, 4)])
    world.step([(0, 1), (1, 1)])
    world.finish()


@each_impl
def test_softplus_is_right_for_any_argument(impl: str, device: str) -> None:
    """Also where exp(x) is far below 1: what a token adds is in proportion to it."""
    world = World(SELECTIVE, [6], 100, impl=impl, device=device, without=["z"])
    for token in world.tokens:
        token["dt"].copy_(torch.linspace(-30, 30, token["dt"].numel()).view(token["dt"].shape))
    world.constants["dt_bias"].zero_()
    world.compute_expected()
    world.step([(0, 6)])
    world.finish()


@interpreted
@each_op
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["step", "mixed"])
def test_slots_beyond_32_bits(op: Op, sizes: tuple[int, int]) -> None:
    """Slot 2 starts at element 2^31 of a pool whose strides fit 32 bits."""
    world = World(op, sizes, 100, impl="triton", whole=True)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python from 3.12
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    storage = torch.frombuffer(mmap.mmap(-1, 4 * (2**31 + 2**16), flags=flags), dtype=torch.float32)
    pool = storage.as_strided((3, *op.unit_shape), (2**30, *world.pool.stride()[1:]))
    segments = Segments.from_host(
        query_lens=sizes, read_slots=[2, NO_SLOT], ends=[[n] for n in sizes], write_slots=[[1], [2]]
    )
    tokens = {k: torch.cat([ts[k] for ts in world.tokens]) for k in world.tokens[0]}
    out = op.call(tokens, world.constants, pool, segments, "triton")
    expected = torch.cat([y for y, _ in world.exact])
    assert torch.equal(out.double(), expected.round())
    for slot, (_, states) in zip((1, 2), world.exact, strict=True):
        assert torch.equal(pool[slot].double(), states[-1].round())


@each_op
def test_an_unknown_implementation_is_refused(op: Op) -> None:
    world = World(op, [1], 100, impl="cuda")
    with pytest.raises(AssertionError, match="unknown"):
        world.step([(0, 1)])


@each_op
def test_a_state_must_be_dense_inside_a_unit(op: Op) -> None:
    world = World(op, [1], 100)
    world.pool = torch.zeros(4, *op.unit_shape).mT.contiguous().mT
    with pytest.raises(AssertionError, match="dense"):
        world.step([(0, 1)])
