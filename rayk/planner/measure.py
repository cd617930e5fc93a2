"""Plan the runs that measure a model's costs: a grid of steps, then pairs of engines, then neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from rayk.costs import step_of, windows_of
from rayk.costs.roofline import Hardware
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import engine_groups
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.planner.hardware import roofline_book
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError

STEP = 4
"""Sizes of a grid grow by this: hull.REACH has no hole between two of them."""
SHORTEST = 16  # tokens of a prompt
OUTPUT_TOKENS = 24  # decode steps of each length
DRAFTED_OUTPUT = 48  # the same of requests that are drafted for
MIN_PROMPTS = 8
MIXED = 4  # prompts per place where lengths are mixed: one comes as another ends, into steps that decode
PAIR_TOKENS = (32, 256, 1024)
PAIR_PROMPTS = 12
MAX_PAIR_RATE = 4.0  # requests per second
LOADED_PROMPTS = 48
JOINED = 2.5  # requests that are there at once, on such a machine, where they come one by one
IDLE = 2
"""Requests of a pair come this much slower than a usual machine serves them: reads meet idle engines."""
USUAL = {  # machines whose speed is guessed, to say how fast requests come
    "cpu": Hardware(
        name="a core", tflops=dict.fromkeys(("float32", "bfloat16", "float16"), 0.1), memory_gb_per_s=20.0
    ),
    "cuda": Hardware(
        name="a GPU", tflops={"float32": 20.0, "bfloat16": 120.0, "float16": 120.0}, memory_gb_per_s=600.0
    ),
}
PAIR_OUTPUT = 4  # tokens: what comes after a read is measured elsewhere
NEIGHBOUR_PROMPTS = 72
"""Each of an engine's classes of steps is to meet each of its neighbour's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRequest:
    """What to measure of a model."""

    model: str
    tp: Sequence[int] = (1,)
    pairs: Sequence[tuple[int, int]] = ()
    """TP sizes of prefill and decode engines whose hand-overs are measured."""
    device: str = "cpu"
    dtype: str = "float32"
    max_tokens: int = 1024  # of the longest prompt
    max_seqs: int = 16
    max_batch_tokens: int = 512
    block_size: int = 16
    has_neighbours: bool = True
    """Whether two engines at once are measured."""
    drafts: int = 0
    """Steps are measured in which n-gram drafters propose up to so many tokens for a request."""
    is_quick: bool = False
    """Measure the smallest and the largest batch only, and one size of chunks."""


def grid_spec(asked: GridRequest, config: DecoderConfig) -> dict[str, Any]:
    """Return the experiment that measures it: each cell holds one size of batch at one length of prompts.
    Raises UserError for what the model cannot do."""
    for tp in {*asked.tp, *(n for pair in asked.pairs for n in pair)}:
        if (why := why_tp_unsupported(config, tp)) is not None:
            raise UserError(f"TP {tp}: {why}", where=asked.model)
    output = DRAFTED_OUTPUT if asked.drafts else OUTPUT_TOKENS
    longest = min(asked.max_tokens, config.max_positions - output)
    if longest < SHORTEST:
        raise UserError(f"no room for prompts of {SHORTEST} tokens and their outputs", where=asked.model)
    batches = sorted({1, asked.max_seqs}) if asked.is_quick else _grown(1, asked.max_seqs)
    matrix = [cell for num in batches for cell in _steps(asked, config, num, longest)]
    if asked.max_seqs > 1:
        matrix.append(_joining(asked, config, longest))
    if asked.drafts:
        matrix += [_drafting(asked, config, num, longest) for num in batches]
    matrix += [cell for pair in asked.pairs for cell in _pairs(asked, config, pair, longest)]
    if asked.has_neighbours:
        matrix.append(_neighbours(asked, config, longest))
    return {
        "name": "costs",
        "model": asked.model,
        "device": asked.device,
        "dtype": asked.dtype,
        "mode": "aggregated",
        "prompts": {"random": {"count": MIN_PROMPTS, "input_tokens": [SHORTEST]}},
        "sampling": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
        # No answer is compared: a reference of every prompt would take longer than the cells.
        "checks": ["kv_bytes"],
        "prefill": {"block_size": asked.block_size},
        "decode": {"block_size": asked.block_size},
        "engine": {
            "record_steps": True,
            "max_seqs": asked.max_seqs,
            "max_batch_tokens": asked.max_batch_tokens,
            "num_blocks": _num_blocks(asked, config, asked.max_seqs, longest),
        },
        "matrix": matrix,
    }


def lengths(longest: int) -> list[int]:
    """List the prompts' lengths of a grid."""
    return _grown(SHORTEST, longest)


def _grown(first: int, last: int) -> list[int]:
    """List sizes that grow by STEP, the last one included."""
    sizes = [first]
    while sizes[-1] * STEP < last:
        sizes.append(sizes[-1] * STEP)
    return [*sizes, *([last] if last > sizes[-1] else [])]


def _steps(
    asked: GridRequest, config: DecoderConfig, num: int, longest: int
) -> Iterator[dict[str, list[Any]]]:
    """Batches of `num` requests: of one length each, then of all lengths mixed; in chunks of each size."""
    of_lengths = lengths(longest)
    alike: dict[str, list[Any]] = {
        "engine.max_seqs": [num],
        "engine.num_blocks": [_num_blocks(asked, config, num, longest)],
        "prompts.random.count": [max(MIN_PROMPTS, 2 * num)],
        "prompts.random.input_tokens": [[n] for n in of_lengths],
        "engine.max_batch_tokens": _chunks(asked),
        "prefill.tp": list(asked.tp),
    }
    yield alike
    if num > 1 and len(of_lengths) > 1:
        yield alike | {
            "prompts.random.count": [MIXED * num],
            "prompts.random.input_tokens": [of_lengths],
        }


