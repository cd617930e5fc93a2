"""Time what a step's attention metadata costs: its inputs, every view's transforms, what is built of them.

    python jobs/benchmarks/metadata.py --record

No model is run: steps of requests of 512 to 4096 tokens in blocks of 16, on one core. `inputs` makes block
tables, slots and lengths of every KV group out of the scheduler's batch; `views` transforms them, `build`
asks the backend for every attention group's metadata. The target is `views` + `build` for 256 requests x 4
groups. Times are the thread's on its core (nothing here waits), whoever else uses the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.attention import (
    AttentionGroups,
    AttentionLayer,
    AttentionView,
    CommonAttentionMetadata,
    get_backend,
)
from rayk.attention.transforms import chunked_local, fast_prefill
from rayk.engine.inputs import InputBuilder
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec
from rayk.types.batch import ScheduledBatch, ScheduledRequest

TARGET_MS = 2.0
MOST_POWER = 1.2
"""Of the number of requests, in the last doubling."""
NUM_REQUESTS = 256
GROWTH = (32, 64, 128, 256, 512, 1024)
BLOCK_SIZE, WINDOW, CHUNK = 16, 512, 512
LENGTHS = (512, 4096)
PROMPT_TOKENS = 256
"""Tokens that each request in prefill computes in a mixed step; one in 32 does, and half of those end."""

FULL = AttentionView(kv_group=0)
FAST = replace(FULL, fast_prefill=True)
MODELS: dict[str, tuple[AttentionView, ...]] = {
    "full, window; fast both": (
        FULL,
        AttentionView(kv_group=1, window=WINDOW),
        FAST,
        AttentionView(kv_group=1, window=WINDOW, fast_prefill=True),
    ),
    "full, 3 x chunk": (FULL, *(AttentionView(kv_group=1 + i, chunk=CHUNK) for i in range(3))),
    "full, window, chunk; fast chunk": (
        FULL,
        replace(FULL, window=WINDOW),
        replace(FULL, chunk=CHUNK),
        replace(FAST, chunk=CHUNK),
    ),
}
"""The attention groups of three models: windows that share keys (gemma3n), chunks (llama4), and all in one KV
group, as without the hybrid manager."""


def make_batches(num_requests: int, num_groups: int, *, mixed: bool) -> tuple[ScheduledBatch, ScheduledBatch]:
    """(one that fills the block tables, the step to be timed)."""
    random = np.random.default_rng(0)
    requests = []
    for row, length in enumerate(random.integers(*LENGTHS, size=num_requests).tolist()):
        prompt = mixed and row % 32 == 0
        num_tokens = PROMPT_TOKENS if prompt else 1
        blocks = tuple(random.integers(1, 1 << 20, size=-(-length // BLOCK_SIZE)).tolist())
        requests.append(
            ScheduledRequest(
                request_id=str(row),
                row=row,
                num_computed_tokens=length - num_tokens,
                token_ids=(7,) * num_tokens,
                new_block_ids=((0, blocks),) * num_groups,
                needs_logits=not prompt or row % 64 == 0,
            )
        )
    filling = ScheduledBatch(step=0, requests=tuple(requests))
    nothing = ((0, ()),) * num_groups
    return filling, replace(filling, requests=tuple(replace(r, new_block_ids=nothing) for r in requests))


def make_builder(num_requests: int, num_groups: int) -> InputBuilder:
    spec = FullAttentionSpec(BLOCK_SIZE, 1, 16, 16, "bfloat16", 1)
    groups = tuple(KVCacheGroup(i, spec, (i,), 1) for i in range(num_groups))
    geometry = plan_rank(groups, LAYOUTS["BHLNC"], num_blocks=2)
    return InputBuilder(geometry, max_seqs=num_requests, max_positions=LENGTHS[1])


def make_groups(views: Sequence[AttentionView]) -> AttentionGroups:
    """An attention group per view."""
    spec = FullAttentionSpec(BLOCK_SIZE, 1, 16, 16, "bfloat16", 1)
    backend, groups = get_backend("reference", "cpu"), AttentionGroups()
    groups.initialise(
        AttentionLayer(layer=i, backend=backend, spec=spec, num_query_heads=1, view=view)
        for i, view in enumerate(views)
    )
    return groups


Call = Callable[[], object]


def times_ms(calls: Sequence[Call], repeats: int) -> list[list[float]]:
    """Of every repeat, by call. In turns, so that what else the machine does meets all of them."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, found, strict=True):
            start = time.thread_time()
            call()
            times.append(1e3 * (time.thread_time() - start))
    return found


