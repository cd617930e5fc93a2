"""Time the CPU paths of the state kernels against transformers' torch paths, as a ratio in one run.

    python jobs/benchmarks/state_cpu.py [--threads 1] [--repeats 20]

Each row gives best-of milliseconds of both, taken in turns, and how many times faster ours is. Both do the
same work on the same numbers: a prefill starts from nothing, a step updates states; ours reads and writes
them in slots of a pool. Results are first compared; a wrong one is not timed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba2 import modeling_mamba2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, in_turns, run
from rayk.kernels.causal_conv1d import causal_conv1d
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.selective_scan import selective_scan
from rayk.kernels.ssd_scan import ssd_scan

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Equal sequences: one of several tokens is a prefill, of one token a step."""

    num_seqs: int
    num_tokens: int
    dtype: torch.dtype = torch.float32

    @property
    def segments(self) -> Segments:
        """Every sequence updates its slot, or starts it."""
        slots = [1 + r for r in range(self.num_seqs)]
        return Segments.from_host(
            query_lens=[self.num_tokens] * self.num_seqs,
            read_slots=slots if self.num_tokens == 1 else [NO_SLOT] * self.num_seqs,
            ends=[[self.num_tokens]] * self.num_seqs,
            write_slots=[[slot] for slot in slots],
        )

    def draw(self, *shape: int) -> torch.Tensor:
        """[R, n, ...] as transformers takes it."""
        return torch.randn(self.num_seqs, self.num_tokens, *shape).to(self.dtype)

    def __str__(self) -> str:
        what = "step" if self.num_tokens == 1 else f"prefill {self.num_tokens}"
        return f"{self.num_seqs:>2} x {what} {str(self.dtype).removeprefix('torch.')}"


BATCHES = (
    Batch(1, 512),
    Batch(8, 64),
    Batch(1, 512, torch.bfloat16),
    Batch(1, 1),
    Batch(16, 1),
    Batch(16, 1, torch.bfloat16),
)


def packed(value: torch.Tensor) -> torch.Tensor:
    """[R, n, ...] -> [T, ...]."""
    return value.flatten(0, 1)