def _chunks(asked: GridRequest) -> list[int]:
    """List token budgets; one below `max_seqs` would leave requests out of steps."""
    small = max(asked.max_seqs, SHORTEST * STEP)
    largest = asked.max_batch_tokens
    return [largest] if asked.is_quick or small >= largest else [small, largest]


def _pairs(
    asked: GridRequest, config: DecoderConfig, pair: tuple[int, int], longest: int
) -> Iterator[dict[str, list[Any]]]:
    """Hand-overs of a pair of engines: where they have little else to do, then where both are busy."""
    engines: dict[str, list[Any]] = {
        "mode": ["disaggregated"],
        "prefill.tp": [pair[0]],
        "decode.tp": [pair[1]],
        "engine.num_blocks": [_num_blocks(asked, config, asked.max_seqs, longest)],
    }
    for size in [n for n in PAIR_TOKENS if n <= longest] or [longest]:
        yield engines | {
            "prompts.random.count": [PAIR_PROMPTS],
            "prompts.random.input_tokens": [[size]],
            "sampling.max_tokens": [PAIR_OUTPUT],
            "arrival.rate": [pair_rate(asked, config, size)],
            "arrival.process": ["constant"],
        }
    sizes = lengths(longest)[:3]
    yield engines | {
        "prompts.random.count": [LOADED_PROMPTS],
        "prompts.random.input_tokens": [sizes],
        "arrival.rate": [_rate(asked, config, round(fmean(sizes)), OUTPUT_TOKENS, JOINED)],
        "arrival.process": ["poisson"],
    }


def pair_rate(asked: GridRequest, config: DecoderConfig, num_tokens: int) -> float:
    """Return requests per second that leave a pair of engines idle between them on a usual machine."""
    return min(MAX_PAIR_RATE, _rate(asked, config, num_tokens, PAIR_OUTPUT, 1 / IDLE))


def _rate(
    asked: GridRequest, config: DecoderConfig, num_tokens: int, num_output: int, num_at_once: float
) -> float:
    """Return requests per second of which so many are there at once, on a usual machine."""
    dtype = config.dtype if asked.dtype == "auto" else asked.dtype
    usual = USUAL[asked.device]
    book = roofline_book(usual, config, tp=(1,), dtype=dtype, block_size=asked.block_size)
    (costs,) = book.engines.values()
    steps = [step_of([share], windows_of(config)) for share in ((num_tokens, 0), (1, num_tokens))]
    first, later = (costs.step_ns(step) + costs.turn_ns(step) for step in steps)
    return round(1e9 * num_at_once / (first + num_output * later), 3)


def _joining(asked: GridRequest, config: DecoderConfig, longest: int) -> dict[str, list[Any]]:
    """Short prompts that come one by one into steps that decode others."""
    short = lengths(longest)[:2]
    return {
        "engine.max_seqs": [asked.max_seqs],
        "engine.num_blocks": [_num_blocks(asked, config, asked.max_seqs, longest)],
        "prompts.random.count": [max(MIN_PROMPTS, MIXED * asked.max_seqs)],
        "prompts.random.input_tokens": [short],
        "arrival.rate": [_rate(asked, config, max(short), OUTPUT_TOKENS, JOINED)],
        "arrival.process": ["poisson"],
        "prefill.tp": list(asked.tp),
    }


def _drafting(asked: GridRequest, config: DecoderConfig, num: int, longest: int) -> dict[str, list[Any]]:
    """Batches of `num` requests whose steps have drafts: one token that was there before is enough for one.
    Models repeat themselves sooner or later, and the longer the answer, the more."""
    return {
        "engine.max_seqs": [num],
        "engine.num_blocks": [_num_blocks(asked, config, num, longest, DRAFTED_OUTPUT)],
        "engine.max_batch_tokens": [max(asked.max_batch_tokens, num * (1 + asked.drafts))],
        "prompts.random.count": [max(MIN_PROMPTS, 2 * num)],
        "prompts.random.input_tokens": [[n] for n in lengths(longest)],
        "sampling.max_tokens": [DRAFTED_OUTPUT],
        "prefill.tp": list(asked.tp),
        "speculative.method": ["ngram"],
        "speculative.num_tokens": _grown(1, asked.drafts),
        "speculative.prompt_lookup_min": [1],
    }


def _neighbours(asked: GridRequest, config: DecoderConfig, longest: int) -> dict[str, list[Any]]:
    """Two engines that compute at the same time."""
    return {
        "prefill.num_engines": [2],
        "prefill.tp": [min(asked.tp)],
        "engine.max_seqs": [min(4, asked.max_seqs)],
        "engine.num_blocks": [_num_blocks(asked, config, 4, longest)],
        "prompts.random.count": [NEIGHBOUR_PROMPTS],
        "prompts.random.input_tokens": [[n] for n in lengths(longest)[:3]],
    }


def _num_blocks(
    asked: GridRequest, config: DecoderConfig, num: int, longest: int, output: int = OUTPUT_TOKENS
) -> int:
    """Return blocks in which `num` requests of the longest prompts fit."""
    engine = EngineConfig(
        model=asked.model, dtype=asked.dtype, device=asked.device, block_size=asked.block_size
    )
    # A chunk's tokens are kept until it is computed, also where only a window's are needed after it.
    tokens = longest + output + asked.max_batch_tokens
    of_request = sum(-(-tokens // g.spec.block_size) + 1 for g in engine_groups(engine, config))
    return num * of_request + 1


def every_pair(tp: Sequence[int]) -> list[tuple[int, int]]:
    """List the pairs of TP sizes."""
    return list(product(tp, tp))
