"""Pushed into another format: P writes into D's wire caches, where rows are converted as pulled ones are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.oracle.checkpoint import read_marker
from rayk.transfer import wire_geometry
from rayk.transfer.convert import Converting
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.wire import WireCache
from rayk.types.errors import DeadlineExceeded, KVMismatch, TransferError
from rayk.types.request import FinishReason
from tests.handover.cases import stubborn_agents
from tests.handover.test_push import wait_until_pushed
from tests.pd import Pair, make_request, wait_until

FORMATS: dict[str, dict[str, Any]] = {
    "auto": {"kv_dtype": "auto"},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "token-head": {"kv_dtype": "fp8_e4m3", "kv_scales": "token_head"},
    "nvfp4": {"kv_dtype": "nvfp4"},
}
PAIRS = (
    ("qwen3", "auto", "fp8", (1, 2)),
    ("qwen3", "fp8", "auto", (2, 1)),
    ("qwen3", "auto", "nvfp4", (2, 1)),
    ("qwen3", "nvfp4", "fp8", (1, 2)),
    ("qwen3", "token-head", "nvfp4", (1, 2)),
    ("qwen3", "fp8", "token-head", (2, 1)),
    ("bamba", "token-head", "auto", (2, 1)),
    ("bamba", "auto", "nvfp4", (1, 2)),
)
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def prompts_of(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """A tiny checkpoint, and prompts of 5, 37 and 110 tokens."""

    def find(family: str) -> tuple[Path, list[list[int]]]:
        path = checkpoint(family)
        probe: list[int] = read_marker(path)["probes"][2]["prompt"]
        return path, [probe[:5], probe[20:57], probe[60:170]]

    return find


def changes(names: tuple[str, str]) -> Any:
    return tuple(dict(FORMATS[name]) for name in names)


def wires_of(pair: Pair) -> list[WireCache]:
    """D's wire caches for P, by rank."""
    wires = [e.transfer._links[pair.p.engine.name].wire for e in pair.d.extensions]
    assert all(wire is not None for wire in wires)
    return [wire for wire in wires if wire is not None]


def num_claimed(pair: Pair) -> list[int]:
    """Blocks of each rank's wire cache that a request holds."""
    return [w.caches.geometry.num_blocks - 1 - w.num_free_blocks for w in wires_of(pair)]


def check_all_free(pair: Pair) -> None:
    pair.check_all_free()
    assert num_claimed(pair) == [0] * len(pair.d.extensions)


