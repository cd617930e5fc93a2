"""Requests run in this process, as rows that the checks `logprobs` and `kv_values` take. No Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.oracle.checkpoint import read_marker
from rayk.types.request import Request, TokenLogprobs
from rayk.types.rows import RequestRow
from tests.pd import Pair, make_request

NUM_TOKENS = 24


def prompts_of(path: Path) -> list[list[int]]:
    """5, 37 and 300 tokens."""
    return [list(probe["prompt"]) for probe in read_marker(path)["probes"]]


def telling(index: int, prompt: Sequence[int], **sampling: Any) -> Request:
    """A request whose tokens' log probabilities are all told."""
    return make_request(str(index), prompt, NUM_TOKENS, logprobs=0, prompt_logprobs=0, **sampling)


def handed_over(
    pair: Pair, prompts: Sequence[Sequence[int]], **sampling: Any
) -> tuple[list[RequestRow], list[Any]]:
    """Rows of prompts prefilled at P and decoded at D, and P's captured KV of each."""
    rows, captured = [], []
    for index, prompt in enumerate(prompts):
        request = telling(index, prompt, **sampling)
        first = pair.prefill(request, capture=True)
        rest = pair.decode(request, first)
        captured.append(first.info["captured"])
        rows.append(row_of(index, prompt, [first, rest]))
    return rows, captured


def aggregated(engine: ThreadEngine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[RequestRow]:
    """Rows of prompts that run together on one engine."""
    done = engine.generate([telling(i, p, **sampling) for i, p in enumerate(prompts)])
    return [row_of(i, p, [d]) for (i, p), d in zip(enumerate(prompts), done, strict=True)]


def row_of(index: int, prompt: Sequence[int], parts: Sequence[RequestResult]) -> RequestRow:
    """What the coordinator notes of a finished request."""
    assert all(part.error is None for part in parts), [part.error for part in parts]
    told: list[TokenLogprobs] = [t for part in parts for t in part.logprobs]
    return RequestRow(
        cell_id="c",
        repeat=0,
        request_id=str(index),
        prompt_index=index,
        prompt_token_ids=list(prompt),
        output_token_ids=[token for part in parts for token in part.token_ids],
        output_logprobs=[t.logprob for t in told],
        prompt_logprobs=[None if t is None else t.logprob for t in parts[0].prompt_logprobs],
    )
