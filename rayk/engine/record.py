"""Record each step of an engine: what it was made of, and what it took."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rayk.costs.features import step_features, windows_of
from rayk.types.batch import ScheduledBatch
from rayk.types.clock import Clock, host_clock
from rayk.types.steps import StepRow

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.engine.loop import TurnStats
    from rayk.engine.rank import EngineRank

MAX_STEPS = 1 << 20
"""Later steps of an engine are not recorded: they would take over 170 MB."""
_COLUMNS = (
    "step", "begin_ns", "turn_ns", "model_ns", "num_commands", "num_requests", "num_tokens", "num_logits",
    "num_prefills", "num_pairs", "num_seen", "num_drafts", "num_running", "num_waiting", "num_free_blocks",
    "num_cached_blocks",
)  # fmt: skip


class StepRecorder:
    """Records steps on rank 0, beside what else counts them. Implements TurnStats."""

    def __init__(
        self, leader: Leader, inner: TurnStats, windows: Sequence[int] = (), clock: Clock = host_clock
    ) -> None:
        """`windows`: the model's, see costs.windows_of."""
        self._leader = leader
        self._inner = inner
        self._windows = tuple(windows)
        self._clock = clock
        self._values = array("q")

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int = 0) -> None:
        self._inner.stepped(batch, busy_ns, model_ns, num_commands)
        if len(self._values) >= MAX_STEPS * (len(_COLUMNS) + 2 * len(self._windows)):
            return
        begin_ns = self._clock() - busy_ns
        f = step_features(batch, self._windows)
        scheduler, pool = self._leader.scheduler, self._leader.manager.pool
        self._values.extend(
            (
                batch.step, begin_ns, busy_ns, model_ns, num_commands, f.num_requests, f.num_tokens,
                f.num_logits, f.num_prefills, f.num_pairs, f.num_seen, f.num_drafts,
                scheduler.num_running, scheduler.num_waiting, pool.num_free_blocks, pool.num_cached_blocks,
            )
        )  # fmt: skip
        for pair in f.windowed:
            self._values.extend(pair)

    def turned(self) -> None:
        self._inner.turned()

    def recorded(self) -> RecordedSteps:
        """Return what was recorded so far; it can be pickled."""
        return RecordedSteps(self._values, len(self._windows))


def recorder(rank: EngineRank, leader: Leader, inner: TurnStats) -> StepRecorder:
    """Return what records the steps of an engine whose rank 0 this is."""
    return StepRecorder(leader, inner, windows_of(rank.model_config))


class RecordedSteps:
    """An engine's steps in one array, so that they are small on their way; `begin_ns` by its host's clock."""

    def __init__(self, values: array[int], num_windows: int) -> None:
        self._values = values
        self._num_windows = num_windows

    @property
    def is_full(self) -> bool:
        """Whether steps may be missing at the end."""
        return len(self) >= MAX_STEPS

    def __len__(self) -> int:
        return len(self._values) // (len(_COLUMNS) + 2 * self._num_windows)

    def rows(self, *, cell_id: str, repeat: int, engine: str, started_ns: int) -> Iterator[StepRow]:
        """Yield rows; `started_ns`: when the repeat began, by the same clock."""
        num_columns = len(_COLUMNS)
        width = num_columns + 2 * self._num_windows
        for at in range(0, len(self) * width, width):
            values = self._values[at : at + width].tolist()
            row = dict(zip(_COLUMNS, values[:num_columns], strict=True))
            row["begin_ns"] -= started_ns
            rest = values[num_columns:]
            windowed = tuple(zip(rest[::2], rest[1::2], strict=True))
            yield StepRow(cell_id=cell_id, repeat=repeat, engine=engine, windowed=windowed, **row)
