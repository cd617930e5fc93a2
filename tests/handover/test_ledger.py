"""Blocks put aside for transfers: counted at every stage where a hand-over is cancelled, all given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.usage import Ledger
from rayk.types.request import FinishReason
from tests.handover.cases import Model, stubborn_agents
from tests.pd import Pair, Side, make_request, wait_until

NUM_BLOCKS = 19
"""Of a prompt of 300 tokens."""


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def ledger(side: Side) -> Ledger:
    return side.engine.leader.manager.ledger


def test_what_is_handed_over_is_counted_on_both_sides(qwen3: Model) -> None:
    with Pair.open(qwen3.path, tp=(2, 1)) as pair:
        request = make_request("r", qwen3.prompts[2], 4)
        prefilled = pair.prefill(request)
        assert ledger(pair.p) == Ledger(NUM_BLOCKS, 0)
        assert ledger(pair.d) == Ledger(0, 0)
        assert pair.decode(request, prefilled).error is None
        pair.check_all_free()
        assert ledger(pair.p) == ledger(pair.d) == Ledger(NUM_BLOCKS, NUM_BLOCKS)


@pytest.mark.parametrize("stage", ["prefilling", "leased", "waiting", "reading", "decoding"])
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=["1to2", "2to1"])
def test_a_request_that_is_cancelled_at_any_stage_holds_nothing(
    qwen3: Model, stage: str, tp: tuple[int, int]
) -> None:
    make_agent, agents = stubborn_agents()
    with Pair.open(qwen3.path, tp=tp, make_agent=make_agent, num_blocks=80) as pair:
        request = make_request("r", qwen3.prompts[2], 600)
        if stage == "prefilling":
            stream = pair.start_prefill(request)
            pair.p.engine.leader.abort("r")
            pair.p.engine.collect(stream)
        else:
            _cancel_later(pair, request, stage, agents)
        for agent in agents:
            agent.go = True
        pair.p.handover.settle("r")
        pair.check_all_free()
        for side in (pair.p, pair.d):
            assert ledger(side).num_held == 0
            assert side.engine.leader.manager.leases == ()
        leased = 0 if stage == "prefilling" else NUM_BLOCKS
        assert ledger(pair.p).num_leased >= leased


def _cancel_later(pair: Pair, request: Any, stage: str, agents: list[Any]) -> None:
    prefilled = pair.prefill(request)
    assert ledger(pair.p).num_held == NUM_BLOCKS
    if stage == "leased":
        pair.p.engine.leader.abort("r")
        return
    receiving = pair.d.handover.receiving
    if stage == "waiting":  # for blocks, which another request has
        blocker = pair.d.engine.leader.manager
        pair.d.run(lambda: blocker.extend("blocker", 70 * 16))
    stream = pair.start_decode(request, prefilled)
    if stage == "waiting":
        wait_until(lambda: bool(receiving._queued))
    elif stage == "reading":
        wait_until(lambda: bool(receiving._reading))
        assert ledger(pair.d).num_held == NUM_BLOCKS
    else:
        for agent in agents:
            agent.go = True
        wait_until(lambda: pair.d.engine.leader.scheduler.num_running == 1)
        assert ledger(pair.d).num_held == NUM_BLOCKS, "until the request is over"
    pair.d.engine.leader.abort("r")
    assert pair.d.engine.collect(stream).finish_reason == FinishReason.ABORT
    if stage == "waiting":
        pair.d.run(lambda: pair.d.engine.leader.manager.free("blocker"))


def test_the_books_must_balance(qwen3: Model) -> None:
    """A lease whose blocks come back without being released is found out."""
    with Pair.open(qwen3.path) as pair:
        pair.prefill(make_request("r", qwen3.prompts[2], 4))
        manager = pair.p.engine.leader.manager
        (lease,) = manager.leases

        def lose() -> None:
            manager._give_back(manager._leases.pop(lease), leased=True)

        pair.p.run(lose)
        with pytest.raises(AssertionError, match="the ledger holds 19 blocks, not 0"):
            manager.check_integrity()
        pair.p.run(lambda: setattr(manager, "_num_freed", NUM_BLOCKS))
        pair.p.handover.settle("r")
        pair.check_all_free()
