"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayk.serve.answers import Piece, Prompt
from rayk.serve.asks import Call, Front, check_call, check_text, open_call, room, sampling_of
from rayk.serve.errors import ApiError
from rayk.serve.logprobs import chat_content
from rayk.serve.protocol import ChatRequest, Message
from rayk.serve.text import reserved_arguments
from rayk.serve.writer import Writer


async def open_chat(front: Front, body: ChatRequest) -> Call:
    """What a client wants. Raises ApiError, UserError."""
    check_call(front, body, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    messages, arguments = [_plain(m) for m in body.messages], _template_arguments(body)
    token_ids = await front.chats.run(_read, front, messages, arguments)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room(front, len(token_ids)))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, front.settings, max_tokens=max_tokens, logprobs=logprobs)
    return open_call(front, body, "chatcmpl", [Prompt(token_ids=tuple(token_ids))], sampling)


def _read(front: Front, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation. Raises ApiError, UserError."""
    text = front.need_text()
    told = text.conversation(messages, **arguments)
    check_text(front, told)
    return text.encode(told, add_special_tokens=False)


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
    given = body.chat_template_kwargs or {}
    if taken := reserved_arguments(given):
        problem = f"chat_template_kwargs: {taken[0]} is not for clients to set"
        raise ApiError(400, problem, param="chat_template_kwargs", code="invalid_value")
    return given


class ChatWriter(Writer):
    """A choice's first event names the role."""

    KINDS = ("chat.completion", "chat.completion.chunk")

    def __init__(self, front: Front, call: Call, body: ChatRequest) -> None:
        super().__init__(front, call, body.stream_options)
        self._body = body

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

    def _choice(self, pieces: list[Piece]) -> dict[str, Any]:
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
