"""Send one request over HTTP, stamp its server-sent events as they are read, and count its tokens. The server
says how many tokens there are, by token ids of each chunk or usage at the end: a chunk may carry several, or
none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rayk.bench.load import Load
from rayk.bench.prompts import Planned
from rayk.types.reaching import why_unreached

# answered; turned away (429); past its deadline; any other error; cancelled here
OK, REFUSED, TIMEOUT, FAILED, ABORTED = "ok", "refused", "timeout", "failed", "aborted"
TOO_MANY_REQUESTS = 429
_SHOWN = 300  # characters of a server's error that are kept


@dataclass(kw_only=True, slots=True)
class Observed:
    """Records what happened to one request. Times are time.monotonic_ns; filled by `send` as news come."""

    planned: Planned
    due_ns: int = 0  # when it was to be sent; the time of sending in a closed load
    sent_ns: int = 0  # when its sending began
    ended_ns: int = 0  # when its answer, or its failure, was complete
    status: int | None = None
    outcome: str = ABORTED
    error: str | None = None
    chunk_ns: list[int] = field(default_factory=list)  # when each chunk that carries tokens was read
    chunk_tokens: list[int] = field(default_factory=list)  # tokens of each chunk, where the server says so
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    # prompt_tokens, completion_tokens, cached_tokens, accepted_tokens, rejected_tokens, as far as told
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int | None:
        """Count output tokens as the server does; None where it does not say."""
        if self.chunk_tokens and len(self.chunk_tokens) == len(self.chunk_ns):
            return sum(self.chunk_tokens)
        return self.usage.get("completion_tokens")


class EventLines:
    """Parses server-sent events from bytes cut anywhere (WHATWG HTML, 9.2.6)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is complete by now."""
        text = self._rest + received
        # A CR at the end may be the first half of a CR LF.
        incomplete = b"\r" if text.endswith(b"\r") else b""
        lines = text[: len(text) - len(incomplete)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + incomplete
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


def request_body(load: Load, planned: Planned, model: str) -> bytes:
    """Write the request as JSON; a field of the load that is None takes one away."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": planned.max_tokens,
        "temperature": load.temperature,
        "seed": planned.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": load.ignore_eos,
        "return_token_ids": True,
    }
    if load.use_chat:
        body["messages"] = [{"role": "user", "content": planned.prompt}]
    else:
        body["prompt"] = planned.prompt
    fields = {name: value for name, value in (body | dict(load.body)).items() if value is not None}
    return json.dumps(fields).encode()


async def send(
    session: aiohttp.ClientSession, url: str, body: bytes, seen: Observed, timeout_s: float
) -> None:
    """Send a request and fill in what comes of it. Raises only asyncio.CancelledError."""
    seen.sent_ns = time.monotonic_ns()
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(session, url, body, seen)
    except TimeoutError:
        seen.outcome, seen.error = TIMEOUT, f"no end within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        what = "no server answers" if seen.status is None else "the stream broke"
        seen.outcome, seen.error = FAILED, f"{what}: {why_unreached(error)}"[:_SHOWN]
    finally:
        seen.ended_ns = time.monotonic_ns()


async def _exchange(session: aiohttp.ClientSession, url: str, body: bytes, seen: Observed) -> None:
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        seen.status = response.status
        if response.status != 200:
            text = (await response.read()).decode(errors="replace")
            seen.outcome = REFUSED if response.status == TOO_MANY_REQUESTS else FAILED
            seen.error = f"HTTP {response.status}: {_message(text)}"[:_SHOWN]
            return
        lines = EventLines()
        async for received in response.content.iter_any():
            now = time.monotonic_ns()
            for data in lines.feed(received):
                if data == b"[DONE]":
                    _conclude(seen)
                    continue
                if not take_event(seen, data, now):
                    return
        if seen.outcome == ABORTED:
            seen.outcome, seen.error = FAILED, "the stream ended before the answer did"


def _conclude(seen: Observed) -> None:
    if seen.finish_reason is None:
        seen.outcome, seen.error = FAILED, "the stream ended without a finish reason"
    elif not seen.chunk_ns:
        seen.outcome, seen.error = FAILED, "the answer has no tokens"
    else:
        seen.outcome = OK


def take_event(seen: Observed, data: bytes, now_ns: int) -> bool:
    """Note what an event says; false where it is an error, which ends the request."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict) or event.get("error"):
        told = _message(data.decode(errors="replace"))
        seen.outcome, seen.error = FAILED, f"in the stream: {told}"[:_SHOWN]
        return False
    try:
        _take(seen, event, now_ns)
    except (TypeError, ValueError, AttributeError, OverflowError):
        told = data.decode(errors="replace")
        seen.outcome, seen.error = FAILED, f"not an event of OpenAI's: {told}"[:_SHOWN]
        return False
    return True


def _take(seen: Observed, event: dict[str, Any], now_ns: int) -> None:
    """Note a well-formed event. Raises TypeError, ValueError, AttributeError or OverflowError for others."""
    if event.get("usage"):
        seen.usage = _counts(event["usage"])
    for choice in event.get("choices") or ():
        token_ids = choice.get("token_ids")
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if token_ids or (token_ids is None and text):
            seen.chunk_ns.append(now_ns)
            if token_ids:
                seen.chunk_tokens.append(len(token_ids))
                seen.output_token_ids += map(int, token_ids)
        reason = choice.get("finish_reason")
        seen.finish_reason = str(reason) if reason else seen.finish_reason


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Take the token counts that usage tells."""
    counts = {name: value for name, value in usage.items() if value is not None}
    names = ("prompt_tokens", "completion_tokens")
    found: dict[str, Any] = {name: int(counts[name]) for name in names if name in counts}
    if "prompt_tokens_details" in counts:
        cached = counts["prompt_tokens_details"].get("cached_tokens")
        found["cached_tokens"] = None if cached is None else int(cached)
    details = counts.get("completion_tokens_details") or {}
    for name in ("accepted", "rejected"):
        # Servers without drafts tell 0 of both, or nothing.
        number = details.get(f"{name}_prediction_tokens")
        if number is not None:
            found[f"{name}_tokens"] = int(number)
    return found


def _message(text: str) -> str:
    """Find the message of an OpenAI error body, or return the text."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text.strip()
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
