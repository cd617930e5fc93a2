"""An engine decodes while others join it: no step waits for a peer's answer."""

from __future__ import annotations

import queue

import pytest

from rayk.actors.commands import Wire
from rayk.engine.leader import RequestEvent
from rayk.types.errors import TransferError
from tests.pd import Pair, local_agents, make_request


def test_a_decode_engine_goes_on_while_a_producer_does_not_answer(checkpoint) -> None:
    never = local_agents(delay_polls=10**9)
    with Pair.open(checkpoint("qwen3"), tp=(1, 2), make_agent=never, num_blocks=160) as pair:
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        request = make_request("r", [1, 2, 3], max_tokens=2000)
        pair.d.handover.submit(request, events.put, hand_over=False)
        engine = pair.p.engine.name
        answers = [pair.d.call(Wire(engine, 0.5))]
        num_before = events.qsize()

        def wire() -> None:
            while True:
                answers.append(pair.d.call(Wire(engine, 0.5)))

        with pytest.raises(TransferError, match="does not answer"):
            wire()
        assert all(answer == [False, False] for answer in answers)
        # Each call took a turn of its own, with a step of the request; one that waited would be alone.
        assert events.qsize() - num_before >= len(answers) - 1 > 1
        pair.d.engine.leader.abort("r")
        pair.check_all_free()
