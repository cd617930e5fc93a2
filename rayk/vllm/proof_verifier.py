"""D's worker verifies arrivals in a thread of its own, and counts what it finds."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rayk.transfer.verify import CanonicalViews, Rows
from rayk.types.bugs import bug
from rayk.types.errors import TransferError
from rayk.vllm.proof import Ticket, fetch_digests, fetch_rows, num_row_bytes
from rayk.vllm.proof_compare import ArrivedKV, Comparison, PeerProof, classify, compare

LOGGER = logging.getLogger("vllm.rayk")
"""A child of vLLM's own logger, whose handlers it shares."""
MAX_WAITING = 256
"""Arrivals that may wait to be verified; those beyond are counted as unverified."""
MAX_ROW_BYTES = 1 << 30
"""Bytes of the rows of all that wait: an arrival beyond is kept without rows, so it can be wrong and located,
but not classified. The rows of one alone are kept whatever their size, as P does."""
MAX_RESULTS = 4096
NOT_COMPARED = ("local", "skipped")
"""How requests are counted that load nothing of P's, or are not sampled."""
MAX_FIRST = 256
"""First wrong coordinates that are counted one by one: each is a series of its own, for good."""
LEAST_S = 1.0
"""P has so long to answer, however long an arrival has waited behind others."""
FirstWrong = tuple[int, str, int, int, str]
"""(layer, field, unit, token, classification)"""
_MORE: FirstWrong = (-1, "", -1, -1, "more")


class Fetcher:
    """Fetches P's proofs for one D rank, and compares. It waits at most `timeout_s` after a request's arrival
    for its digests, and as long again for the rows of a wrong one. So a P that does not answer delays the
    requests behind it only once."""

    def __init__(
        self, description: Mapping[str, Any], views: CanonicalViews, secret: bytes, timeout_s: float
    ) -> None:
        self._description, self._views = description, views
        self._secret, self._timeout_s = secret, timeout_s
        self._descriptions: dict[tuple[str, int, str], Mapping[str, Any]] = {}

    def verify(self, arrival: ArrivedKV) -> Comparison:
        """Fetch and compare. What does not come is unverified, with the reason."""
        start = time.monotonic()
        deadline = max(arrival.made_at + self._timeout_s, start + min(self._timeout_s, LEAST_S))
        deadline = min(deadline, arrival.deadline)
        proofs: dict[int, PeerProof] = {}
        reasons = []
        if arrival.ticket is None:
            reasons.append(
                "the request came without rayk_proof in its kv_transfer_params, or it cannot be read"
            )
        elif not arrival.ticket.sampled:
            reasons.append("P did not sample it, and D's sampling_rate is 1")
        elif not arrival.ticket.ranks:
            reasons.append("P told of no worker that has its proof")
        else:
            for rank, peer in enumerate(arrival.ticket.ranks):
                try:
                    proofs[rank] = self._fetch(peer, arrival.ticket.nonce, deadline)
                except TransferError as error:
                    reasons.append(str(error))
        comparison = compare(arrival, self._views, self._description, proofs)
        left_out = _left_out(arrival.ticket, proofs)
        if left_out:
            reasons.append(left_out)
            comparison.status = "mismatch" if comparison.wrong else "unverified"
        comparison.why = "; ".join([*reasons, comparison.why] if comparison.why else reasons)
        if comparison.wrong:
            self._classify(arrival, comparison, proofs)
        comparison.digest_s, comparison.fetch_s = arrival.digest_s, time.monotonic() - start
        return comparison

    def _fetch(self, peer: tuple[str, int, str], nonce: str, deadline: float) -> PeerProof:
        proof = PeerProof(*fetch_digests(peer, nonce, self._secret, deadline, self._descriptions.get(peer)))
        self._descriptions[peer] = proof.description
        return proof

    def _classify(self, arrival: ArrivedKV, comparison: Comparison, proofs: Mapping[int, PeerProof]) -> None:
        """Name what is wrong by the rows of both sides, where they are kept; else the digests' words stay."""
        if arrival.rows is None or arrival.ticket is None:
            return
        first = comparison.wrong[0]
        view = next(v for v in self._views if (v.group.index, v.layer) == (first.group, first.layer))
        deadline = min(time.monotonic() + self._timeout_s, arrival.deadline)
        fetched: dict[int, tuple[int, Rows]] = {}
        try:
            for rank, proof in proofs.items():
                peer, part = arrival.ticket.ranks[rank], view.group.spec.part
                rows = fetch_rows(peer, arrival.ticket.nonce, view.layer, part, self._secret, deadline)
                fetched[rank] = proof.num_tokens, rows
        except TransferError as error:
            LOGGER.info("KV proof: %s is not classified: %s", arrival.request_id, error)
            return
        comparison.mismatch = classify(arrival, self._views, comparison, fetched) or comparison.mismatch


