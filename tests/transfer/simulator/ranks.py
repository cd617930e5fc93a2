"""The ranks of a simulated engine: the real ones, over agents of the simulated network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rayk.transfer.handshake import CacheDescription, describe_cache
from rayk.transfer.push_messages import PUSH_AGENT
from rayk.transfer.pusher import Pusher
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from tests.transfer.simulator.network import Network, SimulatedAgent

if TYPE_CHECKING:
    from tests.transfer.simulator.core import Clock, Engine

ROWS_PER_GROUP = 4
"""Of digests."""
FINGERPRINT = {"weights": "w"}
NEVER_STAGED = StagingSettings(mode="never")


def make_ranks(engine: Engine, network: Network) -> list[TransferRank]:
    """One per TP rank, each with its agent."""
    clock, ranks = engine.clock, []
    for rank, caches in enumerate(engine.memory.caches):
        agent = SimulatedAgent(f"{engine.name}.{engine.epoch}/{rank}", engine, network)
        description = describe_cache(
            agent, caches, engine=engine.name, epoch=engine.epoch, fingerprint=FINGERPRINT
        )
        description = replace(description, rows_per_group=ROWS_PER_GROUP)
        views = engine.memory.views[rank]
        ranks.append(TransferRank(agent, caches, views, description, staging=NEVER_STAGED, clock=_now(clock)))
    return ranks


def make_pushers(engine: Engine, network: Network, ranks: list[TransferRank], layers: int) -> list[Pusher]:
    """One per rank, each with an agent of its own; `layers` per write. The world calls their turns."""
    return [
        Pusher(
            SimulatedAgent(rank.description.agent_name + PUSH_AGENT, engine, network),
            caches.buffer,
            rank.description,
            push_layers=layers,
            clock=_now(engine.clock),
            has_thread=False,
        )
        for rank, caches in zip(ranks, engine.memory.caches, strict=True)
    ]


def descriptions(ranks: list[TransferRank]) -> list[CacheDescription]:
    """What ranks say of themselves."""
    return [rank.description for rank in ranks]


def _now(clock: Clock):
    return lambda: clock.now_ns
