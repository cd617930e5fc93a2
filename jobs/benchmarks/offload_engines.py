"""The engines and host tiers that jobs/benchmarks/offload.py and offload_overlap.py measure: Ray actors
that NIXL moves pages between, as a server has them. All on one event loop, in the driver."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.forming import COMM_S, dissolve, form_engine, stop_loops
from rayk.actors.nodes import EngineDemand, worker_resources
from rayk.actors.placement import line_host
from rayk.actors.pool import WorkerPool
from rayk.actors.rank_spec import RankSpec
from rayk.actors.tiers import HostTiers
from rayk.handover.engine_request import EngineRequest
from rayk.lines.line import Line
from rayk.types.config import EngineConfig
from rayk.types.errors import DeadlineExceeded
from rayk.types.offload import OffloadSettings
from rayk.types.request import Request, SamplingParams
from rayk.types.rows import TransferRow

REQUEST_S = 300.0
SETTLE_S = 120.0
POLL_S = 0.02
STILL_POLLS = 10
"""A disk whose counters stay the same for so many polls has nothing left to write."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request, as the engine and its host tier told of it."""

    ttft_ms: float
    """From before the request leaves until its engine has the first token."""
    token_ids: tuple[int, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    transfers: Sequence[TransferRow] = ()


class Deployment:
    """One model's engines, each behind the host tier that it is given, if any."""

    def __init__(self, name: str, engines: Mapping[str, tuple[EngineConfig, str | None]]) -> None:
        """`engines`: name -> settings and the name of its tier."""
        self._name = name
        self._wanted = dict(engines)
        self._pool = WorkerPool(name, keep=True)
        self.tiers: dict[str, HostTiers] = {}
        self.engines: dict[str, EngineHandle] = {}
        self._numbers = itertools.count()

    async def open(self, tiers: Mapping[str, OffloadSettings], gpus_per_worker: float) -> None:
        """Form engines and tiers, and connect them. Raises RaykError."""
        device, model = next((c.device, c.model) for c, _ in self._wanted.values())
        resources = worker_resources(device, gpus_per_worker)
        demands = [
            EngineDemand(name=n, num_workers=c.tp, resources=resources) for n, (c, _) in self._wanted.items()
        ]
        await self._pool.prepare(demands, "auto", model)
        self.tiers = {
            tier: HostTiers(f"{self._name}/{tier}", settings, reopens=True)
            for tier, settings in tiers.items()
        }
        for name, (config, tier) in self._wanted.items():
            await self._form(name, config, tiers[tier] if tier is not None else None, tier)

    async def _form(
        self, name: str, config: EngineConfig, settings: OffloadSettings | None, tier: str | None
    ) -> None:
        workers, node = self._pool.engine(name, config.tp)
        engine = self.engines[name] = EngineHandle(name, "aggregated", 1, config, workers, str(node))

        def spec_of(rank: int, address: str) -> RankSpec:
            return RankSpec(
                engine=name,
                epoch=1,
                role="aggregated",
                rank=rank,
                config=config,
                address=address,
                comm_timeout_s=COMM_S,
                lease_s=REQUEST_S,
                notices_deaths=True,
                offload=settings,
            )

        await form_engine(engine, spec_of)
        open_line = engine.leader.open_line.options(concurrency_group="control")
        address = await engine.guard(open_line.remote(line_host(node.node_id)), "a line", CONTROL_S)
        engine.line = Line(address)
        if tier is not None:
            await self.tiers[tier].attach(engine, node.node_id)

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Engine -> what it runs with."""
        return {name: engine.facts for name, engine in self.engines.items()}

    async def ask(self, name: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Run one request on an engine, over a line as a server's front. Raises what it ends with."""
        engine = self.engines[name]
        request = Request(
            request_id=f"{name}/{next(self._numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        tokens: list[int] = []
        transfers: list[TransferRow] = []
        info: dict[str, Any] = {}
        first_ns = 0
        began_ns = time.monotonic_ns()
        async with aclosing(engine.stream(REQUEST_S, EngineRequest(request=request))) as batches:
            async for events in batches:
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.token_ids and not tokens:
                        first_ns = event.time_ns + engine.clock_offset_ns
                    tokens += event.token_ids
                    if event.info is not None:
                        transfers += event.info.transfers or ()
                        info |= event.info.told()
        ttft_ms = (first_ns - began_ns) / 1e6
        return Answer(ttft_ms=ttft_ms, token_ids=tuple(tokens), info=info, transfers=transfers)

    async def settle(self, name: str) -> None:
        """Wait until an engine has nothing left to store, and its tier nothing to write. Raises
        DeadlineExceeded."""
        engine = self.engines[name]
        until = time.monotonic() + SETTLE_S
        seen, still = None, 0
        while still < STILL_POLLS:
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the stores of {name}", SETTLE_S)
            await asyncio.sleep(POLL_S)
            status = await engine.guard(
                engine.leader.status.options(concurrency_group="control").remote(), "its leases", CONTROL_S
            )
            tier = self._wanted[name][1]
            now = (await self.tiers[tier].status()) if tier is not None else {}
            is_idle = not status["leases"] and not any(t["num_used_blocks"] for t in now.values())
            still = still + 1 if is_idle and now == seen else 0
            seen = now

    async def restart(self, tier: str) -> None:
        """Kill a tier's process at once, as a crash would, and wait until its engines have a new one. What
        was in host memory is gone; what is on disk is found again. Raises DeadlineExceeded."""
        tiers = self.tiers[tier]
        (status,) = (await tiers.status()).values()
        engines = [self.engines[n] for n, (_, t) in self._wanted.items() if t == tier]
        before = {e.name: e.tier for e in engines}
        os.kill(status["pid"], signal.SIGKILL)
        until = time.monotonic() + SETTLE_S
        while any(e.tier is None or e.tier is before[e.name] for e in engines):
            if time.monotonic() > until:
                raise DeadlineExceeded(f"another life of the tier {tier}", SETTLE_S)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        try:
            for engine in self.engines.values():
                if engine.line is not None:
                    await engine.line.close()
                if engine.is_running and not engine.died.done():
                    await stop_loops(engine, 0.0)
                    await dissolve(engine)
        finally:
            for tiers in self.tiers.values():
                await tiers.close()
            self._pool.free_all()


def drop_page_cache(folder: Path) -> None:
    """Have the next reads of these files come from the disk, as far as the system does as it is told."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
