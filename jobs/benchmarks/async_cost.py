"""CPU time of a decode step with asynchronous scheduling off and on, beside a loop that has none of its code.

    python jobs/benchmarks/async_cost.py [--rounds 20] [--steps 100] [--batches 1 16] [--out DIR] [--check]
                                           [--record]

One process, one thread, the model of throughput.py in float32, greedy. In each round every loop takes the
same decode steps, in an order that turns; time is that of the thread on a CPU, which neighbours change less
than a clock's, though they do by taking the cache. The first column of ratios is of the least times of all
rounds, the other the median over rounds of ratios within a round. With --check the code that is off may cost
1 %, by the lower of the two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from jobs.benchmarks.throughput import MODEL, write_model
from rayk.engine.build import make_leader
from rayk.engine.leader import Leader
from rayk.engine.loop import EngineLoop, NoExtension, TurnResult
from rayk.engine.rank import EngineRank
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

MOST_OFF = 1.01
NUM_PROMPT = 64
BLOCK_SIZE = 32


class PlainLoop(EngineLoop):
    """Computes, samples and settles a step before it plans the next, and knows of no other way."""

    def turn(self) -> bool:
        leader, rank = self._leader, self._rank
        assert leader is not None
        leader.wait()
        begun_ns = time.monotonic_ns()
        turn = leader.plan()
        batch = turn.batch
        if batch is None:
            return not turn.stop
        assigned = tuple(b for r in batch.requests for b in r.fresh_blocks())
        if assigned:
            self._extension.blocks_assigned(assigned)
        pending = leader.sample(batch, rank.step(batch), rank.prompt_logits())
        self._extension.poll()
        leader.absorb(turn, TurnResult(results=(), polls=()))
        tokens = pending.finish(pending.tokens.tolist())
        leader.settle(batch, tokens)
        self.times.model_ns += rank.measure()
        self.times.turn_ns += time.monotonic_ns() - begun_ns
        self.times.num_computed_tokens += batch.num_tokens
        self.times.num_sampled_tokens += len(tokens.token_ids)
        self.times.num_steps += 1
        self.times.num_turns += 1
        return not turn.stop


LOOPS = {"none": ("off", PlainLoop), "off": ("off", EngineLoop), "on": (None, EngineLoop)}
"""Contestant -> why its rank does not run ahead, and its loop."""


class Contestant:
    """A leader and a loop, whose turns this thread takes. All have one rank: where the weights of another lie
    in memory makes more of a difference than the loops do."""

    def __init__(self, rank: EngineRank, name: str, batch: int, num_steps: int) -> None:
        why_not_ahead, loop = LOOPS[name]
        rank.why_not_ahead = why_not_ahead  # which the loop asks for when it is made
        self._leader: Leader = make_leader(rank)
        self._loop = loop(rank, NoExtension(), self._leader)
        self._batch, self._num_steps, self._num_rounds = batch, num_steps, 0
        self.tokens: list[tuple[str, int]] = []
        """Of the last round, by request."""

    def cpu_us(self) -> float:
        """Prefill the batch, then return a decode step's CPU time in microseconds."""
        self._num_rounds += 1
        self.tokens = []
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(4, MODEL["vocab_size"], (self._batch, NUM_PROMPT), generator=draw).tolist()
        sampling = SamplingParams(max_tokens=self._num_steps + 8, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            name = f"{self._num_rounds}.{index}"
            request = Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)
            self._leader.submit(
                request, lambda event, i=index: self.tokens.extend((str(i), t) for t in event.token_ids)
            )
        for _ in range(4):
            self._loop.turn()
        begun_ns = time.thread_time_ns()
        for _ in range(self._num_steps):
            self._loop.turn()
        took_us = (time.thread_time_ns() - begun_ns) / 1e3 / self._num_steps
        while self._leader.scheduler.has_work:
            self._loop.turn()
        return took_us


def measure(model: Path, batch: int, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Take rounds in turns. Raises AssertionError where the loops' tokens differ."""
    blocks = -(-(NUM_PROMPT + num_steps + 8) // BLOCK_SIZE)
    config = EngineConfig(
        model=str(model),
        block_size=BLOCK_SIZE,
        num_blocks=2 + batch * (blocks + 1),
        max_batch_tokens=max(512, batch * NUM_PROMPT),
        max_seqs=batch,
    )
    rank = EngineRank(config, LocalComm())
    everybody = {name: Contestant(rank, name, batch, num_steps) for name in LOOPS}
    for contestant in everybody.values():
        contestant.cpu_us()
    assert len({tuple(sorted(c.tokens)) for c in everybody.values()}) == 1, "other tokens"
    found: dict[str, list[float]] = {name: [] for name in LOOPS}
    names = list(LOOPS)
    for turn in range(num_rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(everybody[name].cpu_us())
    return found


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per batch size and loop; returns where the code that is off costs too much."""
    torch.set_num_threads(1)
    missed = []
    page.head("asynchronous code", "batch", "CPU us a step (least)", "by none: least", "by none: median")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for batch in options.batches:
            found = measure(Path(folder), batch, options.rounds, options.steps)
            for name, times in found.items():
                least = min(times) / min(found["none"])
                median = statistics.median(t / n for t, n in zip(times, found["none"], strict=True))
                page.row(name, batch, f"{min(times):.0f}", f"{least:.4f}", f"{median:.4f}")
                if name == "off" and min(least, median) > MOST_OFF:
                    missed.append(
                        f"off, batch {batch}: {least:.4f} and {median:.4f}, the limit is {MOST_OFF}"
                    )
    return missed


def main() -> int:
    return run(
        fill,
        __file__,
        title="What asynchronous scheduling costs a CPU",
        rounds=20,
        steps=100,
        batches={"type": int, "nargs": "+", "default": [1, 16]},
    )


if __name__ == "__main__":
    sys.exit(main())
