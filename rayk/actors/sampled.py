"""Sampling as the coordinator sees it: each request's seed, and what its row tells of its tokens."""

from __future__ import annotations

from dataclasses import replace

from rayk.engine.leader import RequestEvent
from rayk.engine.noise import derived_seed
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow


def with_seed(sampling: SamplingParams, prompt_index: int, repeat: int) -> SamplingParams:
    """The parameters of one request of a cell.

    A seed that nobody gave depends on the prompt's index and the repeat alone, so that every cell and every
    run of the spec draws the same tokens.
    """
    if not sampling.temperature or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=derived_seed(prompt_index, repeat))


def note_sampling(row: RequestRow, event: RequestEvent) -> None:
    """Add an event's log probabilities and stop reason to its request's row.

    The best tokens beside each are told only if the request asked for any.
    """
    if event.logprobs is not None:
        row.output_logprobs = [*(row.output_logprobs or ()), *(t.logprob for t in event.logprobs)]
        if any(t.top for t in event.logprobs):
            row.output_top_logprobs = [
                *(row.output_top_logprobs or ()),
                *(list(t.top) for t in event.logprobs),
            ]
    if event.prompt_logprobs is not None:
        row.prompt_logprobs = [None if t is None else t.logprob for t in event.prompt_logprobs]
        if any(t is not None and t.top for t in event.prompt_logprobs):
            row.prompt_top_logprobs = [None if t is None else list(t.top) for t in event.prompt_logprobs]
    if event.stop_reason is not None:
        row.stop_reason = str(event.stop_reason)
