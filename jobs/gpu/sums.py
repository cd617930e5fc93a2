"""Sums over the GPUs of one host, by NCCL and through mapped memory: jobs/benchmarks/all_reduce.py."""

from __future__ import annotations

from collections.abc import Iterator

import all_reduce  # of jobs/benchmarks

from jobs.gpu.rows import Row
from jobs.gpu.stages import Bench, Lacking, Stage

BESIDE = "times as fast as NCCL"


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    ranks = int(item.split()[1])
    if lacking := all_reduce.why_nothing(ranks, bench.device):
        raise Lacking(lacking)
    kernel, ring_ms = f"all-reduce, {ranks} ranks", 0.0
    device = "cpu" if bench.is_small else "cuda"
    for row in all_reduce.measured(ranks, device, bench.repeats):
        if "why_not" in row:
            note = f"skipped: {row['why_not']}"
            yield Row(kernel=kernel, variant="symmetric memory", status="skipped", note=note)
            continue
        is_ring = row["way"] in all_reduce.RING.values()
        ring_ms = row["ms"] if is_ring else ring_ms
        # What each rank sends at least, whichever way: its own share to all, and the sum of that.
        moved = 2 * row["num_bytes"] * (ranks - 1) / ranks
        yield Row(
            kernel=kernel,
            shape=f"{row['num_bytes'] >> 10} KiB of bfloat16",
            variant=row["way"],
            ms=row["ms"],
            gbps=moved / row["ms"] / 1e6,
            **({} if is_ring else {"value": ring_ms / row["ms"], "unit": BESIDE}),
            note="chosen by rayk" if row["is_chosen"] else "",
        )


STAGE = Stage(
    name="all-reduce",
    about="sums over several GPUs",
    items=lambda device: [f"over {n} ranks" for n in ((2,) if device == "cpu" else (2, 4, 8))],
    measure=_measure,
)
