"""A call's answer in OpenAI's form, at once or as it comes; what chats and completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rayk.serve.answers import Piece
from rayk.serve.asks import Call, Front
from rayk.serve.protocol import StreamOptions
from rayk.serve.replies import event


class Writer(ABC):
    """Writes frames: what is said of the call, around its choices."""

    KINDS: tuple[str, str]
    """OpenAI's names of the answer, and of a part of it in a stream."""

    def __init__(self, front: Front, call: Call, options: StreamOptions | None) -> None:
        self._text = front.text
        self._metrics = front.metrics
        self._call = call
        self._includes_usage = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are complete."""
        pieces = await self._metrics.gathered(self._call.answer)
        frame = self._frame(self.KINDS[0], [self._choice(own) for own in pieces])
        return {**frame, "usage": self._call.answer.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        kind = self.KINDS[1]
        async with aclosing(self._metrics.metered(self._call.answer)) as news:
            async for piece in news:
                written = b""
                for chunk in self._chunks(piece):
                    frame = self._frame(kind, [chunk])
                    if self._includes_usage:
                        frame["usage"] = self._call.answer.usage() if self._is_continuous else None
                    written += event(frame)
                if written:
                    yield written
        if self._includes_usage:
            yield event({**self._frame(kind, []), "usage": self._call.answer.usage()})

    @abstractmethod
    def _choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """A whole choice, from all its pieces."""

    @abstractmethod
    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a stream says of a piece, if anything."""

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        call = self._call
        return {
            "id": call.call_id,
            "object": kind,
            "created": call.created_s,
            "model": call.model_id,
            "choices": choices,
        }
