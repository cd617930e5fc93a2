"""Name the verdicts of cells, and the one that an error stands for."""

from __future__ import annotations

from typing import Literal, get_args

from rayk.types.errors import (
    DeadlineExceeded,
    HandshakeMismatch,
    KVMismatch,
    LayoutVetoed,
    NotFiniteError,
    RaykError,
    TransferError,
    Unsupported,
)

Verdict = Literal[
    "KV_MISMATCH",
    "NOT_FINITE",
    "TRANSFER_ERROR",
    "ENGINE_ERROR",
    "TIMEOUT",
    "DRAFT_MISMATCH",
    "TOKEN_MISMATCH",
    "OUT_OF_PACE",
    "NEAR_TIE",
    "PASS",
    "UNSUPPORTED",
    "PREDICTED",
]
VERDICTS: tuple[str, ...] = get_args(Verdict)
"""Gravest first. ENGINE_ERROR: an engine died or refused work, and no transfer was to blame.
NOT_FINITE: NaN or infinity in logits or KV.
DRAFT_MISMATCH: a drafter proposed other tokens than in the aggregated run.
OUT_OF_PACE: engines that wait in place of computing were late, so the times are none. PREDICTED: simulated;
nothing was computed, moved or compared."""


def verdict_of(error: RaykError) -> str:
    match error:
        case KVMismatch():
            return "KV_MISMATCH"
        case NotFiniteError():
            return "NOT_FINITE"
        case TransferError() | HandshakeMismatch():
            return "TRANSFER_ERROR"
        case DeadlineExceeded():
            return "TIMEOUT"
        case Unsupported() | LayoutVetoed():
            return "UNSUPPORTED"
        case _:
            return "ENGINE_ERROR"
