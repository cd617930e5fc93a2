"""Time how fast the simulator gets through requests, and what memory it needs.

    python jobs/benchmarks/simulate.py [--requests 20000] [--engines 64] [--shapes pairs,fleet]
    python jobs/benchmarks/simulate.py --requests 1000000 --slow-requests 20000 --record

A server's requests, of 500 to 1,500 prompt tokens and 100 to 300 output tokens, come at random to engines of
an 8B model's size: 10 a second and engine, of which about 24 run at once there. Steps take what a table says
that is made up here. Nothing is left out but computing: each engine's own scheduler, blocks and leader run.
Shapes:

    engines      --engines aggregated ones
    caching      the same, whose prompts share one of 100 beginnings of 512 tokens, with prefix caching
    ahead        the same as `engines`, of those that begin a step before they know the last one's tokens
    pairs        as many engines, half of which prefill for the others
    fleet        1,000 aggregated ones

The last four get 100,000 requests at most.

    us           of processor time per request, quiet steps taken at once
    single us    the same where every step is taken by itself, over --slow-requests
    minutes      of processor time, for all of them
    MiB at 10 %  of the process when so many requests were over, and at the end

Target: a million requests over 64 aggregated engines in 10 minutes of one core, 600 us each; singly in 60,
3,600 us each. Memory that does not grow with requests, but for a few numbers of each.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, option, run
from rayk.costs import CostBook, EngineCosts
from rayk.costs.table import Gap, GapTable, LinearCost, ReadCosts, StepTable, TransferTable
from rayk.models.config import DecoderConfig, LayerConfig, MlpConfig, NormConfig
from rayk.simulate import Arrival, SimOutcome, simulate_cell
from rayk.simulate.summary import Summary
from rayk.specs import Cell, expand
from rayk.specs.experiment import ExperimentSpec
from rayk.specs.serving import ServerSettings, model_card, settings_of
from rayk.types.rows import RequestRow

TARGET_US, SINGLE_TARGET_US = 600.0, 3_600.0
RATE = 10.0
"""Requests a second and engine."""
PROMPTS, OUTPUTS = (500, 1_500), (100, 300)
BEGINNINGS, BEGINNING_TOKENS = 100, 512
FLEET_ENGINES = 1_000
OTHER_REQUESTS = 100_000
MODEL = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    family="qwen3",
    hidden_size=4096,
    num_layers=36,
    num_query_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=151_936,
    max_positions=40_960,
    norm=NormConfig(eps=1e-6),
    tie_embeddings=False,
    dtype="bfloat16",
    layers=(LayerConfig(window=None, rope=None, mlp=MlpConfig(intermediate_size=12_288)),) * 36,
    eos_token_ids=(151_645,),
)
STEPS = StepTable(terms=("one", "tokens", "seen"), constants=(5e6, 30e3, 35.0))
COSTS = replace(EngineCosts.flat(0), decode=STEPS, prefill=STEPS, host_ns=200e3)
READ = ReadCosts(post=LinearCost(fixed_ns=20e3), wait=LinearCost(fixed_ns=100e3, byte_ns=0.02))
BOOK = CostBook(
    any_engine=COSTS,
    gaps=GapTable(dispatch=Gap(quantiles=(4e5,)), handover=Gap(quantiles=(4e5,))),
    transfers=TransferTable(reads={"nixl cuda 1:1 auto:auto": READ}),
    folder="flat",
)


@dataclass(frozen=True)
class Shape:
    name: str
    num_engines: int
    num_requests: int
    caching: bool = False
    ahead: bool = False
    pairs: bool = False

    @property
    def text(self) -> str:
        half = self.num_engines // 2
        return f"{half} prefill, {half} decode" if self.pairs else f"{self.num_engines} aggregated"


def shapes(num_engines: int, num_requests: int) -> list[Shape]:
    fewer = min(OTHER_REQUESTS, num_requests)
    return [
        Shape("engines", num_engines, num_requests),
        Shape("caching", num_engines, fewer, caching=True),
        Shape("ahead", num_engines, fewer, ahead=True),
        Shape("pairs", num_engines, fewer, pairs=True),
        Shape("fleet", FLEET_ENGINES, fewer),
    ]


def server_of(shape: Shape) -> tuple[Cell, ServerSettings]:
    """A server of such engines, and a cell to name its rows by."""
    spec = ExperimentSpec.model_validate(
        {
            "model": "m",
            "mode": "disaggregated" if shape.pairs else "aggregated",
            "prompts": {"random": {"count": 1, "input_tokens": 1}},
            "engine": {
                "num_blocks": 8_000,
                "max_seqs": 128,
                "max_batch_tokens": 2_048,
                "prefix_caching": shape.caching,
                "async_scheduling": "always" if shape.ahead else "never",
            },
        }
    )
    (cell,) = expand(spec, MODEL, device="cuda")
    num = shape.num_engines // 2 if shape.pairs else shape.num_engines
    decode = [] if cell.decode is None else [cell.decode] * num
    many = {"max_running": 1 << 20, "max_waiting": 1 << 20, "request_s": 3_600.0}
    return cell, settings_of(cell, model_card("m", MODEL, "m"), [cell.prefill] * num, decode, **many)


def arrivals(shape: Shape, num: int, seed: int = 0) -> Iterator[Arrival]:
    """Requests at random times. Prompts of one length are one, but for common beginnings."""
    draw = random.Random(seed)
    prompts: dict[int, tuple[int, ...]] = {}
    at_s = 0.0
    for index in range(num):
        at_s += draw.expovariate(RATE * shape.num_engines)
        length, num_output = round(draw.uniform(*PROMPTS)), round(draw.uniform(*OUTPUTS))
        if shape.caching:
            rest = max(1, length - BEGINNING_TOKENS)
            own = (1_000 + index % 100_000,) * rest
            prompt = (draw.randrange(BEGINNINGS),) * BEGINNING_TOKENS + own
        else:
            prompt = prompts.setdefault(length, tuple(range(length)))
        yield Arrival(
            at_ns=round(at_s * 1e9),
            index=index,
            prompt=prompt,
            max_tokens=OUTPUTS[1],
            num_output_tokens=num_output,
        )


class Progress(Summary):
    """Notes the process's memory at each tenth."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.mib: list[int] = []
        self._every = max(1, num // 10)

    def __call__(self, row: RequestRow) -> None:
        super().__call__(row)
        if self.num_requests % self._every == 0:
            self.mib.append(resident_mib())
            print(f"  {self.num_requests:,} requests, {self.mib[-1]} MiB", file=sys.stderr, flush=True)


def resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (pages * 4_096) >> 20


def simulated(shape: Shape, num: int, *, fast: bool = True) -> tuple[SimOutcome, Progress]:
    cell, server = server_of(shape)
    sink = Progress(num)
    outcome = simulate_cell(cell, MODEL, arrivals(shape, num), BOOK, server=server, fast=fast, sink=sink)
    assert sink.num_requests == num, "requests got lost"
    assert not sink.num_failed, "none fails"
    return outcome, sink


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Run every shape and add the table; returns the rows that miss the target."""
    asked = [s for s in shapes(options.engines, options.requests) if s.name in options.shapes.split(",")]
    page.head(
        "shape", "engines", "requests", "us", "single us", "minutes", "MiB at 10 %", "MiB at the end", ""
    )
    missed = []
    for shape in asked:
        outcome, sink = simulated(shape, shape.num_requests)
        us = outcome.cpu_s / shape.num_requests * 1e6
        gc.collect()
        slow_us = float("nan")
        if options.slow_requests:
            num = min(options.slow_requests, shape.num_requests)
            slow_us = simulated(shape, num, fast=False)[0].cpu_s / num * 1e6
        told = "-"
        if shape.name == "engines":
            told = "MISSED" if us >= TARGET_US or slow_us >= SINGLE_TARGET_US else "met"
        if told == "MISSED":
            limits = f"under {TARGET_US:g} and {SINGLE_TARGET_US:g}"
            missed.append(f"{shape.name}: {us:.0f} us, singly {slow_us:.0f} us; {limits}")
        page.row(
            shape.name,
            shape.text,
            f"{shape.num_requests:,}",
            f"{us:.0f}",
            f"{slow_us:.0f}",
            f"{outcome.cpu_s / 60:.1f}",
            sink.mib[0],
            sink.mib[-1],
            told,
        )
    page.say("")
    return missed


def main() -> int:
    return run(
        fill,
        __file__,
        title="How fast the simulator is",
        requests=option(20_000, "simulated in each shape"),
        engines=option(64, "of each shape but `fleet`"),
        slow_requests=option(2_000, "simulated step by step; 0: none"),
        shapes=option("engines,caching,ahead,pairs,fleet", "those that are run"),
    )


if __name__ == "__main__":
    sys.exit(main())
