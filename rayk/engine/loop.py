"""Run an engine's turns on every rank. A turn is roll-backs of states, commands, at most one model step,
and a poll.

Rank 0's leader decides a turn, the header is broadcast, all ranks carry it out; where the leader asked
for it, command results and polls are gathered back to rank 0. An idle engine turns slowly: that is the
heartbeat its peers wait for.

Where a rank runs ahead, a turn queues its step and then settles the one of the turn before: fetches its
tokens, which the step that was just queued takes on the device. With pipeline parallel, a stage computes the
step that came to it as many turns ago as there are stages before it; see pipeline.

Where a drafter is on the ranks, it computes once the step is settled, in the same turn: before the next one's
commands hand out what it writes. Rank 0 tells the others what came of the step.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rayk.engine.header import decode_batch, decode_plan, encode_batch, encode_plan
from rayk.engine.pipeline import Due, Pipeline
from rayk.types.batch import Rollback, ScheduledBatch, StepTokens
from rayk.types.clock import Clock, host_clock
from rayk.types.drafting import DraftPlan, fresh_blocks
from rayk.types.errors import RaykError

if TYPE_CHECKING:
    import torch

    from rayk.engine.rank import EngineRank
    from rayk.engine.sampling import PendingTokens
    from rayk.parallel.comm import Comm

_PREFIX = struct.Struct("<Bi")  # flags, bytes of the batch


class RankExtension(Protocol):
    """Lets the engine's owner run commands on every rank between steps (KV transfers). Single-threaded."""

    def execute(self, command: object) -> object:
        """Run one command. A RaykError raised here is the command's result; anything else ends the rank."""

    def blocks_assigned(self, block_ids: tuple[int, ...]) -> None:
        """Learn which blocks were handed out and are about to be written."""

    def poll(self) -> object:
        """Make progress; return news for the leader (picklable)."""


class TurnStats(Protocol):
    """Counts a rank's turns. Implemented by engine.stats."""

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int) -> None:
        """Count a turn with a step, of which the forward pass took `model_ns`; `num_commands` were carried
        out in it."""
        ...

    def turned(self) -> None:
        """Count a turn, after `stepped` if it had a step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Turn:
    batch: ScheduledBatch | None = None
    rollbacks: tuple[Rollback, ...] = ()
    """Before all else: states of drafts that the last step of these rows did not accept."""
    commands: tuple[object, ...] = ()
    step_commands: tuple[object, ...] = ()
    """Executed on each rank just before it computes the batch; without results."""
    gather: bool = False  # bring command results and polls to rank 0
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class TurnResult:
    results: tuple[tuple[object, ...], ...]  # per rank, per command; empty unless gathered
    polls: tuple[object, ...]  # per rank; empty unless gathered


class TurnSource(Protocol):
    """Decides turns on rank 0 and takes their results. Implemented by engine.leader."""

    def wait(self) -> None:
        """Return when there is work, or after a heartbeat."""

    def plan(self) -> Turn: ...

    def sample(
        self, batch: ScheduledBatch, logits: torch.Tensor, prompt_logits: Iterable[torch.Tensor]
    ) -> PendingTokens:
        """Choose the step's tokens, on the device; see engine.sampling.sample_step. `prompt_logits` is used
        up."""

    def absorb(self, turn: Turn, result: TurnResult) -> None: ...

    def settle(self, batch: ScheduledBatch, tokens: StepTokens) -> None:
        """Take what a step came to, in the order of steps."""

    def plan_drafts(self, batch: ScheduledBatch) -> DraftPlan:
        """Say what a drafter on ranks does after the step that was just settled."""

    def take_proposals(
        self, proposals: Sequence[Sequence[int]], drawn_from: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Take what it proposed, for the requests of the plan that asked for it, in their order; by place in
        that order, logits [V] that each token was drawn from, where it was."""

    def must_settle(self) -> bool:
        """Tell whether the tokens of the steps so far must be known before the next one is planned."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that is queued on the rank's device, and not settled."""

    batch: ScheduledBatch
    begun_ns: int
    num_commands: int  # carried out in its turn
    measure: Callable[[], int]  # the forward pass, in ns
    fetch: Callable[[], StepTokens] | None  # on rank 0