class Pages:
    """Bytes of live rows of D's own caches, right after they were made of what arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[bytes] = []
        real = Converting.finish

        def finish(converting: Converting, ticket: TransferTicket, *more: Any) -> KVMismatch | None:
            mismatch = real(converting, ticket, *more)
            for view in converting.conversion.own:
                ids, slots, _ = view.places(converting.tables[view.group.index], ticket.num_tokens)
                for f in view.fields:
                    self.found.append(f.view.view(torch.uint8)[ids, :, slots].numpy().tobytes())
            return mismatch

        monkeypatch.setattr(Converting, "finish", finish)

    def take(self) -> list[bytes]:
        """Since the last call; of two ranks, any may be quicker."""
        found, self.found = self.found, []
        return sorted(found)


@pytest.mark.parametrize(("family", "p", "d", "tp"), PAIRS)
def test_pushed_rows_become_what_pulled_ones_do(
    prompts_of: Callable[[str], tuple[Path, list[list[int]]]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    p: str,
    d: str,
    tp: tuple[int, int],
) -> None:
    path, prompts = prompts_of(family)
    pages, found = Pages(monkeypatch), []
    for push in (False, True):
        requests = [make_request(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
        with Pair.open(path, tp=tp, changes=changes((p, d)), push=push, max_batch_tokens=64) as pair:
            done = pair.complete(requests)
            check_all_free(pair)
        rows = [row for completion in done for row in completion.info["transfers"]]
        assert {row.mode for row in rows} == {"push" if push else "pull"}
        assert all(row.convert_ns > 0 for row in rows)
        found.append((pages.take(), [completion.token_ids for completion in done]))
    assert found[0] == found[1]
    assert found[0][0]


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_a_reservation_that_nobody_uses_gives_its_room_back(
    prompts_of: Callable[[str], tuple[Path, list[list[int]]]], tp: tuple[int, int]
) -> None:
    path, prompts = prompts_of("qwen3")
    with Pair.open(path, tp=tp, changes=changes(("auto", "nvfp4")), push=True) as pair:
        request = make_request("r", prompts[2], NUM_TOKENS)
        reservation = pair.reserve(request)
        assert num_claimed(pair) == [7] * tp[1]
        assert len(reservation.wire_tables) == tp[1]
        pair.d.engine.leader.abort("r")
        check_all_free(pair)


@pytest.mark.parametrize("when", ["written", "decoding"])
def test_an_abort_gives_the_room_back_when_nothing_is_in_flight(
    prompts_of: Callable[[str], tuple[Path, list[list[int]]]], when: str
) -> None:
    path, prompts = prompts_of("qwen3")
    make, made = stubborn_agents()
    settings: dict[str, Any] = {"make_agent": make, "push": True, "push_layers": 1, "max_batch_tokens": 64}
    with Pair.open(path, tp=(1, 2), changes=changes(("auto", "fp8")), **settings) as pair:
        request = make_request("r", prompts[2], NUM_TOKENS)
        stream = pair.start_prefill(request, reservation=pair.reserve(request))
        if when == "decoding":
            events = pair.start_decode(request, pair.p.engine.collect(stream))
        else:
            pusher = pair.p.extensions[0]._push._pusher
            assert pusher is not None
            wait_until(lambda: pusher.num_posted > 0)
        pair.d.engine.leader.abort("r")
        pair.d.run(lambda: None)
        assert num_claimed(pair) == [7, 7], "somebody may still write"
        for agent in made:
            agent.go = True
        if when == "decoding":
            assert pair.d.engine.collect(events).finish_reason is FinishReason.ABORT
        else:
            late = pair.decode(request, pair.p.engine.collect(stream))
            assert isinstance(late.error, TransferError)
            pair.p.handover.settle("r")
        check_all_free(pair)


def test_requests_wait_for_room(
    prompts_of: Callable[[str], tuple[Path, list[list[int]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one of them: the second is given its reservation when the first is through; late, or too long
    for any room, it is told so."""
    path, prompts = prompts_of("qwen3")
    real = wire_geometry.num_wire_blocks
    monkeypatch.setattr("rayk.transfer.wire.num_wire_blocks", lambda p, d: min(8, real(p, d)))
    with Pair.open(path, tp=(2, 2), changes=changes(("auto", "fp8")), push=True) as pair:
        first, second, third = (make_request(name, prompts[2], NUM_TOKENS) for name in "abc")
        reservation = pair.reserve(first)
        waiting = pair.start_reserve(second)
        late = pair.d.engine.collect(pair.start_reserve(third, reserve_s=0.05))
        assert isinstance(late.error, DeadlineExceeded)
        assert waiting.empty()
        done = pair.p.engine.collect(pair.start_prefill(first, reservation=reservation))
        pair.decode(first, done)
        given = pair.d.engine.collect(waiting)
        assert given.payload is not None
        pair.d.engine.leader.abort("b")
        longer = make_request("d", [*prompts[2], *prompts[1]], NUM_TOKENS)
        refused = pair.d.engine.collect(pair.start_reserve(longer))
        assert isinstance(refused.error, TransferError)
        assert "the wire cache has 7" in refused.error.reason
        check_all_free(pair)


def test_a_wrong_byte_is_found(prompts_of: Callable[[str], tuple[Path, list[list[int]]]]) -> None:
    """What lies in the wire cache after the push is what is digested."""
    path, prompts = prompts_of("qwen3")
    with Pair.open(path, changes=changes(("auto", "fp8")), push=True) as pair:
        request = make_request("r", prompts[1], NUM_TOKENS)
        reservation = pair.reserve(request)
        done = pair.p.engine.collect(pair.start_prefill(request, reservation=reservation))
        pusher = pair.p.extensions[0]._push._pusher
        assert pusher is not None
        wait_until_pushed(pusher)
        (wire,) = wires_of(pair)
        view = wire.caches.view(2, "attention")
        block = reservation.wire_tables[0][0][1]
        pair.d.run(lambda: view[block].view(torch.int32)[1, 3].bitwise_xor_(1 << 7))
        late = pair.decode(request, done)
        assert isinstance(late.error, KVMismatch)
        assert late.error.layer == 2
        pair.d.handover.settle("r")
        check_all_free(pair)
