"""One request with a long prompt keeps every multiprocessor of a large GPU busy, by the grids launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.target import TARGETS
from tests.markers import interpreted

pytestmark = interpreted
TOKENS = 8192
MULTIPROCESSORS = TARGETS["sm_90"].num_multiprocessors
"""The interpreter plays a sm_90."""
FILLED = 0.96
"""Of them, at least: 128 programs, which heads and values make, leave 4 of 132 idle."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def segments() -> Segments:
    return Segments.from_host(
        query_lens=[TOKENS], read_slots=[NO_SLOT], ends=[[TOKENS]], write_slots=[[0]], device="meta"
    )


def scan_channels() -> None:
    """Falcon-Mamba's and Jamba's."""
    from rayk.kernels.selective_scan.launch import selective_scan_triton

    x, dt, z = (empty(TOKENS, 8192) for _ in range(3))
    b, c = empty(TOKENS, 16), empty(TOKENS, 16)
    a, d = numbers(8192, 16), numbers(8192)
    selective_scan_triton(x, dt, a, b, c, d, d, z, numbers(1, 64, 128, 16), segments())


def scan_heads(heads: int, head_size: int, state_size: int) -> None:
    from rayk.kernels.ssd_scan.launch import ssd_scan_triton

    x, dt = empty(TOKENS, heads, head_size), empty(TOKENS, heads)
    b, c = empty(TOKENS, 1, state_size), empty(TOKENS, 1, state_size)
    a, index = numbers(heads), empty(heads, dtype=torch.int64)
    state = numbers(1, heads, head_size, state_size)
    ssd_scan_triton(x, dt, a, b, c, a, a, index, state, segments())


def apply_delta_rule(tp_size: int) -> None:
    """A rank's heads of Qwen3-Next."""
    from rayk.kernels.gated_delta_rule.launch import gated_delta_rule_triton

    keys, heads = 16 // tp_size, 32 // tp_size
    q, k, v = empty(TOKENS, keys, 128), empty(TOKENS, keys, 128), empty(TOKENS, heads, 128)
    g, index = numbers(TOKENS, heads), empty(heads, dtype=torch.int64)
    state = numbers(1, heads, 128, 128)
    gated_delta_rule_triton(q, k, v, g, g, index, state, segments(), scale=1.0)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        pytest.param(scan_channels, ("chunk", "states", "chunk"), id="selective_scan"),
        # Nemotron-H, Mamba2 2.7B, Falcon-H1 0.5B and 34B.
        *(
            pytest.param(
                lambda sizes=sizes: scan_heads(*sizes), ("decay", "states", "output"), id=f"ssd_scan-{sizes}"
            )
            for sizes in ((128, 64, 128), (80, 64, 128), (24, 64, 128), (32, 128, 256))
        ),
        *(
            pytest.param(
                lambda size=size: apply_delta_rule(size),
                ("solve", "states", "output"),
                id=f"gated_delta_rule-tp{size}",
            )
            for size in (1, 2)
        ),
    ],
)
def test_a_long_prompt_fills_every_multiprocessor(
    call: Callable[[], None], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    grids: list[tuple[str, int]] = []

    def note(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        name = kernel.fn.__name__.removesuffix("_kernel").rpartition("_")[2]
        grids.append((name, torch.Size(grid).numel()))
        return lambda **arguments: None

    monkeypatch.setattr(InterpretedFunction, "__getitem__", note)
    call()
    assert tuple(name for name, _ in grids) == names
    assert all(count >= FILLED * MULTIPROCESSORS for _, count in grids), grids
