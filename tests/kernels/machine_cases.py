"""Kernels as Triton compiles them for an H100, run by tests.ptx beside their references.

`python -m tests.kernels.machine_cases CASE` prints how far outputs are from right ones, relatively.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from rayk.kernels.gated_delta_rule.launch import gated_delta_rule_triton
from rayk.kernels.gated_delta_rule.reference import gated_delta_rule_reference
from rayk.kernels.paged_attention import head_groups
from rayk.kernels.paged_attention.launch import paged_attention_triton
from rayk.kernels.segments import Segments
from rayk.kernels.ssd_scan.launch import ssd_scan_triton
from rayk.kernels.ssd_scan.reference import ssd_scan_reference
from rayk.kernels.target import TARGETS
from tests.kernels.cases import dense_attention, make_batch
from tests.kernels.quantised_cases import quantised
from tests.ptx.launches import on_machine

H100 = TARGETS["sm_90"]


def _distance(own: torch.Tensor, right: torch.Tensor) -> float:
    return float((own.double() - right.double()).norm() / right.double().norm())


def _segments() -> Segments:
    """A request that goes on: a full chunk and a part of one."""
    return Segments.from_host(query_lens=[86], read_slots=[0], ends=[[86]], write_slots=[[1]])


def mamba2() -> float:
    """Heads of 16 channels with states of 24, as slices of a projection."""
    heads, channels, groups, states = 4, 16, 2, 24
    generator, segments = torch.Generator().manual_seed(0), _segments()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sizes = [heads * channels, groups * states, groups * states]
    x, b, c = torch.split(draw(segments.num_tokens, sum(sizes)).half(), sizes, dim=-1)
    arguments = (
        x.unflatten(-1, (heads, channels)),
        draw(segments.num_tokens, 360).half()[:, -heads:],
        -draw(heads).exp(),
        b.unflatten(-1, (groups, states)),
        c.unflatten(-1, (groups, states)),
        draw(heads),
        draw(heads) - 1,
        torch.arange(heads) // (heads // groups),
    )
    state = draw(2, heads, channels, states)
    exact = [x.double() if x.is_floating_point() else x for x in (*arguments, state)]
    right = ssd_scan_reference(*exact, segments)
    with on_machine(H100) as ran:
        own = ssd_scan_triton(*arguments, state, segments)
    assert ran == ["ssd_decay_kernel", "ssd_states_kernel", "ssd_output_kernel"]
    return max(_distance(own, right), _distance(state, exact[-1]))


def delta_rule() -> float:
    """Qwen3-Next's heads."""
    generator, segments = torch.Generator().manual_seed(0), _segments()
    q, k = torch.randn(2, segments.num_tokens, 1, 128, generator=generator).half()
    v = torch.randn(segments.num_tokens, 1, 128, generator=generator).half()
    g, beta = torch.rand(2, segments.num_tokens, 1, generator=generator)
    key_index = torch.zeros(1, dtype=torch.int64)
    state = torch.randn(2, 1, 128, 128, generator=generator)
    exact = [x.double() for x in (q, k, v, -g, beta)]
    right_state = state.double()
    right = gated_delta_rule_reference(*exact, key_index, right_state, segments, scale=0.1)
    with on_machine(H100) as ran:
        own = gated_delta_rule_triton(q, k, v, -g, beta, key_index, state, segments, scale=0.1)
    assert "gated_delta_output_kernel" in ran
    return max(_distance(own, right), _distance(state, right_state))


def nvfp4() -> float:
    """Decode with heads of 256."""
    batch = make_batch(
        [(1, 75)], head_size_k=256, head_size_v=256, kv_heads=1, kv_index=(0, 0), dtype=torch.float16
    )
    cache = quantised(batch, "nvfp4", "LBNHC")
    right = dense_attention(batch, torch.float64, 0.1)
    with on_machine(H100) as ran:
        own = paged_attention_triton(
            batch.q,
            cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            groups=head_groups(torch.tensor(batch.kv_index)),
            scale=0.1,
            window=None,
            head_size_k=256,
            num_splits=2,
        )
    assert ran[0] == "paged_attention_decode_kernel"
    return _distance(own, right)


CASES: dict[str, Callable[[], float]] = {f.__name__: f for f in (mamba2, delta_rule, nvfp4)}

if __name__ == "__main__":
    print(CASES[sys.argv[1]]())
