"""A request as a coordinator sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayk.sched.recovery import Recovery
from rayk.types.errors import RaykError
from tests.transfer.simulator.consumer import Consumer
from tests.transfer.simulator.producer import Producer
from tests.transfer.simulator.requests import Job

GRAVEST = ("KV_MISMATCH", "TRANSFER_ERROR", "ENGINE_ERROR", "TIMEOUT", "PASS")
"""Verdicts, the gravest first; see specs.experiment."""


class Stream:
    """Output tokens of one request, each delivered exactly once and in order, whoever computed them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """Delivered so far."""
        self.attempt = 0

    def begin_again(self) -> int:
        """Another attempt takes over: what earlier ones still send is not delivered. Its number."""
        self.attempt += 1
        return self.attempt

    def take(self, attempt: int, first_index: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens of an attempt, the first of which is output token `first_index`; those to deliver now."""
        if attempt != self.attempt:
            return ()
        known = len(self.token_ids)
        assert first_index <= known, f"output tokens {known} to {first_index - 1} never came"
        fresh = tuple(token_ids[known - first_index :])
        self.token_ids += fresh
        return fresh


@dataclass(eq=False, slots=True)
class RequestState:
    """A request as the coordinator sees it."""

    index: int
    num_tokens: int
    recovery: Recovery
    stream: Stream = field(default_factory=Stream)
    job: Job | None = None
    """The attempt that is followed."""
    producer: Producer | None = None
    consumer: Consumer | None = None
    stage: str = "waiting"
    """waiting, reserving, prefilling, decoding, computing (the decode engine needs nobody) or over."""
    step: int = 0
    """Counts stages: a deadline is of one of them."""
    ended: int = 0
    """How often it ended."""
    ended_at: int = 0
    error: RaykError | None = None
    is_recovered: bool = False
    is_aborted: bool = False
    num_valid: int | None = None
