"""A call's answer in OpenAI's form, at once or as it comes; what chats and completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from rayk.serve.choices import Piece, joined
from rayk.serve.protocol import Generation
from rayk.serve.replies import event
from rayk.serve.request_parsing import Call, Front
from rayk.serve.responses import AnswerHead

Body = TypeVar("Body", bound=Generation)


class Writer(ABC, Generic[Body]):
    """Writes what stands around a call's choices; a subclass writes the choices."""

    KINDS: tuple[str, str]
    """OpenAI's names of the answer, and of a part of it in a stream."""

    def __init__(self, front: Front, call: Call, body: Body) -> None:
        self._text = front.text
        self._metrics = front.metrics
        self._call = call
        self._body = body

    async def whole(self) -> dict[str, Any]:
        """Write all choices, once they are complete."""
        pieces: list[list[Piece]] = [[] for _ in self._call.choices.each]
        async with aclosing(self._metrics.metered(self._call.choices)) as news:
            async for piece in news:
                pieces[piece.index].append(piece)
        choices = [self._choice(joined(own)) for own in pieces]
        return {**self._head(self.KINDS[0]), "choices": choices, "usage": self._call.choices.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Write server-sent events, as the engines give tokens."""
        head, usage, options = self._head(self.KINDS[1]), self._call.choices.usage, self._body.stream_options
        includes_usage = options is not None and bool(options.include_usage)
        is_continuous = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self._metrics.metered(self._call.choices)) as news:
            async for piece in news:
                written = b""
                for chunk in self._chunks(piece):
                    frame: dict[str, Any] = {**head, "choices": [chunk]}
                    if includes_usage:
                        frame["usage"] = usage() if is_continuous else None
                    written += event(frame)
                if written:
                    yield written
        if includes_usage:
            yield event({**head, "choices": [], "usage": usage()})

    @abstractmethod
    def _choice(self, piece: Piece) -> Any:
        """Write a whole choice, all of whose pieces are one."""

    @abstractmethod
    def _chunks(self, piece: Piece) -> Sequence[Any]:
        """Write what a stream says of a piece, if anything."""

    def _head(self, kind: str) -> AnswerHead:
        call = self._call
        return {"id": call.call_id, "object": kind, "created": call.created_s, "model": call.model_id}
