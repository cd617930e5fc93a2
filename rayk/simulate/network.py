"""What joins the simulated engines of a cell that hand requests over: who is there, and what reads cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from rayk.costs.book import CostBook
from rayk.costs.table import LinearCost, ReadCosts
from rayk.models.config import DecoderConfig
from rayk.simulate.clock import EventQueue
from rayk.simulate.links import SimLinks
from rayk.simulate.reads import TRANSPORT, ReadPlans
from rayk.specs.cells import Cell
from rayk.transfer.costs import transfer_costs
from rayk.transfer.lease import ReleaseMessage, RenewMessage

Message = ReleaseMessage | RenewMessage


class Peer(Protocol):
    """One life of an engine, as others know it. Implemented by simulate.extension."""

    name: str
    epoch: int

    def take(self, message: Message) -> None:
        """A reader has news of a lease."""
        ...

    def generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Tell how often each block was handed out."""
        ...


class SimNetwork:
    """The engines of one cell."""

    def __init__(
        self,
        world: EventQueue,
        cell: Cell,
        model: DecoderConfig,
        book: CostBook,
        release_ns: Callable[[], int] = int,
    ) -> None:
        """`release_ns` tells how long news of a lease travels."""
        assert cell.decode is not None, "nobody hands over"
        self.world, self.cell = world, cell
        self.plans = ReadPlans(cell.prefill, cell.decode, model, cell.spec.transfer)
        self.links = SimLinks(world)
        found = book.transfers.find(cell.prefill, cell.decode)
        self.is_measured = found is not None
        self.reads = found or as_coded(cell.decode.device)
        self.reads_in_post = {cell.prefill.device, cell.decode.device} == {"cpu"}
        """Whether a reader copies the bytes itself as it posts a read (over CMA), and has them then."""
        self._release_ns = release_ns
        self._peers: dict[str, Peer] = {}

    def join(self, peer: Peer) -> None:
        """An engine is there from now on, in place of its earlier life."""
        self._peers[peer.name] = peer

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
