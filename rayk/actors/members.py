"""Member: one engine of a deployment over all its lives."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rayk.actors.deployment_metrics import EngineNow
from rayk.actors.engines import EngineHandle
from rayk.actors.forming import hear, until_it_hangs
from rayk.lines.line import LineAddress
from rayk.sched.dispatcher import FormAgain
from rayk.sched.policy import EngineLoad
from rayk.specs.serving import EngineEntry
from rayk.types.errors import InternalError, RaykError
from rayk.types.serving import EngineState
from rayk.types.tasks import until

SILENT_S = 4.0
"""An engine with a rank that gave no word for so long is not well. It is not ended for that: machines
stall."""
KEPT_BUGS = 16
"""Requests that ended with an engine ask what it died of while they are young."""


@dataclass(eq=False)
class Member:
    """One engine over all its lives."""

    entry: EngineEntry
    role: str
    handle: EngineHandle | None = None
    line: LineAddress | None = None
    """The address of rank 0 of its current life."""
    state: str = "forming"
    """One of forming, ready, lost."""
    trouble: str = ""
    """Why it is not ready."""
    turned_s: float = 0.0
    """When it was last seen to take a turn (time.monotonic)."""
    heard_s: float = 0.0
    """When all its ranks last gave a word (time.monotonic): in the middle of a long step, too."""
    num_restarts: int = 0
    """Lives that it has lost."""
    restart: dict[str, object] = field(default_factory=dict)
    """How long its last restart took, in all and by parts, as far as is known."""
    decided: EngineHandle | None = None
    """The last life whose death the dispatcher has decided about."""
    again: FormAgain | None = None
    """What it decided."""
    next_life: asyncio.Future[None] | None = None
    """Done when it was formed again, or cannot be; None: nothing waits for that."""
    bugs: deque[tuple[int, InternalError]] = field(default_factory=lambda: deque(maxlen=KEPT_BUGS))
    """Bugs that its last lives died of, by epoch."""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def life(self) -> EngineHandle:
        """Return its current life, or its last one."""
        assert self.handle is not None, f"{self.name} was never formed"
        return self.handle

    @property
    def life_line(self) -> LineAddress:
        assert self.line is not None, f"{self.name} was never formed"
        return self.line

    @property
    def is_live(self) -> bool:
        """Return whether it takes requests, as far as is known."""
        return self.state == "ready" and not self.life.died.done()

    @property
    def epoch(self) -> int:
        """Return the epoch of its last life; 0 before the first."""
        return 0 if self.handle is None else self.handle.epoch

    async def until_lost(self, hang_s: float | None, *, hears: bool) -> None:
        """Watch its current life until that is over. A life that takes no turn in `hang_s` is ended. `hears`:
        ask its ranks for words meanwhile."""

        def on_turn(engine: EngineHandle) -> None:
            if engine is self.handle:
                self.turned_s = time.monotonic()

        def on_word(engine: EngineHandle) -> None:
            if engine is self.handle:
                self.heard_s = time.monotonic()

        watches = [] if hang_s is None else [until_it_hangs(self.life, hang_s, on_turn)]
        if hears and hang_s is not None:
            watches.append(hear(self.life, hang_s, on_word))
        await until(self.life.died, *watches)
        if isinstance(found := self.life.died.exception(), InternalError):
            self.bugs.append((self.epoch, found))

    async def death(self, epoch: int, within_s: float) -> BaseException | None:
        """Return what this life died of, as EngineHandle.death; of an earlier life only a bug is known."""
        if self.handle is not None and epoch == self.epoch:
            return await self.handle.death(within_s)
        return dict(self.bugs).get(epoch)

    def why_unwell(self, now: float, patience_s: float) -> str:
        """Explain why requests should not come to it; empty if they may. `now`: time.monotonic."""
        age_s, silent_s = now - self.turned_s, now - self.heard_s
        if self.state == "ready" and silent_s > SILENT_S:
            return f"{self.name} has given no sign of life for {silent_s:.0f} s"
        if self.state == "ready":
            return f"{self.name} took no step for {age_s:.0f} s" if age_s > patience_s else ""
        return f"{self.name} is {self.state}: {self.trouble}".removesuffix(": ")

    @property
    def now(self) -> EngineNow:
        return EngineNow(self.name, self.role, self.state == "ready")

    def row(self, now: float) -> dict[str, object]:
        """Make its row of types.serving.Health. `now`: time.monotonic."""
        return {
            "name": self.name,
            "role": self.role,
            "state": self.state,
            "trouble": self.trouble,
            "epoch": self.epoch,
            "turned_s_ago": round(now - self.turned_s, 3) if self.turned_s else None,
            "restart": dict(self.restart),
        }

    async def said(self, timeout_s: float) -> dict[str, Any]:
        """Return its leader's own counters; empty where the leader does not answer in time."""
        if self.state != "ready":
            return {}
        reply = self.life.leader.status.options(concurrency_group="control").remote()
        try:
            return await self.life.guard(reply, "how it is", timeout_s)
        except RaykError:
            return {}

    def told(self, load: EngineLoad, said: dict[str, Any]) -> EngineState:
        """Make its state for users. `said`: its leader's counters."""
        own = (
            "num_running",
            "num_waiting",
            "num_steps",
            "num_computed_tokens",
            "num_sampled_tokens",
            "num_free_blocks",
            "num_blocks",
        )
        return EngineState(
            name=self.name,
            role=self.role,
            tp=self.entry.config.tp,
            pp=self.entry.config.pp,
            dcp=self.entry.config.dcp,
            state=self.state,
            trouble=self.trouble,
            epoch=self.epoch,
            num_restarts=self.num_restarts,
            restart=dict(self.restart),
            num_requests=load.num_requests,
            num_prompt_tokens=load.num_prompt_tokens,
            num_output_tokens=load.num_output_tokens,
            forward_s=said["model_ns"] / 1e9 if "model_ns" in said else None,
            **{name: said.get(name) for name in (*own, "offload")},
        )
