"""Fleet: a server's coordinator. It owns the workers; it forms, connects, watches and replaces engines, and
says which of them each request goes to.

A plain class whose async methods run in one Ray actor; `launch` makes it remote. Its workers end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from rayk.actors.deployment import Deployment, DeploymentRules
from rayk.actors.deployment_metrics import LOST, watch_engines, watch_places
from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.forming import all_of, end_engine, survivors
from rayk.actors.members import Member
from rayk.actors.nodes import engine_demand, weights_of
from rayk.actors.placement import line_host, this_node
from rayk.actors.pool import WorkerPool
from rayk.actors.push_flow import push_settings
from rayk.actors.ray_metrics import make_meter
from rayk.actors.serving import Assignment, EngineAccount, EngineCard
from rayk.actors.spares import Spares
from rayk.actors.tiers import HostTiers
from rayk.lines.line import LineAddress, LineService
from rayk.sched.admission import AdmissionController, News
from rayk.sched.dispatcher import Abort, Dispatcher, FormAgain
from rayk.sched.policies import get_policy
from rayk.sched.policy import PlacementRequest
from rayk.specs.serving import ServerSettings
from rayk.transfer.staging import StagingSettings
from rayk.types.errors import EngineDied, InternalError, RoleConflict, UnknownEngine
from rayk.types.serving import EngineState, Health
from rayk.types.tasks import lasting

SURVIVE_S = 5.0
"""How long the live ranks of a lost engine may take to be as good as new; else others take their places."""
LOOK_S = 0.5
"""How often fronts are looked after."""
STATUS_S = 2.0
"""An engine that is asked how it is, for whoever wants to know, answers within this or not at all."""
LEAVE_S = 1.0
"""What fronts get to end the requests that were left when a server's time to end was over."""


