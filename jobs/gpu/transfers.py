"""NIXL between the device memory of two processes: jobs/benchmarks/device_reads.py, a row per transfer."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator

from jobs.gpu.rows import Row
from jobs.gpu.stages import Bench, Lacking, Stage

SETTINGS = {"rayk's setting": None, "n": "n", "auto, UCX's own": "auto"}
"""Item -> UCX_CUDA_IPC_ENABLE_GET_ZCOPY; None: what rayk's agents choose."""
COPIES = "copies in one process"
BESIDE = "of cudaMemcpy between the processes"
"""What a row's `value` is a share of: the speed of the same blocks copied without NIXL."""


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
        raise Lacking("nixl")
    import device_reads  # of jobs/benchmarks; without NIXL it cannot be imported

    options = argparse.Namespace(
        device=bench.device, peer=None, mib=8 if bench.is_small else 256, repeats=bench.repeats
    )
    if bench.device != "cpu":
        options.device = "cuda:0"
    options.peer = device_reads.peer_of(options)
    found = device_reads.repack(options) if item == COPIES else device_reads.run(SETTINGS[item], options)
    copy = device_reads.copy_gbps(options)
    for row in found:
        if row["operation"] == device_reads.COSTS:
            for name, value in row["constants"].items():
                yield Row(kernel="transfer costs", shape=name, variant=item, value=value, unit="ns")
            continue
        gbps = row["count"] * row["each"] / row["s"] / 1e9
        yield Row(
            kernel=f"NIXL {row['operation']}" if item != COPIES else "copy_runs",
            shape=f"{row['count']} x {row['each']} bytes, {row['memory']}",
            variant=item,
            ms=row["s"] * 1e3,
            gbps=gbps,
            of_copy=gbps / copy,
            **({"value": row["copy_s"] / row["s"], "unit": BESIDE} if "copy_s" in row else {}),
            note="each byte counted once",
        )


STAGE = Stage(
    name="nixl",
    about="NIXL between the device memory of two processes",
    items=lambda device: [*SETTINGS, COPIES],
    measure=_measure,
)
