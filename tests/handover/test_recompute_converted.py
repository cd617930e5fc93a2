"""A transfer that was to be converted and failed: the decode engine computes the whole prompt itself."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from rayk.engine.build import ThreadEngine
from rayk.engine.leader import RequestEvent
from rayk.oracle.checkpoint import read_marker
from rayk.transfer.ticket import TransferTicket
from rayk.types.config import EngineConfig
from rayk.types.errors import RaykError
from tests.pd import Pair, make_request

NUM_TOKENS = 8


@pytest.mark.parametrize("kinds", [("auto", "fp8_e4m3"), ("nvfp4", "auto")], ids="-to-".join)
def test_nothing_of_a_converted_transfer_is_kept(
    checkpoint: Callable[..., Path], kinds: tuple[str, str]
) -> None:
    """P's blocks count as reused, so that D may not use what it read. Output is then that of D's own kind of
    engine, which was given P's first token."""
    path = checkpoint("qwen3")
    prompt: list[int] = read_marker(path)["probes"][2]["prompt"][:150]
    with Pair.open(path, changes=tuple({"kv_dtype": kind} for kind in kinds)) as pair:  # type: ignore[arg-type]
        request = make_request("r", prompt, NUM_TOKENS)
        prefilled = pair.prefill(request)
        ticket = prefilled.payload
        assert isinstance(ticket, TransferTicket)
        pair.p.extensions[0].transfer.bump_generations([b for t in ticket.block_tables for b in t if b])
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        first = tuple(prefilled.token_ids)
        pair.d.handover.submit_decode(request, ticket, first, 20.0, events.put, recompute=True)
        done = pair.d.engine.collect(events)
        assert done.error is None
        assert isinstance(done.info["failure"], RaykError)
        assert done.info["num_valid_tokens"] == 0
        assert done.info["num_recomputed_tokens"] == len(prompt)
        pair.check_all_free()
    with ThreadEngine(EngineConfig(model=str(path), num_blocks=64, kv_dtype=kinds[1])) as engine:
        (alone,) = engine.generate([make_request("a", [*prompt, *first], NUM_TOKENS - len(first))])
    assert done.token_ids == alone.token_ids
