"""Deployment: the engines of a cell or a server, formed on workers, connected, watched and formed again.

Runs inside the actor that owns the workers, on one event loop. Whether a lost engine gets another life is its
dispatcher's decision.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import RayError

from rayk.actors.engines import CONTROL_S, WHY_S, EngineHandle
from rayk.actors.failures import translate
from rayk.actors.forming import COMM_S, connect, end_reads, form_engine
from rayk.actors.members import Member
from rayk.actors.nodes import Node
from rayk.actors.placement import line_host
from rayk.actors.pool import WorkerPool, name_lost_nodes
from rayk.actors.rank_spec import RankSpec
from rayk.actors.tiers import HostTiers
from rayk.parallel.shard import EngineShape
from rayk.sched.dispatcher import Dispatcher, FormAgain
from rayk.specs.experiment import TransferSpec
from rayk.transfer.token_classes import common_classes
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, RaykError, TransferError
from rayk.types.tasks import lasting

WIRE_S = 15.0
"""How long a producer may take to answer a first read. Idle engines look at the network every 50 ms."""
NUM_TRIES = 3
"""A handshake whose messages get lost is tried so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRules:
    """What holds for all engines of a deployment."""

    transfer: TransferSpec
    request_s: float
    transfer_s: float
    hang_s: float | None
    """An engine whose loop stands still for so long is ended; None: hangs are not looked for."""
    has_lines: bool
    """Whether requests reach engines over lines from other processes, as a server's do."""