@dataclass(frozen=True)
class Step:
    inputs: Call
    views: Call
    build: Call
    num_rows: int
    """Virtual batches or requests, summed over the groups' metadata."""


def make_step(views: Sequence[AttentionView], num_requests: int, *, mixed: bool) -> Step:
    """Block tables are filled; `views` and `build` work on what `inputs` makes."""
    num_groups = 1 + max(view.kv_group for view in views)
    filling, batch = make_batches(num_requests, num_groups, mixed=mixed)
    builder, groups = make_builder(num_requests, num_groups), make_groups(views)
    builder.build(filling)
    inputs = builder.build(batch)
    commons = {i: m for i, m in enumerate(inputs.metadata) if isinstance(m, CommonAttentionMetadata)}
    seen = groups.see(commons, inputs.logits_index_host)
    return Step(
        inputs=lambda: builder.build(batch),
        views=lambda: groups.see(commons, inputs.logits_index_host),
        build=lambda: groups.build(seen),
        num_rows=sum(common.num_requests for common in seen.values()),
    )


def model_rows(repeats: int) -> tuple[list[list[str]], list[float]]:
    """(cells, milliseconds of metadata in the median) per model and step."""
    rows, totals = [], []
    for name, views in MODELS.items():
        for kind in ("decode", "mixed"):
            step = make_step(views, NUM_REQUESTS, mixed=kind == "mixed")
            inputs, see, build = times_ms((step.inputs, step.views, step.build), repeats)
            best, median = min(see) + min(build), statistics.median(see) + statistics.median(build)
            numbers = min(inputs), min(see), min(build), best, median
            rows.append([name, kind, str(step.num_rows), *(f"{n:.3f}" for n in numbers)])
            totals.append(median)
    return rows, totals


@dataclass(frozen=True)
class Growth:
    costs: tuple[float, ...]
    """One per entry of GROWTH."""

    @property
    def line(self) -> tuple[float, float]:
        """(milliseconds of a step, more for each request), by least squares of relative errors."""
        weights = 1 / np.array(self.costs)
        slope, start = np.polyfit(GROWTH, self.costs, 1, w=weights)
        return float(start), float(slope)

    @property
    def worst(self) -> float:
        """Largest relative distance from the line."""
        start, slope = self.line
        return max(abs(cost / (start + slope * n) - 1) for n, cost in zip(GROWTH, self.costs, strict=True))

    @property
    def exponent(self) -> float:
        """Of the last doubling; 1 where twice the requests cost twice as much."""
        return float(np.log2(self.costs[-1] / self.costs[-2]))


def growth_rows(repeats: int) -> tuple[list[list[str]], list[Growth]]:
    """(cells, growth) per model and step."""
    rows, found = [], []
    for name, views in MODELS.items():
        for kind in ("decode", "mixed"):
            steps = [make_step(views, n, mixed=kind == "mixed") for n in GROWTH]
            see = times_ms([step.views for step in steps], repeats)
            build = times_ms([step.build for step in steps], repeats)
            growth = Growth(tuple(min(a) + min(b) for a, b in zip(see, build, strict=True)))
            start, slope = growth.line
            fit = f"{start:.3f} + {1e3 * slope:.2f} n / 1000", f"{growth.worst:.0%}", f"{growth.exponent:.2f}"
            rows.append([name, kind, *(f"{cost:.3f}" for cost in growth.costs), *fit])
            found.append(growth)
    return rows, found


ORDERS: dict[str, tuple[tuple[tuple[int, int, bool], ...], int]] = {
    "8 prompts of 1024, chunk 512": (((1024, 1024, True),) * 8, 512),
    "8 prompts of 1024, chunk 64": (((1024, 1024, True),) * 8, 64),
    "1 prompt of 8192, chunk 64": (((8192, 8192, True),), 64),
    "8192 of a prompt of 16384, chunk 64": (((16384, 8192, False),), 64),
    "128 decode, 8 prompts of 1024, chunk 64": (((1024, 1024, True),) * 8 + ((3000, 1, True),) * 128, 64),
    "256 decode, chunk 512": (((3000, 1, True),) * 256, 512),
}
"""(tokens in all, of this step, whether the last one's logits are wanted) per request; positions of a
chunk."""


