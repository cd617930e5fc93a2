"""What digests cost, in percent of the transfer whose bytes they prove.

    python jobs/benchmarks/digest_cost.py --record

A producer and a consumer rank in this process, joined by NIXL; a request of 32 layers of 8 KV heads of
128 + 128 bfloat16 is read, and digested on both sides through the views that kernels use. On the CPU: the
kernel for GPUs (rayk/kernels/digest/triton.py) is not measured here. Medians over rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, medians, run
from jobs.benchmarks.transfer_rate import (
    CLOCK,
    NUM_LAYERS,
    SPEC,
    Case,
    Side,
    block_table,
    make_side,
)
from rayk.kernels.digest import digest_rows, native_digest
from rayk.kv.fields import FIELD_IDS

SIZES = (16, 128, 512, 1024)
"""Tokens: 2 MiB per block of 16."""
MIB = 1 << 20
TOKEN_BYTES = NUM_LAYERS * SPEC.num_kv_heads * (SPEC.head_size_k + SPEC.head_size_v) * 2
ABOUT = """\
One request read over NIXL between two ranks of one process, whole heads, 32 layers of 64 KiB per block of 16
tokens; processor times in ms, medians of {rounds} rounds. `own` and `theirs` are the digests of the consumer
(after the read, with the comparison) and of the producer (before the ticket); percent is both, of the time of
the read. `sum` is what it takes to only add up as many bytes that lie in one piece: what reading memory alone
costs a core. `torch` is one side's digest in plain torch, what a machine without a compiler does.

{device}
"""


def fill(options: argparse.Namespace, page: Page) -> None:
    torch.set_num_threads(1)
    page.say(ABOUT.format(rounds=options.rounds, device=_device()))
    page.head("tokens", "MiB", "read", "read GB/s", "own", "theirs", "digest GB/s", "sum", "percent", "torch")
    case = Case(("BHLNC", "BHLNC"), (1, 1), scattered=True)
    num_blocks = max(SIZES) // SPEC.block_size + 2
    sides = [make_side(case, side, num_blocks, 0) for side in (0, 1)]
    descriptions = [[r.description for r in side.ranks] for side in sides]
    for side in sides:
        side.ranks[0].connect(*descriptions)
    generator = torch.Generator().manual_seed(0)
    pages = sides[0].caches[0].buffer
    pages.copy_(torch.randint(-128, 128, pages.shape, generator=generator, dtype=torch.int8))
    for num_tokens in SIZES:
        rounds = range(options.rounds)
        read, own, theirs = medians([_round(sides, case, num_tokens, num_blocks, i) for i in rounds])
        (adding,) = medians([[_sum_ns(pages, num_tokens)] for _ in rounds])
        plain = _torch_ns(sides[1], block_table(case, 1, num_tokens, num_blocks), num_tokens)
        size = num_tokens * TOKEN_BYTES
        times = [f"{ns / 1e6:.2f}" for ns in (read, own, theirs, adding)]
        rate, percent = f"{2 * size / (own + theirs):.1f}", f"{100 * (own + theirs) / read:.0f}"
        shown = (times[0], f"{size / read:.1f}", *times[1:3], rate, times[3], percent, f"{plain / 1e6:.0f}")
        page.row(num_tokens, f"{size / MIB:.0f}", *shown)
    for side in sides:
        side.close()


def main() -> int:
    return run(fill, __file__, title="What digests cost", rounds=7)


def _round(
    sides: list[Side], case: Case, num_tokens: int, num_blocks: int, number: int
) -> tuple[int, int, int]:
    """ns of the read, the consumer's and the producer's digest."""
    tables = [[block_table(case, i, num_tokens, num_blocks)] for i in range(2)]
    producer, consumer = (side.ranks[0] for side in sides)
    name = f"r{num_tokens}-{number}"
    producer.lease(name, time.monotonic_ns() + 60 * 10**9)
    began = CLOCK.now_ns()
    digests = producer.digests(num_tokens, tables[0])
    theirs = CLOCK.now_ns() - began
    ticket = producer.make_ticket(
        request_id=name, lease_id=name, num_tokens=num_tokens, block_tables=tables[0], digests=[digests]
    )
    consumer.start(ticket, tables[1], time.monotonic_ns() + 60 * 10**9)
    outcomes = []
    while not outcomes:
        producer.poll(time.monotonic_ns())
        outcomes = consumer.poll(time.monotonic_ns())
    assert outcomes[0].ok, outcomes[0].error
    (row,) = outcomes[0].rows
    return row.transfer_ns, row.digest_ns, theirs


def _sum_ns(pages: torch.Tensor, num_tokens: int) -> int:
    """The bytes of so many tokens added up as int64 words, by numpy."""
    words = pages.numpy()[: num_tokens * TOKEN_BYTES].view(np.int64)
    began = CLOCK.now_ns()
    words.sum()
    return CLOCK.now_ns() - began


def _torch_ns(side: Side, table: list[int], num_tokens: int) -> int:
    """One side's digest in plain torch."""
    view = side.caches[0].view(0)
    assert isinstance(view, torch.Tensor)
    rows = torch.arange(num_tokens)
    blocks, slots = torch.tensor(table)[rows // SPEC.block_size], rows % SPEC.block_size
    fields = [(FIELD_IDS["k"], 0, SPEC.head_size_k), (FIELD_IDS["v"], SPEC.head_size_k, SPEC.head_size_v)]
    began = CLOCK.now_ns()
    for layer in range(4):
        digest_rows(
            view,
            blocks,
            slots,
            rows,
            layer=layer,
            units=side.heads[0],
            fields=fields,
            rows_per_group=256,
            first_group=0,
            num_groups=-(-num_tokens // 256),
            impl="reference",
        )
    return (CLOCK.now_ns() - began) * 8  # of 32 layers


def _device() -> str:
    how = "C++ (rayk/kernels/digest/native.cpp)" if native_digest() is not None else "plain torch"
    cpu = f"CPU, one thread a rank, {how}."
    return f"{cpu}\nThe kernel for GPUs is compiled and interpreted in tests; on one H100 see gpu_day.md."


if __name__ == "__main__":
    sys.exit(main())
