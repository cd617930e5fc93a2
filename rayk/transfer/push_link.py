"""What a producer rank keeps ready to push to one consumer engine: plans, descriptor lists, layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from rayk.transfer.agent import Handle, TransferAgent
from rayk.transfer.costs import CostTable, TransferCosts
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.link import PREPARED_PER_READ, PreparedReads, pattern_lists
from rayk.transfer.options import choose_layers, kept_layers
from rayk.transfer.plan import Pattern, TransferPlan, plan_pushes


class PreparedWrites(PreparedReads):
    """Descriptor lists of writes: ours is the source."""

    def __init__(
        self, agent: TransferAgent, me: CacheDescription, consumer: CacheDescription, max_kept: int
    ) -> None:
        super().__init__(agent, (), me, max_kept)
        self._consumer = consumer

    def _make(self, pattern: Pattern) -> Handle:
        local, remote = pattern_lists(self._me, self._consumer, pattern)
        return self._agent.prepare(self._consumer.agent_name, local, remote, self._consumer.device)


@dataclass(frozen=True, eq=False)
class ConsumerLink:
    """One consumer engine as one producer rank sees it."""

    consumers: dict[int, CacheDescription]
    """Descriptions by rank: of the whole engine, or of some of its ranks."""
    plans: dict[int, TransferPlan]
    """What goes to each consumer rank; ranks that get nothing are absent."""
    prepared: dict[int, PreparedWrites]
    """Prepared lists by consumer rank."""
    layers: tuple[int, ...]
    """Layers whose computing is told, from `kept_layers`."""
    late_layers: frozenset[int]
    """Positions in `layers` of those of which only the end of the prompt decides what is kept."""
    _choose: Callable[[int], int]
    """What a layer takes to compute (ns, a power of two) -> layers per write."""
    told_costs: Callable[[], str]
    """Tells where the costs that these are chosen by come from; empty where they are set."""

    def layers_per_write(self, layer_ns: float) -> int:
        """Choose the layers that a write should bring while computing one takes so long; 0: writes do not
        overlap."""
        return self._choose(1 << int(layer_ns).bit_length() if layer_ns else 0)

    @property
    def engine(self) -> str:
        """The consumer engine's name."""
        return next(iter(self.consumers.values())).engine

    @property
    def epoch(self) -> int:
        """Life of the consumer engine."""
        return next(iter(self.consumers.values())).epoch


def make_consumer_link(
    agent: TransferAgent,
    me: CacheDescription,
    producers: Sequence[CacheDescription],
    consumers: Sequence[CacheDescription],
    *,
    push_layers: int | None,
    costs: CostTable,
) -> ConsumerLink:
    """Add the consumer's ranks as peers: also those that get nothing may ask this rank to stop.

    push_layers: layers per write; None: as the cost model says, for prompts that fill a few blocks.
    """
    by_rank = {consumer.rank: consumer for consumer in consumers}
    for consumer in consumers:
        agent.add_peer(consumer.agent_name, consumer.agent_metadata)
    plans = plan_pushes(me.geometry, [p.geometry for p in producers], [c.geometry for c in consumers])
    layers = kept_layers(me.geometry)
    late = {n for plan in plans.values() for n in plan.late_layers}
    prepared = {
        rank: PreparedWrites(agent, me, by_rank[rank], PREPARED_PER_READ * _num_lists(plan))
        for rank, plan in plans.items()
    }

    @cache
    def choose_by(known: TransferCosts, layer_ns: int) -> int:
        return choose_layers(known, me.geometry, plans, layer_ns)

    def choose(layer_ns: int) -> int:
        known = costs.of(agent.transport, me.device, consumers[0].device)
        return push_layers or choose_by(known, layer_ns)

    def told_costs() -> str:
        return "" if push_layers else costs.told(agent.transport, me.device, consumers[0].device)

    return ConsumerLink(
        by_rank,
        plans,
        prepared,
        layers,
        frozenset(i for i, layer in enumerate(layers) if layer in late),
        choose,
        told_costs,
    )


def _num_lists(plan: TransferPlan) -> int:
    """Count the reads, layer by layer at worst."""
    return sum(len(r.layers) for r in plan.reads)
