"""What storing costs those that decode: step times while 1 GiB is stored in the host tier, and while none is.

    python jobs/benchmarks/offload_overlap.py [--check] [--rounds 6] [--record]

One aggregated engine (a Ray actor) decodes requests of 4096 tokens of context, 1 GiB of KV together. Again
and again the host tier is told to forget everything: the engine then stores all of it once more, beside its
steps. Steps in any part of which something was stored are compared with the steps between stores, in the
same run:

    fall     of decode throughput: 1 - (mean step between stores) / (mean step within them)
    rate     bytes stored over the time in which stores were open, from digests to releases

Engines tell when their last stores began and ended.

--check: a fall below 10 % at 0.5 GB/s or more.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, above_zero, option, run
from jobs.benchmarks.offload_engines import Deployment
from rayk.actors.engines import EngineHandle
from rayk.actors.launch import connect
from rayk.actors.tiers import HostTiers
from rayk.handover.engine_request import EngineRequest
from rayk.oracle.checkpoint import write_checkpoint
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings
from rayk.types.request import Request, SamplingParams

MAX_FALL_PERCENT, MIN_GB_PER_S = 10.0, 0.5
NUM_REQUESTS, PROMPT_TOKENS = 4, 4096
LAYERS, KV_HEADS, HEAD_SIZE = 8, 8, 128
"""Of the model: 64 KiB of KV per token in float32."""
POLL_S = 0.25
LARGE_BYTES = 64 << 20
"""Of what is stored of one request at once: the blocks that it fills meanwhile are stored, too."""
REST_S = 4.0
"""Between two stores."""
LIMIT_S = 600.0


@dataclass
class Measured:
    token_times: list[list[float]] = field(default_factory=list)
    """Of each request, on this clock."""
    stores: set[tuple[float, float, int]] = field(default_factory=set)
    """Begin, end and bytes of every store that moved anything."""
    rounds: list[tuple[float, float]] = field(default_factory=list)
    """Between which times everything was stored once."""

    def open(self, least_bytes: int) -> list[tuple[float, float]]:
        """When stores of so many bytes were open: (begin, end), in order, without overlaps."""
        merged: list[tuple[float, float]] = []
        for start, stop, num_bytes in sorted(self.stores):
            if num_bytes < least_bytes:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return merged

    def rates(self) -> list[tuple[float, float]]:
        """(GiB, GB/s) of each round."""
        found = []
        for start, stop in self.rounds:
            own = [(a, b, n) for a, b, n in self.stores if start <= a and b <= stop and n >= LARGE_BYTES]
            num_bytes = sum(n for _, _, n in own)
            seconds = sum(b - a for a, b in self.open(LARGE_BYTES) if start <= a and b <= stop)
            found.append((num_bytes / 2**30, num_bytes / seconds / 1e9))
        return found

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds of the steps that share any time with a large store, and of those in which nothing was
        stored. A step that a store's border delays is that store's."""
        begin = max(times[0] for times in self.token_times) + 1.0
        end = min(times[-1] for times in self.token_times)
        within, between, large, any_size = [], [], self.open(LARGE_BYTES), self.open(1)
        for a, b in pairwise(self.token_times[0]):
            if a < begin or b > end:
                continue
            if _shared(a, b, large):
                within.append(b - a)
            elif not _shared(a, b, any_size):
                between.append(b - a)
        return within, between


def _shared(a: float, b: float, stores: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(b, stop) - max(a, start)) for start, stop in stores)


def model_config() -> dict[str, Any]:
    return {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "max_position_embeddings": 8192,
    }


