"""The links of one consumer rank to producer engines, by name, and the peers that links share.

An engine may have several: one for each turn of its replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rayk.transfer.agent import TransferAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.link import ProducerLink
from rayk.transfer.wire import WireCache


class Links:
    """A peer is forgotten with the last link to it."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._links: dict[str, ProducerLink] = {}
        self._num_users: Counter[str] = Counter()
        """Agent name of a producer rank -> links to it."""

    def __getitem__(self, name: str) -> ProducerLink:
        return self._links[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._links))

    def get(self, name: str) -> ProducerLink | None:
        """Return None when there is no link of this name."""
        return self._links.get(name)

    def values(self) -> list[ProducerLink]:
        return list(self._links.values())

    def of(self, engine: str, epoch: int) -> list[ProducerLink]:
        return [link for link in self._links.values() if (link.engine, link.epoch) == (engine, epoch)]

    def replaced_by(self, name: str, producer: CacheDescription) -> list[str]:
        """List names of links that a new one to this engine ends: the one of its name, and all to other
        lives."""
        return [
            known
            for known, link in self._links.items()
            if known == name or (link.engine == producer.engine and link.epoch != producer.epoch)
        ]

    def add(self, name: str, link: ProducerLink) -> None:
        """Its peers are in use. AssertionError if the name is taken."""
        assert name not in self._links, f"there is a link {name}"
        self._links[name] = link
        self._num_users.update(link.peers)

    def remove(self, name: str) -> None:
        """Forget a link whose transfers were cancelled: lists that none in flight uses at once, the others
        when that one ends; those of fences with the peer."""
        link = self._links.pop(name)
        link.prepared.retire()
        if link.wire is not None:
            link.wire.retire()
        for peer in link.peers:
            self._num_users[peer] -= 1
            if not self._num_users[peer]:
                del self._num_users[peer]
                self._agent.remove_peer(peer)

    def undo(self, producers: Iterable[CacheDescription], wire: WireCache | None) -> None:
        """A link could not be made: what was added and registered for it alone goes."""
        if wire is not None:
            wire.retire()
        for producer in producers:
            if not self._num_users[producer.agent_name]:
                self._agent.remove_peer(producer.agent_name)
