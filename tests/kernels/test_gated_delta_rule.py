"""The gated delta rule against float64 and transformers' own functions, through any schedule of steps."""

from __future__ import annotations

import mmap
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from rayk.kernels.gated_delta_rule import gated_delta_rule
from rayk.kernels.gated_delta_rule.tiles import DeltaTiles
from rayk.kernels.segments import NO_SLOT, Segments
from tests.kernels.state_cases import Op, Tensors, World
from tests.markers import gpu, interpreted, one_per

CPU = ("reference", "torch")
IMPLS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", marks=interpreted, id="interpreter"),
    pytest.param("chunks", "cpu", marks=interpreted, id="interpreter-chunks"),
    pytest.param("triton", "cuda", marks=gpu, id="gpu"),
]
each_impl = pytest.mark.parametrize(("impl", "device"), IMPLS)
KEY_HEADS = 3
CHUNKS = DeltaTiles(16, 32)
"""Of two blocks, as inverses go."""


def draw(op: Op, n: int, generator: torch.Generator, whole: bool) -> tuple[Tensors, Tensors]:
    """x is v. Three key heads, one of which nobody reads, the others by unequal numbers of value heads."""
    assert not whole, "lengths are divided out: nothing is exact"
    heads, key_size, value_size = op.unit_shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = {
        "x": normal(n, heads, value_size),
        "q": normal(n, KEY_HEADS, key_size),
        "k": normal(n, KEY_HEADS, key_size),
        "g": -torch.nn.functional.softplus(normal(n, heads)),
        "beta": torch.rand(n, heads, generator=generator),
    }
    return tokens, {"key_index": torch.tensor([0] * (heads - heads // 3) + [2] * (heads // 3))}


def step(token: Tensors, constants: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
    """With matrices: S = exp(g) (I - beta k k^T) S + beta k v^T."""
    q, k = (token[name][constants["key_index"]] for name in ("q", "k"))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    beta, keep = token["beta"][:, None, None], torch.exp(token["g"])[:, None, None]
    outer = k[:, :, None] * k[:, None, :]
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    state = keep * ((identity - beta * outer) @ state) + beta * k[:, :, None] * token["x"][:, None, :]
    return (q[:, None, :] @ state)[:, 0] * k.shape[-1] ** -0.5, state


def transformers_own(op: Op, tokens: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
    """Outputs by their chunks, the state after every token by their recurrence."""
    index = constants["key_index"]
    q, k, v, g, beta = (tokens[name].unsqueeze(0) for name in ("q", "k", "x", "g", "beta"))
    q, k = q[:, :, index], k[:, :, index]
    outs, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    state, states = torch.zeros(1, *op.unit_shape), []
    for t in range(v.shape[1]):
        one = (x[:, t : t + 1] for x in (q, k, v, g, beta))
        _, state = torch_recurrent_gated_delta_rule(
            *one, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        states.append(state[0])
    return outs[0], torch.stack(states)


def call(
    tokens: Tensors,
    constants: Tensors,
    state: Tensor,
    segments: Segments,
    impl: str,
    tiles: DeltaTiles = CHUNKS,
) -> Tensor:
    """q and k as slices of one wider tensor of NaN, as a projection's output is sliced. tiles: of chunks."""
    q, k = tokens["q"], tokens["k"]
    mixed = q.new_full((len(q), 3, *q.shape[1:]), float("nan"))
    mixed[:, 0], mixed[:, 1] = q, k
    g, beta = (tokens[name].float() for name in ("g", "beta"))
    batch = (mixed[:, 0], mixed[:, 1], tokens["x"], g, beta, constants["key_index"], state, segments)
    scale = q.shape[-1] ** -0.5
    if impl == "chunks":
        from rayk.kernels.gated_delta_rule.launch import gated_delta_rule_triton

        return gated_delta_rule_triton(*batch, scale=scale, tiles=tiles)
    return gated_delta_rule(*batch, scale=scale, impl=impl)


DELTA = Op("gated_delta_rule", (3, 20, 24), draw, step, call, otherwise=transformers_own)
SMALL = replace(DELTA, unit_shape=(2, 16, 16))


@pytest.mark.parametrize("impl", CPU)
@pytest.mark.parametrize("seed", range(6))
def test_mixed_batches_at_random(impl: str, seed: int, poisoned_empty: None) -> None:
    """Any split into steps and segments; in place and forked, with states at borders kept or not."""
    lengths = [90, 1, 37, 9]
    world = World(DELTA, lengths, (3, 16, 100)[seed % 3], impl=impl, seed=seed)
    rng = random.Random(seed)
    while left := [s for s, n in enumerate(lengths) if world.done[s] < n]:
        limit = rng.choice([1, 40])
        chosen = rng.sample(left, rng.randint(1, len(left)))
        work = [(s, min(rng.randint(1, limit), lengths[s] - world.done[s])) for s in chosen]
        world.step(work, fork=seed % 2 == 1, keep="last" if seed % 3 == 2 else "all")
    world.finish()


@each_impl
@pytest.mark.parametrize(
    ("dtype", "fork"), [(torch.float32, True), (torch.float16, False), (torch.bfloat16, True)], ids=str
)
def test_prefills_and_decodes_together(
    impl: str, device: str, dtype: torch.dtype, fork: bool, poisoned_empty: None
) -> None:
    """New requests; then one that goes on over two borders, a new one and a decode; then all decode."""
    world = World(SMALL if impl == "chunks" else DELTA, [4, 9, 4], 3, dtype, impl, device)
    world.step([(1, 2), (2, 3)], fork=fork)
    world.step([(0, 3), (1, 6), (2, 1)], fork=fork, keep="last" if fork else "all")
    world.step([(1, 1), (0, 1)], fork=fork)
    world.finish(tight=device == "cpu")


def many_tokens(impl: str, device: str) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """More than one chunk, the last of one token; then decodes."""
    if impl in ("triton", "chunks") and device == "cpu":
        return [35, 2], [[(0, 33), (1, 1)], [(0, 1), (1, 1)], [(0, 1)]]
    return [300, 131], [[(0, 193), (1, 130)], [(0, 107), (1, 1)]]


@one_per()
@each_impl
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
def test_long_sequences(impl: str, device: str, decay: float) -> None:
    """Several chunks, with next to nothing, or nearly everything, forgotten in each."""
    lengths, steps = many_tokens(impl, device)
    op = SMALL if len(steps) == 3 else DELTA
    world = World(op, lengths, 1000, torch.float16, impl, device)
    for tokens in world.tokens:
        tokens["g"] *= decay
    world.compute_expected()
    for work in steps:
        world.step(work)
    world.finish(tight=device == "cpu")


@each_impl
def test_keys_that_are_alike(impl: str, device: str) -> None:
    """Every token overwrites what the one before wrote: terms of a careless inverse would grow and cancel."""
    lengths, steps = many_tokens(impl, device)
    world = World(SMALL, lengths, 1000, impl=impl, device=device)
    for tokens in world.tokens:
        tokens["k"].copy_(tokens["k"][:1] + 0.01 * tokens["k"])
        tokens["g"] *= 1e-3
        tokens["beta"].copy_(1 - 0.01 * tokens["beta"])
    world.compute_expected()
    for work in steps:
        world.step(work)
    world.finish()


@each_impl
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)], ids=["step", "mixed"])
def test_a_state_that_nobody_keeps_is_not_written(
    impl: str, device: str, sizes: tuple[int, int], poisoned_empty: None
) -> None:
    """Padding of a captured batch: it starts from nothing and leaves nothing, whatever slots hold."""
    world = World(SMALL, sizes, 100, impl=impl, device=device)
    world.step(list(enumerate(sizes)), keep="none")
    assert not world.states
    assert bool((world.buffer == -1).all())
    assert all(own[0].isfinite().all() for own in world.outs)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted, id="interpreter"), pytest.param("cuda", marks=gpu, id="gpu")],
)
def test_a_step_of_single_tokens_asks_nothing_of_the_host(device: str) -> None:
    """A CUDA graph replays it for other slots, and its grid may depend on nothing but shapes."""
    outs = []
    for blind in (False, True):
        world = World(DELTA, [1, 1, 1], 100, impl="triton", device=device)
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
        outs.append((call(tokens, constants, world.pool, segments, "triton"), world.buffer))
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


