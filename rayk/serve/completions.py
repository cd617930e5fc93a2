"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from rayk.serve.answers import Piece, Prompt
from rayk.serve.asks import Call, Front, check_call, open_call, room, sampling_of
from rayk.serve.errors import ApiError
from rayk.serve.logprobs import Columns
from rayk.serve.protocol import CompletionRequest
from rayk.serve.replies import event

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
        starts = text.starts(given, **begins) if wants_starts else ()
        return Prompt(token_ids=tuple(text.encode(given, **begins)), text=given, starts=tuple(starts))
    known = [t for t in given if t < front.completer.model.vocab_size]
    if not body.echo or front.text is None or len(known) < len(given):
        return Prompt(token_ids=tuple(given), starts=(0,) * len(given))
    skip = {"skip_special_tokens": body.skip_special_tokens is not False}
    starts = front.text.starts_of(given, **skip) if wants_starts else ()
    return Prompt(token_ids=tuple(given), text=front.text.decode(given, **skip), starts=tuple(starts))


class CompletionWriter:
    """A call's answer in OpenAI's form."""

    def __init__(self, front: Front, call: Call, body: CompletionRequest) -> None:
        self._text = front.text
        self._metrics = front.metrics
        self._call = call
        self._body = body

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are complete."""
        pieces = await self._metrics.gathered(self._call.answer)
        choices = [self._joined([self._choice(p) for p in own]) for own in pieces]
        return {**self._frame(choices), "usage": self._call.answer.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        options = self._body.stream_options
        includes = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self._metrics.metered(self._call.answer)) as news:
            async for piece in news:
                choice = self._choice(piece)
                if not (
                    choice["text"] or piece.finish_reason or choice["logprobs"] or choice.get("token_ids")
                ):
                    continue
                frame = self._frame([choice])
                if includes:
                    frame["usage"] = self._call.answer.usage() if continuous else None
                yield event(frame)
        if includes:
            yield event({**self._frame([]), "usage": self._call.answer.usage()})

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        call = self._call
        return {
            "id": call.call_id,
            "object": "text_completion",
            "created": call.created_s,
            "model": call.model_id,
            "choices": choices,
        }

    def _choice(self, piece: Piece) -> dict[str, Any]:
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

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """One choice from the chunks of a stream."""
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
