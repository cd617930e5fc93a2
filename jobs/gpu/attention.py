"""Attention beside other people's kernels: jobs/benchmarks/attention_gpu.py, a row per path and shape."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import attention_gpu

from jobs.gpu.rows import Row
from jobs.gpu.stages import Bench, Stage

STAND_IN = ("decode 8 x 4096", "prefill 4 x 2048 sinks window 128")


def _items(device: str) -> Sequence[str]:
    return STAND_IN if device == "cpu" else [shape.name for shape in attention_gpu.SHAPES]


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    shape = next(shape for shape in attention_gpu.SHAPES if shape.name == item)
    shape = shape.small() if bench.is_small else shape
    options = argparse.Namespace(device=bench.device, torch_dtype=bench.dtype, repeats=bench.repeats)
    for found in attention_gpu.measure(shape, bench.clock, options):
        about = {"kernel": "attention", "shape": shape.name, "variant": found.path}
        if found.milliseconds is None:
            is_ours = found.path == attention_gpu.OURS
            yield Row(**about, status="failed" if is_ours else "skipped", note=found.reason)
        else:
            work = {"num_bytes": shape.num_bytes(bench.dtype.itemsize), "flop": shape.flop}
            yield Row(**about, **bench.rates(found.milliseconds, **work), note=f"error {found.error:.1e}")


STAGE = Stage(name="attention", about="attention beside other kernels", items=_items, measure=_measure)
