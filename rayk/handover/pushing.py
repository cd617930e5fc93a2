"""Producer's half of a push: which requests are pushed (rank 0), and what each rank does for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rayk.handover.commands import EndPush, PushStep
from rayk.transfer.options import kept_layers
from rayk.transfer.push import Chunk
from rayk.transfer.pusher import Pusher

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.engine.rank import EngineRank
    from rayk.transfer.agent import TransferAgent
    from rayk.transfer.costs import CostTable
    from rayk.transfer.handshake import CacheDescription
    from rayk.transfer.push_messages import StopMessage
    from rayk.transfer.ticket import Reservation
    from rayk.types.batch import ScheduledBatch, ScheduledRequest


class Pushing:
    """Requests that are pushed while they are prefilled, on rank 0, on the loop's thread. `leader` is set
    when the hand-over is attached."""

    def __init__(self, commands: list[object]) -> None:
        """`commands`: what all ranks are to do at the next turn; appended to."""
        self._commands = commands
        self.leader: Leader | None = None
        self._requests: dict[str, Reservation] = {}
        self._attempts: dict[str, int] = {}
        """Request -> the attempt to push it of which a chunk was announced."""

    def begin(self, request_id: str, reservation: Reservation) -> None:
        """A request comes whose KV goes to these blocks."""
        self._requests[request_id] = reservation

    def step_commands(self, batch: ScheduledBatch) -> tuple[object, ...]:
        """Return what of the step is pushed."""
        if not self._requests:
            return ()
        assert self.leader is not None
        states = {s.request_id: s for s in self.leader.scheduler.scheduled(batch)}
        chunks = tuple(
            Chunk(
                reservation=self._requests[share.request_id],
                attempt=states[share.request_id].num_preemptions,
                start=self._first_row(share, states[share.request_id].num_preemptions),
                stop=share.num_computed_tokens + len(share.token_ids),
                block_tables=self.leader.manager.group_tables(share.request_id),
            )
            for share in batch.requests
            if share.request_id in self._requests
        )
        return (PushStep(chunks),) if chunks else ()

    def _first_row(self, share: ScheduledRequest, attempt: int) -> int:
        """Tell where a chunk's rows begin: the first one of an attempt brings what was cached, too."""
        is_first = self._attempts.get(share.request_id) != attempt
        self._attempts[share.request_id] = attempt
        return 0 if is_first else share.num_computed_tokens

    def take(self, request_id: str) -> Reservation | None:
        """The request leaves with its ticket: where it was pushed to, if it was."""
        self._attempts.pop(request_id, None)
        return self._requests.pop(request_id, None)

    def end(self, request_id: str, reason: str) -> None:
        """There will be no ticket: what is not written will not be. Nothing for a request that is not
        pushed."""
        reservation = self.take(request_id)
        if reservation is not None:
            self._commands.append(EndPush(reservation.reservation_id, reason))

    def clear(self) -> None:
        """The engine is going down."""
        self._requests.clear()
        self._attempts.clear()


class PushSide:
    """One producer rank between the engine's steps and its pusher."""

    def __init__(
        self,
        rank: EngineRank,
        make_agent: Callable[[], TransferAgent] | None,
        me: CacheDescription,
        push_layers: int | None,
        costs: CostTable | None = None,
    ) -> None:
        """`make_agent`: of the pusher's own; None where nothing is ever pushed. `push_layers`, `costs`: see
        Pusher."""
        self._rank = rank
        self._make_agent = make_agent
        self._me = me
        self._push_layers = push_layers
        self._costs = costs
        self._pusher: Pusher | None = None
        self._positions = {layer: i for i, layer in enumerate(kept_layers(me.geometry))}
        self._has_begun = False

    def connect(self, producers: Sequence[CacheDescription], consumers: Sequence[CacheDescription]) -> None:
        """Get ready to push to an engine. Raises RaykError."""
        if self._pusher is None:
            assert self._make_agent is not None, "this rank has no agent to push with"
            agent, buffer = self._make_agent(), self._rank.caches.buffer
            layers, costs = self._push_layers, self._costs
            self._pusher = Pusher(agent, buffer, self._me, push_layers=layers, costs=costs)
        self._pusher.connect(producers, consumers)

    def begin(self, step: PushStep) -> None:
        """The next step computes these chunks."""
        assert self._pusher is not None, "connect first"
        self._has_begun = False
        # A CPU that copies does not compute; on a GPU, as the last step went.
        is_gpu = self._rank.device.type == "cuda"
        layer_ns = self._rank.fence.step_ns() / len(self._rank.decoder.layers) if is_gpu else 0.0
        chunks = [replace(chunk, layer_ns=layer_ns) for chunk in step.chunks]
        self._rank.on_layer = partial(self._on_layer, chunks)

    def blocks_assigned(self, block_ids: Sequence[int]) -> None:
        """These are handed out: nobody may read them for their last owner any more."""
        if self._pusher is not None:
            self._pusher.wait_for(block_ids)

    def end(self, reservation_id: str, reason: str) -> None:
        """A request is over here."""
        assert self._pusher is not None, "connect first"
        self._pusher.end(reservation_id, reason)

    def turn(self, stops: Sequence[StopMessage]) -> None:
        """After each step: what it computed is known, and who wants blocks back."""
        self._rank.on_layer = None  # a drafter tells of its layers yet
        if self._pusher is not None:
            self._pusher.check()
            for message in stops:
                self._pusher.stop(message)

    def close(self) -> None:
        """Give the agent back."""
        self._rank.on_layer = None
        if self._pusher is not None:
            self._pusher.close()

    def _on_layer(self, chunks: Sequence[Chunk], layer: int) -> None:
        assert self._pusher is not None
        if not self._has_begun:
            # Not before: the step's blocks were handed out after the command came.
            self._has_begun = True
            self._pusher.begin(chunks)
        position = self._positions.get(layer)
        if position is not None:
            self._pusher.computed(position, chunks, self._rank.fence.mark())
