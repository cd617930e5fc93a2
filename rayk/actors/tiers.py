"""The host tiers of a deployment: one actor per node and kind of pages, opened when an engine first needs it.

Runs inside the actor that owns the workers: a coordinator's for the engines of a cell, a server's fleet.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.failures import translate
from rayk.actors.tier_actor import TierHost, plain_identity, tier_identity
from rayk.handover.commands import Connect, Describe, DescribeOutbox, EndReads, WarmUp
from rayk.handover.tier_side import TierFacts
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.page_file import PageIdentity
from rayk.transfer.handshake import like_engine
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, EngineDied, RaykError, TransferError
from rayk.types.offload import OffloadSettings
from rayk.types.request import Request
from rayk.types.tasks import lasting

NO_BLINDFOLD = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""The variable by which Ray hides no GPU from a process."""
OPEN_S = 60.0  # how long a tier may take to start and allocate its memory
DIGEST_S = 240.0  # so much more with a disk tier, for which all weights are hashed
WIRE_S = 15.0
WIRE_POLL_S = 0.01
AGAIN_S = (0.0, 0.5, 2.0, 5.0)
"""Pauses before each try to connect an engine to the tier in a lost one's place, which may be lost too."""
STATUS_S = 5.0

Kind = tuple[str, str]
"""Node, and what a page means (the text of tier_identity): engines alike in these share a tier. One without a
drafter shares that of engines with one, if there is one on its node: hand-overs may go through it."""


@dataclass(eq=False)
class _TierActor:
    name: str
    handle: Any
    facts: TierFacts
    pid: int
    node_id: str
    engines: dict[str, EngineHandle] = field(default_factory=dict)
    watcher: asyncio.Task[None] | None = None
    died: str = ""  # what of; empty while it lives
    plain: Kind | None = None  # of engines like its own, but that they have no drafter


class TierEvents(Protocol):
    """Receives which engine has which tier, by their names, for placing requests."""

    def attached(self, engine: str, tier: str) -> None: ...

    def detached(self, engine: str) -> None: ...

    def tier_lost(self, tier: str) -> None: ...


