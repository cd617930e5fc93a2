"""Stand in for a rank: a step takes the time that a cost table says, and computes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from rayk.costs import DecodeRun, EngineCosts, StepFeatures, step_features
from rayk.costs.table import quantile
from rayk.simulate.clock import LocalClock
from rayk.types.batch import Rollback, ScheduledBatch
from rayk.types.drafting import DraftPlan
from rayk.types.speculative import SpeculativeConfig

NO_LOGITS = torch.empty(0)


class Slow(Protocol):
    """Tells how long something takes beside what else runs on the host, given when it begins and what it
    takes alone. Implemented by simulate.host."""

    def step(self, begin_ns: int, length_ns: int, *, is_decode: bool) -> int:
        """Tell it of a step, its turn included."""
        ...

    def work(self, begin_ns: int, length_ns: int) -> int:
        """Tell it of something beside the steps."""
        ...


class StepTimer:
    """Tells what an engine's steps take."""

    def __init__(
        self,
        costs: EngineCosts,
        windows: Sequence[int] = (),
        *,
        draw: np.random.Generator | None = None,
        strict: bool = True,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        """`draw`: steps vary as those measured did; None: each takes the mean. `speculative`: the engine
        drafts so."""
        self.costs = costs
        self.windows = tuple(windows)
        self.num_outside_hull = 0
        self._draw = draw
        self._drawn: deque[float] = deque()  # for steps to come
        self._strict = strict
        self._turns = costs.turns_of(speculative)

    def features(self, batch: ScheduledBatch) -> StepFeatures:
        return step_features(batch, self.windows)

    def model_ns(self, features: StepFeatures) -> int:
        """Tell what the step itself takes. Raises OutsideHull where it must lie inside."""
        is_outside = not self.costs.is_inside(features)
        self.num_outside_hull += is_outside
        length_ns = self.costs.step_ns(features, strict=self._strict and is_outside)
        if self._draw is not None:
            share = self._drawn.popleft() if self._drawn else self._draw.random()
            length_ns *= quantile(self.costs.table_of(features).ratios, share)
        return round(length_ns)

    def ahead(self, run: DecodeRun) -> tuple[list[int], int]:
        """Tell what each of these steps takes, up to the first that lies outside, and what the host takes of
        each one's turn: what `model_ns` and `host_ns` would say. `passed` says how many were taken."""
        table = self.costs.decode
        lengths_ns = table.each_ns(run)
        del lengths_ns[table.hull.num_inside(run) :]
        if self._draw is not None:
            self._drawn += self._draw.random(max(0, len(lengths_ns) - len(self._drawn))).tolist()
            drawn = zip(lengths_ns, self._drawn, strict=False)  # some may be left for steps to come
            lengths_ns = [ns * quantile(table.ratios, share) for ns, share in drawn]
        return list(map(round, lengths_ns)), self.host_ns(run)

    def passed(self, num_steps: int) -> None:
        """So many steps of those asked about last were taken."""
        for _ in range(min(num_steps, len(self._drawn))):
            self._drawn.popleft()

    def host_ns(self, features: StepFeatures | DecodeRun) -> int:
        """Tell what the host takes of the step's turn beside it."""
        if self._turns is not None:
            assert isinstance(features, StepFeatures), "engines that draft take single steps"
            return round(self._turns.ns(features))
        return round(self.costs.turn_ns(features))


class SimRank:
    """Implements what EngineLoop needs of an EngineRank, which stands for all of an engine's ranks.

    Without `runs_ahead` it computes before it returns. With it, as on a device, a step is queued behind the
    one before, and whoever fetches its tokens waits for it. The host's part of a turn comes before its step.
    """

    def __init__(
        self,
        clock: LocalClock,
        timer: StepTimer,
        *,
        runs_ahead: bool = False,
        slow: Slow | None = None,
        drafts_on_ranks: bool = False,
    ) -> None:
        """`slow`: None: nothing else runs on its host. `drafts_on_ranks`: it has a drafter."""
        self.comm: Any = SimpleNamespace(rank=0, size=1)
        self.comms: Any = SimpleNamespace(before=None, after=None)
        self.stage = 0
        self.why_not_ahead = None if runs_ahead else "it computes before it returns"
        self.drafter = drafts_on_ranks or None
        self.drawn_from: Mapping[int, Sequence[torch.Tensor]] = {}
        self.timer = timer
        self.features: deque[StepFeatures] = deque()  # of the steps that nobody has counted yet
        self.measure: Callable[[], int] = lambda: 0
        self._clock = clock
        self._slow = slow
        self.free_ns = 0  # when the device is done with all that is queued
        self._runs_ahead = runs_ahead

    def step(self, batch: ScheduledBatch) -> torch.Tensor:
        """Take the time of a step; the logits are none."""
        features = self.timer.features(batch)
        self.features.append(features)
        host_ns, took_ns = self.timer.host_ns(features), self.timer.model_ns(features)
        if self._slow is not None:
            begin_ns, alone_ns = max(self._clock.end_ns, self.free_ns - host_ns), host_ns + took_ns
            turn_ns = self._slow.step(begin_ns, alone_ns, is_decode=features.is_decode)
            host_ns = round(host_ns * turn_ns / max(1, alone_ns))
            took_ns = turn_ns - host_ns
        self._clock.advance(host_ns)
        self.free_ns = max(self.free_ns, self._clock.end_ns) + took_ns
        if not self._runs_ahead:
            self._clock.wait_until(self.free_ns)
        self.measure = lambda: took_ns
        return NO_LOGITS

    def go_on(self, features: StepFeatures, took_ns: int, free_ns: int) -> None:
        """Have this step queued, and those before it counted: whoever took them took them without this."""
        self.features = deque([features])
        self.measure = lambda: took_ns
        self.free_ns = free_ns

    def work(self, length_ns: float) -> int:
        """Take time for something beside the steps, once those that are queued have run; return how long."""
        self._clock.wait_until(self.free_ns)
        took_ns = round(length_ns)
        if self._slow is not None and took_ns:
            took_ns = self._slow.work(self._clock.end_ns, took_ns)
        self._clock.advance(took_ns)
        return took_ns

    def propose(self, batch: ScheduledBatch, plan: DraftPlan) -> torch.Tensor:
        """Propose nothing: what a drafter on ranks says is the leader's business (SimLeader.proposer), and
        its time is a part of the turns of engines that draft."""
        del batch, plan
        return NO_LOGITS

    def roll_back(self, rollbacks: Sequence[Rollback]) -> None:
        """Do nothing: it has no states. Copying them takes no time in any table."""

    def prompt_logits(self) -> Iterator[torch.Tensor]:
        return iter(())

    def keep(self, tokens: torch.Tensor | None) -> None:
        """Keep nothing: the next step's tokens do not matter."""

    def fetch(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Return what waits for the step that was queued last."""
        del tokens
        done_ns = self.free_ns

        def wait() -> list[int]:
            self._clock.wait_until(done_ns)
            return []

        return wait
