"""The Worker as its owners see it, without torch: they ask for workers before they import it themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.actors.rank_spec import RankSpec
    from rayk.engine.leader import RequestEvent
    from rayk.engine.record import RecordedSteps
    from rayk.handover.engine_request import EngineRequest
    from rayk.handover.tier_side import TierFacts
    from rayk.lines.line import LineAddress


class WorkerActor:
    """Passes calls on to a Worker, which is imported in the actor's process alone. None of its methods may be
    a coroutine: see worker.LineStreams."""

    def __init__(self, name: str) -> None:
        gc.disable()  # what is imported stays, and looking for garbage in it is a fifth of the time
        try:
            from rayk.actors.worker import Worker
        finally:
            gc.enable()
        self._worker = Worker(name)

    def __repr__(self) -> str:
        return repr(self._worker)

    def describe(self) -> dict[str, Any]:
        return self._worker.describe()

    def clock_ns(self) -> int:
        return self._worker.clock_ns()

    def check_model(self, model: str) -> None:
        self._worker.check_model(model)

    def reserve_address(self) -> str:
        return self._worker.reserve_address()

    def form(self, spec: RankSpec) -> dict[str, Any]:
        return self._worker.form(spec)

    def run(self) -> None:
        self._worker.run()

    def call(self, command: object, timeout_s: float) -> list[object]:
        return self._worker.call(command, timeout_s)

    def generate(self, asked: EngineRequest) -> Iterator[list[RequestEvent]]:
        yield from self._worker.generate(asked)

    def open_line(self, host: str) -> LineAddress:
        return self._worker.open_line(host)

    def abort(self, request_id: str) -> None:
        self._worker.abort(request_id)

    def attach_tier(self, handle: Any, facts: TierFacts) -> None:
        self._worker.attach_tier(handle, facts)

    def lose_tier(self, epoch: int, why: str) -> None:
        self._worker.lose_tier(epoch, why)

    def settle(self, request_id: str) -> None:
        self._worker.settle(request_id)

    def holders(self, block_ids: Sequence[int], timeout_s: float) -> dict[int, str]:
        return self._worker.holders(block_ids, timeout_s)

    def status(self) -> dict[str, Any]:
        return self._worker.status()

    def recorded_steps(self) -> RecordedSteps | None:
        return self._worker.recorded_steps()

    def check_integrity(self) -> None:
        self._worker.check_integrity()

    def take_role(self, role: str) -> None:
        self._worker.take_role(role)

    def stop(self) -> None:
        self._worker.stop()

    def dissolve(self) -> None:
        self._worker.dissolve()

    def release(self, within_s: float) -> bool:
        return self._worker.release(within_s)
