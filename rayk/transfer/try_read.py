"""One small read from a producer rank, waited for: so that the network between two ranks is set up."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rayk.kv.block_pool import NULL_BLOCK
from rayk.transfer.agent import Handle, TransferAgent, TransferState
from rayk.transfer.link import Landing
from rayk.types.errors import TransferError

POLL_S = 0.0003


def try_read(
    agent: TransferAgent, landing: Landing, handle: Handle, until: float, idle: Callable[[], None]
) -> str | None:
    """Read one generation by `until` (time.monotonic); what went wrong, if anything did. `idle` is called
    while it is waited for. Raises TransferError."""
    slots = landing.take(1)
    assert slots is not None, "nothing else is in flight"
    null_block = np.array([NULL_BLOCK], dtype=np.int32)
    try:
        transfer = agent.read(handle, np.array(slots, dtype=np.int32), null_block)
    except TransferError:
        landing.give_back(slots)
        raise
    while (state := agent.poll(transfer)) is TransferState.PENDING:
        idle()
        if time.monotonic() > until:
            return "it does not answer"  # the slot stays taken: the bytes may still come
        time.sleep(POLL_S)  # the producer may want this core to answer
    agent.release(transfer)
    landing.give_back(slots)
    return None if state is TransferState.DONE else "the read failed"