async def measure(model: Path, tp: int, rounds: int, device: str) -> Measured:
    max_tokens = 3000
    per_request = -(-(PROMPT_TOKENS + max_tokens) // 16) + 2
    config = EngineConfig(
        model=str(model),
        tp=tp,
        device=device,
        num_blocks=NUM_REQUESTS * per_request,
        max_batch_tokens=1024,
        max_seqs=NUM_REQUESTS,
        prefix_caching=True,
    )
    settings = OffloadSettings(host_bytes=3 << 30, store_tokens=16, load="never", pending_share=0.9)
    deployment, measured = Deployment("rayk/overlap", {"prefill0": (config, "tier")}), Measured()
    try:
        await deployment.open({"tier": settings}, 1.0)
        engine, tiers = deployment.engines["prefill0"], deployment.tiers["tier"]
        for i in range(NUM_REQUESTS):
            # Then all begin in one step, and cross their blocks' ends together.
            await _stream(engine, i, 1, Measured())
        streams = [asyncio.create_task(_stream(engine, i, max_tokens, measured)) for i in range(NUM_REQUESTS)]
        await _watch(engine, tiers, streams, measured, rounds)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for i in range(NUM_REQUESTS):
            engine.leader.abort.options(concurrency_group="control").remote(f"r{i}")
    finally:
        await deployment.close()
    return measured


async def _stream(engine: EngineHandle, number: int, max_tokens: int, measured: Measured) -> None:
    prompt = tuple((7 * number + i * 13) % 90 + 5 for i in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    name = f"r{number}" if max_tokens > 1 else f"warm{number}"
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    times: list[float] = []
    measured.token_times.append(times)
    async for events in engine.stream(LIMIT_S, EngineRequest(request=request)):
        for event in events:
            if event.error is not None:
                raise event.error
            times += [event.time_ns / 1e9] * len(event.token_ids)


async def _watch(
    engine: EngineHandle,
    tiers: HostTiers,
    streams: Sequence[asyncio.Task[None]],
    measured: Measured,
    rounds: int,
) -> None:
    """Have all be stored `rounds` times, with rests between."""
    while len(measured.token_times) < NUM_REQUESTS or not all(measured.token_times):
        await _poll(engine, streams, measured)
    await _settle(engine, streams, measured)
    goal = 0.98 * NUM_REQUESTS * PROMPT_TOKENS * LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
    for _ in range(rounds):
        await asyncio.sleep(REST_S)
        start = time.monotonic()
        await _clear(engine, tiers, streams, measured)
        stored = 0
        while stored < goal:
            await _poll(engine, streams, measured)
            stored = sum(n for a, _, n in measured.stores if a > start)
        measured.rounds.append((start, time.monotonic()))
    await asyncio.sleep(REST_S)


async def _clear(
    engine: EngineHandle, tiers: HostTiers, streams: Sequence[asyncio.Task[None]], measured: Measured
) -> None:
    """Until a store finds that what it builds on is gone: one that is under way keeps all that it knows."""
    failed = (await _poll(engine, streams, measured)).get("stores_failed", 0)
    while (await _poll(engine, streams, measured)).get("stores_failed", 0) == failed:
        await tiers.clear()
        await asyncio.sleep(1.0)


async def _settle(engine: EngineHandle, streams: Sequence[asyncio.Task[None]], measured: Measured) -> None:
    quiet = 0
    while quiet < 5:
        quiet = 0 if (await _poll(engine, streams, measured))["num_open"] else quiet + 1


async def _poll(
    engine: EngineHandle, streams: Sequence[asyncio.Task[None]], measured: Measured
) -> dict[str, Any]:
    await asyncio.sleep(POLL_S)
    for task in streams:
        if task.done():
            task.result()
            raise SystemExit("requests ended before the measurement: raise max_tokens")
    status = await engine.leader.status.options(concurrency_group="control").remote()
    found: dict[str, Any] = status["offload"]
    measured.stores |= {(a / 1e9, b / 1e9, n) for a, b, n in found["recent_stores"]}
    return found


TITLES = (
    *("TP", "stored each time", "GB/s: least, median, most", "steps with stores", "ms", "between", "ms"),
    "fall",
)


def summary(measured: Measured, tp: int) -> tuple[list[object], float, float]:
    """(the cells under TITLES, the fall in percent, GB/s)."""
    within, between = measured.steps()
    sizes, rates = zip(*measured.rates(), strict=True)
    fall = 100 * (1 - statistics.mean(between) / statistics.mean(within))
    rate = statistics.median(rates)
    cells = [tp, f"{statistics.median(sizes):.2f} GiB, {len(rates)} times"]
    cells.append(f"{min(rates):.2f}, {rate:.2f}, {max(rates):.2f}")
    for steps in (within, between):
        cells += [len(steps), f"{1e3 * statistics.mean(steps):.1f}"]
    return [*cells, f"{fall:.1f} %"], fall, rate


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add the row; returns the limits that it breaks."""
    with tempfile.TemporaryDirectory() as folder, connect(None):
        model = write_checkpoint("qwen3", Path(folder) / "model", overrides=model_config())
        measured = asyncio.run(measure(model, options.tp, options.rounds, options.device))
    cells, fall, rate = summary(measured, options.tp)
    page.table(TITLES, [cells])
    page.say("", "A mean step in which something was stored against one between stores, one run.")
    return missed(fall, rate)


def main() -> int:
    return run(
        fill,
        __file__,
        title="Decoding while 1 GiB is stored",
        rounds=option(6, "times that all is stored", type=above_zero),
        tp=option(1, "of the engine", type=above_zero),
        device="cpu",
    )


def missed(fall: float, rate: float) -> list[str]:
    """Which limits a fall in percent at a rate in GB/s breaks."""
    found = []
    if fall > MAX_FALL_PERCENT:
        found.append(f"decoding while storing: a fall of {fall:.1f} %, the limit is {MAX_FALL_PERCENT} %")
    if rate < MIN_GB_PER_S:
        found.append(f"storing: {rate:.2f} GB/s, the limit is {MIN_GB_PER_S} or more")
    return found


if __name__ == "__main__":
    sys.exit(main())
