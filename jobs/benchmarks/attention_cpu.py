"""Time the CPU paths of paged attention against the time it takes merely to read the keys and values.

    python jobs/benchmarks/attention_cpu.py [--threads 1] [--repeats 30]

Each decode row gives best-of milliseconds and the ratio to the read floor: the best time of a C loop (torch's
sum) over as many contiguous bytes. Prefill rows give GFLOP/s of the two matrix products instead. Every
path's result is first compared with the reference; a wrong one is not timed. Rows with sinks or a soft cap
(scores = cap * tanh(scores / cap)) follow the row of the same shape without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, in_turns, run
from rayk.kernels.paged_attention import Workspace, head_groups, paged_attention, why_no_native


@dataclass(frozen=True)
class Shape:
    """A batch of equal sequences. `query_len` 1 is decode."""

    name: str
    num_seqs: int
    seq_len: int
    query_len: int
    num_kv_heads: int
    group: int
    head_size: int
    dtype: torch.dtype
    block_size: int = 16
    sinks: bool = False
    soft_cap: float | None = None

    @property
    def kv_bytes(self) -> int:
        per_token = 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return self.num_seqs * self.seq_len * per_token


PLAIN_DECODE = (
    Shape("B8 L512 G4 D64 fp32", 8, 512, 1, 12, 4, 64, torch.float32),
    Shape("B8 L2048 G4 D64 fp32", 8, 2048, 1, 12, 4, 64, torch.float32),
    Shape("B32 L512 G1 D32 fp32", 32, 512, 1, 12, 1, 32, torch.float32),
    Shape("B8 L2048 G4 D64 bf16", 8, 2048, 1, 12, 4, 64, torch.bfloat16),
    Shape("B16 L64 tiny fp32", 16, 64, 1, 2, 4, 32, torch.float32),
)
PLAIN_PREFILL = (
    Shape("prefill 512 G4 D64 fp32", 1, 512, 512, 2, 4, 64, torch.float32),
    Shape("prefill 512 G4 D128 fp32", 1, 512, 512, 2, 4, 128, torch.float32),
    Shape("chunk 128 of 2048 G4 D64 fp32", 1, 2048, 128, 2, 4, 64, torch.float32),
    Shape("prefill 512 G4 D64 bf16", 1, 512, 512, 2, 4, 64, torch.bfloat16),
)


def with_softmax_options(shapes: tuple[Shape, ...], index: int) -> tuple[Shape, ...]:
    """These shapes, and after the one at `index` the same with sinks and with a soft cap."""
    plain = shapes[index]
    sinks = replace(plain, name=f"{plain.name} sinks", sinks=True)
    capped = replace(plain, name=f"{plain.name} soft cap", soft_cap=50.0)
    return (*shapes[: index + 1], sinks, capped, *shapes[index + 1 :])


DECODE = with_softmax_options(PLAIN_DECODE, 1)
PREFILL = with_softmax_options(PLAIN_PREFILL, 0)
PATHS = ("native NHD", "native HND", "torch NHD", "torch HND")


def make_call(shape: Shape, path: str) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """(the path, the reference) over the same random cache with shuffled blocks."""
    torch.manual_seed(0)
    blocks_per_seq = shape.seq_len // shape.block_size
    num_blocks = shape.num_seqs * blocks_per_seq + 1
    sizes = (num_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_size)
    if path.endswith("NHD"):
        cache = torch.randn(sizes[0], sizes[2], sizes[1], sizes[3]).to(shape.dtype).transpose(1, 2)
    else:
        cache = torch.randn(sizes).to(shape.dtype)
    ids = torch.randperm(num_blocks - 1, dtype=torch.int32) + 1
    num_query_heads = shape.num_kv_heads * shape.group
    kv_index = torch.arange(num_query_heads) // shape.group
    batch = (
        torch.randn(shape.num_seqs * shape.query_len, num_query_heads, shape.head_size).to(shape.dtype),
        cache,
        ids.view(shape.num_seqs, blocks_per_seq),
        torch.arange(shape.num_seqs + 1, dtype=torch.int32) * shape.query_len,
        torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32),
        kv_index,
    )
    groups, workspace = head_groups(kv_index), Workspace()
    sinks = torch.randn(num_query_heads) if shape.sinks else None

    def call(impl: str) -> torch.Tensor:
        return paged_attention(
            *batch,
            scale=shape.head_size**-0.5,
            window=None,
            head_size_k=shape.head_size,
            impl=impl,
            groups=groups,
            workspace=workspace,
            sinks=sinks,
            soft_cap=shape.soft_cap,
        )

    return lambda: call(path.split()[0]), lambda: call("reference")


def check(call: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor], name: str) -> None:
    """Refuse to time a wrong result."""
    got, want = call().float(), reference().float()
    error = float((got - want).norm() / want.norm())
    if not error < 1e-2:
        raise SystemExit(f"{name}: relative error {error:.3g}; not timed")


def fill(options: argparse.Namespace, page: Page) -> None:
    """Add a row per shape, those of decode first."""
    torch.set_num_threads(options.threads)
    paths = PATHS if why_no_native() is None else tuple(p for p in PATHS if p.startswith("torch"))
    page.say(f"threads {options.threads}; native: {why_no_native() or 'available'}", "")
    page.head("shape", "read floor ms", *paths)
    for shape in DECODE + PREFILL:
        memory = torch.ones(shape.kv_bytes // 4)
        floor = min(in_turns([memory.sum], options.repeats)[0])
        cells = [shape.name, f"{floor:.2f} ({shape.kv_bytes / 2**20:.0f} MiB)"]
        for path in paths:
            call, reference = make_call(shape, path)
            check(call, reference, f"{shape.name}, {path}")
            took = min(in_turns([call], options.repeats)[0])
            if shape.query_len == 1:
                cells.append(f"{took:.2f} x{took / floor:.1f}")
                continue
            seen = shape.query_len * (2 * shape.seq_len - shape.query_len + 1) / 2
            flop = 4 * seen * shape.num_seqs * shape.num_kv_heads * shape.group * shape.head_size
            cells.append(f"{took:.2f} {flop / took / 1e6:.0f} GFLOP/s")
        page.row(*cells)


def main() -> int:
    return run(fill, __file__, title="CPU paths of paged attention", threads=1, repeats=30)


if __name__ == "__main__":
    sys.exit(main())
