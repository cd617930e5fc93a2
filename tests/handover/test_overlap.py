"""An engine decodes while others join it: no step waits for a peer's answer."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from rayk.engine.leader import RequestEvent
from rayk.handover.commands import WarmUp
from rayk.transfer import try_read
from rayk.types.errors import TransferError
from tests.conftest import CheckpointFactory
from tests.pd import Pair, local_agents, make_request


def test_a_decode_engine_goes_on_while_a_producer_does_not_answer(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, num_calls, now_s = local_agents(delay_polls=10**9), 20, 0.0
    monkeypatch.setattr(try_read, "time", SimpleNamespace(monotonic=lambda: now_s))
    with Pair.open(checkpoint("qwen3"), tp=(1, 2), make_agent=never, num_blocks=160) as pair:
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        request = make_request("r", [1, 2, 3], max_tokens=2000)
        pair.d.handover.submit(request, events.put, hand_over=False)
        wire = WarmUp(pair.p.engine.name, 600.0)
        assert pair.d.call(wire) == [False, False]
        num_before = events.qsize()
        assert [pair.d.call(wire) for _ in range(num_calls)] == [[False, False]] * num_calls
        # Each call took a turn of its own, with a step of the request; one that waited would be alone.
        assert events.qsize() - num_before >= num_calls - 1
        now_s = 601.0
        with pytest.raises(TransferError, match="does not answer"):
            pair.d.call(wire)
        pair.d.engine.leader.abort("r")
        pair.check_all_free()
