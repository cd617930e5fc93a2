"""Tokens a second of the engine on one CPU thread, beside transformers' generate and generate_batch.

    python jobs/benchmarks/throughput.py [--rounds 5] [--tokens 64] [--batches 1 16] [--out DIR] [--check]
                                           [--record]

One process, one model (llama: hidden 512, 8 layers, 8 query and 4 KV heads, vocabulary 4096), one thread for
everybody. In each round every contestant does the same requests, in an order that turns from round to round;
a round that warms up is not counted. Greedy, no end of sequence, equal prompts of `--prompt` tokens:

    prefill     prompt tokens / time until every request has its first token
    decode      tokens after that / time after that
    end to end  all generated tokens / time of the whole call

Rates are medians over rounds. A ratio is the median over rounds of rayk's rate by the other's in the same
round: a neighbour who takes the machine for a while hits both. Tokens must be equal in float32; in bfloat16
the table says how many are, before the first of a request that is not. generate_batch gets a pool that fits
the requests and keeps its manager between calls: as it comes, every call would measure the memory anew.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from jobs.benchmarks.peer_workers.contract import Contestant, Job, Prompts, Run
from jobs.benchmarks.peer_workers.with_rayk import Rayk, settings
from jobs.benchmarks.peer_workers.with_transformers import Generate, read_model
from rayk.engine.build import ThreadEngine

METRICS = ("prefill", "decode", "end to end")
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


class GenerateBatch:
    """transformers' generate_batch: continuous batching over a paged cache."""

    name = "generate_batch"

    def __init__(self, model: Any, num_requests: int, num_tokens: int) -> None:
        """Room for so many requests of so many tokens each, prompt included."""
        self._model = model
        pages = num_requests * -(-num_tokens // 256)
        self._config = transformers.ContinuousBatchingConfig(
            num_blocks=2 * pages + 2, max_batch_tokens=num_requests * num_tokens, allow_block_sharing=False
        )

    # Inside inference_mode it fails: it writes to its cache outside.
    @torch.no_grad()
    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        settings = transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        started = time.monotonic()
        outputs = self._model.generate_batch(
            prompts,
            settings,
            self._config,
            record_timestamps=True,
            persistent_manager=True,
        )
        ended = time.monotonic()
        assert len(outputs) == len(prompts), f"{len(outputs)} of {len(prompts)} requests came back"
        found = [outputs[name] for name in outputs]
        return Run([o.generated_tokens for o in found], [o.timestamps for o in found], started, ended)

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()


CASE_OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"type": int, "default": 64, "help": "tokens of a prompt"},
    "tokens": {"type": int, "default": 64, "help": "generated tokens of a request"},
    "batches": {"type": int, "nargs": "+", "default": [1, 16]},
    "dtypes": {"nargs": "+", "default": ["float32", "bfloat16"]},
}


@dataclass(frozen=True)
class Case:
    dtype: str
    batch: int
    num_prompt: int
    num_tokens: int
    text: tuple[int, ...] = ()
    """Token ids of which prompts are stretches; none: prompts are random."""

    def prompts(self) -> Prompts:
        """The same for every contestant and run."""
        if self.text:
            step = (len(self.text) - self.num_prompt) // self.batch
            return [list(self.text[at : at + self.num_prompt]) for at in range(0, self.batch * step, step)]
        draw = torch.Generator().manual_seed(0)
        shape = (self.batch, self.num_prompt)
        return torch.randint(4, MODEL["vocab_size"], shape, generator=draw).tolist()


@dataclass(frozen=True)
class Result:
    rates: dict[str, list[dict[str, float]]]
    """Contestant -> per round, metric -> tokens a second."""
    share_equal: dict[str, float]
    """Contestant -> the share of tokens before the first, in their request, that is not the right one."""
    least_equal: dict[str, int] = field(default_factory=dict)
    """Contestant -> the least number of such tokens of a request."""

    def rate(self, name: str, metric: str) -> float:
        return statistics.median(rates[metric] for rates in self.rates[name])

    def ratios(self, name: str, metric: str, of: str = Rayk.name) -> list[float]:
        """By round, the rate of one, rayk unless told, by this one's."""
        pairs = zip(self.rates[of], self.rates[name], strict=True)
        return [ours[metric] / theirs[metric] for ours, theirs in pairs]

    def ratio(self, name: str, metric: str, of: str = Rayk.name) -> float:
        """Median over rounds."""
        return statistics.median(self.ratios(name, metric, of))