def convolve(batch: Batch, num_channels: int, width: int) -> tuple[Call, Call]:
    x = batch.draw(num_channels)
    weight = torch.randn(num_channels, width).to(batch.dtype)
    bias = torch.randn(num_channels).to(batch.dtype)
    pool = torch.zeros(batch.num_seqs + 1, num_channels // 64, 64, width - 1, dtype=batch.dtype)
    segments, state = batch.segments, torch.zeros(batch.num_seqs, num_channels, width - 1, dtype=batch.dtype)

    def theirs() -> torch.Tensor:
        if batch.num_tokens == 1:
            update = modeling_mamba2.causal_conv1d_update
            return update(x.mT, state, weight, bias, activation="silu").mT
        out = modeling_mamba2.causal_conv1d_fn(x.mT, weight, bias, activation="silu")
        state.copy_(x.mT[..., 1 - width :])
        return out.mT

    return lambda: causal_conv1d(packed(x), weight, bias, pool, segments), theirs


def scan_channels(batch: Batch, num_channels: int, state_size: int) -> tuple[Call, Call]:
    x, dt, z = (batch.draw(num_channels) for _ in range(3))
    b, c = (batch.draw(state_size) for _ in range(2))
    a, d, dt_bias = -torch.rand(num_channels, state_size), torch.ones(num_channels), torch.zeros(num_channels)
    pool = torch.zeros(batch.num_seqs + 1, num_channels // 16, 16, state_size)
    segments, state = batch.segments, torch.zeros(batch.num_seqs, num_channels, state_size)

    def theirs() -> torch.Tensor:
        if batch.num_tokens == 1:
            rows = [value[:, 0] for value in (x, dt, b, c, z)]
            out = modeling_jamba.mamba_selective_state_update(
                state, rows[0], rows[1], a, *rows[2:4], d, z=rows[4], dt_bias=dt_bias, dt_softplus=True
            )
            return out[:, None]
        options = {"delta_softplus": True, "return_last_state": True}
        out, last = modeling_jamba.mamba_selective_scan(
            x.mT, dt.mT, a, b.mT, c.mT, d, z=z.mT, delta_bias=dt_bias, **options
        )
        state.copy_(last)
        return out.mT

    rows = [packed(value) for value in (x, dt, b, c, z)]
    constants = (d, dt_bias)
    return lambda: selective_scan(*rows[:2], a, *rows[2:4], *constants, rows[4], pool, segments), theirs


def scan_heads(batch: Batch, num_heads: int, head_size: int, state_size: int) -> tuple[Call, Call]:
    """(ours, theirs): one group."""
    x, dt = batch.draw(num_heads, head_size), batch.draw(num_heads)
    b, c = (batch.draw(1, state_size) for _ in range(2))
    a, d, dt_bias = -torch.rand(num_heads), torch.ones(num_heads), torch.zeros(num_heads)
    pool = torch.zeros(batch.num_seqs + 1, num_heads, head_size, state_size)
    segments, state = batch.segments, torch.zeros(batch.num_seqs, num_heads, head_size, state_size)
    head = (num_heads, head_size)

    def theirs() -> torch.Tensor:
        if batch.num_tokens == 1:
            out = modeling_mamba2.mamba2_selective_state_update(
                state,
                x[:, 0],
                dt[:, 0, :, None].expand(-1, *head),
                a[:, None, None].expand(*head, state_size),
                b[:, 0],
                c[:, 0],
                d[:, None].expand(head),
                dt_bias=dt_bias[:, None].expand(head),
                dt_softplus=True,
            )
            return out[:, None]
        options = {"dt_bias": dt_bias, "dt_softplus": True, "return_final_states": True}
        out, last = modeling_mamba2.mamba2_chunk_scan(x, dt, a, b, c, 256, D=d, **options)
        state.copy_(last)
        return out

    rows, groups = [packed(value) for value in (x, dt, b, c)], torch.zeros(num_heads, dtype=torch.int64)
    return lambda: ssd_scan(*rows[:2], a, *rows[2:], d, dt_bias, groups, pool, segments), theirs


CASES: dict[str, Callable[[Batch], tuple[Call, Call]]] = {
    "causal_conv1d 1792 x 4": lambda batch: convolve(batch, 1792, 4),
    "selective_scan 2048 x 16": lambda batch: scan_channels(batch, 2048, 16),
    "selective_scan 128 x 16": lambda batch: scan_channels(batch, 128, 16),
    "ssd_scan 24 x 64 x 128": lambda batch: scan_heads(batch, 24, 64, 128),
    "ssd_scan 8 x 16 x 16": lambda batch: scan_heads(batch, 8, 16, 16),
}


def disagreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, in units of the largest value."""
    theirs = packed(theirs).float()
    return float((ours.float() - theirs).abs().max() / theirs.abs().max())


def fill(options: argparse.Namespace, page: Page) -> None:
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    page.head("op", "batch", "ours ms", "theirs ms", "times faster")
    for name, make in CASES.items():
        for batch in BATCHES:
            torch.manual_seed(0)
            with torch.inference_mode():
                ours, theirs = make(batch)
                error = disagreement(ours(), theirs())
                # bfloat16 is rounded in between by transformers alone.
                assert error < (0.05 if batch.dtype == torch.bfloat16 else 1e-4), (name, str(batch), error)
                mine, other = map(min, in_turns((ours, theirs), options.repeats, limit_s=0.5))
            page.row(name, batch, f"{mine:.3f}", f"{other:.3f}", f"{other / mine:.1f}")


def main() -> int:
    return run(fill, __file__, title="State kernels on CPUs against transformers", threads=1, repeats=20)


if __name__ == "__main__":
    sys.exit(main())
