"""TierHost: the process that owns a node's host tier. A loop on a thread of its own turns it.

A plain class whose async methods run in one Ray actor; `tiers` makes it remote. NIXL moves the pages; Ray
carries what engines ask, and the answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rayk.actors.agents import make_agent
from rayk.actors.ray_metrics import make_meter
from rayk.actors.stack_watch import StackWatch
from rayk.handover.tier_side import TierFacts, facts_of
from rayk.handover.transfer_metrics import TIER_NAME, report_tier
from rayk.kv.groups import KVCacheGroup
from rayk.metrics import Meter
from rayk.models.drafters.config import find_drafter
from rayk.models.drafters.riders import engine_riders
from rayk.models.families import read_config
from rayk.models.fingerprint import whole_weights_digest
from rayk.models.hub import model_folder
from rayk.models.kv_specs import tier_groups as groups_of_tier
from rayk.offload.disk import DiskTier
from rayk.offload.disk_folder import make_folder
from rayk.offload.host import HostTier
from rayk.offload.messages import LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.page_file import PageIdentity
from rayk.offload.pages import DiskPages, identity_of
from rayk.offload.tier_parts import TierParts
from rayk.transfer.agent import TransferAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.ticket import TransferTicket
from rayk.types.config import EngineConfig
from rayk.types.errors import DiskUnavailable, EngineDied, HandshakeMismatch, RaykError, UserError
from rayk.types.offload import OffloadSettings
from rayk.types.waiting import get_within

T = TypeVar("T")
LOG = logging.getLogger(__name__)
HEARTBEAT_S = 0.02  # an idle tier looks at the network this often: engines that connect wait for it
BUSY_S = 0.0005  # the same while something is on its way
WIRE_POLL_S = 0.002


def tier_groups(config: EngineConfig, settings: OffloadSettings) -> tuple[KVCacheGroup, ...]:
    """List the KV groups of a tier behind engines like this one, those of its drafter included. Raises as
    find_drafter does."""
    model = read_config(model_folder(config.model))
    return groups_of_tier(config, model, settings, engine_riders(config, model))


def tier_identity(config: EngineConfig, settings: OffloadSettings, like: CacheDescription) -> PageIdentity:
    """Return what pages mean in a tier behind engines like this one; `like`: of `like_engine`.
    Engines whose identity is equal may share a tier, and pages on disk. Those that have no drafter on their
    ranks may also share one behind engines with any, which has pages of the model's layers beside others."""
    return identity_of(tier_groups(config, settings), like, config.dtype)


def plain_identity(config: EngineConfig, settings: OffloadSettings, like: CacheDescription) -> PageIdentity:
    """Return the same of engines like this one without a drafter."""
    return tier_identity(replace(config, speculative=None), settings, like)


def disk_identity(
    groups: Sequence[KVCacheGroup], config: EngineConfig, like: CacheDescription
) -> PageIdentity:
    """Return what pages on disk mean. They outlive the weights, of which a fingerprint takes only samples, so
    the weights count as a whole."""
    identity = identity_of(groups, like, config.dtype)
    if not config.has_weights:
        return identity
    weights = {"weights": whole_weights_digest(model_folder(config.model))}
    drafter = find_drafter(config, read_config(model_folder(config.model)))
    if drafter is not None and drafter.method != "mtp":  # whose layers are among the model's weights
        weights["drafter's weights"] = whole_weights_digest(drafter.path)
    return replace(identity, facts={**identity.facts, **weights})


