"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rayk.serve.answers import Piece, Prompt
from rayk.serve.asks import Call, Front, check_call, open_call, room, sampling_of
from rayk.serve.errors import ApiError
from rayk.serve.logprobs import chat_content
from rayk.serve.protocol import ChatRequest, Message
from rayk.serve.replies import event


async def open_chat(front: Front, body: ChatRequest) -> Call:
    """What a client wants. Raises ApiError, UserError."""
    check_call(front, body, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    text, messages = front.need_text(), [_plain(m) for m in body.messages]
    arguments = _template_arguments(body)
    # Templates are programs: they run beside the loop.
    token_ids = await asyncio.to_thread(lambda: text.chat(messages, **arguments))
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room(front, len(token_ids)))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, front.settings, max_tokens=max_tokens, logprobs=logprobs)
    return open_call(front, body, "chatcmpl", [Prompt(token_ids=tuple(token_ids))], sampling)


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates know messages: the content is text. Raises ApiError."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type not in ("text", "input_text") or part.text is None:
                problem = f"messages: content of type {part.type[:100]!r}; this model reads text only"
                raise ApiError(400, problem, param="messages", code="unsupported_content")
        plain["content"] = "\n".join(part.text or "" for part in message.content)
    plain.setdefault("content", "")
    return plain


def _template_arguments(body: ChatRequest) -> dict[str, Any]:
    """More for the template. Raises ApiError for what would change more than its variables."""
    from transformers import PreTrainedTokenizerBase

    given = body.chat_template_kwargs or {}
    reserved = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    if taken := sorted(reserved & given.keys()):
        problem = f"chat_template_kwargs: {taken[0]} is not for clients to set"
        raise ApiError(400, problem, param="chat_template_kwargs", code="invalid_value")
    return given


class ChatWriter:
    """A call's answer in OpenAI's form."""

    def __init__(self, front: Front, call: Call, body: ChatRequest) -> None:
        self._text = front.text
        self._metrics = front.metrics
        self._call = call
        self._body = body

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are complete."""
        pieces = await self._metrics.gathered(self._call.answer)
        choices = [self._message(own) for own in pieces]
        return {**self._frame("chat.completion", choices), "usage": self._call.answer.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. A choice's first one names the role."""
        options = self._body.stream_options
        includes = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self._metrics.metered(self._call.answer)) as news:
            async for piece in news:
                written = b""
                for choice in self._chunks(piece):
                    frame = self._frame("chat.completion.chunk", [choice])
                    if includes:
                        frame["usage"] = self._call.answer.usage() if continuous else None
                    written += event(frame)
                if written:
                    yield written
        if includes:
            yield event({**self._frame("chat.completion.chunk", []), "usage": self._call.answer.usage()})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        call = self._call
        return {
            "id": call.call_id,
            "object": kind,
            "created": call.created_s,
            "model": call.model_id,
            "choices": choices,
        }

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        body = self._body
        chunks = []
        if piece.is_first:
            chunks.append(self._chunk(piece, {"role": "assistant", "content": ""}))
        chunk = self._chunk(piece, {"content": piece.text} if piece.text else {})
        chunk["finish_reason"] = piece.finish_reason
        chunk["stop_reason"] = piece.stop_reason
        if body.logprobs and piece.logprobs:
            chunk["logprobs"] = {"content": chat_content(self._text, piece.logprobs), "refusal": None}
        if body.return_token_ids:
            chunk["token_ids"] = list(piece.token_ids)
        if piece.text or piece.finish_reason or chunk["logprobs"] or chunk.get("token_ids"):
            chunks.append(chunk)
        return chunks

    def _chunk(self, piece: Piece, delta: dict[str, Any]) -> dict[str, Any]:
        chunk = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**chunk, "token_ids": []} if self._body.return_token_ids else chunk

    def _message(self, pieces: list[Piece]) -> dict[str, Any]:
        content = "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {
            "index": pieces[-1].index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        if self._body.logprobs:
            told = [t for piece in pieces for t in piece.logprobs]
            choice["logprobs"] = {"content": chat_content(self._text, told), "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = [t for piece in pieces for t in piece.token_ids]
        return choice
