"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rayk.serve.choices import Piece, Prompt
from rayk.serve.errors import ApiError
from rayk.serve.logprobs import completion_logprobs
from rayk.serve.protocol import CompletionRequest
from rayk.serve.request_parsing import (
    Call,
    Front,
    check_call,
    check_text,
    num_tokens_left,
    open_call,
    sampling_of,
)
from rayk.serve.responses import CompletionChoice
from rayk.serve.structured import form_of
from rayk.serve.writer import Writer
from rayk.types.request import TokenLogprobs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
SHORT = 2000
"""Longer prompts, in characters or ids, are tokenised in a thread, and others go on meanwhile."""


async def open_completion(front: Front, body: CompletionRequest) -> Call:
    """Read and check what a client wants. Raises ApiError."""
    given = _prompts(body)
    check_call(front, body, len(given))
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 only with echo", param="max_tokens", code="invalid_value")
    if sum(len(g) for g in given) > SHORT:
        prompts = await asyncio.to_thread(_read, front, body, given)
    else:
        prompts = _read(front, body, given)
    max_tokens = body.max_tokens
    if max_tokens is None:
        left = min(num_tokens_left(front, len(p.token_ids)) for p in prompts)
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, left))
    form = await form_of(front, body)
    sampling = sampling_of(
        body,
        front.settings,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        structured_outputs=form,
    )
    return open_call(front, body, "cmpl", prompts, sampling)


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """List the prompts, as text or ids. Raises ApiError."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt: empty", param="prompt", code="invalid_value")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _read(front: Front, body: CompletionRequest, given: Sequence[str | list[int]]) -> list[Prompt]:
    return [_read_one(front, body, g) for g in given]


def _read_one(front: Front, body: CompletionRequest, given: str | list[int]) -> Prompt:
    wants_starts = bool(body.echo) and body.logprobs is not None
    if isinstance(given, str):
        begins = {"add_special_tokens": body.add_special_tokens is not False}
        text = front.need_text()
        check_text(front, given)
        starts = text.starts(given, **begins) if wants_starts else ()
        return Prompt(token_ids=tuple(text.encode(given, **begins)), text=given, starts=tuple(starts))
    known = [t for t in given if t < front.completer.model.vocab_size]
    if not body.echo or front.text is None or len(known) < len(given):
        return Prompt(token_ids=tuple(given), starts=(0,) * len(given))
    skip = {"skip_special_tokens": body.skip_special_tokens is not False}
    starts = front.text.starts_of(given, **skip) if wants_starts else ()
    return Prompt(token_ids=tuple(given), text=front.text.decode(given, **skip), starts=tuple(starts))


class CompletionWriter(Writer[CompletionRequest]):
    """Writes completions; what is echoed comes with a choice's first piece."""

    KINDS = ("text_completion", "text_completion")

    def _choice(self, piece: Piece) -> CompletionChoice:
        body, prompt = self._body, self._call.prompt_of(piece.index)
        echoed = prompt.text if body.echo else ""
        choice: CompletionChoice = {
            "index": piece.index,
            "text": (echoed if piece.is_first else "") + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if body.logprobs is not None:
            tokens: list[tuple[int, TokenLogprobs | None, int]] = []
            if body.echo and piece.prompt_logprobs is not None:
                tokens += zip(prompt.token_ids, piece.prompt_logprobs, prompt.starts, strict=True)
            for known, start in zip(piece.logprobs, piece.starts, strict=True):
                tokens.append((known.token_id, known, len(echoed) + start))
            choice["logprobs"] = completion_logprobs(self._text, tokens)
        return choice

    def _chunks(self, piece: Piece) -> list[CompletionChoice]:
        chunk = self._choice(piece)
        if chunk["logprobs"] is not None and not chunk["logprobs"]["tokens"]:
            chunk["logprobs"] = None
        says = chunk["text"] or piece.finish_reason or chunk["logprobs"] or chunk.get("token_ids")
        return [chunk] if says else []
