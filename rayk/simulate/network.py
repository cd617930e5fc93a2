"""What joins the simulated engines that hand requests over: who is there, and what reads move and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from rayk.costs.book import CostBook
from rayk.costs.table import LinearCost, ReadCosts
from rayk.models.config import DecoderConfig
from rayk.offload.messages import TIER
from rayk.simulate.clock import EventQueue
from rayk.simulate.links import SimLinks
from rayk.simulate.reads import TRANSPORT, ReadPlans
from rayk.specs.experiment import TransferSpec
from rayk.transfer.costs import transfer_costs
from rayk.transfer.lease import ReleaseMessage, RenewMessage
from rayk.types.config import EngineConfig

Message = ReleaseMessage | RenewMessage


class Peer(Protocol):
    """One life of an engine, as others know it. Implemented by simulate.extension."""

    name: str
    epoch: int

    @property
    def config(self) -> EngineConfig: ...

    def take(self, message: Message) -> None:
        """A reader has news of a lease."""
        ...

    def generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Tell how often each block was handed out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A kind of decode engine that reads from a kind of prefill engine."""

    plans: ReadPlans
    costs: ReadCosts
    is_measured: bool
    reads_in_post: bool
    """Whether a reader copies the bytes itself as it posts a read (over CMA), and has them then."""


class SimNetwork:
    """The engines of one deployment."""

    def __init__(
        self,
        world: EventQueue,
        model: DecoderConfig,
        book: CostBook,
        transfer: TransferSpec,
        *,
        lease_s: float,
        release_ns: Callable[[], int] = int,
    ) -> None:
        """`lease_s`: the longest time that a lease lasts. `release_ns` tells how long news of one travels."""
        self.world, self.links = world, SimLinks(world)
        self.lease_ns = int(lease_s * 1e9)
        self.renewed_ns = None if transfer.lease_s is None else int(transfer.lease_s * 1e9)
        """A lease that nobody renews ends after so long; None: it needs no renewal."""
        self._model, self._book, self._transfer = model, book, transfer
        self._release_ns = release_ns
        self._peers: dict[str, Peer] = {}
        self._pairs: dict[tuple[EngineConfig, EngineConfig], Pairing] = {}
        self._readers: dict[EngineConfig, None] = {}
        """Kinds of engines that decode, in the order in which they came."""

    @property
    def is_measured(self) -> bool:
        """Whether the costs of all reads were measured."""
        return all(pair.is_measured for pair in self._pairs.values())

    def join(self, peer: Peer, *, reads: bool) -> None:
        """An engine is there from now on, in place of its earlier life; `reads`: from others."""
        self._peers[peer.name] = peer
        if reads:
            self._readers[peer.config] = None

    def leave(self, peer: Peer) -> None:
        """A life of an engine is over: nobody reads from it, and news does not reach it."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]

    def peer(self, name: str, epoch: int) -> Peer | None:
        """Find a life of an engine; None: it is over, or not there yet."""
        found = self._peers.get(name)
        return found if found is not None and found.epoch == epoch else None

    def epoch(self, name: str) -> int | None:
        """Return the life of an engine that is there, if one is."""
        found = self._peers.get(name)
        return None if found is None else found.epoch

    def pairing(self, prefill: EngineConfig, decode: EngineConfig) -> Pairing:
        """Return what reads between engines of two kinds move and cost."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            found = self._book.transfers.find(prefill, decode)
            pair = self._pairs[prefill, decode] = Pairing(
                plans=ReadPlans(prefill, decode, self._model, self._transfer),
                costs=found or as_coded(decode.device),
                is_measured=found is not None,
                reads_in_post=prefill.device == decode.device == "cpu",
            )
        return pair

    def lent_bytes(self, prefill: EngineConfig, num_tokens: int) -> int:
        """Count the bytes of a request that the rank of an engine has which is read from most."""
        reader = next(iter(self._readers), None)
        return 0 if reader is None else self.pairing(prefill, reader).plans.lent_bytes(num_tokens)

    def stored_bytes(self, engine: EngineConfig, first_row: int, num_tokens: int) -> int:
        """Count the bytes of rows that a host tier reads from the rank of an engine which has most."""
        lent = self.pairing(engine, self._peers[TIER].config).plans.lent_bytes
        return lent(num_tokens) - (lent(first_row) if first_row else 0)

    def tell(self, at_ns: int, name: str, epoch: int, message: Message) -> None:
        """Send news of a lease to a life of an engine, which may be over when it comes."""

        def arrive() -> None:
            if (peer := self.peer(name, epoch)) is not None:
                peer.take(message)

        self.world.at(at_ns + self._release_ns(), arrive)


def as_coded(device: str) -> ReadCosts:
    """Return what the code says of reads where nobody measured any: of a CPU all is posting, else waiting."""
    known = transfer_costs(TRANSPORT, device)
    all_of_it = LinearCost(
        fixed_ns=known.request_ns, descriptor_ns=known.descriptor_ns, byte_ns=known.byte_ns
    )
    if device == "cpu":
        return ReadCosts(post=all_of_it, wait=LinearCost())
    return ReadCosts(post=LinearCost(fixed_ns=known.request_ns), wait=all_of_it)
