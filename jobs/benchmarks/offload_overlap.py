"""What storing costs those that decode: step times while 1 GiB is stored in the host tier, and while none is.

    python jobs/benchmarks/offload_overlap.py [--check] [--rounds 6]

One aggregated engine (a Ray actor) decodes requests of 4096 tokens of context, 1 GiB of KV together. Again
and again the host tier is told to forget everything: the engine then stores all of it once more, beside its
steps. Steps that lie within a store are compared with the steps between stores, in the same run:

    fall     of decode throughput: 1 - (mean step between stores) / (mean step within them)
    rate     bytes stored over the time in which stores were open, from digests to releases

A store is seen by asking the engine every 50 ms: its begin and end are known so well. Asking costs the engine
a little, within stores and between.

--check: a fall below 10 % at 0.5 GB/s or more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rayk.actors.environment import prepare_environment

prepare_environment()

from rayk.actors.engines import EngineHandle  # noqa: E402
from rayk.actors.forming import dissolve, form_engine, stop_loops  # noqa: E402
from rayk.actors.launch import connect  # noqa: E402
from rayk.actors.nodes import EngineAsk, worker_resources  # noqa: E402
from rayk.actors.pool import WorkerPool  # noqa: E402
from rayk.actors.rank_spec import RankSpec  # noqa: E402
from rayk.actors.tiers import HostTiers  # noqa: E402
from rayk.oracle.checkpoint import write_checkpoint  # noqa: E402
from rayk.types.config import EngineConfig  # noqa: E402
from rayk.types.offload import OffloadSettings  # noqa: E402
from rayk.types.request import Request, SamplingParams  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "offload_overlap.md"
MAX_FALL_PERCENT, MIN_GB_PER_S = 10.0, 0.5
NUM_REQUESTS, PROMPT_TOKENS = 4, 4096
LAYERS, KV_HEADS, HEAD_SIZE = 8, 8, 128
"""Of the model: 64 KiB of KV per token in float32."""
POLL_S = 0.05
REST_S = 4.0
"""Between two stores."""
LIMIT_S = 600.0


@dataclass
class Measured:
    """What one run saw."""

    token_times: list[list[float]] = field(default_factory=list)
    """Of each request, on this clock."""
    open: list[tuple[float, float]] = field(default_factory=list)
    """When stores were open: (begin, end), in order."""
    rounds: list[tuple[int, float]] = field(default_factory=list)
    """Bytes stored each time, and seconds in which stores were open for that."""

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds of the steps that lie within stores, and of those that lie between."""
        begin = max(times[0] for times in self.token_times) + 1.0
        end = min(times[-1] for times in self.token_times)
        within, between = [], []
        for a, b in pairwise(self.token_times[0]):
            if a < begin or b > end:
                continue
            shared = sum(max(0.0, min(b, stop) - max(a, start)) for start, stop in self.open)
            if shared > 0.5 * (b - a):
                within.append(b - a)
            elif shared == 0.0:
                between.append(b - a)
        return within, between


def model_config() -> dict[str, Any]:
    """A small model with the KV of a large one."""
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
    """Decode while stores come and go."""
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
    pool = WorkerPool("overlap", keep=True)
    resources = worker_resources(device, 1.0)
    await pool.prepare([EngineAsk(name="prefill0", num_workers=tp, resources=resources)], "auto", str(model))
    workers, node = pool.engine("prefill0", tp)
    engine = EngineHandle("prefill0", "aggregated", 1, config, workers, str(node))

    def spec_of(rank: int, address: str) -> RankSpec:
        return RankSpec(
            engine="prefill0",
            epoch=1,
            role="aggregated",
            rank=rank,
            config=config,
            address=address,
            comm_timeout_s=60.0,
            lease_s=120.0,
            offload=settings,
        )

    tiers, measured = HostTiers("rayk/overlap", settings), Measured()
    try:
        await form_engine(engine, spec_of)
        await tiers.attach(engine, node.node_id)
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
        await stop_loops(engine, 0.0)
        await dissolve(engine)
    finally:
        await tiers.close()
        pool.free_all()
    return measured