@dataclass(slots=True)
class LoopTimes:
    """Adds up a rank's time in nanoseconds: the control plane is `turn` minus `model`. Rank 0's turns count
    from when it decides one; a peer's include its wait for rank 0."""

    num_turns: int = 0
    num_steps: int = 0
    turn_ns: int = 0  # turns that had a step
    model_ns: int = 0  # the decoder's forward pass up to the logits, its collectives included
    num_computed_tokens: int = 0  # tokens that forward passes took
    num_sampled_tokens: int = 0  # on rank 0, which samples


def encode_turn(turn: Turn) -> bytes:
    """Write flags, the batch as int32, then (rarely) pickled roll-backs and commands."""
    batch = encode_batch(turn.batch) if turn.batch is not None else b""
    others = turn.commands, turn.step_commands, turn.rollbacks
    flags = int(turn.gather) | int(turn.stop) << 1 | int(any(others)) << 2
    pickled = pickle.dumps(others) if any(others) else b""
    return _PREFIX.pack(flags, len(batch)) + batch + pickled


def decode_turn(payload: bytes) -> Turn:
    """Invert `encode_turn`, request ids aside."""
    flags, size = _PREFIX.unpack_from(payload)
    body = payload[_PREFIX.size :]
    commands, step_commands, rollbacks = pickle.loads(body[size:]) if flags & 4 else ((), (), ())
    return Turn(
        batch=decode_batch(body[:size]) if size else None,
        rollbacks=rollbacks,
        commands=commands,
        step_commands=step_commands,
        gather=bool(flags & 1),
        stop=bool(flags & 2),
    )