def _left_out(ticket: Ticket | None, proofs: Mapping[int, PeerProof]) -> str:
    """Say how many of P's ranks the ticket names where it lacks some, as far as those that answered tell;
    else empty."""
    num_told = 0 if ticket is None else len(ticket.ranks)
    num_told -= len(proofs) - len({proof.description["tp_rank"] for proof in proofs.values()})
    size = max((proof.description["tp_size"] for proof in proofs.values()), default=0)
    return f"the ticket names {num_told} of P's {size} ranks" if num_told < size else ""


class Counts:
    """Counts outcomes between two calls of `take`. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[FirstWrong] = set()
        """First wrong coordinates that have a series of their own."""
        self._totals: Counter[str] = Counter()
        """What was counted in all, by series of Prometheus."""
        self._clear()

    def _clear(self) -> None:
        self._proofs: Counter[str] = Counter()
        self._words: Counter[str] = Counter()
        self._wrong: Counter[tuple[int, str, int]] = Counter()
        self._first: Counter[FirstWrong] = Counter()
        self._digest_s: list[float] = []
        self._fetch_s: list[float] = []

    def count(self, comparison: Comparison, views: CanonicalViews) -> None:
        """Count one rank's comparison of a request."""
        fields = {(v.group.index, v.layer): v.names for v in views}
        with self._lock:
            self._proofs[comparison.status] += 1
            self._words["equal"] += comparison.num_equal
            self._words["mismatch"] += len(comparison.wrong)
            self._words["unverified"] += comparison.num_unverified
            for word in comparison.wrong:
                name = fields[word.group, word.layer][word.field_index]
                self._wrong[word.layer, name, word.unit] += 1
            if comparison.mismatch is not None:
                m = comparison.mismatch
                key = (m.layer, m.field, m.head, m.token, m.classification)
                if len(self._known) < MAX_FIRST:
                    self._known.add(key)
                self._first[key if key in self._known else _MORE] += 1
            self._digest_s.append(comparison.digest_s)
            self._fetch_s.append(comparison.fetch_s)

    def leave_out(self, status: str) -> None:
        """Count a request that is not compared."""
        with self._lock:
            self._proofs[status] += 1

    def made(self, digest_s: float) -> None:
        """Count a digest that P made of a request."""
        with self._lock:
            self._proofs["made"] += 1
            self._digest_s.append(digest_s)

    def take(self) -> dict[str, Any] | None:
        """Return what was counted, as lists of plain rows, and begin anew; None where nothing was."""
        with self._lock:
            if not self._proofs:
                return None
            self._add_totals(self._totals)
            taken = {
                "proofs": [[k, n] for k, n in self._proofs.items()],
                "words": [[k, n] for k, n in self._words.items() if n],
                "wrong": [[*k, n] for k, n in self._wrong.items()],
                "first": [[*k, n] for k, n in self._first.items()],
                "digest_s": self._digest_s,
                "fetch_s": self._fetch_s,
            }
            self._clear()
            return taken

    def text(self) -> str:
        """Write all counts since the start in Prometheus' text format."""
        with self._lock:
            totals = self._totals.copy()
            self._add_totals(totals)
        return "".join(f"{series} {number:g}\n" for series, number in totals.items())

    def _add_totals(self, totals: Counter[str]) -> None:
        def add(name: str, number: float, **labels: object) -> None:
            told = ",".join(f"{key}={json.dumps(str(value))}" for key, value in labels.items())
            totals[f"rayk_kv_proof_{name}" + (f"{{{told}}}" if told else "")] += number  # type: ignore[assignment]

        for status, number in self._proofs.items():
            add("requests_total", number, status=status)
        for status, number in self._words.items():
            add("words_total", number, status=status)
        for (layer, name, unit), number in self._wrong.items():
            add("mismatched_words_total", number, layer=layer, field=name, head=unit)
        for (layer, name, unit, token, what), number in self._first.items():
            place = {"layer": layer, "field": name, "head": unit, "token": token}
            add("first_mismatch_total", number, **place, classification=what)
        for name, times in (("digest", self._digest_s), ("fetch", self._fetch_s)):
            add(f"{name}_seconds_sum", sum(times))
            add(f"{name}_seconds_count", len(times))