class HostTiers:
    """Opens, watches and closes the tiers of a deployment, all on one event loop."""

    def __init__(
        self,
        name: str,
        settings: OffloadSettings,
        told: TierEvents | None = None,
        *,
        reopens: bool = False,
    ) -> None:
        """`name` begins the actors' names and must be unique. `reopens`: a tier that dies is opened anew,
        empty, for the engines that it had."""
        self._name = name
        self.told = told
        self.settings = settings
        self._reopens = reopens
        self._tiers: dict[Kind, _TierActor] = {}
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()
        self.losses: list[str] = []  # what tiers died of, one each

    async def attach_all(self, engines: Sequence[tuple[EngineHandle, str]]) -> None:
        """Connect engines, each to its node's tier. Tiers of other kinds that no engine uses end first,
        because the new ones need their memory."""
        for engine, _ in engines:
            await self._describe(engine)
        # Those with drafters first: their tiers are others', too.
        engines = sorted(engines, key=lambda where: not where[0].config.drafts_on_ranks)
        shared = {self._plain_kind_of(*where): self._kind_of(*where) for where in reversed(engines)}
        wanted = {
            self._kind_of(*where) if where[0].config.drafts_on_ranks else shared[self._plain_kind_of(*where)]
            for where in engines
        }
        for kind, tier in list(self._tiers.items()):
            if kind not in wanted and not tier.engines and not tier.died:
                del self._tiers[kind]
                await self._end(tier)
        for where in engines:
            await self.attach(*where)

    async def attach(self, engine: EngineHandle, node_id: str) -> None:
        """Connect an engine to its node's tier, in both directions. Raises what either refuses."""
        await self._describe(engine)
        tier = await self._tier_for(engine, node_id)
        outboxes = [found for found in await engine.call(DescribeOutbox(), CONTROL_S) if found is not None]
        asked = engine.descriptions, self._identity_of(engine), WIRE_S, outboxes
        theirs = await _reply(tier.handle.attach.remote(*asked), WIRE_S + 5)
        await engine.call(Connect((theirs,), engine.descriptions), CONTROL_S)
        while not all(await engine.call(WarmUp(TIER, WIRE_S), CONTROL_S)):
            await asyncio.sleep(WIRE_POLL_S)
        attach = engine.leader.attach_tier.options(concurrency_group="control")
        await engine.guard(attach.remote(tier.handle, tier.facts), "its host tier", CONTROL_S)
        if tier.died:  # too early for its engines to be told
            raise EngineDied(tier.name, tier.died)
        tier.engines[engine.name] = engine
        engine.tier = tier.handle
        if self.told is not None:
            self.told.attached(engine.name, tier.name)

    async def _describe(self, engine: EngineHandle) -> None:
        if not engine.descriptions:
            engine.descriptions = tuple(await engine.call(Describe(), CONTROL_S))

    async def detach(self, engine: EngineHandle) -> None:
        """Disconnect an engine that is gone, or about to be."""
        for tier in tuple(self._tiers.values()):
            if tier.engines.get(engine.name) is engine:
                del tier.engines[engine.name]
                if self.told is not None:
                    self.told.detached(engine.name)
                if not tier.died:
                    await _quietly(tier.handle.detach.remote(engine.name), STATUS_S)

    async def clear(self) -> None:
        """Have every tier forget the pages that are not in use."""
        await asyncio.gather(*(_quietly(t.handle.clear.remote(), STATUS_S) for t in self._live))

    async def leaks(self) -> list[RaykError]:
        """Return an error for each tier whose blocks do not add up."""
        tiers = self._live
        found = await asyncio.gather(*(_quietly(t.handle.find_leak.remote(), STATUS_S) for t in tiers))
        pairs = zip(tiers, found, strict=True)
        return [EngineDied(t.name, f"blocks leaked: {leak}") for t, leak in pairs if leak]

    async def status(self) -> dict[str, dict[str, Any]]:
        """Return the status of each tier that lives, by name."""
        tiers = self._live
        found = await asyncio.gather(*(_quietly(t.handle.status.remote(), STATUS_S) for t in tiers))
        return {t.name: {**s, "pid": t.pid} for t, s in zip(tiers, found, strict=True) if s is not None}

    async def close(self) -> None:
        await asyncio.gather(*(self._end(tier) for tier in self._tiers.values()))
        self._tiers.clear()

    async def _end(self, tier: _TierActor) -> None:
        if tier.watcher is not None:
            tier.watcher.cancel()
        if not tier.died:
            await _quietly(tier.handle.close.remote(), STATUS_S + 10)
        ray.kill(tier.handle)

    @property
    def _live(self) -> list[_TierActor]:
        return [t for t in self._tiers.values() if not t.died]

    async def _tier_for(self, engine: EngineHandle, node_id: str) -> _TierActor:
        kind = self._kind_of(engine, node_id)
        async with self._opening:
            tier = self._tiers.get(kind)
            if not engine.config.drafts_on_ranks:
                tier = self._with_drafter(kind) or tier
            if tier is None or tier.died:
                tier = self._tiers[kind] = await self._open(engine, node_id)
                tier.watcher = lasting(self._watch(tier), f"the watch over {tier.name}")
        return tier

    async def _open(self, engine: EngineHandle, node_id: str) -> _TierActor:
        number = next(self._numbers)
        name = f"{self._name}/{TIER}{number}"
        handle: Any = (
            ray.remote(TierHost)
            .options(
                name=name,
                num_cpus=0,
                max_concurrency=1000,
                max_restarts=0,
                enable_task_events=False,
                # It asks for no GPU, and locks memory for those that its engines have.
                runtime_env={"env_vars": {NO_BLINDFOLD: "1"}} if engine.config.device == "cuda" else {},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(name)
        )
        how = engine.config, self.settings, like_engine(engine.descriptions), number
        try:
            limit_s = OPEN_S + (DIGEST_S if self.settings.disk_folder is not None else 0.0)
            facts = await _reply(handle.open.remote(*how, may_lack_disk=bool(self.losses)), limit_s)
            pid = await _reply(handle.pid.remote(), STATUS_S)
        except BaseException:
            ray.kill(handle)
            raise
        return _TierActor(name, handle, facts, pid, node_id, plain=self._plain_kind_of(engine, node_id))

    def _with_drafter(self, plain: Kind) -> _TierActor | None:
        """Return a tier that lives behind engines with a drafter, of this kind without it."""
        found = (t for kind, t in self._tiers.items() if t.plain == plain != kind and not t.died)
        return next(found, None)

    def _kind_of(self, engine: EngineHandle, node_id: str) -> Kind:
        return node_id, self._identity_of(engine).text

    def _plain_kind_of(self, engine: EngineHandle, node_id: str) -> Kind:
        return node_id, plain_identity(engine.config, self.settings, like_engine(engine.descriptions)).text

    def _identity_of(self, engine: EngineHandle) -> PageIdentity:
        """Return what the engine's pages mean; the disk tier asks this, too."""
        return tier_identity(engine.config, self.settings, like_engine(engine.descriptions))

    async def _watch(self, tier: _TierActor) -> None:
        """Wait until a tier dies, then tell its engines, which may not be in contact with it then."""
        try:
            await tier.handle.until_over.remote()
        except RayError as error:
            tier.died = str(translate(error, tier.name))
        if not tier.died:
            return
        self.losses.append(tier.died)
        engines = [e for e in tier.engines.values() if not e.died.done()]
        for engine in engines:
            engine.tier = None
        if self.told is not None:
            self.told.tier_lost(tier.name)
        lose = (
            e.leader.lose_tier.options(concurrency_group="control").remote(tier.facts.epoch, tier.died)
            for e in engines
        )
        ends = (e.call(EndReads(TIER, tier.facts.epoch), CONTROL_S) for e in engines)
        await asyncio.gather(*lose, *ends, return_exceptions=True)
        # As `attach_all` does: who comes first says what the tier keeps.
        engines.sort(key=lambda engine: not engine.config.drafts_on_ranks)
        for engine in engines if self._reopens else ():
            await self._attach_again(engine, tier.node_id)

    async def _attach_again(self, engine: EngineHandle, node_id: str) -> None:
        why: RaykError | None = None
        for pause_s in AGAIN_S:
            await asyncio.sleep(pause_s)
            if engine.died.done():
                return
            try:
                await self.attach(engine, node_id)
            except RaykError as error:
                why = error
            else:
                return
        # It goes on without: its next life tries again.
        logging.getLogger(__name__).warning("%s has no host tier any more: %s", engine.name, why)


async def relay(
    prefill: EngineHandle,
    decode: EngineHandle,
    ticket: TransferTicket,
    request: Request,
    timeout_s: float,
    stored: Callable[[StoreAnswer], None],
) -> TransferTicket:
    """Have the engines' host tier store a prefilled request's KV; returns the ticket by which the decode
    engine reads it from there. `stored` receives the outcome of the first half, its failure included. Raises
    TransferError, DeadlineExceeded. The handles forget a tier that is dead."""
    name, handle = ticket.request_id, prefill.tier
    if handle is None or decode.tier != handle:
        where = f"{prefill.name} and {decode.name} share no host tier"
        raise TransferError(name, where, producer=prefill.name, consumer=decode.name)
    tokens, kept_as = tuple(request.prompt_token_ids[: ticket.num_tokens]), f"relay/{name}"
    ask = StoreRequest(
        ticket=ticket,
        token_ids=tokens,
        cache_salt=request.cache_salt,
        keep_as=kept_as,
        deadline_s=timeout_s,
    )
    again = LoadRequest(request_id=name, kept_as=kept_as)
    try:
        answer: StoreAnswer = await _reply(handle.store.remote(ask), timeout_s + 5)
        stored(answer)
        offered: LoadAnswer | None = None
        if answer.ok:
            offered = await _reply(handle.load.remote(again), timeout_s + 5)
    except EngineDied as error:
        prefill.tier = decode.tier = None
        raise TransferError(name, str(error), producer=TIER, consumer=decode.name) from None
    except BaseException:
        handle.drop.remote(kept_as)  # what nobody will ask for would stay
        raise
    if offered is None:
        raise TransferError(name, f"host tier: {answer.reason}", producer=prefill.name, consumer=TIER)
    if offered.ticket is None:
        raise TransferError(name, f"host tier: {offered.reason}", producer=TIER, consumer=decode.name)
    return offered.ticket


async def _reply(reply: Awaitable[Any], timeout_s: float) -> Any:
    """Await an answer of a tier. Raises what the tier raises or died of, DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            return await reply
    except TimeoutError:
        raise DeadlineExceeded("an answer of the host tier", timeout_s) from None
    except RayError as error:
        raise translate(error, TIER) from None


async def _quietly(reply: Awaitable[Any], timeout_s: float) -> Any:
    """Await an answer; None where none comes."""
    try:
        return await _reply(reply, timeout_s)
    except RaykError:
        return None
