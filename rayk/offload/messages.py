"""What engines and whoever coordinates them ask of a host tier, and its answers. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.transfer.ticket import TransferTicket
from rayk.types.rows import TransferRow

TIER = "host"  # the tier's name as an engine of tickets and handshakes


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRequest:
    """Keep the KV that an engine offers. The engine's lease is released, whatever comes of it."""

    ticket: TransferTicket
    """Its `request_id` is the store's own name; rows before its `first_row` are here already, or nothing is
    stored."""
    token_ids: tuple[int, ...]  # those of the ticket: as many as its `num_tokens`
    next_token: int | None = None  # the one after these, if it is known: see `known_tokens`
    cache_salt: str | None = None  # their request's
    keep_as: str | None = None
    """A name under which exactly these tokens stay, the last block's part included, until they are loaded or
    dropped by it. None: whole blocks stay, to be found by their tokens, as long as there is room."""
    deadline_s: float = 30.0

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """The tokens, and the next one. Where rows of draft layers depend on the token after their own, the
        last block is found by that, too, or not at all."""
        return self.token_ids if self.next_token is None else (*self.token_ids, self.next_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAnswer:
    name: str
    num_tokens: int = 0  # that the tier holds now; 0 where it refused or failed
    num_known_tokens: int = 0  # of these, first ones that it held before
    num_bytes: int = 0  # moved for it
    num_bytes_checked: int = 0  # of these and others, proven by digests
    took_ns: int = 0
    reason: str = ""  # why nothing was stored; empty where it was
    transfers: tuple[TransferRow, ...] = ()  # request and cell are left to whoever knows them

    @property
    def ok(self) -> bool:
        """The tokens were stored, or had been before."""
        return not self.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """Offer what is held of a sequence."""

    request_id: str  # of the ticket that is answered
    token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    max_tokens: int = 0  # no more of them
    num_local_tokens: int = 0
    """The engine has the live rows of so many first ones: a whole number of row groups. They are not
    offered."""
    min_tokens: int = 1  # nothing is offered that has fewer rows than this behind those
    drafts: bool = True  # rows of draft layers count, where the tier keeps some: the engine has a drafter
    kept_as: str | None = None
    """What a store kept by name: all of it, in place of what is found by tokens. It is gone from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAnswer:
    """What the tier offers; its blocks stay until the ticket's lease is released, or ends."""

    request_id: str
    ticket: TransferTicket | None = None  # None: nothing is offered
    num_disk_tokens: int = 0  # tokens up to the end of the last block that came from disk; 0: none did
    disk_bytes: int = 0  # read from disk for it
    took_ns: int = 0
    reason: str = ""  # why nothing is offered, where it is no mere miss
    lost: tuple[str, ...] = field(default=())
    """Pages on disk that turned out damaged or gone on the way, in words."""

    @property
    def num_tokens(self) -> int:
        """First tokens whose KV is offered; 0: nothing is."""
        return 0 if self.ticket is None else self.ticket.num_tokens
