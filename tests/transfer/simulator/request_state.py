"""A request as a coordinator sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.sched.recovery import Recovery, Stream
from rayk.types.errors import RaykError
from tests.transfer.simulator.consumer import Consumer
from tests.transfer.simulator.producer import Producer
from tests.transfer.simulator.requests import Job

GRAVEST = ("KV_MISMATCH", "TRANSFER_ERROR", "ENGINE_ERROR", "TIMEOUT", "PASS")
"""Verdicts, the gravest first; see specs.experiment."""


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
