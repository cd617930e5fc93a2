"""Stores that come to nothing: how often they are tried again, and that nothing is lost with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.handover.commands import TicketPart
from rayk.handover.digesting import Digesting
from rayk.handover.extension import TransferExtension
from rayk.offload.host import HostTier
from rayk.offload.messages import StoreRequest
from rayk.transfer.rank import TransferRank
from rayk.types.errors import DeviceError
from tests.markers import one_per
from tests.offload.faults import AskedTier, Case, FaultyAgents
from tests.offload.node import Node, NodeEngine
from tests.pd import make_request, wait_until
from tests.transfer_faults import flip_bit

STORE_TOKENS = 32
LONG = {"num_blocks": 400}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def growing(model: Path, reference: Callable[..., Any]) -> Case:
    return Case.make(model, reference(model), [40 + i for i in range(8)], 120)


@pytest.fixture(scope="module")
def long(model: Path, reference: Callable[..., Any]) -> Case:
    return Case.make(model, reference(model), [300, 301], 100)


def told(engine: NodeEngine) -> dict[str, Any]:
    return engine.offloading.status()


def found_of(case: Case, engine: NodeEngine, name: str, num_answer: int) -> int:
    """Tokens that come from the tier for the first prompt and so much of its answer; the rest is right."""
    prompt, answer = case.prompts[0] + case.expected[0][:num_answer], case.expected[0][num_answer:]
    (done,) = engine.complete([make_request(name, prompt, len(answer))])
    assert done.token_ids == answer
    return int(done.info.get("num_host_tokens", 0))


# What the tier refuses.


def test_what_a_small_tier_refuses_is_digested_again_only_after_so_many_tokens(growing: Case) -> None:
    with Node.open(growing.path, [LONG], store_tokens=STORE_TOKENS, host_bytes=40_000) as node:
        (engine,) = node.engines
        tier = AskedTier.before(node, engine)
        growing.complete(engine, "a", 0)
        node.settle()
        assert {a.reason.partition(":")[0] for a in tier.answers} == {"no room"}
        tokens = [ask.ticket.num_tokens for ask in tier.stores]
        # Whole blocks of the prompt's 40 tokens; then from time to time; then of all 159 that have KV.
        assert tokens == [32, 64, 96, 128, 144]
        assert told(engine)["stores_failed"] == len(tokens)


def test_the_store_after_one_that_failed_has_everything(growing: Case) -> None:
    agents = FaultyAgents()
    with Node.open(growing.path, [LONG, LONG], store_tokens=STORE_TOKENS, make_agent=agents) as node:
        first, second = node.engines
        tier = AskedTier.before(node, first)
        agents.made["tier"].plant(flip_bit(byte=7, bit=6))
        growing.complete(first, "a", 0)
        node.settle()
        assert [a.ok for a in tier.answers] == [False, *[True] * (len(tier.answers) - 1)]
        assert [ask.ticket.num_tokens for ask in tier.stores[:2]] == [32, 64]
        assert [ask.ticket.first_row for ask in tier.stores[:2]] == [0, 0]
        assert found_of(growing, second, "b", 105) == 144
        node.settle()


def test_what_built_on_rows_that_are_gone_is_stored_anew_at_once(long: Case) -> None:
    with Node.open(long.path, [LONG, LONG], store_tokens=STORE_TOKENS) as node:
        first, second = node.engines
        tier = AskedTier.before(node, first)

        def clear_before_the_second(_: StoreRequest) -> None:
            if len(tier.stores) == 1:
                node.thread.post(node.thread.tier.clear)

        tier.before_store = clear_before_the_second
        long.complete(first, "a", 0)
        node.settle()
        assert [a.ok for a in tier.answers[:3]] == [True, False, True]
        assert "not here any more" in tier.answers[1].reason
        one, two, three = (ask.ticket for ask in tier.stores[:3])
        assert (one.first_row, two.first_row, three.first_row) == (0, 256, 0)
        assert three.num_tokens < two.num_tokens + STORE_TOKENS
        assert told(first)["stores_failed"] == 1
        assert found_of(long, second, "b", 90) == 384
        node.settle()


# What cannot be digested.


class Digests:
    """Digests of stores fail in their thread, while there is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.num_failed = 0
        self.only: TransferRank | None = None
        """Where they fail; None: at every rank."""
        self.ranks: list[TransferRank] = []
        real = TransferExtension._finite_digests

        def digests(extension: TransferExtension, *what: Any, **more: Any) -> Any:
            rank = extension.transfer
            if threading.current_thread().name.startswith("rayk-digest"):
                self.ranks += [rank] if rank not in self.ranks else []
                if self.error is not None and self.only in (None, rank):
                    self.num_failed += 1
                    raise self.error
            return real(extension, *what, **more)

        monkeypatch.setattr(TransferExtension, "_finite_digests", digests)

    @property
    def open_leases(self) -> list[str]:
        return [lease for rank in self.ranks for lease in rank._leases.open_leases]


