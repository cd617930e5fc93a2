"""The choices of one call: their tokens as they come, turned into text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from rayk.serve.errors import SERVER, ApiError
from rayk.serve.text import Detokenizer, Text
from rayk.types.request import FinishReason, TokenLogprobs
from rayk.types.serving import Ask, Completer, Delta

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One of a call's prompts."""

    token_ids: tuple[int, ...]
    text: str = ""
    """What `echo` gives back."""
    starts: tuple[int, ...] = ()
    """Where each token begins in it, if its log probabilities are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """News of one choice, for its client."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    starts: tuple[int, ...] = ()
    """Where each token begins in the choice's output, in characters."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    is_first: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(eq=False)
class Choice:
    """One choice's way from tokens to text."""

    index: int
    ask: Ask
    text: Text | None
    """None: there is no tokenizer, and so no text."""
    skip_special_tokens: bool = True
    wants_output: bool = True
    """False: the prompt is all that was asked about (max_tokens 0)."""
    num_tokens: int = 0
    num_cached_tokens: int | None = None
    _detokenizer: Detokenizer | None = None
    _held: str = ""
    """Text that may be the beginning of a stop string."""
    _length: int = 0
    """Of the text so far, in characters, that which is held included."""
    _is_first: bool = True

    def __post_init__(self) -> None:
        if self.text is not None:
            self._detokenizer = Detokenizer(self.text, skip_special_tokens=self.skip_special_tokens)

    def take(self, delta: Delta) -> Piece:
        """What a delta means to the client. Raises ApiError where the request was aborted."""
        reason = None
        if delta.finish_reason is not None:
            reason = FINISH_REASONS.get(delta.finish_reason)
            if reason is None:
                raise ApiError(503, "the request was aborted", SERVER, code="aborted", retry_after_s=1)
            self.num_cached_tokens = delta.num_cached_tokens
        is_first, self._is_first = self._is_first, False
        common: dict[str, Any] = {"prompt_logprobs": delta.prompt_logprobs, "is_first": is_first}
        if not self.wants_output:
            reason = reason and "length"
            return Piece(index=self.index, text="", finish_reason=reason, **common)
        self.num_tokens += len(delta.token_ids)
        starts = self._feed(delta.token_ids)
        return Piece(
            index=self.index,
            text=self._told(delta, is_last=reason is not None),
            token_ids=delta.token_ids,
            logprobs=delta.logprobs or (),
            starts=tuple(starts),
            finish_reason=reason,
            stop_reason=delta.stop_reason,
            **common,
        )

    def _feed(self, token_ids: Sequence[int]) -> list[int]:
        if self.text is None or self._detokenizer is None:
            return [0] * len(token_ids)
        starts, wants_starts = [], self.ask.request.sampling.logprobs is not None
        for token in token_ids:
            told = self._detokenizer.feed(token)
            starts.append(self._length + (self.text.start_in(told, token) if wants_starts else 0))
            self._grow(told)
        return starts

    def _grow(self, text: str) -> None:
        self._held += text
        self._length += len(text)

    def _told(self, delta: Delta, *, is_last: bool) -> str:
        """Text that goes out now."""
        if is_last and self._detokenizer is not None:
            self._grow(self._detokenizer.end())
        held = self._held
        if is_last:
            # The engine, which looks at text without special tokens, says which stop string it was.
            at = held.find(delta.stop_reason) if isinstance(delta.stop_reason, str) else -1
            return held if at < 0 else held[:at]
        keep = max((_overlap(held, stop) for stop in self.ask.request.sampling.stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that the stop string begins with, not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Answer:
    """All choices of one call; choice i belongs to prompt i // n."""

    completer: Completer
    prompts: Sequence[Prompt]
    choices: Sequence[Choice]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """News of all choices as they come. Closing it aborts them all, as does the error of one."""
        if len(self.choices) == 1:
            async with aclosing(self._follow(self.choices[0])) as single:
                async for piece in single:
                    yield piece
            return
        async with aclosing(_merged([self._follow(c) for c in self.choices])) as merged:
            async for piece in merged:
                yield piece

    async def _follow(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        """One choice to its end."""
        # A completer's iterators can be closed; it says so in words only.
        deltas = cast(AsyncGenerator[Delta, None], self.completer.generate(choice.ask))
        async with aclosing(deltas):
            async for delta in deltas:
                piece = choice.take(delta)
                yield piece
                if piece.finish_reason is not None:
                    return
        raise ApiError(503, "the request ended without its last token", SERVER, code="engine_failed")

    def usage(self) -> dict[str, Any]:
        """So far. Cached tokens are those of each prompt's first choice: later ones may find its own."""
        num_prompt = sum(len(p.token_ids) for p in self.prompts)
        num_output = sum(c.num_tokens for c in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        firsts = self.choices[:: len(self.choices) // len(self.prompts)]
        cached = [c.num_cached_tokens for c in firsts if c.num_cached_tokens is not None]
        usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)} if cached else None
        return usage


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The news of several streams in order of arrival. The first error ends all."""
    news: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    news.put_nowait(piece)
            news.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - whoever reads the news raises it
            news.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        num_left = len(streams)
        while num_left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
