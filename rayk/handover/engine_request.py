"""What rank 0 of an engine is asked for, by a front or a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.types.request import Request

Mode = Literal["whole", "prefill", "decode", "reserve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One attempt of a request on one engine."""

    request: Request
    mode: Mode = "whole"
    """whole: prefill and decode here; prefill: ends with a ticket; decode: starts from one; reserve: ends
    with a Reservation of blocks that engine `producer` may push into."""
    output_token_ids: tuple[int, ...] = ()
    """What the client has already: the engine goes on behind it."""
    capture: bool = False
    """Whether the prompt's KV rows are copied out."""
    via_host: bool = False
    """Whether a host tier is to read what is prefilled."""
    reservation: Reservation | None = None
    """Blocks to push a prompt's KV into."""
    ticket: TransferTicket | None = None
    transfer_s: float = 30.0
    reserve_s: float | None = None
    """How long it may wait for blocks; None: as long as a transfer may last."""
    recompute: bool = False
    """Whether a decode engine goes on by itself where the transfer fails."""
    producer: str = ""
    hold_s: float = 30.0
    """How long reserved blocks are held."""
