"""What a user asks for and what one request leaves behind."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Temperature 0 is greedy (the lowest id wins a tie)."""

    max_tokens: int = 16
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@enum.unique
class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORT = enum.auto()
    ERROR = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to complete. Filled by whoever submits it; never changed afterwards."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
