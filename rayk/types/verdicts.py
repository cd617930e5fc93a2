"""Give the verdict that an error stands for, in experiments and in the simulator."""

from __future__ import annotations

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