class TierHost:
    """Owns a node's host tier. `open` has to be called first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tier: HostTier | None = None
        self._identities: tuple[PageIdentity, ...] = ()
        """What pages mean to engines that may attach; empty: nobody asks."""
        self._meter = Meter()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._died: RaykError | None = None
        self._waiting: set[Future[Any]] = set()

    def __repr__(self) -> str:
        return f"TierHost({self.name})"

    async def until_over(self) -> None:
        """Wait until this process or its tier ends. Raises what the tier died of."""
        while self._thread is None or self._thread.is_alive():
            await asyncio.sleep(HEARTBEAT_S)
        if not self._is_over.is_set():
            assert self._died is not None
            raise self._died

    async def pid(self) -> int:
        return os.getpid()

    async def open(
        self,
        config: EngineConfig,
        settings: OffloadSettings,
        like: CacheDescription,
        epoch: int,
        *,
        may_lack_disk: bool = False,
    ) -> TierFacts:
        """Allocate the tier for engines like this one, and begin to turn it. `may_lack_disk`: see open_tier.
        Raises UserError for a tier that is impossible, or a folder that cannot be used."""
        agent = make_agent(f"{self.name}-{os.getpid()}-{epoch}", "peer")
        tier = open_tier(agent, config, settings, like, epoch, may_lack_disk=may_lack_disk)
        self._tier = tier
        self._identities = tuple(
            identity(config, settings, like) for identity in (tier_identity, plain_identity)
        )
        self._meter = make_meter(config.model, engine=TIER_NAME)
        self._meter.on_flush(lambda: report_tier(self._meter, tier.status()))
        self._is_over.clear()
        self._thread = threading.Thread(target=self._run, name="rayk-tier", daemon=True)
        self._thread.start()
        return facts_of(self._tier)

    async def attach(
        self,
        engine: Sequence[CacheDescription],
        identity: PageIdentity,
        timeout_s: float,
        outboxes: Sequence[CacheDescription] = (),
    ) -> CacheDescription:
        """Connect an engine, whose ranks are polled meanwhile, and its outboxes, if it has some. `identity`:
        what its KV means, see tier_identity. Raises HandshakeMismatch, TransferError."""
        if self._identities and identity not in self._identities:
            raise HandshakeMismatch(_differing(self._identities[0], identity))
        name = engine[0].engine
        await self._on_loop(lambda tier: tier.attach(engine, outboxes))
        while not await self._on_loop(lambda tier: tier.wire(name, timeout_s)):
            await asyncio.sleep(WIRE_POLL_S)
        return await self._on_loop(lambda tier: tier.description)

    async def detach(self, engine: str) -> None:
        """Forget an engine that is gone."""
        await self._on_loop(lambda tier: tier.detach(engine))

    async def store(self, ask: StoreRequest) -> StoreAnswer:
        """Store what an engine offers; returns what became of it."""
        found: StoreAnswer = await self._answer(lambda tier, done: tier.store(ask, done))
        return found

    async def load(self, ask: LoadRequest) -> LoadAnswer:
        """Offer the pages of a sequence that the tier holds."""
        found: LoadAnswer = await self._answer(lambda tier, done: tier.load(ask, done))
        return found

    async def drop(self, kept_as: str) -> None:
        """Free what was kept by this name: nobody will load it."""
        await self._on_loop(lambda tier: tier.drop(kept_as))

    async def doubt(self, ticket: TransferTicket) -> None:
        """Check the pages of a ticket: an engine that read them got something else than the ticket says."""
        await self._on_loop(lambda tier: tier.doubt(ticket))

    async def clear(self) -> None:
        """Forget every page that is not in use."""
        await self._on_loop(HostTier.clear)

    async def status(self) -> dict[str, Any]:
        """Return what it holds, and counters of its answers."""
        found: dict[str, Any] = await self._on_loop(HostTier.status)
        return found

    async def find_leak(self) -> str:
        """Explain what is wrong with its blocks; empty where they add up."""

        def look(tier: HostTier) -> str:
            try:
                tier.check_integrity()
            except AssertionError as error:
                return str(error) or "its blocks do not add up"
            return ""

        found: str = await self._on_loop(look)
        return found

    async def close(self) -> None:
        """End the loop; give registrations and files back."""
        self._is_over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    async def _on_loop(self, action: Callable[[HostTier], T]) -> T:
        """Run an action on the tier's thread and return its result."""
        found: T = await self._answer(lambda tier, done: done(action(tier)))
        return found

    async def _answer(self, begin: Callable[[HostTier, Callable[[Any], None]], None]) -> Any:
        """Await what the tier's thread answers. Raises what it raises, EngineDied once it has ended."""
        future: Future[Any] = Future()
        self._waiting.add(future)
        try:
            # Once `_died` is set nobody looks at the inbox any more.
            if self._thread is None or self._died is not None:
                raise self._died or EngineDied(self.name, "it is not open")
            self._inbox.put(partial(self._begin, begin, future))
            return await asyncio.wrap_future(future)
        finally:
            self._waiting.discard(future)

    def _begin(self, begin: Callable[[HostTier, Callable[[Any], None]], None], future: Future[Any]) -> None:
        def done(found: Any) -> None:
            with suppress(InvalidStateError):  # its caller was told that the tier has ended
                future.set_result(found)

        if not future.set_running_or_notify_cancel():
            return
        assert self._tier is not None, "open first"
        try:
            begin(self._tier, done)
        except RaykError as error:  # another one may leave blocks half handed out: the tier ends
            with suppress(InvalidStateError):  # it had answered
                future.set_exception(error)

    def _run(self) -> None:
        assert self._tier is not None
        watch = StackWatch()
        why = "it was closed"
        try:
            while not self._is_over.is_set():
                watch.tick()
                self._turn(self._tier)
                self._meter.tick()
        except Exception as error:
            LOG.exception("the host tier ends")
            why = f"{type(error).__name__}: {error}"
        finally:
            watch.end()
            self._died = EngineDied(self.name, why)
            for future in tuple(self._waiting):
                with suppress(InvalidStateError):  # it was answered, or its caller has gone
                    future.set_exception(self._died)
            self._tier.close()

    def _turn(self, tier: HostTier) -> None:
        try:
            action = get_within(self._inbox, BUSY_S if tier.is_busy else HEARTBEAT_S)
        except queue.Empty:
            pass
        else:
            action()
            until = time.monotonic() + BUSY_S
            while not self._inbox.empty() and time.monotonic() < until:
                self._inbox.get_nowait()()
        tier.turn()