@interpreted
@pytest.mark.parametrize("impl", ["triton", "chunks"])
def test_slots_beyond_32_bits(impl: str) -> None:
    """Slot 2 starts at element 2^31 of a pool whose strides fit 32 bits."""
    world = World(SMALL, (2, 1), 100, impl=impl)
    near = torch.full((3, *SMALL.unit_shape), 7.0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    storage = torch.frombuffer(mmap.mmap(-1, 4 * (2**31 + 2**16), flags=flags), dtype=torch.float32)
    far = storage.as_strided(near.shape, (2**30, *world.pool.stride()[1:]))
    far[2] = near[2]
    segments = Segments.from_host(
        query_lens=(2, 1), read_slots=[2, NO_SLOT], ends=[[2], [1]], write_slots=[[1], [2]]
    )
    tokens = {k: torch.cat([ts[k] for ts in world.tokens]) for k in world.tokens[0]}
    outs = [call(tokens, world.constants, pool, segments, impl) for pool in (near, far)]
    assert torch.equal(*outs)
    assert torch.equal(near[1:], far[1:])


def test_mistakes_are_refused() -> None:
    world = World(DELTA, [1], 100, impl="cuda")
    with pytest.raises(AssertionError, match="unknown"):
        world.step([(0, 1)])
    world = World(DELTA, [1], 100)
    world.pool = torch.zeros(4, *DELTA.unit_shape).mT.contiguous().mT
    with pytest.raises(AssertionError, match="dense"):
        world.step([(0, 1)])