def order_rows(repeats: int) -> list[list[str]]:
    """What either order of fast prefill and chunks builds and costs."""
    rows = []
    for name, (requests, chunk) in ORDERS.items():
        width = max(total for total, _, _ in requests) // BLOCK_SIZE + 1
        num_tokens = sum(n for _, n, _ in requests)
        common = CommonAttentionMetadata.from_host(
            query_lens=[n for _, n, _ in requests],
            seq_lens=[total for total, _, _ in requests],
            block_table=torch.arange(len(requests) * width, dtype=torch.int32).view(-1, width),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            block_size=BLOCK_SIZE,
        )
        ends = np.cumsum([n for _, n, _ in requests]) - 1
        wanted = ends[[is_wanted for _, _, is_wanted in requests]]

        before = partial(batches_before, common, wanted, chunk)
        behind = partial(batches_behind, common, wanted, chunk)
        best = [f"{min(times):.3f}" for times in times_ms((before, behind), repeats)]
        rows.append([name, str(before()), str(behind()), *best])
    return rows


def batches_before(common: CommonAttentionMetadata, wanted: np.ndarray, chunk: int) -> int:
    """Virtual batches built where fast prefill comes before chunks."""
    reduced = fast_prefill(common, wanted)
    return 0 if reduced is None else chunked_local(reduced, chunk).num_requests


def batches_behind(common: CommonAttentionMetadata, wanted: np.ndarray, chunk: int) -> int:
    """The same where it comes behind."""
    chunks = chunked_local(common, chunk)
    fast_prefill(chunks, wanted)
    return chunks.num_requests


def missed_targets(totals: Sequence[float], growths: Sequence[Growth]) -> list[str]:
    """What of these medians of metadata in milliseconds, and of their growth, is over a limit."""
    rows = [f"{name}, {kind}" for name in MODELS for kind in ("decode", "mixed")]
    missed = [
        f"{row}: {total:.3f} ms, not under {TARGET_MS:g}"
        for row, total in zip(rows, totals, strict=False)
        if not total < TARGET_MS
    ]
    return missed + [
        f"{row}: power {growth.exponent:.2f} in the last doubling, over {MOST_POWER:g}"
        for row, growth in zip(rows, growths, strict=False)
        if not growth.exponent <= MOST_POWER
    ]


ABOUT = f"""\
## {NUM_REQUESTS} requests x 4 attention groups, milliseconds

Requests of {LENGTHS[0]} to {LENGTHS[1]} tokens, blocks of {BLOCK_SIZE}, window {WINDOW}, chunk {CHUNK}.
decode: one token each. mixed: one request in 32 computes {PROMPT_TOKENS} tokens of its prompt, half of those
its last. rows: requests or virtual batches, of all groups. Best of {{repeats}} turns, and the median of
metadata, which is views + build. Target: both under {TARGET_MS:g} ms. inputs, block tables, slots and lengths
of every KV group (a CommonAttentionMetadata each), comes before and is not in these sums: a step pays all
three.
"""
ABOUT_GROWTH = """
## Milliseconds of metadata by number of requests

line: of least relative errors, for n requests; off: the worst of them; power: of n, in the last doubling.
"""
ABOUT_ORDER = """
## Fast prefill before or behind chunks

Either order comes to the same batch (tests/attention/test_transforms.py). Virtual batches built on the way,
and milliseconds.
"""


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add the tables; returns the rows over the target, or whose growth is worse than linear."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        page.say(ABOUT.format(repeats=options.repeats))
        body, totals = model_rows(options.repeats)
        page.table(("groups", "step", "rows", "inputs", "views", "build", "metadata", "median"), body)
        page.say("", f"Worst median: {max(totals):.3f} ms, {'met' if max(totals) < TARGET_MS else 'MISSED'}.")
        page.say(ABOUT_GROWTH)
        body, growths = growth_rows(options.repeats)
        page.table(("groups", "step", *map(str, GROWTH), "line", "off", "power"), body)
        page.say(ABOUT_ORDER)
        head = ("step", "batches, before", "batches, behind", "ms, before", "ms, behind")
        page.table(head, order_rows(options.repeats))
    return missed_targets(totals, growths)


def main() -> int:
    return run(fill, __file__, title="What attention metadata costs per step", repeats=200)


if __name__ == "__main__":
    sys.exit(main())
