"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayk.serve.choices import Piece, Prompt
from rayk.serve.errors import ApiError
from rayk.serve.logprobs import chat_logprobs
from rayk.serve.protocol import ChatRequest, Message
from rayk.serve.request_parsing import (
    Call,
    Front,
    check_call,
    check_text,
    num_tokens_left,
    open_call,
    sampling_of,
)
from rayk.serve.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
)
from rayk.serve.structured import check_form, form_of
from rayk.serve.text import reserved_arguments
from rayk.serve.tool_forms import ToolForm, tool_form
from rayk.serve.tools import (
    CallReader,
    check_tools,
    chosen,
    form_of_calls,
    make_reader,
    plain_calls,
    template_tools,
)
from rayk.serve.writer import Writer


async def open_chat(front: Front, body: ChatRequest) -> Call:
    """Read and check what a client wants. Raises ApiError, UserError."""
    check_call(front, body, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    arguments = _template_arguments(body)
    if body.tools:
        check_tools(body, _template(front), _form_of_tools(front, body))
        arguments = {**arguments, "tools": template_tools(body.tools)}
    form = form_of_calls(body)
    if form is not None:
        await check_form(front, form, "tools")
    else:
        form = await form_of(front, body)
    messages = [_plain(m) for m in body.messages]
    token_ids = await front.chats.run(_read, front, messages, arguments)
    max_tokens = (
        body.max_completion_tokens or body.max_tokens or max(1, num_tokens_left(front, len(token_ids)))
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(
        body, front.settings, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form
    )
    calls = _form_of_tools(front, body)
    marks = () if calls is None else calls.all_marks
    return open_call(front, body, "chatcmpl", [Prompt(token_ids=tuple(token_ids))], sampling, marks)


def _template(front: Front) -> str:
    """Return the chat template's source. Raises CheckpointError, UserError."""
    templates = front.need_text().templates
    return "" if templates is None else templates.template


def _form_of_tools(front: Front, body: ChatRequest) -> ToolForm | None:
    """Return the form of the calls that the model chooses to make; None: it may make none, or none is known.
    Raises CheckpointError, UserError."""
    if chosen(body) != "auto":
        return None
    return tool_form(front.settings.tool_call_parser, _template(front))


def _read(front: Front, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
    """Write a conversation as the model reads it. Raises ApiError, UserError."""
    text = front.need_text()
    written = text.conversation(messages, **arguments)
    check_text(front, written)
    return text.encode(written, add_special_tokens=False)


def _plain(message: Message) -> dict[str, Any]:
    """Make a message as chat templates know it: the content is text. Raises ApiError."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type not in ("text", "input_text") or part.text is None:
                problem = f"messages: content of type {part.type[:100]!r}; this model reads text only"
                raise ApiError(400, problem, param="messages", code="unsupported_content")
        plain["content"] = "\n".join(part.text or "" for part in message.content)
    plain.setdefault("content", "")
    return plain_calls(plain)


def _template_arguments(body: ChatRequest) -> dict[str, Any]:
    """Find more variables for the template. Raises ApiError for what would change anything else."""
    given = body.chat_template_kwargs or {}
    if reserved := reserved_arguments(given):
        problem = f"chat_template_kwargs: {reserved[0]} is not for clients to set"
        raise ApiError(400, problem, param="chat_template_kwargs", code="invalid_value")
    return given


class ChatWriter(Writer[ChatRequest]):
    """Writes chat completions; a choice's first event names the role."""

    KINDS = ("chat.completion", "chat.completion.chunk")

    def __init__(self, front: Front, call: Call, body: ChatRequest) -> None:
        super().__init__(front, call, body)
        self._form = _form_of_tools(front, body)
        self._readers: dict[int, CallReader] = {}
        """Follow a stream's choices, by index."""

    def _choice(self, piece: Piece) -> ChatChoice:
        reader = make_reader(self._body, self._form)
        said, calls = reader.feed(piece.text, is_last=True)
        message: ChatMessage = {"role": "assistant", "content": said, "refusal": None}
        if calls:
            message["content"] = said or None
            message["tool_calls"] = [_without_index(call) for call in calls]
        choice: ChatChoice = {
            "index": piece.index,
            "message": message,
            "logprobs": self._logprobs(piece) if self._body.logprobs else None,
            "finish_reason": reader.reason(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice

    def _chunks(self, piece: Piece) -> list[ChatChunkChoice]:
        chunks = []
        if piece.is_first:
            chunks.append(self._chunk(piece.index, {"role": "assistant", "content": ""}))
        reader = self._readers.setdefault(piece.index, make_reader(self._body, self._form))
        said, calls = reader.feed(piece.text, is_last=piece.finish_reason is not None)
        delta: ChatDelta = {"content": said} if said else {}
        if calls:
            delta["tool_calls"] = calls
        chunk = self._chunk(piece.index, delta)
        chunk["finish_reason"] = reader.reason(piece.finish_reason)
        chunk["stop_reason"] = piece.stop_reason
        if self._body.logprobs and piece.logprobs:
            chunk["logprobs"] = self._logprobs(piece)
        if self._body.return_token_ids:
            chunk["token_ids"] = list(piece.token_ids)
        if delta or piece.finish_reason or chunk["logprobs"] or chunk.get("token_ids"):
            chunks.append(chunk)
        return chunks

    def _chunk(self, index: int, delta: ChatDelta) -> ChatChunkChoice:
        chunk: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            chunk["token_ids"] = []
        return chunk

    def _logprobs(self, piece: Piece) -> ChatLogprobs:
        return {"content": chat_logprobs(self._text, piece.logprobs), "refusal": None}


def _without_index(call: ToolCall) -> ToolCall:
    """Make a whole call of a stream's: there it has a place among others."""
    return {"id": call["id"], "type": call["type"], "function": call["function"]}