class Verifier:
    """Verifies arrivals one after another in a thread, so that no step of an engine waits for the net."""

    def __init__(
        self, verify: Callable[[ArrivedKV], Comparison], counts: Counts, views: CanonicalViews
    ) -> None:
        self._verify, self._counts, self._views = verify, counts, views
        self._waiting: queue.Queue[ArrivedKV | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._results: OrderedDict[str, Comparison] = OrderedDict()
        self._ended: list[str] = []
        self._submitted: Counter[str] = Counter()
        """Requests whose verification has not ended, each as often as its id was sent."""
        self._row_bytes = 0
        """Bytes of the rows of arrivals that wait or are being verified."""
        self._thread = threading.Thread(target=self._run, name="rayk-verifier", daemon=True)
        self._thread.start()

    def submit(self, arrival: ArrivedKV) -> None:
        """Have an arrival verified; `take_ended` names it when that is done."""
        row_bytes = num_row_bytes(arrival.rows)
        with self._lock:
            self._submitted[arrival.request_id] += 1
            self._results.pop(arrival.request_id, None)
            is_too_much = self._row_bytes > 0 and self._row_bytes + row_bytes > MAX_ROW_BYTES
            if is_too_much:
                row_bytes, arrival = 0, replace(arrival, rows=None)
            self._row_bytes += row_bytes
        if is_too_much:
            LOGGER.info("KV proof: %s will not be classified: others' rows wait", arrival.request_id)
        try:
            self._waiting.put_nowait(arrival)
        except queue.Full:
            self._let_go(arrival)
            self.end(
                arrival.request_id, Comparison("unverified", f"{MAX_WAITING} others wait to be verified")
            )

    def take_ended(self) -> list[str]:
        """Return the requests whose verification has ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def is_waiting(self, request_id: str) -> bool:
        """Return whether it was submitted and has not ended."""
        with self._lock:
            return self._submitted[request_id] > 0

    def result(self, request_id: str) -> Comparison | None:
        """Return what was found of a request, if its verification has ended."""
        with self._lock:
            return self._results.get(request_id) if not self._submitted[request_id] else None

    def pop(self, request_id: str) -> Comparison | None:
        """Return and forget what was found of a request."""
        with self._lock:
            return self._results.pop(request_id, None)

    def clear(self) -> None:
        """Forget what was found."""
        with self._lock:
            self._results.clear()

    def close(self) -> None:
        """End the thread after its current arrival."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return  # It is a daemon.

    def run(self, arrival: ArrivedKV) -> Comparison:
        """Verify an arrival now."""
        try:
            comparison = self._verify(arrival)
        except Exception as error:  # noqa: BLE001 - a bug here must neither pass for a proof nor end the thread
            comparison = Comparison("unverified", str(bug(f"the proof of {arrival.request_id}", error)))
        self.end(arrival.request_id, comparison)
        return comparison

    def end(self, request_id: str, comparison: Comparison) -> None:
        """Record the end of a request's verification, or that there is nothing to verify."""
        if comparison.mismatch is not None:
            LOGGER.error("KV proof: %s (%d words)", comparison.mismatch, len(comparison.wrong))
        elif comparison.status == "unverified":
            LOGGER.warning("KV proof: %s is unverified: %s", request_id, comparison.why)
        if comparison.status in NOT_COMPARED:
            self._counts.leave_out(comparison.status)
        else:
            self._counts.count(comparison, self._views)
        with self._lock:
            self._results[request_id] = replace(comparison, wrong=[])
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
            self._submitted -= Counter([request_id])
            self._ended.append(request_id)

    def _run(self) -> None:
        while (arrival := self._waiting.get()) is not None:
            self.run(arrival)
            self._let_go(arrival)
            del arrival  # Its rows, while nothing waits.

    def _let_go(self, arrival: ArrivedKV) -> None:
        with self._lock:
            self._row_bytes -= num_row_bytes(arrival.rows)