def write_model(folder: Path) -> None:
    """Random weights that tell tokens apart: as transformers draws them, logits would hardly differ."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)


@contextmanager
def contestants(model: Path, case: Case) -> Iterator[list[Contestant]]:
    job = Job(str(model), case.dtype, case.batch, case.num_prompt, case.num_tokens)

    def theirs() -> Any:
        return read_model(job.model, job.dtype)

    with ExitStack() as stack:
        engine = stack.enter_context(ThreadEngine(settings(job)))
        batched = GenerateBatch(theirs(), case.batch, job.max_length)
        stack.callback(batched.close)
        yield [Rayk(engine), Generate(theirs()), batched]


def run_case(model: Path, case: Case, num_rounds: int, only: list[str] | None = None) -> Result:
    """Rounds in turn. Raises AssertionError where float32 tokens differ."""
    with contestants(model, case) as everybody:
        everybody = [c for c in everybody if only is None or c.name in only]
        result = take_turns(everybody, case, num_rounds, Rayk.name)
    for name, share in result.share_equal.items():
        assert share == 1.0 or case.dtype != "float32", f"{name}: other tokens than rayk's"
    return result


def take_turns(everybody: list[Contestant], case: Case, num_rounds: int, right: str) -> Result:
    """A round that warms up, then rounds that count. Tokens are compared with those of `right`."""
    prompts = case.prompts()
    tokens = {c.name: c.run(prompts, case.num_tokens).tokens for c in everybody}
    num_equal = {
        name: [_num_equal(*pair) for pair in zip(tokens[right], found, strict=True)]
        for name, found in tokens.items()
    }
    share_equal = {name: sum(found) / (case.batch * case.num_tokens) for name, found in num_equal.items()}
    rates: dict[str, list[dict[str, float]]] = {c.name: [] for c in everybody}
    gc.collect()
    for turn in range(num_rounds):
        at = turn % len(everybody)
        for contestant in everybody[at:] + everybody[:at]:
            run = contestant.run(prompts, case.num_tokens)
            rates[contestant.name].append(run.rates(case.batch * case.num_prompt))
    return Result(rates, share_equal, {name: min(found) for name, found in num_equal.items()})


def _num_equal(ours: list[int], theirs: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))


TITLES = ("dtype", "batch", "contestant", *METRICS, "rayk by it: prefill", *METRICS[1:], "equal tokens")


def cells(case: Case, result: Result, name: str) -> list[str]:
    """A contestant's row: tokens a second, and how many times as fast rayk is."""
    found = [f"{result.rate(name, metric):.0f}" for metric in METRICS]
    if name == Rayk.name:
        beside = [""] * (len(METRICS) + 1)
    else:
        ratios = [f"{result.ratio(name, metric):.2f}" for metric in METRICS]
        beside = [*ratios, f"{result.share_equal[name]:.0%}"]
    return [case.dtype, str(case.batch), name, *found, *beside]


def behind(results: dict[Case, Result]) -> list[str]:
    """Where somebody is as fast as rayk, or faster."""
    return [
        f"{case.dtype} batch {case.batch} {metric}: {result.ratio(name, metric):.2f} of {name}, "
        "the limit is above 1"
        for case, result in results.items()
        for name in result.rates
        for metric in METRICS
        if name != Rayk.name and result.ratio(name, metric) <= 1.0
    ]


DATA_TITLES = ("dtype", "batch", "prompt", "tokens", "contestant", "round", "metric", "tokens_per_s")


def data_rows(results: dict[Case, Result]) -> list[tuple[object, ...]]:
    """Every round, by DATA_TITLES."""
    return [
        (case.dtype, case.batch, case.num_prompt, case.num_tokens, name, turn, metric, rate)
        for case, result in results.items()
        for name, rounds in result.rates.items()
        for turn, found in enumerate(rounds)
        for metric, rate in found.items()
    ]


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per case and contestant, and keep every round; returns where rayk is not ahead."""
    torch.set_num_threads(1)
    page.environment["threads"] = 1
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    only = None if options.only is None else [Rayk.name, *options.only]
    results = {}
    page.say(
        f"Prompts of {options.prompt} tokens, {options.tokens} generated; medians of {options.rounds}.", ""
    )
    page.head(*TITLES)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for dtype, batch in itertools.product(options.dtypes, options.batches):
            case = Case(dtype, batch, options.prompt, options.tokens)
            result = results[case] = run_case(Path(folder), case, options.rounds, only)
            for name in result.rates:
                page.row(*cells(case, result, name))
    page.data(DATA_TITLES, data_rows(results))
    return [f"not ahead: {line}" for line in behind(results)]


def main() -> int:
    return run(
        fill,
        __file__,
        title="An engine on one CPU thread, beside transformers",
        rounds=5,
        **CASE_OPTIONS,
        only={"nargs": "+", "help": "names of contestants besides rayk"},
    )


if __name__ == "__main__":
    sys.exit(main())