def _differing(ours: PageIdentity, theirs: PageIdentity) -> tuple[tuple[str, str, str], ...]:
    """List (fact, ours, theirs) for each fact that differs."""
    names = dict.fromkeys([*ours.facts, *theirs.facts])
    pairs = ((name, ours.facts.get(name, "absent"), theirs.facts.get(name, "absent")) for name in names)
    return tuple((name, a, b) for name, a, b in pairs if a != b)


def open_tier(
    agent: TransferAgent,
    config: EngineConfig,
    settings: OffloadSettings,
    like: CacheDescription,
    epoch: int,
    *,
    may_lack_disk: bool = False,
) -> HostTier:
    """Open a host tier, with its disk tier where the settings ask for one. It goes without where the disk is
    unavailable and, with `may_lack_disk`, where anything is wrong with it. Raises UserError."""
    groups, pages, why = tier_groups(config, settings), None, ""
    drafter = find_drafter(config, read_config(model_folder(config.model)))
    looks_ahead = drafter is not None and drafter.takes_hidden
    if settings.disk_folder is not None:
        try:
            identity = disk_identity(groups, config, like)
            pages = _open_pages(Path(settings.disk_folder), identity, settings.disk_bytes)
        except UserError as error:
            if not (may_lack_disk or isinstance(error, DiskUnavailable)):
                raise
            why = f"{error.where}: {error.problem}"
            LOG.warning("the host tier goes on without its disk tier: %s", error)
    try:
        parts = TierParts.open(
            agent, groups, like, settings, epoch=epoch, pages=pages, looks_ahead=looks_ahead
        )
        return HostTier(parts, settings, pages=pages, why_no_disk=why)
    except OSError as error:
        if pages is not None:
            pages.close()
        raise UserError(
            f"no memory for a host tier of {settings.host_bytes:,} bytes: {error}",
            where="offload.host_gib",
            mend="less than the node has free",
        ) from None


def _open_pages(folder: Path, identity: PageIdentity, num_bytes: int) -> DiskPages:
    """Open the pages in a folder, which is made if it is missing. Raises UserError, DiskUnavailable."""
    make_folder(folder)
    return DiskPages(DiskTier(folder, identity, num_bytes))
