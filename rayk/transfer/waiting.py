"""A ticket at a consumer rank before its blocks are there: its lease is renewed, and given up if it must.

Also how renewals and releases are sent, from here and from where the data arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayk.transfer.agent import TransferAgent
from rayk.transfer.lease import ReleaseMessage, Renewals, RenewMessage
from rayk.transfer.link import ProducerLink
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import TransferError


@dataclass(eq=False)
class WaitingTicket:
    ticket: TransferTicket
    link: ProducerLink
    agent: TransferAgent
    renewals: Renewals = field(init=False)

    def __post_init__(self) -> None:
        self.renewals = Renewals(self.ticket.lease_ns)

    def step(self, now_ns: int) -> None:
        """Renew the lease if it is time."""
        if self.renewals.is_due(now_ns):
            ranks = tuple(self.link.num_releases)
            send_renewals(self.agent, self.link, self.ticket.lease_id, ranks, self.renewals.num_sent)

    def release(self) -> None:
        """Nobody will read it."""
        send_releases(self.agent, self.link, self.ticket.lease_id, tuple(self.link.num_releases))


def send_releases(agent: TransferAgent, link: ProducerLink, lease_id: str, ranks: Sequence[int]) -> None:
    """Tell these producer ranks that this consumer rank needs a lease no longer."""
    for rank in ranks:
        message = ReleaseMessage(lease_id, agent.name, link.num_releases[rank])
        _notify(agent, link, rank, message.encode())


def send_renewals(
    agent: TransferAgent, link: ProducerLink, lease_id: str, ranks: Sequence[int], number: int
) -> None:
    """Tell these producer ranks that this consumer rank still needs a lease."""
    for rank in ranks:
        _notify(agent, link, rank, RenewMessage(lease_id, agent.name, number).encode())


def _notify(agent: TransferAgent, link: ProducerLink, rank: int, message: bytes) -> None:
    try:
        agent.notify(link.producers[rank].agent_name, message)
    except TransferError:
        # The producer rank is gone, and its lease with it.
        link.num_unsent[rank] = link.num_unsent.get(rank, 0) + 1
