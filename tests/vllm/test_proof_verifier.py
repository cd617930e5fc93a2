"""What D's verifier counts, keeps and outlives."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rayk.types.errors import KVMismatch
from rayk.vllm import proof_verifier
from rayk.vllm.proof import num_row_bytes
from rayk.vllm.proof_compare import ArrivedKV, Comparison
from rayk.vllm.proof_verifier import Counts, Fetcher, Verifier
from tests.pd import HANG_S
from tests.vllm.sides import HETERO, SECRET, roll_heads, sides, wait_for


def test_the_verifier_counts_what_it_finds_and_outlives_its_bugs() -> None:
    with sides(HETERO) as made:
        caches, counts = made.caches[1], Counts()
        right = made.arrival(1)
        caches.change(2, "v", roll_heads)
        wrong = replace(made.arrival(1), request_id="wrong")
        fetcher = Fetcher(caches.description, caches.all_views, SECRET, HANG_S)

        def verify(arrival: ArrivedKV) -> Comparison:
            if arrival.request_id == "bug":
                raise KeyError("planted")
            return fetcher.verify(arrival)

        verifier = Verifier(verify, counts, caches.all_views)
        for arrival in (right, replace(right, request_id="bug"), wrong):
            verifier.submit(arrival)
        wait_for(lambda: verifier.result("wrong") is not None)
        assert sorted(verifier.take_ended()) == ["bug", "d", "wrong"]
        assert verifier.pop("bug").why.startswith("a bug in the proof of bug")
        kept = verifier.pop("wrong")
        assert (kept.num_wrong, kept.wrong) == (16, []), "a number is kept of what is counted"
        verifier.close()
    counts.leave_out("skipped")
    before = counts.text()
    taken = counts.take()
    assert counts.text() == before, "what was taken is still told"
    counts.leave_out("skipped")
    told = dict(line.rsplit(" ", 1) for line in counts.text().splitlines())
    assert told['rayk_kv_proof_requests_total{status="equal"}'] == "1"
    assert told['rayk_kv_proof_requests_total{status="skipped"}'] == "2"
    assert told['rayk_kv_proof_mismatched_words_total{layer="2",field="v",head="3"}'] == "8"
    assert told["rayk_kv_proof_fetch_seconds_count"] == "3"
    counts.take()
    assert taken is not None
    assert dict(taken["proofs"]) == {"equal": 1, "mismatch": 1, "unverified": 1, "skipped": 1}
    # 3 layers, K and V, 2 heads, 8 row groups of 30 tokens; one head pair of one layer is wrong.
    assert dict(taken["words"]) == {"equal": 2 * 96 - 16, "mismatch": 16}
    assert sorted(taken["wrong"]) == [[2, "v", 2, 8], [2, "v", 3, 8]]
    assert taken["first"] == [[2, "v", 2, 0, "head 2 holds head 3 of the producer", 1]]
    assert counts.take() is None


def test_rows_beyond_what_may_wait_are_only_located(monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(HETERO) as made:
        caches = made.caches[1]
        caches.change(2, "v", roll_heads)
        wrong = made.arrival(1)
        monkeypatch.setattr(proof_verifier, "MAX_ROW_BYTES", 2 * num_row_bytes(wrong.rows))
        fetcher = Fetcher(caches.description, caches.all_views, SECRET, HANG_S)
        may_go_on = threading.Event()

        def verify(arrival: ArrivedKV) -> Comparison:
            assert may_go_on.wait(HANG_S)
            return fetcher.verify(arrival)

        def found(name: str) -> str:
            wait_for(lambda: verifier.result(name) is not None)
            comparison = verifier.pop(name)
            assert comparison.status == "mismatch"
            return comparison.mismatch.classification

        verifier = Verifier(verify, Counts(), caches.all_views)
        for name in ("first", "second", "third"):
            verifier.submit(replace(wrong, request_id=name))
        may_go_on.set()
        for name in ("first", "second"):
            assert found(name) == "head 2 holds head 3 of the producer"
        assert "digests differ" in found("third")
        monkeypatch.setattr(proof_verifier, "MAX_ROW_BYTES", 1)
        verifier.submit(replace(wrong, request_id="alone"))
        assert found("alone") == "head 2 holds head 3 of the producer"
        verifier.close()


def test_no_more_series_are_made_than_prometheus_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_verifier, "MAX_FIRST", 2)
    counts = Counts()
    with sides(HETERO) as made:
        for token in (1, 2, 3, 1, 4):
            wrong = KVMismatch("r", 0, 0, "k", 0, token, "other content")
            counts.count(Comparison("mismatch", mismatch=wrong), made.caches[0].all_views)
    taken = counts.take()
    assert taken is not None
    assert [(row[3], row[4], row[5]) for row in taken["first"]] == [
        (1, "other content", 2),
        (2, "other content", 1),
        (-1, "more", 2),
    ]
