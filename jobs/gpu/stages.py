"""What a stage of the GPU day is, and how one process measures what is missing of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import attention_gpu
import torch

from jobs.gpu.rows import Row, Rows

ROOT = Path(__file__).resolve().parents[2]
NOTE_CHARACTERS = 200


class Lacking(Exception):
    """The name of a package or tool without which an item cannot be measured."""


class Bench:
    """What the items of a stage share in one process: the device, its clock, its ceilings."""

    def __init__(self, device: str, rows: Rows) -> None:
        self.device = device
        self.rows = rows
        self.is_small = device == "cpu"
        """A stand-in: Triton's interpreter and small shapes, whose times mean nothing."""
        self.repeats = 3 if self.is_small else 30
        self.dtype = torch.bfloat16
        self.kept: dict[str, Any] = {}
        """What an item leaves for the next one, by name."""

    def close(self) -> None:
        """Close what is kept."""
        while self.kept:
            self.kept.popitem()[1].close()

    @cached_property
    def clock(self) -> Any:
        return attention_gpu.Clock(self.device, graphs=True)

    @cached_property
    def plain_clock(self) -> Any:
        """For calls that no graph can hold."""
        return attention_gpu.Clock(self.device, graphs=False)

    @cached_property
    def ceilings(self) -> Any:
        return attention_gpu.measure_ceilings(self.clock, self.device, self.dtype, self.repeats)

    def milliseconds(self, call: Callable[[], object], *, graph: bool = True) -> float:
        """The median of a call: on a GPU replayed from a graph, with cold caches; on a CPU one call."""
        if self.is_small:
            return float(self.plain_clock.milliseconds(call))
        clock = self.clock if graph else self.plain_clock
        return float(clock.medians({"call": clock.prepared(call)}, self.repeats)["call"])

    def rates(self, ms: float, *, num_bytes: float = 0, flop: float = 0) -> dict[str, float]:
        """A row's time and rates of the work done in it."""
        found = {"ms": ms}
        if num_bytes:
            gbps = num_bytes / ms / 1e6
            found |= {"gbps": gbps, "of_copy": gbps / self.ceilings.copy_gbps}
        if flop:
            tflops = flop / ms / 1e9
            found |= {"tflops": tflops, "of_matmul": tflops / self.ceilings.matmul_tflops}
        return found


@dataclass(frozen=True)
class Stage:
    name: str
    about: str
    items: Callable[[str], Sequence[str]]
    """(device) -> names of what is measured, in order."""
    measure: Callable[[str, Bench], Iterable[Row]]
    """Raises Lacking. Any other error becomes the item's row, and ends the process: after some errors of a
    GPU nothing works in it any more."""

    def missing(self, rows: Rows, device: str) -> list[str]:
        """Items without rows."""
        there = rows.items(self.name)
        return [item for item in self.items(device) if item not in there]

    def only(self, words: Sequence[str]) -> Stage:
        """Those of its items that have one of these words in their names."""
        return replace(
            self, items=lambda device: [i for i in self.items(device) if any(w in i for w in words)]
        )

    def run(self, rows: Rows, device: str) -> int:
        """Measure what is missing; 1 if an item failed, before the next one."""
        bench = Bench(device, rows)
        with closing(bench):
            for item in self.missing(rows, device):
                with rows.measuring(self.name, item) as add:
                    if not self._measure(item, bench, add):
                        return 1
        return 0

    def _measure(self, item: str, bench: Bench, keep: Callable[[Row], object]) -> bool:
        """Measure one item; whether this process can measure more."""
        found: list[Row] = []
        try:
            for row in self.measure(item, bench):
                keep(row)
                found.append(row)
        except Lacking as lacking:
            found.append(Row(kernel=item, status="skipped", note=f"skipped: no {lacking}"))
            keep(found[-1])
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest is measured
            traceback.print_exc()
            keep(failed(item, error))
            return False
        print(f"{self.name}: {item}: {told(found)}", flush=True)
        return True


def failed(kernel: str, error: Exception, **about: str) -> Row:
    """The row of an error."""
    note = f"{type(error).__name__}: {error}".split("\n")[0][:NOTE_CHARACTERS]
    return Row(kernel=kernel, status="failed", note=note, **about)


def told(rows: Sequence[Row]) -> str:
    """Rows in a few words."""
    if len(rows) != 1:
        return f"{len(rows)} rows"
    (row,) = rows
    shares = [
        f"{s:.0%} of {n}" for s, n in ((row.of_copy, "copy"), (row.of_matmul, "matmul")) if s is not None
    ]
    words = [f"{row.ms:.4g} ms" if row.ms is not None else "", *shares, row.note]
    return ", ".join(filter(None, words)) or row.status
