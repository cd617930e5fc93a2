"""The choices of one call: their tokens become text as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

from rayk.serve.errors import SERVER, ApiError
from rayk.serve.responses import Usage
from rayk.serve.text import Detokenizer, Text
from rayk.types.request import FinishReason, TokenLogprobs
from rayk.types.serving import Completer, Delta, ServerRequest

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
DRAFTED = ("num_drafted", "num_accepted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str = ""
    """`echo` gives it back."""
    starts: tuple[int, ...] = ()
    """Where each token begins in `text`, if log probabilities are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a client is told of one choice at once."""

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
    """Turns one choice's tokens into text."""

    index: int
    server_request: ServerRequest
    text: Text | None
    """None: the model has no tokenizer, so clients get token ids alone."""
    skip_special_tokens: bool = True
    marks: tuple[str, ...] = ()
    """Special tokens that are not skipped."""
    wants_output: bool = True
    """False: the client asked about the prompt alone (max_tokens 0)."""
    num_tokens: int = 0
    num_cached_tokens: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    _detokenizer: Detokenizer | None = None
    _withheld: str = ""
    """Text that may be the beginning of a stop string."""
    _length: int = 0
    """Characters of the text so far, with the withheld ones."""
    _is_first: bool = True

    def __post_init__(self) -> None:
        if self.text is not None:
            self._detokenizer = Detokenizer(
                self.text, skip_special_tokens=self.skip_special_tokens, marks=self.marks
            )

    def take(self, delta: Delta) -> Piece:
        """Turn a delta into a piece. Raises ApiError where the request was aborted."""
        reason = None
        if delta.finish_reason is not None:
            reason = FINISH_REASONS.get(delta.finish_reason)
            if reason is None:
                raise ApiError(503, "the request was aborted", SERVER, code="aborted", retry_after_s=1)
            self.num_cached_tokens = delta.num_cached_tokens
            self.num_drafted, self.num_accepted = delta.num_drafted, delta.num_accepted
        is_first, self._is_first = self._is_first, False
        common: dict[str, Any] = {"prompt_logprobs": delta.prompt_logprobs, "is_first": is_first}
        if not self.wants_output:
            reason = reason and "length"
            return Piece(index=self.index, text="", finish_reason=reason, **common)
        self.num_tokens += len(delta.token_ids)
        starts = self._feed(delta.token_ids)
        return Piece(
            index=self.index,
            text=self._release(delta, is_last=reason is not None),
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
        starts, wants_starts = [], self.server_request.request.sampling.logprobs is not None
        for token in token_ids:
            new = self._detokenizer.feed(token)
            starts.append(self._length + (self.text.start_in(new, token) if wants_starts else 0))
            self._grow(new)
        return starts

    def _grow(self, text: str) -> None:
        self._withheld += text
        self._length += len(text)

    def _release(self, delta: Delta, *, is_last: bool) -> str:
        """Take the text that goes out now: all that begins no stop string."""
        if is_last and self._detokenizer is not None:
            self._grow(self._detokenizer.end())
        text = self._withheld
        if is_last:
            # The engine, which looks at text without special tokens, says which stop string it was.
            at = text.find(delta.stop_reason) if isinstance(delta.stop_reason, str) else -1
            return text if at < 0 else text[:at]
        keep = max((overlap(text, stop) for stop in self.server_request.request.sampling.stop), default=0)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Count the characters at the end of the text that the stop string begins with, unless it ends there."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Choices:
    """Choice i belongs to prompt i // n."""

    completer: Completer
    prompts: Sequence[Prompt]
    each: Sequence[Choice]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Follow all choices. Closing this aborts them all, as does the error of one."""
        if len(self.each) == 1:
            async with aclosing(self._follow(self.each[0])) as single:
                async for piece in single:
                    yield piece
            return
        async with aclosing(_merged([self._follow(c) for c in self.each])) as merged:
            async for piece in merged:
                yield piece

    async def _follow(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        # Completer promises an iterator; all of them are generators, which can be closed.
        deltas = cast(AsyncGenerator[Delta, None], self.completer.generate(choice.server_request))
        async with aclosing(deltas):
            async for delta in deltas:
                piece = choice.take(delta)
                yield piece
                if piece.finish_reason is not None:
                    return
        raise ApiError(503, "the request ended without its last token", SERVER, code="engine_failed")

    def usage(self) -> Usage:
        """Count tokens so far. Of cached ones, each prompt's first choice tells: later ones may find its."""
        num_prompt = sum(len(p.token_ids) for p in self.prompts)
        num_output = sum(c.num_tokens for c in self.each)
        firsts = self.each[:: len(self.each) // len(self.prompts)]
        cached = [c.num_cached_tokens for c in firsts if c.num_cached_tokens is not None]
        usage: Usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
        }
        num_drafted, num_accepted = (sum(getattr(c, name) for c in self.each) for name in DRAFTED)
        if num_drafted:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_drafted - num_accepted,
            }
        return usage


def joined(pieces: Sequence[Piece]) -> Piece:
    """Make one piece of all those of a choice."""
    return replace(
        pieces[-1],
        text="".join(p.text for p in pieces),
        token_ids=tuple(chain.from_iterable(p.token_ids for p in pieces)),
        logprobs=tuple(chain.from_iterable(p.logprobs for p in pieces)),
        starts=tuple(chain.from_iterable(p.starts for p in pieces)),
        prompt_logprobs=next((p.prompt_logprobs for p in pieces if p.prompt_logprobs is not None), None),
        is_first=True,
    )


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pass the pieces of several streams on in order of arrival. The first error ends all."""
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
