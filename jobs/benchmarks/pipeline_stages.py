"""Prefill on two pipeline stages beside one, each with one CPU thread.

    python jobs/benchmarks/pipeline_stages.py [--rounds 6] [--batch 16] [--tokens 2] [--out DIR] [--check]
                                              [--record]

The model of throughput.py in float32, prompts of 256 to 512 random tokens that come together, few output
tokens, steps of 256 tokens. PP 2 has a rank in this process and one in another, over shared memory. Engines
take turns, A B B A; a ratio is of two runs side by side, and the last row is their geometric mean. All runs
must give the same tokens, or the script fails. The mean must be at least 1.4: with --check the script fails
where it is not.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from jobs.benchmarks.throughput import MODEL, write_model
from rayk.engine.build import make_leader
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.parallel.factory import make_comm
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

LEAST = 1.4
BLOCK_SIZE = 32
LENGTHS = 256, 512
TIMEOUT_S = 600.0


def make_rank(config: EngineConfig, rank: int, address: str) -> EngineRank:
    """Make one rank of an engine, which has one thread."""
    torch.set_num_threads(1)
    made = make_comm(config.comm, rank, config.num_ranks, address, config.device, TIMEOUT_S)
    return EngineRank(config, made.comm)


def follow(config: EngineConfig, rank: int, address: str) -> None:
    """Be another rank than the first, until that one stops."""
    made = make_rank(config, rank, address)
    EngineLoop(made, NoExtension(), None).run()
    made.comm.close()


class Contestant:
    """An engine, whose first rank takes its turns in this thread."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        self.config = config
        self._rank = make_rank(config, 0, address)
        self._leader = make_leader(self._rank)
        self._loop = EngineLoop(self._rank, NoExtension(), self._leader)
        self._num_runs = 0

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Run all prompts from their first to their last token; returns (s, each one's tokens)."""
        self._num_runs += 1
        outputs: list[list[int]] = [[] for _ in prompts]
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        began_s = time.perf_counter()
        for index, prompt in enumerate(prompts):
            name = f"{self._num_runs}.{index}"
            request = Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)
            self._leader.submit(request, lambda event, i=index: outputs[i].extend(event.token_ids))
        self._loop.turn()
        while self._leader.scheduler.has_work:
            self._loop.turn()
        return time.perf_counter() - began_s, outputs

    def close(self) -> None:
        """End all ranks."""
        self._leader.stop()
        self._loop.turn()
        self._rank.comm.close()


@contextmanager
def contestants(model: Path, batch: int) -> Iterator[list[Contestant]]:
    """Make an engine of one stage and one of two."""
    blocks = -(-(LENGTHS[1] + 64) // BLOCK_SIZE)
    one = EngineConfig(
        model=str(model),
        block_size=BLOCK_SIZE,
        num_blocks=2 + batch * blocks,
        max_batch_tokens=256,
        max_seqs=batch,
    )
    two, address = replace(one, pp=2, comm="shm"), f"pipeline-stages-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    peer = context.Process(target=follow, args=(two, 1, address), daemon=True)
    peer.start()
    made = [Contestant(one, ""), Contestant(two, address)]
    try:
        yield made
    finally:
        for contestant in made:
            contestant.close()
        peer.join(60)


def make_prompts(batch: int) -> list[list[int]]:
    """Make the same prompts for everybody."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*LENGTHS, batch).int().tolist()
    return [torch.randint(4, MODEL["vocab_size"], (n,), generator=draw).tolist() for n in lengths]


def measure(model: Path, batch: int, num_tokens: int, num_rounds: int) -> list[tuple[float, float]]:
    """Take turns after a run of each that does not count; returns the seconds (PP 1, PP 2) of each pair.
    Raises AssertionError where their tokens differ."""
    prompts = make_prompts(batch)
    with contestants(model, batch) as engines:
        expected = [engine.run(prompts, num_tokens)[1] for engine in engines]
        assert expected[0] == expected[1], "other tokens"
        pairs = []
        for number in range(num_rounds):
            seconds = [0.0, 0.0]
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                seconds[index], tokens = engines[index].run(prompts, num_tokens)
                assert tokens == expected[0], "other tokens than before"
            pairs.append((seconds[0], seconds[1]))
    return pairs


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per pair of runs, and their mean; returns a line where that is below LEAST."""
    torch.set_num_threads(1)
    page.environment["threads"] = 1
    num_tokens = sum(map(len, make_prompts(options.batch)))
    page.say(
        f"Llama (hidden {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers, float32), "
        f"{options.batch} prompts of {LENGTHS[0]} to {LENGTHS[1]} tokens that come together, {num_tokens:,} "
        f"in all, and {options.tokens} output tokens each; steps of 256 tokens, one thread per stage. Rates "
        "are prompt tokens by the seconds until the last request's last token.",
        "",
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        pairs = measure(Path(folder), options.batch, options.tokens, options.rounds)
    page.head("pair", "PP 1: prompt tokens/s", "PP 2: prompt tokens/s", "ratio")
    ratios = [one / two for one, two in pairs]
    for number, ((one, two), ratio) in enumerate(zip(pairs, ratios, strict=True)):
        page.row(number + 1, f"{num_tokens / one:.0f}", f"{num_tokens / two:.0f}", f"{ratio:.2f}")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    page.row("geometric mean", "", "", f"{mean:.2f}")
    is_met = mean >= LEAST
    page.say("", f"Demanded of the mean: at least {LEAST}. {'Met' if is_met else 'Missed'}.")
    return [] if is_met else [f"PP 2 by PP 1: {mean:.2f}, at least {LEAST}"]


def main() -> int:
    return run(
        fill,
        __file__,
        title="Prefill on two pipeline stages and on one",
        rounds=6,
        batch=16,
        tokens=2,
    )


if __name__ == "__main__":
    sys.exit(main())