class Deployment:
    """The engines of a cell or a server. Subclasses say what is special about either."""

    def __init__(
        self,
        members: Sequence[Member],
        rules: DeploymentRules,
        dispatcher: Dispatcher,
        pool: WorkerPool,
        tiers: HostTiers | None,
        epochs: Iterator[int],
    ) -> None:
        self.members = {m.name: m for m in members}
        self.dispatcher = dispatcher
        self.host_tiers = tiers
        self.pool = pool
        self.nodes: dict[str, Node] = {}
        """Node of each engine, by the engine's name."""
        self.wiring = asyncio.Lock()
        """Held while engines are connected or change their roles."""
        self._rules = rules
        self._epochs = epochs
        self._linked: set[tuple[str, int, str, int]] = set()
        """Producer and its epoch, consumer and its epoch."""
        self._lenders: set[tuple[str, int]] = set()
        """Engines and their epochs whose memory others read."""

    # What subclasses add.

    def rank_options(self, engine: EngineHandle, rank: int) -> dict[str, Any]:
        """Return further fields of a rank's RankSpec."""
        raise NotImplementedError

    async def replace_workers(self, member: Member) -> int:
        """Put other workers in a lost engine's place; returns how many. Raises RaykError."""
        raise NotImplementedError

    def begun(self, engine: EngineHandle) -> None:
        """Take note that a life of an engine begins."""

    def opened(self, member: Member) -> None:
        """Take note that an engine takes requests from now on."""
        raise NotImplementedError

    def lost(self, member: Member, again: FormAgain | None) -> None:
        """Take note that an engine was lost. `again`: the decision to form it again; None: it is not."""
        raise NotImplementedError

    # What all do.

    def ready(self) -> Iterator[Member]:
        """Return the engines that take requests."""
        return (m for m in self.members.values() if m.state == "ready")

    async def form_all(self) -> None:
        """Form the engines on workers that are in their places. Raises RaykError."""
        await asyncio.gather(*(self._form(m) for m in self.members.values()))
        if self.host_tiers is not None:
            places = [(m.life, self.nodes[m.name].node_id) for m in self.members.values()]
            await self.host_tiers.attach_all(places)

    async def connect_all(self) -> None:
        """Connect the engines, which take requests from then on. Raises what they refuse, or die of for
        good."""
        for member in self.members.values():
            try:
                if not member.num_restarts:
                    await self._join(member)
            except EngineDied:
                if not (member.num_restarts or member.life.died.done()):
                    raise  # it was another one, which does not return
            if member.num_restarts or member.life.died.done():
                if member.next_life is None:
                    member.life.raise_if_dead()
                else:
                    await asyncio.shield(member.next_life)

    async def look_after(self, member: Member) -> None:
        """Watch an engine and form it again when it is lost, as long as the dispatcher says so. Raises what
        another try would not mend."""
        while True:
            await member.until_lost(self._rules.hang_s, hears=self._rules.has_lines)
            lost_s = time.monotonic()
            again = self.note_death(member)
            member.state, member.trouble = "lost", str(member.life.died.exception())
            member.num_restarts += 1
            member.restart = {}
            self.lost(member, again)
            self._linked = {n for n in self._linked if member.name not in (n[0], n[2])}
            ending = lasting(self._end_reads(member.life), f"the end of reads from {member.name}")
            try:
                if again is None:
                    await ending
                    return
                if self.host_tiers is not None:
                    await self.host_tiers.detach(member.life)
                await self._form_again(member, again)
                member.restart["total_s"] = round(time.monotonic() - lost_s, 3)
            finally:
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

    def note_death(self, member: Member) -> FormAgain | None:
        """Have the dispatcher decide, once, what becomes of an engine that died."""
        if member.decided is not member.life:
            member.decided, member.again = member.life, self.dispatcher.lost(member.name)
        return member.again

    async def _form_again(self, member: Member, again: FormAgain) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(again.pause_s)
            began = time.monotonic()
            parts: dict[str, object] = {"try": number}
            member.restart = parts
            try:
                parts["num_replaced"] = await self.replace_workers(member)
                parts["workers_s"] = round(time.monotonic() - began, 3)
                await self._form(member)
                parts["formed_s"] = round(time.monotonic() - began, 3)
                parts["cpu_s"] = member.life.facts["cpu_s"]
                await self._join(member, attaches=True)
                parts["joined_s"] = round(time.monotonic() - began, 3)
            except (RaykError, RayError) as error:
                found = error if isinstance(error, RaykError) else translate(error, member.name)
                await name_lost_nodes([found], self.nodes)
                member.state, member.trouble = "lost", str(found)
                member.life.declare_dead(member.trouble)
                following = self.dispatcher.not_formed(member.name, found)
                if following is None:
                    raise found from None
                again = following
            else:
                return

    async def _form(self, member: Member) -> None:
        """Make an engine of the workers that are in its place."""
        config = member.entry.config
        workers, node = self.pool.engine(member.name, config.num_ranks)
        self.nodes[member.name] = node
        member.state, member.trouble = "forming", ""
        life = EngineHandle(member.name, member.role, next(self._epochs), config, workers, str(node))
        member.handle = life
        self.begun(life)
        await form_engine(life, partial(self._rank_spec, life))
        if self._rules.has_lines:
            host = await asyncio.to_thread(line_host, node.node_id)
            open_line = life.leader.open_line.options(concurrency_group="control")
            member.line = await life.guard(open_line.remote(host), "a line", CONTROL_S)

    def _rank_spec(self, engine: EngineHandle, rank: int, address: str) -> RankSpec:
        rules = self._rules
        return RankSpec(
            engine=engine.name,
            epoch=engine.epoch,
            role=engine.role,
            rank=rank,
            config=engine.config,
            address=address,
            comm_timeout_s=COMM_S,
            # A ticket may wait for the consumer's blocks as long as its request may last.
            lease_s=rules.request_s + rules.transfer_s,
            renewed_lease_s=rules.transfer.lease_s,
            spans_nodes=len({n.node_id for n in self.nodes.values()}) > 1,
            token_classes=common_classes(
                EngineShape(c.tp, c.dcp, c.dcp_interleave)
                for c in (member.entry.config for member in self.members.values())
            ),
            offload=None if self.host_tiers is None else self.host_tiers.settings.on(engine.config.device),
            **self.rank_options(engine, rank),
        )

    async def _join(self, member: Member, *, attaches: bool = False) -> None:
        """Connect a new life of an engine to its partners; it takes requests from then on. `attaches`: to its
        host tier, too."""
        async with self.wiring:
            await self.connect_to_others(member, member.role)
            if attaches and self.host_tiers is not None:
                await self.host_tiers.attach(member.life, self.nodes[member.name].node_id)
            member.life.raise_if_dead()
            member.state = "ready"
            member.turned_s = member.heard_s = time.monotonic()
            self.opened(member)

    async def connect_to_others(self, member: Member, role: str) -> None:
        """Connect an engine that is to have this role to the engines of the other."""
        for other in [m for m in self.ready() if m is not member and {role, m.role} == {"prefill", "decode"}]:
            if other.state != "ready":
                continue  # lost meanwhile; it connects in its next life
            p, d = (member, other) if role == "prefill" else (other, member)
            link = (p.name, p.life.epoch, d.name, d.life.epoch)
            if link in self._linked:
                continue
            self._lenders.add((p.name, p.life.epoch))
            try:
                await self._connect(p.life, d.life)
            except (EngineDied, InternalError) as error:
                member.life.raise_if_dead()
                if isinstance(error, InternalError) and await other.life.death(WHY_S) is None:
                    raise
                if not self.dispatcher.returns(other.name):
                    raise
                continue  # the other one will connect in its next life
            self._linked.add(link)

    async def _connect(self, p: EngineHandle, d: EngineHandle) -> None:
        wire_s = min(WIRE_S, self._rules.transfer_s)
        for left in reversed(range(NUM_TRIES)):
            try:
                await connect(p, d, wire_s, is_push=self._rules.transfer.mode == "push")
            except (TransferError, DeadlineExceeded):
                if not left:
                    raise
            else:
                return

    async def _end_reads(self, lost: EngineHandle) -> None:
        if lost.role != "aggregated":
            await end_reads(lost, [m.life for m in self.ready()])
