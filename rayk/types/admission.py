"""Check what a request must satisfy before it may run: parameters in their ranges, a prompt that fits the
model."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

from rayk.types.errors import UserError
from rayk.types.request import MAX_LOGPROBS, MAX_PENALTY, MAX_SEED, Request, SamplingParams
from rayk.types.serving import ModelCard
from rayk.types.structured import StructuredOutputs


def check_request(prompt: Sequence[int], sampling: SamplingParams, model: ModelCard, where: str) -> None:
    """Refuse what no engine would take, before any has it. Raises UserError."""
    if not prompt:
        raise UserError("empty", where=where)
    problem = bad_sampling(sampling)
    if problem is not None:
        raise replace(problem, where=where)
    outside = outside_vocabulary(prompt, model.vocab_size)
    if outside is not None:
        raise replace(outside, where=where)
    if len(prompt) + sampling.max_tokens > model.max_positions:
        raise UserError(
            f"prompt of {len(prompt)} + max_tokens {sampling.max_tokens} exceeds the model's "
            f"{model.max_positions} positions",
            where=where,
        )


def outside_vocabulary(prompt: Sequence[int], vocab_size: int) -> UserError | None:
    if not prompt or (min(prompt) >= 0 and max(prompt) < vocab_size):
        return None
    outside = next(t for t in prompt if not 0 <= t < vocab_size)
    return UserError(f"token id {outside} is outside the vocabulary of {vocab_size}")


def bad_sampling(sampling: SamplingParams) -> UserError | None:
    """Find the first parameter that is out of its range."""
    s = sampling
    logprobs, penalty = f"0 to {MAX_LOGPROBS}", f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}"
    for name, fits, allowed in (
        ("max_tokens", _is_int(s.max_tokens, 1), "at least 1"),
        ("ignore_eos", isinstance(s.ignore_eos, bool), "true or false"),
        ("temperature", _is_number(s.temperature) and s.temperature >= 0, "at least 0"),
        ("top_k", s.top_k is None or _is_int(s.top_k, 1), "at least 1, or none"),
        ("top_p", _is_number(s.top_p) and 0 < s.top_p <= 1, "above 0, at most 1"),
        ("min_p", _is_number(s.min_p) and 0 <= s.min_p <= 1, "0 to 1"),
        ("seed", s.seed is None or _is_int(s.seed, -MAX_SEED - 1, MAX_SEED), "a signed 64-bit integer"),
        ("stop", _are_texts(s.stop), "a tuple of texts, none of them empty"),
        ("stop_token_ids", _are_ids(s.stop_token_ids), "a tuple of token ids"),
        ("logprobs", s.logprobs is None or _is_int(s.logprobs, 0, MAX_LOGPROBS), logprobs),
        (
            "prompt_logprobs",
            s.prompt_logprobs is None or _is_int(s.prompt_logprobs, 0, MAX_LOGPROBS),
            logprobs,
        ),
        ("presence_penalty", _is_penalty(s.presence_penalty), penalty),
        ("frequency_penalty", _is_penalty(s.frequency_penalty), penalty),
        ("repetition_penalty", _is_number(s.repetition_penalty) and s.repetition_penalty > 0, "above 0"),
        (
            "structured_outputs",
            s.structured_outputs is None or _is_structured(s.structured_outputs),
            "a StructuredOutputs of texts and truth values, or none",
        ),
    ):
        if not fits:
            return UserError(f"{name} {getattr(s, name)!r}", mend=f"{name}: {allowed}")
    return None


def no_prompt_logprobs(request: Request) -> UserError | None:
    """Say why an engine with fast prefill cannot compute the request's prompt."""
    if request.sampling.prompt_logprobs is None:
        return None
    return UserError(
        f"request {request.request_id}: prompt_logprobs and fast_prefill exclude each other: layers that "
        "compute the sampled tokens only have no logits of the prompt's others",
        mend="no prompt_logprobs, or engine.fast_prefill: false",
    )


def seeded(request: Request) -> Request:
    """Give the request a seed of its own if it draws tokens and was given none."""
    sampling = request.sampling
    if not sampling.temperature or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))


def _is_int(value: object, least: int, most: int | None = None) -> bool:
    return type(value) is int and least <= value and (most is None or value <= most)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_penalty(value: float) -> bool:
    return _is_number(value) and abs(value) <= MAX_PENALTY


def _are_texts(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, str) and v for v in values)


def _is_structured(wanted: object) -> bool:
    if not isinstance(wanted, StructuredOutputs):
        return False
    texts, flags = (
        (wanted.json, wanted.regex, wanted.grammar),
        (wanted.json_object, wanted.disable_any_whitespace),
    )
    are_texts = all(text is None or isinstance(text, str) for text in texts)
    return are_texts and _are_texts(wanted.choice) and all(isinstance(flag, bool) for flag in flags)


def _are_ids(values: object) -> bool:
    return isinstance(values, tuple) and all(_is_int(v, 0) for v in values)