class Fleet(Deployment):
    """The engines of a server. `start` has to be called first."""

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self.name = name
        self._settings = settings
        self._life = secrets.token_hex(4)
        pool = WorkerPool(f"{name.rpartition('/')[2]}-{self._life}", keep=True)
        members = [Member(e, e.role) for e in settings.engines]
        dispatcher = Dispatcher(
            get_policy(settings.policy, settings.policy_settings),
            settings.dispatch_rules,
            max_running=_max_places(settings, members),
        )
        rules = DeploymentRules(
            transfer=settings.transfer,
            request_s=settings.request_s,
            transfer_s=settings.transfer_s,
            hang_s=settings.hang_s,
            has_lines=True,
        )
        limits = {"transfer_s": settings.transfer_s, "request_s": settings.request_s}
        offload = settings.offload.settings(**limits)
        tiers = None if offload is None else HostTiers(name, offload, dispatcher, reopens=True)
        super().__init__(members, rules, dispatcher, pool, tiers, itertools.count(1))
        demands = sorted((engine_demand(e, settings) for e in settings.engines), key=lambda a: -a.num_workers)
        self._weights = weights_of(settings.engines[0].config)  # all compute, or none does
        self.spares = Spares(pool, demands, settings.num_spares, self._weights)
        self._admission = AdmissionController(dispatcher, self._abort)
        self._is_over = asyncio.Event()
        """Requests that are still here are to end."""
        told = (self.place, self.tell, self.leave, self.roster, self.death)
        asked = (self.health, self.engines, self.set_role)
        calls = {method.__name__: method for method in (*told, *asked)}
        self._service = LineService(calls=calls, streams={"present": self.present})
        self._meter = make_meter(settings.model.folder)
        watch_engines(self._meter, lambda: (m.now for m in self.members.values()))
        watch_places(self._meter, dispatcher)
        self._line: LineAddress | None = None
        self._opening = asyncio.Lock()
        self._bug: InternalError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"Fleet({self.name})"

    # The driver's.

    async def start(self) -> dict[str, dict[str, Any]]:
        """Form and connect all engines; returns the facts of each. Raises RaykError where that fails."""
        demands = [engine_demand(m.entry, self._settings) for m in self.members.values()]
        await self.pool.prepare(demands, self._placement, self._weights)
        await self.form_all()
        await self.connect_all()
        watches = {f"the watch over {m.name}": self.look_after(m) for m in self.members.values()}
        watches["the watch over fronts"] = self._look_after_fronts()
        self._tasks = [lasting(watch, what, self._on_bug) for what, watch in watches.items()]
        self.spares.start(self._on_bug)
        return {m.name: m.life.facts for m in self.members.values()}

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests and wait for the current ones. Returns how many were left after `timeout_s`;
        fronts then end those with an error."""
        self.dispatcher.is_draining = True
        if await self._is_drained(timeout_s):
            return 0
        left = self.dispatcher.num_running + self.dispatcher.num_waiting
        self._is_over.set()
        await self._is_drained(LEAVE_S)
        return left

    async def _is_drained(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._admission.drained()
                return True
        return False

    async def stop(self) -> list[EngineAccount]:
        """End every engine and give the workers back; returns what each engine left."""
        self.dispatcher.is_draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self.spares.stop(), return_exceptions=True)
        accounts = await asyncio.gather(*(self._end(m) for m in self.members.values()))
        if self.host_tiers is not None:
            await self.host_tiers.close()
        self.pool.free_all()
        return list(accounts)

    async def set_role(self, engine: str, role: str) -> None:
        """Have an engine prefill from now on, or decode. Requests that are on it stay.

        Raises UnknownEngine, and RoleConflict where a role would be left without engines.
        """
        member = self.members.get(engine)
        if member is None:
            raise UnknownEngine(f"no engine {engine!r}", mend=f"one of {', '.join(self.members)}")
        if self._settings.is_aggregated or role not in ("prefill", "decode"):
            raise RoleConflict(
                f"{engine} cannot be {role!r}", mend="prefill or decode, of engines that are not aggregated"
            )
        async with self.wiring:
            if member.role == role:
                return
            if not any(m.role == member.role for m in self.members.values() if m is not member):
                raise RoleConflict(
                    f"{engine} is the only {member.role} engine", mend=f"make another one {member.role} first"
                )
            if member.state == "ready":
                await self.connect_to_others(member, role)
            member.role = role
            self.dispatcher.allow(_max_places(self._settings, self.members.values()))
            if member.handle is not None:
                member.handle.take_role(role)
            if member.state == "ready":
                self.opened(member)

    async def num_requests(self) -> tuple[int, int]:
        """Count the attempts that have a place, and those that wait for one."""
        return self.dispatcher.num_running, self.dispatcher.num_waiting

    async def num_spares(self) -> int:
        """Count the idle workers that are ready to take a lost one's place."""
        return self.spares.num_ready

    async def blocks(self) -> dict[str, tuple[int, int]]:
        """Return the number of free blocks, and of all with the null block, of each engine that is ready."""
        found = {}
        for member in list(self.ready()):
            reply = member.life.leader.status.options(concurrency_group="control").remote()
            status = await member.life.guard(reply, "its blocks", CONTROL_S)
            found[member.name] = (status["num_free_blocks"], status["num_blocks"])
        return found

    async def tiers(self) -> dict[str, dict[str, Any]]:
        """Return the status of each host tier, its process id included."""
        return {} if self.host_tiers is None else await self.host_tiers.status()

    async def pids(self) -> dict[str, list[int]]:
        """Return the process ids of each living engine's ranks, rank 0 first."""
        found: dict[str, list[int]] = {}
        for member in list(self.ready()):
            replies = [w.describe.remote() for w in member.life.workers]
            found[member.name] = [
                d["pid"] for d in await member.life.guard(all_of(replies), "its pids", CONTROL_S)
            ]
        return found

    def _on_bug(self, error: InternalError) -> None:
        self._bug = self._bug or error

    async def _end(self, member: Member) -> EngineAccount:
        if member.handle is None or not member.handle.is_running:
            return EngineAccount(engine=member.name, errors=(EngineDied(member.name, member.trouble),))
        return await end_engine(member.handle, self._settings.transfer.lease_s or 0.0)

    # The fronts'.

    async def place(
        self,
        front: str,
        asked: PlacementRequest,
        *,
        priority: int = 0,
        deadline_s: float,
        again: bool = False,
    ) -> Assignment:
        """Find engines for an attempt of a request, once there is room. `again`: it had a place and lost it.

        Raises Overloaded, DeadlineExceeded. The front must report the end of every attempt (`tell`), also of
        one whose place nobody waits for any more.
        """
        placed = await self._admission.place(
            front, asked, priority=priority, deadline_s=deadline_s, again=again
        )
        return Assignment(
            fleet=self._life, prefill=self._lives(placed.prefill), decode=self._lives(placed.decode)
        )

    async def tell(self, front: str, news: News) -> None:
        """Take news of a front's attempts; they also show that the front lives."""
        self._admission.tell(front, news)

    async def leave(self, front: str) -> None:
        """Abort the requests of a front that ends."""
        self._admission.gone(front)

    async def line(self) -> LineAddress:
        """Return the address where fronts reach this fleet without Ray in between."""
        async with self._opening:
            if self._line is None:
                host = await asyncio.to_thread(line_host, this_node())
                self._line = await self._service.open(host)
        return self._line

    async def present(self, front: str) -> AsyncGenerator[bool]:
        """Yield until a front goes; True: the front must end its requests now. When the front's last line is
        lost, its requests are aborted at once."""
        self.dispatcher.connected(front)
        try:
            yield False
            await self._is_over.wait()
            yield True
            await asyncio.Event().wait()
        finally:
            self._admission.disconnected(front)

    async def roster(self) -> tuple[str, tuple[EngineCard, ...]]:
        """Return the id of this fleet's life, and the engines that take requests."""
        cards = [
            EngineCard(
                name=m.name,
                role=m.role,
                epoch=m.life.epoch,
                config=m.entry.config,
                workers=tuple(m.life.workers),
                line=m.life_line,
                node=m.life.node,
                clock_offset_ns=m.life.clock_offset_ns,
                tier=m.life.tier,
            )
            for m in self.ready()
        ]
        return self._life, tuple(cards)

    async def death(self, life: str, engine: str, epoch: int, within_s: float) -> BaseException | None:
        """Return what a life of an engine died of (Member.death); None in another life of the fleet."""
        return await self.members[engine].death(epoch, within_s) if life == self._life else None

    async def health(self) -> Health:
        """Return the server's health: ready when every rank gave a word lately and every engine took a turn.
        Raises InternalError where a task that looks after them has failed."""
        if self._bug is not None:
            raise self._bug
        now = time.monotonic()
        reasons = [m.why_unwell(now, 2 * self._settings.hang_s) for m in self.members.values()]
        rows = tuple(m.row(now) for m in self.members.values())
        if self.dispatcher.is_draining:
            reasons.append("the server is about to end")
        reason = "; ".join(filter(None, reasons))
        return Health(is_ready=not reason, reason=reason, engines=rows)

    async def engines(self) -> tuple[EngineState, ...]:
        """Return the current state of each engine."""
        members = list(self.members.values())
        said = await asyncio.gather(*(m.said(STATUS_S) for m in members))
        return tuple(m.told(self.dispatcher.load(m.name), s) for m, s in zip(members, said, strict=True))

    def _lives(self, name: str | None) -> tuple[str, int] | None:
        return None if name is None else (name, self.members[name].life.epoch)

    # Engines.

    @property
    def _placement(self) -> str:
        # Aggregated engines have nobody to be spread from.
        placement = self._settings.placement
        return "auto" if placement == "spread" and self._settings.is_aggregated else placement

    def rank_options(self, engine: EngineHandle, rank: int) -> dict[str, Any]:
        """Return options with which an engine can prefill and decode, because roles may change."""
        transfer = self._settings.transfer
        return {
            "staging": StagingSettings(transfer.staging, transfer.staging_mib << 20),
            "push": push_settings(transfer),
            "notices_deaths": True,
        }

    def opened(self, member: Member) -> None:
        self._admission.open(member.name, member.role, member.entry.config.num_ranks)

    def lost(self, member: Member, again: FormAgain | None) -> None:
        self._meter.add(LOST, engine=member.name, role=member.role)

    async def replace_workers(self, member: Member) -> int:
        """Replace the workers of a lost engine, except ranks that outlived it and can be used again."""
        num_ranks = member.entry.config.num_ranks
        if not await self.pool.is_placed(member.name):
            self.pool.drop(member.name)
            demand, *others = (
                engine_demand(m.entry, self._settings)
                for m in (member, *(m for m in self.members.values() if m is not member))
            )
            where = self._placement, self._weights
            await self.pool.prepare([demand], *where, alone=True, beside=others)
            return num_ranks
        alive: set[int] = set()
        if self._reuses(member.life):
            alive = await survivors(member.life, SURVIVE_S)
        lost = [rank for rank in range(num_ranks) if rank not in alive]
        await self.spares.fill(member.name, lost)
        return len(lost)

    def _reuses(self, life: EngineHandle) -> bool:
        """Return whether ranks that outlived their engine may serve another one: only if nobody reads or
        writes their memory."""
        is_lender = self.host_tiers is not None or (life.name, life.epoch) in self._lenders
        return life.is_running and not is_lender and self._settings.transfer.mode == "pull"

    async def _look_after_fronts(self) -> None:
        """Abort the requests of fronts that are gone, and report metrics."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._meter.flush()
            self._admission.look_for_silent(self._settings.front_s)

    def _abort(self, action: Abort) -> None:
        for engine in {action.placement.prefill, action.placement.decode} - {None}:
            member = self.members[str(engine)]
            if member.state == "ready":
                member.life.leader.abort.options(concurrency_group="control").remote(action.name)


def _max_places(settings: ServerSettings, members: Iterable[Member]) -> int:
    return settings.max_places((m.role, m.entry.config) for m in members)