async def _stream(engine: EngineHandle, number: int, max_tokens: int, measured: Measured) -> None:
    prompt = tuple((7 * number + i * 13) % 90 + 5 for i in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    name = f"r{number}" if max_tokens > 1 else f"warm{number}"
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    times: list[float] = []
    measured.token_times.append(times)
    async for events in engine.stream(LIMIT_S, request, mode="whole"):
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
        await _poll(engine, streams)
    await _settle(engine, streams)
    for _ in range(rounds):
        await asyncio.sleep(REST_S)
        await _clear(engine, tiers, streams)
        status = await _poll(engine, streams, measured)
        before, num_open = status.get("stored_bytes", 0), len(measured.open)
        goal = 0.98 * NUM_REQUESTS * PROMPT_TOKENS * LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
        while status.get("stored_bytes", 0) - before < goal or status["num_open"]:
            status = await _poll(engine, streams, measured)
        seconds = sum(stop - start for start, stop in measured.open[num_open:])
        measured.rounds.append((status["stored_bytes"] - before, seconds))
    await asyncio.sleep(REST_S)


async def _clear(engine: EngineHandle, tiers: HostTiers, streams: Sequence[asyncio.Task[None]]) -> None:
    """Until a store finds that what it builds on is gone: one that is under way keeps all that it knows."""
    failed = (await _poll(engine, streams)).get("stores_failed", 0)
    while (await _poll(engine, streams)).get("stores_failed", 0) == failed:
        await tiers.clear()
        await asyncio.sleep(1.0)


async def _settle(engine: EngineHandle, streams: Sequence[asyncio.Task[None]]) -> None:
    quiet = 0
    while quiet < 5:
        quiet = 0 if (await _poll(engine, streams))["num_open"] else quiet + 1


async def _poll(
    engine: EngineHandle, streams: Sequence[asyncio.Task[None]], measured: Measured | None = None
) -> dict[str, Any]:
    """What the engine says of its stores. `measured`: told whether any is open."""
    asked = time.monotonic()
    await asyncio.sleep(POLL_S)
    for task in streams:
        if task.done():
            task.result()
            raise SystemExit("requests ended before the measurement: raise max_tokens")
    status = await engine.leader.status.options(concurrency_group="control").remote()
    found: dict[str, Any] = status["offload"]
    if measured is not None and found["num_open"]:
        last = measured.open[-1] if measured.open else (0.0, 0.0)
        if asked - last[1] < POLL_S:
            measured.open[-1] = last[0], time.monotonic()
        else:
            measured.open.append((asked, time.monotonic()))
    return found


def table(measured: Measured, tp: int) -> tuple[str, float, float]:
    """(Markdown, fall in percent, GB/s)."""
    within, between = measured.steps()
    rates = [num_bytes / seconds / 1e9 for num_bytes, seconds in measured.rounds]
    fall = 100 * (1 - statistics.mean(between) / statistics.mean(within))
    rate = statistics.median(rates)
    each, spread = measured.rounds[0][0] / 2**30, f"{min(rates):.2f}, {rate:.2f}, {max(rates):.2f}"
    names = "TP | stored each time | GB/s: least, median, most | steps within | ms | between | ms | fall"
    cells = [f"{tp} | {each:.2f} GiB, {len(rates)} times | {spread}"]
    cells += [f"{len(steps)} | {1e3 * statistics.mean(steps):.1f}" for steps in (within, between)]
    lines = [f"| {names} |", "|---" * 8 + "|", f"| {' | '.join(cells)} | {fall:.1f} % |"]
    return "\n".join(lines), fall, rate


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail beyond the limits")
    parser.add_argument("--rounds", type=int, default=6, help="times that all is stored")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, connect(None):
        model = write_checkpoint("qwen3", Path(folder) / "model", overrides=model_config())
        measured = asyncio.run(measure(model, asked.tp, asked.rounds, asked.device))
    text, fall, rate = table(measured, asked.tp)
    cpu = platform.processor() or platform.machine()
    text = f"{text}\n\n{cpu}, {os.cpu_count()} cores; a mean step within stores against one between, one run."
    print(text)
    if asked.record:
        title = "# Decoding while 1 GiB is stored"
        how = "`python jobs/benchmarks/offload_overlap.py --check`"
        RESULTS.write_text(f"{title}\n\n{how}\n\n{text}\n")
    if asked.check and (fall > MAX_FALL_PERCENT or rate < MIN_GB_PER_S):
        print(f"fall {fall:.1f} % at {rate:.2f} GB/s: at most {MAX_FALL_PERCENT} % at {MIN_GB_PER_S} or more")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