class EngineLoop:
    """Runs turns on one rank until told to stop."""

    def __init__(
        self,
        rank: EngineRank,
        extension: RankExtension,
        leader: TurnSource | None,
        on_step: Callable[[int], None] | None = None,
        stats: TurnStats | None = None,
        clock: Clock = host_clock,
    ) -> None:
        assert (leader is not None) == (rank.comm.rank == 0), "rank 0 and only rank 0 has the leader"
        self.times = LoopTimes()
        self._rank = rank
        self._comm: Comm = rank.comm
        self._extension = extension
        self._leader = leader
        self._on_step = on_step
        self._stats = stats
        self._clock = clock
        self._pipeline = Pipeline(rank)
        self._runs_ahead = rank.why_not_ahead is None
        self._drafts = rank.drafter is not None
        assert not (self._drafts and self._runs_ahead), "drafts come of known tokens"
        self._in_flight: StepInFlight | None = None
        self._settled_ns = 0  # when the last step was settled

    def run(self) -> None:
        """Turn until the leader says stop. Raises CommError when a peer is gone."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Run one turn; False when it was the last."""
        if self._leader is not None:
            self._leader.wait()
        begun_ns = self._clock()
        turn = self._share(self._leader.plan() if self._leader is not None else None)
        if turn.rollbacks:
            self._rank.roll_back(turn.rollbacks)
        results = tuple(self._execute(command) for command in turn.commands)
        # At once on every rank: before any of them writes.
        assigned = turn.batch.fresh_blocks() if turn.batch is not None else ()
        if assigned:
            self._extension.blocks_assigned(assigned)
        due = self._pipeline.tick(turn.batch, turn.step_commands)
        last, self._in_flight = self._in_flight, self._begin(due, begun_ns, len(turn.commands))
        poll = self._extension.poll()
        gathered = self._gather(turn, results, poll)
        if self._leader is not None:
            self._leader.absorb(
                turn, TurnResult(results=tuple(r for r, _ in gathered), polls=tuple(p for _, p in gathered))
            )
        self._settle(last)
        if not self._runs_ahead or turn.stop or (self._leader is not None and self._leader.must_settle()):
            self._settle(self._in_flight)
            self._in_flight = None
        self.times.num_turns += 1
        if self._stats is not None:
            self._stats.turned()
        return not turn.stop

    @property
    def in_flight(self) -> StepInFlight | None:
        """The step that is queued, and not settled."""
        return self._in_flight

    def since_ns(self, step: StepInFlight) -> int:
        """Tell since when a step's turn counts, if nothing is settled before it: beside the step before it
        from that one's end."""
        return max(step.begun_ns, self._settled_ns)

    def go_on(self, batch: ScheduledBatch, pending: PendingTokens, *, begun_ns: int, settled_ns: int) -> None:
        """Have this step in flight, queued in a turn that began at `begun_ns` and settled the one before at
        `settled_ns`: whoever took the turns up to there took them without this loop. For a simulation."""
        self._in_flight = StepInFlight(batch, begun_ns, 0, self._rank.measure, self._fetching(pending))
        self._settled_ns = settled_ns

    def _share(self, turn: Turn | None) -> Turn:
        if self._comm.size == 1:
            assert turn is not None
            return turn
        payload = self._comm.broadcast_bytes(encode_turn(turn) if turn is not None else None)
        return turn if turn is not None else decode_turn(payload)

    def _execute(self, command: object) -> object:
        try:
            return self._extension.execute(command)
        except RaykError as error:
            return error

    def _begin(self, due: Due | None, begun_ns: int, num_commands: int) -> StepInFlight | None:
        if due is None:
            return None
        batch = due.batch
        if self._on_step is not None:
            self._on_step(batch.step)
        for command in due.commands:
            self._execute(command)
        logits = self._rank.step(batch)
        prompt_logits = self._rank.prompt_logits()
        pending = None
        if self._leader is not None:
            pending = self._leader.sample(batch, logits, prompt_logits)
        for _ in prompt_logits:  # a collective: every rank takes part
            pass
        if self._runs_ahead:
            self._rank.keep(pending.tokens if pending is not None else None)
        fetch = self._fetching(pending) if pending is not None else None
        num_commands += len(due.commands)
        return StepInFlight(batch, begun_ns, num_commands, self._rank.measure, fetch)

    def _fetching(self, pending: PendingTokens) -> Callable[[], StepTokens]:
        fetch = self._rank.fetch(pending.tokens)
        return lambda: pending.finish(fetch())

    def _settle(self, step: StepInFlight | None) -> None:
        if step is None:
            return
        num_sampled = 0
        if step.fetch is not None:
            assert self._leader is not None
            tokens = step.fetch()
            num_sampled = len(tokens.token_ids)
            if tokens.accepted:
                num_sampled += sum(map(len, tokens.accepted.values()))
            self._leader.settle(step.batch, tokens)
        if self._drafts:
            self._draft(step.batch)
        model_ns, now_ns = step.measure(), self._clock()
        turn_ns = now_ns - self.since_ns(step)
        self._settled_ns = now_ns
        self.times.num_steps += 1
        self.times.model_ns += model_ns
        self.times.turn_ns += turn_ns
        self.times.num_computed_tokens += step.batch.num_tokens
        self.times.num_sampled_tokens += num_sampled
        if self._stats is not None:
            self._stats.stepped(step.batch, turn_ns, model_ns, step.num_commands)

    def _draft(self, batch: ScheduledBatch) -> None:
        """Let the drafter go on from a step that was just settled."""
        plan = None if self._leader is None else self._leader.plan_drafts(batch)
        if self._comm.size > 1:
            payload = self._comm.broadcast_bytes(None if plan is None else encode_plan(plan))
            plan = decode_plan(payload) if plan is None else plan
        assert plan is not None
        if assigned := fresh_blocks(plan):
            self._extension.blocks_assigned(assigned)
        proposals = self._rank.propose(batch, plan)
        if self._leader is not None:
            self._leader.take_proposals(proposals.tolist(), self._rank.drawn_from)

    def _gather(
        self, turn: Turn, results: tuple[object, ...], poll: object
    ) -> list[tuple[tuple[object, ...], object]]:
        if not turn.gather:
            return []
        if self._comm.size == 1:
            return [(results, poll)]
        payloads = self._comm.gather_bytes(pickle.dumps((results, poll)))
        return [pickle.loads(p) for p in payloads] if payloads is not None else []


class NoExtension:
    """Fits an engine that moves no KV."""

    def execute(self, command: object) -> object:
        raise AssertionError(f"no extension takes {command!r}")

    def blocks_assigned(self, block_ids: tuple[int, ...]) -> None: ...

    def poll(self) -> object:
        return None
