"""What rank 0 asks all ranks of its engine to do between steps, and what they tell it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.parallel.shard import TokenShard
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.finite import NotFinitePlace
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.push import Chunk
from rayk.transfer.push_reservations import Reserved
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.verify import Digests, Rows

BlockTables = tuple[tuple[int, ...], ...]
"""Manager's block ids per KV group."""
CapturedRows = dict[int, Rows]
"""Layer -> its live rows on one rank, of all the layer's caches."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One rank's answer to Capture."""

    rows: CapturedRows
    tokens: dict[int, TokenShard]
    """Layer with a row per token -> the tokens that the rank's steps compute slots for."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Each rank's CacheDescription."""


@dataclass(frozen=True, slots=True)
class DescribeOutbox:
    """The CacheDescription of each rank's outbox; None where there is none."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Handshake between two engines: check every field, then wire up. Each of them is told: a producer takes
    releases and renewals from no others. A consumer rank answers where it is pushed to (see
    TransferRank.landing)."""

    producers: tuple[CacheDescription, ...]
    consumers: tuple[CacheDescription, ...]
    landings: tuple[CacheDescription, ...] = ()
    """What the consumer's ranks answered, for the producer that is to push."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Read a few bytes from every rank of a connected producer engine, so that later reads need not wait
    for the network to be set up. Each rank answers whether all is here: else ask again. Engines decode
    meanwhile."""

    engine: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MakeTicket:
    """Digest a prefilled request and open its lease."""

    request_id: str
    lease_id: str
    num_tokens: int
    block_tables: BlockTables
    reservation_id: str | None = None
    """Where it was pushed to."""
    attempt: int = 0
    outbox_tables: BlockTables | None = None
    """Blocks of the outbox to copy them to, where a host tier is to read them; see MakeStore."""
    draft_row: int = 0
    """Rows of draft layers before it lack, as a TransferTicket says."""


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read a request's KV from its producer, or wait for it to be pushed."""

    ticket: TransferTicket
    block_tables: BlockTables
    deadline_s: float
    first_row: int = 0
    """Rows before it are here: see the next."""
    cached_blocks: frozenset[int] = frozenset()
    """Blocks of the tables that hold these rows, maybe for others, too."""


@dataclass(frozen=True, slots=True)
class HoldTicket:
    """A ticket waits for blocks here: renew its lease until its read starts."""

    ticket: TransferTicket


@dataclass(frozen=True, slots=True)
class LetGo:
    """A ticket that waited will not be read: release its lease."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy a request's live rows out of the bound views; the answer is a Captured."""

    request_id: str
    num_tokens: int
    block_tables: BlockTables


@dataclass(frozen=True, slots=True)
class Inspect:
    """What was computed for a request is not finite: where is it so first? The answer is an Inspected."""

    request_id: str
    lease_id: str
    """The lease that holds its blocks until then, and ends with it."""
    num_tokens: int
    block_tables: BlockTables


@dataclass(frozen=True, slots=True)
class Inspected:
    """One rank's answer to Inspect."""

    kv: NotFinitePlace | None
    """The first one of the request's live rows."""
    weights: tuple[str, ...] | None
    """Weights of the rank that are not finite; None: none was found, and not all were looked at."""


@dataclass(frozen=True, slots=True)
class Diagnose:
    """After a mismatch: compare with the producer's rows; the answer is a list of KVMismatch, one per
    wrong cache of a layer."""

    request_id: str
    fetched: tuple[CapturedRows, ...]
    """Rows by producer rank."""


@dataclass(frozen=True, slots=True)
class Locate:
    """Where these rows of a layer's field and unit lie in the engine's cache; the answer is a list of
    transfer.locate.FoundRows."""

    layer: int
    field: str
    unit: int
    rows: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReleaseMismatch:
    """A mismatch was looked into: tell the producer that its bytes are needed no longer."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Prove:
    """A transfer failed and nothing of it is in flight any more: what of it arrived all the same? The answer
    is a list of LayerProof."""

    ticket: TransferTicket
    block_tables: BlockTables
    first_row: int = 0
    """It is the StartRead's."""


@dataclass(frozen=True, slots=True)
class EndReads:
    """The producer engine is gone: reads from this life of it fail now, not at their deadline."""

    engine: str
    epoch: int


@dataclass(frozen=True, slots=True)
class MakeStore:
    """Open a lease on these blocks and digest their rows from `first_row` on, beside the steps that follow: a
    host tier is to read them. Each rank says when it has, or that it cannot (RankNews.stored, .unstored)."""

    name: str
    lease_id: str
    num_tokens: int
    block_tables: BlockTables
    first_row: int = 0
    outbox_tables: BlockTables | None = None
    """Blocks of the outbox to copy them to: the tier reads these, the lease and the generations are theirs.
    Where they are null, the tier is not to read."""


@dataclass(frozen=True, slots=True)
class EndLease:
    """End a lease that nobody outside the engine knows of."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class TicketPart:
    """One rank's answer to MakeTicket, or to MakeStore."""

    digests: Digests
    generations: tuple[tuple[int, ...], ...]
    lease_ns: int | None = None
    """How long the lease lasts after a renewal; None: it needs none."""
    digest_ns: int = 0
    """How long the digests took."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """A producer engine may write into these blocks, or where it is converted on its way there. Each rank
    says when it has room for that (RankNews.reserved)."""

    request_id: str
    reservation_id: str
    producer: str
    block_tables: BlockTables
    num_tokens: int
    cached_blocks: frozenset[int] = frozenset()
    """Blocks of the tables that are not written."""


@dataclass(frozen=True, slots=True)
class EndReservation:
    """Nobody will claim these blocks: have the producer's ranks stop writing."""

    reservation_id: str


@dataclass(frozen=True, slots=True)
class PushStep:
    """The next step computes these chunks of requests that are pushed."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class EndPush:
    """A request that is pushed is over at its producer: write no more of it."""

    reservation_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankNews:
    """What a rank tells the leader after a poll; None is told instead when there is nothing."""

    outcomes: tuple[TransferOutcome, ...]
    drained: tuple[str, ...]
    released: tuple[str, ...]
    expired: tuple[str, ...]
    cleared: tuple[str, ...] = ()
    """Reservations into whose blocks nobody writes any more."""
    reserved: tuple[Reserved, ...] = ()
    """Those into which somebody may write from now on."""
    stored: tuple[tuple[str, TicketPart], ...] = ()
    """Stores by name that were digested."""
    unstored: tuple[tuple[str, str], ...] = ()
    """Stores by name that could not be, and why."""
