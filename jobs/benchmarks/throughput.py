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
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.engine.build import ThreadEngine
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

METRICS = ("prefill", "decode", "end to end")
BLOCK_SIZE = 32
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

Prompts = list[list[int]]


@dataclass(frozen=True)
class Run:
    """What one contestant did of one round. Times in seconds of one monotonic clock."""

    tokens: list[list[int]]
    """Generated, by request."""
    token_s: list[list[float]]
    """When each was there."""
    started_s: float
    ended_s: float

    def rates(self, num_prompt_tokens: int) -> dict[str, float]:
        prefilled = max(times[0] for times in self.token_s)
        later = sum(t > prefilled for times in self.token_s for t in times)
        last = max(times[-1] for times in self.token_s)
        return {
            "prefill": num_prompt_tokens / (prefilled - self.started_s),
            "decode": later / (last - prefilled),
            "end to end": sum(map(len, self.tokens)) / (self.ended_s - self.started_s),
        }


class Contestant(Protocol):
    """Runs requests together, to their ends."""

    name: str

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        """Greedily generate `num_tokens` tokens for each prompt."""
        ...


class Rayk:
    name = "rayk"

    def __init__(self, engine: ThreadEngine) -> None:
        self._engine = engine
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        started = time.monotonic()
        streams = [
            self._engine.submit(
                Request(request_id=f"{self._num_runs}.{i}", prompt_token_ids=tuple(prompt), sampling=sampling)
            )
            for i, prompt in enumerate(prompts)
        ]
        tokens: list[list[int]] = []
        times: list[list[float]] = []
        for stream in streams:
            tokens.append([])
            times.append([])
            is_over = False
            while not is_over:
                event = stream.get(timeout=600)
                if event.error is not None:
                    raise event.error
                tokens[-1] += event.token_ids
                times[-1] += [event.time_ns / 1e9] * len(event.token_ids)
                is_over = event.is_last
        return Run(tokens, times, started, time.monotonic())


class Generate:
    """transformers' generate, with a cache of its own choice."""

    name = "generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        times: list[float] = []

        def note(*_: object, **__: object) -> torch.Tensor:
            times.append(time.monotonic())
            return torch.zeros(len(prompts), dtype=torch.bool)

        ids = torch.tensor(prompts)
        started = time.monotonic()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([note]),
        )
        ended = time.monotonic()
        return Run(out[:, ids.shape[1] :].tolist(), [times] * len(prompts), started, ended)


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


@dataclass(frozen=True)
class Case:
    dtype: str
    batch: int
    num_prompt: int
    num_tokens: int

    def prompts(self) -> Prompts:
        """Random, the same for every contestant and run."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.batch, self.num_prompt)
        return torch.randint(4, MODEL["vocab_size"], shape, generator=draw).tolist()


@dataclass(frozen=True)
class Result:
    rates: dict[str, list[dict[str, float]]]
    """Contestant -> per round, metric -> tokens a second."""
    share_equal: dict[str, float]
    """Contestant -> the share of tokens before the first, in their request, that is not rayk's."""

    def rate(self, name: str, metric: str) -> float:
        return statistics.median(rates[metric] for rates in self.rates[name])

    def ratio(self, name: str, metric: str) -> float:
        """Median over rounds of rayk's rate by this one's."""
        pairs = zip(self.rates[Rayk.name], self.rates[name], strict=True)
        return statistics.median(ours[metric] / theirs[metric] for ours, theirs in pairs)


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
    dtype = getattr(torch, case.dtype)
    length = case.num_prompt + case.num_tokens
    config = EngineConfig(
        model=str(model),
        dtype=case.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=2 + case.batch * (length // BLOCK_SIZE + 2),
        max_batch_tokens=max(512, case.batch * case.num_prompt),
        max_seqs=case.batch,
    )

    def theirs() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(model, dtype=dtype).eval()

    with ExitStack() as stack:
        engine = stack.enter_context(ThreadEngine(config))
        batched = GenerateBatch(theirs(), case.batch, length)
        stack.callback(batched.close)
        yield [Rayk(engine), Generate(theirs()), batched]


def run_case(model: Path, case: Case, num_rounds: int, only: list[str] | None = None) -> Result:
    """Rounds in turn. Raises AssertionError where float32 tokens differ."""
    prompts = case.prompts()
    rates: dict[str, list[dict[str, float]]] = {}
    share_equal: dict[str, float] = {}
    with contestants(model, case) as everybody:
        everybody = [c for c in everybody if only is None or c.name in only]
        tokens = {c.name: c.run(prompts, case.num_tokens).tokens for c in everybody}
        for name, found in tokens.items():
            num_equal = sum(map(_num_equal, tokens[Rayk.name], found))
            share_equal[name] = num_equal / (case.batch * case.num_tokens)
            assert share_equal[name] == 1.0 or case.dtype != "float32", f"{name}: other tokens than rayk's"
        gc.collect()
        for turn in range(num_rounds):
            at = turn % len(everybody)
            for contestant in everybody[at:] + everybody[:at]:
                run = contestant.run(prompts, case.num_tokens)
                found_rates = run.rates(case.batch * case.num_prompt)
                rates.setdefault(contestant.name, []).append(found_rates)
    return Result(rates, share_equal)


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
    titles = ("dtype", "batch", "prompt", "tokens", "contestant", "round", "metric", "tokens_per_s")
    page.data(
        titles,
        [
            (case.dtype, case.batch, case.num_prompt, case.num_tokens, name, turn, metric, rate)
            for case, result in results.items()
            for name, rounds in result.rates.items()
            for turn, found in enumerate(rounds)
            for metric, rate in found.items()
        ],
    )
    return [f"not ahead: {line}" for line in behind(results)]


def main() -> int:
    return run(
        fill,
        __file__,
        title="An engine on one CPU thread, beside transformers",
        rounds=5,
        prompt={"type": int, "default": 64, "help": "tokens of a prompt"},
        tokens={"type": int, "default": 64, "help": "generated tokens of a request"},
        batches={"type": int, "nargs": "+", "default": [1, 16]},
        dtypes={"nargs": "+", "default": ["float32", "bfloat16"]},
        only={"nargs": "+", "help": "names of contestants besides rayk"},
    )


if __name__ == "__main__":
    sys.exit(main())