@one_per()
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("planted"),
        torch.OutOfMemoryError("planted"),
        RuntimeError("planted"),
        DeviceError(problem="planted", where="here", mend="nothing"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_digest_that_fails_is_a_store_that_is_refused(
    long: Case, tp: int, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digests = Digests(monkeypatch)
    with Node.open(long.path, [{**LONG, "tp": tp}, LONG]) as node:
        first, second = node.engines
        long.complete(first, "a", 0)
        node.settle()
        stored = told(first)["stores"]
        digests.error, digests.only = error, digests.ranks[-1]
        long.complete(first, "b", 1)
        node.settle()
        assert digests.num_failed == told(first)["stores_failed"] > 0
        assert told(first)["stores"] == stored
        assert "planted" in told(first)["last_store_failure"]
        assert type(error).__name__ in told(first)["last_store_failure"]
        (record, *_) = [r for r in caplog.records if r.exc_info and r.exc_info[1] is error]
        assert record.levelname == "WARNING"
        wait_until(lambda: not digests.open_leases, 10.0, lambda: str(digests.open_leases))
        digests.error = None
        assert found_of(long, second, "c", 0) > 0, "of the first"
        (done,) = second.complete([make_request("d", long.prompts[1], 100)])
        assert done.token_ids == long.expected[1]
        assert done.info.get("num_host_tokens", 0) == 0
        node.settle()
        assert told(second)["stores"] > 0


@one_per()
@pytest.mark.parametrize("tp", [1, 2])
def test_requests_whose_swap_cannot_be_digested_are_computed_again(
    growing: Case, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = Digests(monkeypatch)
    digests.error = MemoryError("planted")
    small = {"num_blocks": 26, "max_seqs": 8, "tp": tp}
    with Node.open(growing.path, [small], store=False, load="never") as node:
        (engine,) = node.engines
        done = growing.complete(engine, "a", *range(8))
        node.settle()
        assert told(engine)["swaps_failed"] == told(engine)["swaps"] > 0
        assert sum(d.info["num_preemptions"] for d in done) > 0
        wait_until(lambda: not digests.open_leases, 10.0, lambda: str(digests.open_leases))
        digests.error = None
        growing.complete(engine, "b", *range(8))
        node.settle()
        assert told(engine)["swapped_in_bytes"] > 0
        assert node.thread.ask(HostTier.status)["num_kept"] == 0


def test_a_thread_that_cannot_be_started_is_a_digest_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    start, part = threading.Thread.start, TicketPart(np.zeros(0, np.uint64), ())

    def no_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    digesting = Digesting()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        digesting.begin("a", lambda: part)
    assert threading.Thread.start is start
    assert digesting.take() == ((), (("a", "RuntimeError: can't start new thread"),))
    digesting.begin("b", lambda: part)
    wait_until(lambda: digesting._made[0][1].done())
    assert digesting.take() == ((("b", part),), ())
    assert digesting.take() == ((), ())
    digesting.close()
