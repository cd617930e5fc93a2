"""Engines record their steps: sizes, times and what was left of blocks."""

from __future__ import annotations

import pickle
from typing import Any

from rayk.costs import step_features
from rayk.engine import record
from rayk.engine.loop import EngineLoop
from rayk.engine.record import RecordedSteps, StepRecorder
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.types.batch import ScheduledBatch
from rayk.types.request import Request, SamplingParams
from tests.engine.test_clocks import STEP_NS, TOKEN_NS, SteppedLeader, TimedRank
from tests.kv.brute import full

WINDOW = 8
COMMAND_NS = 700_000


class Counted:
    """Keeps the batches that it was told of."""

    def __init__(self) -> None:
        self.batches: list[ScheduledBatch] = []
        self.num_turns = 0

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int) -> None:
        del busy_ns, model_ns, num_commands
        self.batches.append(batch)

    def turned(self) -> None:
        self.num_turns += 1


class Slow:
    """Takes COMMAND_NS for a command."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank

    def execute(self, command: object) -> object:
        self.rank.now_ns += COMMAND_NS
        return command

    def blocks_assigned(self, block_ids: tuple[int, ...]) -> None:
        del block_ids

    def poll(self) -> object:
        return None


def run() -> tuple[RecordedSteps, Counted]:
    """A prompt of 20 tokens in chunks of 8, 3 outputs; a command is carried out before the second chunk."""
    rank: Any = TimedRank()
    manager = KVCacheManager((KVCacheGroup(0, full(4), (0,), 1),), 16)
    scheduler = Scheduler(manager, max_batch_tokens=8, max_seqs=2, max_positions=64)
    leader = SteppedLeader(scheduler, manager, clock=rank.clock)
    counted = Counted()
    recorder = StepRecorder(leader, counted, (WINDOW,), rank.clock)
    loop = EngineLoop(rank, Slow(rank), leader, stats=recorder, clock=rank.clock)
    prompt = tuple(range(20))
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3))
    leader.submit(request, lambda event: None)
    rank.now_ns = 1000
    loop.turn()
    leader.call("command")
    while scheduler.has_work:
        loop.turn()
    return recorder.recorded(), counted


def test_each_step_is_recorded_with_its_sizes_and_times() -> None:
    recorded, counted = run()
    found = pickle.loads(pickle.dumps(recorded))
    rows = list(found.rows(cell_id="c", repeat=2, engine="prefill0", started_ns=400))
    tokens = [8, 8, 4, 1, 1]
    commands = [0, 1, 0, 0, 0]
    models = [STEP_NS + TOKEN_NS * n for n in tokens]
    turns = [ns + COMMAND_NS * n for ns, n in zip(models, commands, strict=True)]
    assert [row.num_tokens for row in rows] == tokens
    assert [row.num_commands for row in rows] == commands
    assert [row.model_ns for row in rows] == models
    assert [row.turn_ns for row in rows] == turns
    assert [row.begin_ns for row in rows] == [600 + sum(turns[:n]) for n in range(5)]
    for row, batch in zip(rows, counted.batches, strict=True):
        features = step_features(batch, (WINDOW,))
        names = ("num_requests", "num_logits", "num_prefills", "num_pairs", "num_seen", "windowed")
        assert [getattr(row, n) for n in names] == [getattr(features, n) for n in names]
        assert (row.cell_id, row.repeat, row.engine, row.step) == ("c", 2, "prefill0", batch.step)
    # Blocks of 4 tokens: 5 for the prompt, a sixth for the outputs; all are free in the end.
    assert [row.num_free_blocks for row in rows] == [13, 11, 10, 9, 15]
    assert [row.num_running for row in rows] == [1, 1, 1, 1, 0]
    assert counted.num_turns >= 5


def test_recording_ends_where_memory_would_be_short(monkeypatch) -> None:
    monkeypatch.setattr(record, "MAX_STEPS", 3)
    recorded, counted = run()
    assert (len(recorded), recorded.is_full, len(counted.batches)) == (3, True, 5)
