"""State kernels of released sizes on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.state_cases import SELECTIVE, SSD, Op, World
from tests.kernels.test_gated_delta_rule import DELTA
from tests.markers import gpu

pytestmark = gpu

PRODUCTION = (
    replace(SELECTIVE, unit_shape=(8, 128, 16)),
    replace(SSD, unit_shape=(8, 64, 128)),
    replace(SSD, unit_shape=(4, 64, 256)),
    replace(SSD, unit_shape=(4, 128, 64)),
    replace(DELTA, unit_shape=(4, 128, 128)),
    replace(DELTA, unit_shape=(4, 64, 64)),
    replace(DELTA, unit_shape=(4, 32, 32)),
)
each_state = pytest.mark.parametrize(
    "op", PRODUCTION, ids=lambda op: "-".join(map(str, (op.name, *op.unit_shape)))
)


@each_state
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_of_released_sizes(op: Op, dtype: torch.dtype) -> None:
    """By chunks of tensor cores' products; more than one chunk, also of one that goes on."""
    world = World(op, [130, 40], 1000, dtype, "triton", "cuda")
    world.step([(0, 100)])
    world.step([(0, 29), (1, 38)])
    world.step([(0, 1), (1, 2)])
    world.finish(tight=False)


@each_state
@pytest.mark.parametrize("block_size", [64, 96, 1000])
def test_chunks_end_with_their_segments(op: Op, block_size: int) -> None:
    """Whole chunks, and chunks with one token more or less, from states before; beside single tokens."""
    world = World(op, [257, 130, 64, 3], block_size, torch.float16, "triton", "cuda")
    world.step([(0, 64), (1, 65), (3, 1)])
    world.step([(0, 128), (1, 1), (2, 63), (3, 1)], fork=True)
    world.step([(0, 65), (1, 64), (2, 1), (3, 1)], keep="last")
    world.finish(tight=False)
