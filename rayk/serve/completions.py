"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rayk.serve.answers import Piece, Prompt
from rayk.serve.asks import Call, Front, check_call, check_text, open_call, room, sampling_of
from rayk.serve.errors import ApiError
from rayk.serve.logprobs import Columns
from rayk.serve.protocol import CompletionRequest
from rayk.serve.writer import Writer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
SHORT = 2000
"""Characters that are tokenised at once; longer texts do it in a thread, and others go on meanwhile."""


async def open_completion(front: Front, body: CompletionRequest) -> Call:
    """What a client wants. Raises ApiError."""
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
        left = min(room(front, len(p.token_ids)) for p in prompts)
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, left))
    sampling = sampling_of(body, front.settings, max_tokens=max_tokens, logprobs=body.logprobs)
    prompt_logprobs = body.logprobs if body.echo else None
    return open_call(front, body, "cmpl", prompts, sampling, prompt_logprobs=prompt_logprobs)


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """One or many, as text or ids. Raises ApiError."""
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


class CompletionWriter(Writer):
    """What is echoed comes with a choice's first piece."""

    KINDS = ("text_completion", "text_completion")

    def __init__(self, front: Front, call: Call, body: CompletionRequest) -> None:
        super().__init__(front, call, body.stream_options)
        self._body = body

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunk = self._chunk(piece)
        says = chunk["text"] or piece.finish_reason or chunk["logprobs"] or chunk.get("token_ids")
        return [chunk] if says else []

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        body, prompt = self._body, self._call.prompt_of(piece.index)
        echoed = prompt.text if body.echo else ""
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": (echoed if piece.is_first else "") + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if body.logprobs is not None:
            found = Columns(self._text)
            if body.echo and piece.prompt_logprobs is not None:
                for token, told, start in zip(
                    prompt.token_ids, piece.prompt_logprobs, prompt.starts, strict=True
                ):
                    found.add(token, told, start)
            for told, start in zip(piece.logprobs, piece.starts, strict=True):
                found.add(told.token_id, told, len(echoed) + start)
            choice["logprobs"] = found.values if found.values["tokens"] else None
        return choice

    def _choice(self, pieces: list[Piece]) -> dict[str, Any]:
        parts = [self._chunk(piece) for piece in pieces]
        whole = dict(parts[-1])
        whole["text"] = "".join(p["text"] for p in parts)
        if self._body.return_token_ids:
            whole["token_ids"] = [t for p in parts for t in p["token_ids"]]
        if self._body.logprobs is not None:
            columns = Columns(self._text).values
            for part in parts:
                for name, values in (part["logprobs"] or {}).items():
                    columns[name] += values
            whole["logprobs"] = columns
        return whole
