"""The proving connector's two halves, without vLLM: what the scheduler notes of requests, and what workers do
with it.

On P, `SchedulerHalf.finished` notes the blocks of a prefill that is done. The note reaches each worker with
the next step's metadata, and the worker digests the blocks before that step can write there. On D,
`allocated` notes the blocks into which a request will be loaded. When the inner connector says that it has
arrived, the worker digests them before the model runs, and has them verified.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayk.transfer.verify import Digests
from rayk.types.bugs import bug
from rayk.types.errors import KVMismatch
from rayk.vllm.metrics_port import serve_metrics
from rayk.vllm.planted import PlantedAtScheduler, PlantedAtWorker
from rayk.vllm.proof import (
    Caches,
    PartRows,
    ProofRecord,
    ProofRecords,
    Ticket,
    is_sampled,
    read_ticket,
    serve_records,
)
from rayk.vllm.proof_compare import ArrivedKV, Comparison
from rayk.vllm.proof_verifier import LOGGER, Counts, Fetcher, Verifier
from rayk.vllm.proof_wire import ProofServer
from rayk.vllm.settings import ProvingSettings
from rayk.vllm.transfer_log import TransferLog

Blocks = tuple[tuple[int, ...], ...]
"""A request's block ids, by vLLM's KV cache group."""
_SETTLE_S = 5.0
"""Beyond the two waits of a verification: how long a finished request's verdict keeps the engine stepping."""
PACE_S = 0.02
"""From step to step of an engine that only waits for verdicts."""
OWN_TIERS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors that load what this very engine had, for versions of vLLM that do not tell sources: another
engine's proof says nothing of it."""
OWN_SOURCES = {"host", "disk"}
"""What vLLM (v1/metrics/cache_hit_source.py) calls the same."""
_ENDED_EARLY = ("FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR")
"""vLLM's names for the ends of requests that are not handed on."""


@dataclass(frozen=True)
class Produced:
    """A request whose prefill is done."""

    request_id: str
    nonce: str
    """The nonce of its ticket."""
    blocks: Blocks
    num_tokens: int


@dataclass(frozen=True)
class Expected:
    """A request that is being loaded."""

    request_id: str
    ticket: Ticket | None
    blocks: Blocks
    num_tokens: int
    first_row: int
    is_async: bool
    """Whether the inner connector reports its arrival; else it is loaded within the step."""
    is_stored: bool = False
    """Whether a store that several engines fill may have had it."""


@dataclass(frozen=True)
class Notes:
    """What one step tells the workers."""

    produced: tuple[Produced, ...] = ()
    expected: tuple[Expected, ...] = ()
    local: tuple[tuple[str, str], ...] = ()
    """(request, why) of those that came with a ticket, but load nothing of P's."""


@dataclass
class _AwaitedVerdict:
    num_missing: int
    """Workers whose verdict is still to come."""
    deadline: float | None = None
    """When the wait ends; None while the request runs."""


def _blocks(block_ids: Sequence[Sequence[int]]) -> Blocks:
    return tuple(tuple(int(i) for i in group) for group in block_ids)


def _is_own(loader: str, sources: Collection[str] | None) -> bool:
    """Return whether a request is loaded from what D itself has kept."""
    if sources is None:
        return loader in OWN_TIERS
    # OffloadingConnector calls rows unspecified that need no loading: those before a window.
    known = set(sources) - {"external_unspecified"}
    return bool(known) and known <= OWN_SOURCES


class SchedulerHalf:
    """Takes notes in the scheduler's process. `num_workers`: of this engine."""

    def __init__(
        self,
        settings: ProvingSettings,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._num_workers = settings, num_workers
        self._clock, self._sleep = clock, sleep
        self._servers: tuple[tuple[str, int, str], ...] = ()
        self._matched: dict[str, tuple[int, bool]] = {}
        """Request -> (tokens in D's own cache, whether the rest is loaded between steps)."""
        self._produced: list[Produced] = []
        self._expected: list[Expected] = []
        self._local: list[tuple[str, str]] = []
        self._told: set[str] = set()
        """Requests that workers know of: vLLM asks again when one has arrived or was preempted."""
        self._pending: dict[str, _AwaitedVerdict] = {}
        self._step_at = clock()
        """When the last step began."""
        self._planted = PlantedAtScheduler(settings.planted)

    def set_servers(self, by_rank: Mapping[int, tuple[str, int, str]]) -> None:
        """Set where the workers serve their proofs: rank -> (host, port, life)."""
        self._servers = tuple(by_rank[rank] for rank in sorted(by_rank))

    def matched(self, request_id: str, num_local: int, is_async: bool) -> None:
        """Note that the inner connector was asked what it can load beyond `num_local` tokens."""
        self._matched[request_id] = num_local, is_async

    def before_alloc(self, params: dict[str, Any] | None) -> None:
        """Let a planted fault change a request's parameters before the inner connector gets its blocks."""
        self._planted.mislead(params)

    def allocated(
        self,
        request_id: str,
        params: Mapping[str, Any] | None,
        block_ids: Sequence[Sequence[int]],
        num_external: int,
        loader: str = "",
        sources: Collection[str] | None = None,
    ) -> None:
        """Note the blocks that `num_external` tokens will be loaded into, the class of the connector that
        does (`loader`), and from where by vLLM's names (`sources`; None: it does not tell)."""
        num_local, is_async = self._matched.pop(request_id, (0, False))
        ticket = read_ticket(params)
        if num_external <= 0 or _is_own(loader, sources):
            if ticket is not None and request_id not in self._told:
                self._told.add(request_id)
                own = f": {loader} loads {num_external} tokens that it had" if num_external > 0 else ""
                self._local.append((request_id, f"D loads nothing of P's{own}"))
            return
        self._told.add(request_id)
        num_tokens = num_local + num_external
        is_stored = not self._settings.from_producer and sources is not None and set(sources) != {"p2p"}
        self._expected.append(
            Expected(request_id, ticket, _blocks(block_ids), num_tokens, num_local, is_async, is_stored)
        )
        self._pending[request_id] = _AwaitedVerdict(self._num_workers)

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Note a finished request where a proof was asked for, and add to what the inner connector tells D
        where that proof is served."""
        request_id = request.request_id
        self._matched.pop(request_id, None)
        self._told.discard(request_id)
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.deadline = self._clock() + 2 * self._settings.timeout_s + _SETTLE_S
        asked = request.kv_transfer_params or {}
        is_asked = asked.get("do_remote_decode") is True or asked.get("rayk_proof") is True
        has_ended = getattr(getattr(request, "status", None), "name", "") not in _ENDED_EARLY
        if not is_asked or not has_ended or not any(block_ids):
            return params
        nonce = secrets.token_hex(8)
        if not is_sampled(request_id, self._settings.sampling_rate):
            return {**(params or {}), "rayk_proof": Ticket(request_id, nonce, (), sampled=False).to_params()}
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        # A prompt's rows are what D loads; without D all that was computed may be looked into.
        num_tokens = min(computed, request.num_prompt_tokens) if asked.get("do_remote_decode") else computed
        self._produced.append(Produced(request_id, nonce, _blocks(block_ids), num_tokens))
        return {**(params or {}), "rayk_proof": Ticket(request_id, nonce, self._servers).to_params()}

    def take_notes(self) -> Notes:
        """Return what the next step tells the workers, and begin anew."""
        self._step_at = self._clock()
        notes = Notes(tuple(self._produced), tuple(self._expected), tuple(self._local))
        self._produced, self._expected, self._local = [], [], []
        return notes

    def verified(self, request_ids: Sequence[str]) -> None:
        """Count verdicts of workers, each on the requests that it names."""
        for request_id in request_ids:
            pending = self._pending.get(request_id)
            if pending is not None:
                pending.num_missing -= 1
                if pending.num_missing <= 0:
                    del self._pending[request_id]

    def has_pending(self) -> bool:
        """Return whether verdicts of finished requests are still to come: the engine must step on to hear
        them. It has nothing else to do, and vLLM would ask again at once, so this waits until the next step
        is due."""
        now = self._clock()
        ended = [r for r, p in self._pending.items() if p.deadline is not None]
        for request_id in ended:
            if (self._pending[request_id].deadline or now) < now:
                del self._pending[request_id]
        is_pending = any(request_id in self._pending for request_id in ended)
        if is_pending and now < self._step_at + PACE_S:
            self._sleep(self._step_at + PACE_S - now)
        return is_pending


@dataclass
class Received:
    """What a worker reports of the requests that the inner connector has brought."""

    arrived: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """The requests of `arrived` that failed."""


class WorkerHalf:
    """Digests and verifies in one worker's process. `block_sizes`: of vLLM's KV cache groups; `serves`: it
    may be P; `loads_at_once`: what the inner connector loads within a step is there when `start_load_kv` is
    over."""

    def __init__(
        self,
        settings: ProvingSettings,
        caches: Caches,
        tp_rank: int,
        block_sizes: Sequence[int],
        *,
        serves: bool,
        loads_at_once: bool = True,
        planted: PlantedAtWorker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._caches, self._planted = settings, caches, planted
        self._block_sizes, self._loads_at_once, self._clock = block_sizes, loads_at_once, clock
        self.counts = Counts()
        self.records = ProofRecords()
        self._expected: dict[str, Expected] = {}
        self.transfer_log: TransferLog | None = None
        """Where the inner connector's reads can be told apart."""
        self._unverified: set[str] = set()
        """Arrived, and not told so before they are verified."""
        views = caches.views([()] * len(block_sizes))
        fetcher = Fetcher(caches.description, views, settings.secret, settings.timeout_s)
        self._verifier = Verifier(fetcher.verify, self.counts, views)
        self._server: ProofServer | None = None
        self.served_at: tuple[str, int, str] | None = None
        """(host, port, life) of this worker's proof server."""
        if serves:
            port = settings.port + tp_rank if settings.port else 0
            self._server, life = serve_records(
                settings.host, port, settings.secret, self.records, caches.description
            )
            self.served_at = settings.host, self._server.address[1], life

        self._metrics = None
        if settings.metrics_port:
            self._metrics = serve_metrics(settings.host, settings.metrics_port + tp_rank, self.counts.text)

    def begin_step(self, notes: Notes) -> None:
        """Digest finished requests before this step writes anywhere; expect those that will be loaded."""
        for produced in notes.produced:
            start = time.monotonic()
            try:
                digests, rows = self._read(produced.blocks, produced.num_tokens)
            except Exception as error:  # noqa: BLE001 - the engine serves on: D finds no proof
                bug(f"the digest of {produced.request_id}", error)
                continue
            self.records.put(
                produced.nonce, ProofRecord(produced.num_tokens, digests, rows, produced.request_id)
            )
            self.counts.made(time.monotonic() - start)
        for expected in notes.expected:
            if self._planted is not None:
                self._planted.before_load(expected.request_id, expected.blocks)
            self._expected[expected.request_id] = expected
        for request_id, why in notes.local:
            self._verifier.end(request_id, Comparison("local", why))

    def loaded(self) -> set[int]:
        """Verify what was loaded within the step. Returns blocks of requests that are wrong and must fail.
        vLLM looks for such blocks in a single KV cache group: with more groups, wrong requests are served."""
        bad: set[int] = set()
        at_once = [e for e in self._expected.values() if not e.is_async]
        arrivals = [(expected, self._arrive(expected)) for expected in at_once]
        deadline = self._clock() + self._settings.timeout_s  # One for all: the engine waits for this step.
        for expected, arrival in arrivals:
            if arrival is None:
                continue
            if self._settings.on_mismatch == "report":
                self._verifier.submit(arrival)
            elif self._clock() >= deadline:
                why = "the step has waited timeout_s for the proofs of others"
                self._verifier.end(expected.request_id, Comparison("unverified", why))
            elif self._verifier.run(replace(arrival, deadline=deadline)).status == "mismatch":
                if len(self._block_sizes) > 1:
                    LOGGER.error(
                        "KV proof: %s is served: vLLM fails no load within a step of several KV cache groups",
                        expected.request_id,
                    )
                    continue
                # Others share what D had already, and the null block.
                bad.update(expected.blocks[0][expected.first_row // self._block_sizes[0] :])
                bad.discard(0)
        return bad

    def received(self, arrived: set[str], failed: set[str]) -> Received:
        """Take in requests that have arrived, some of them not whole. Returns those that may go on: with
        `on_mismatch: fail` only when they are verified."""
        told = Received(set(arrived), set(failed))
        for request_id in arrived & set(self._expected):
            if request_id in failed:
                expected = self._expected.pop(request_id)
                self._verifier.end(
                    request_id, Comparison("unverified", "the inner connector failed to load it")
                )
                LOGGER.info("KV proof: %s was not loaded", expected.request_id)
                continue
            arrival = self._arrive(self._expected[request_id])
            if arrival is None:
                continue
            self._verifier.submit(arrival)
            if self._settings.on_mismatch == "fail":
                self._unverified.add(request_id)
                told.arrived.discard(request_id)
        for request_id in list(self._unverified):
            found = self._verifier.result(request_id)
            if found is not None:
                self._unverified.discard(request_id)
                told.arrived.add(request_id)
                if found.status == "mismatch":
                    told.failed.add(request_id)
        return told

    def _arrive(self, expected: Expected) -> ArrivedKV | None:
        """Digest what arrived; None where there is nothing to verify."""
        del self._expected[expected.request_id]
        if self._planted is not None:
            loaded = expected.num_tokens, expected.first_row
            self._planted.after_load(expected.request_id, expected.blocks, *loaded)
        ticket = expected.ticket
        if ticket is not None and self._skips(ticket):
            self._verifier.end(expected.request_id, Comparison("skipped", "it is not sampled"))
            return None
        if not expected.is_async and not self._loads_at_once:
            why = "the inner connector loads within the step, perhaps layer by layer: nobody tells when"
            self._verifier.end(expected.request_id, Comparison("unverified", why))
            return None
        start = time.monotonic()
        try:
            digests, rows = self._read(expected.blocks, expected.num_tokens, expected.first_row)
        except Exception as error:  # noqa: BLE001 - the engine serves on, and this is no proof
            why = str(bug(f"the digest of {expected.request_id}", error))
            self._verifier.end(expected.request_id, Comparison("unverified", why))
            return None
        digest_s = time.monotonic() - start
        what = expected.num_tokens, expected.first_row, digests, rows, digest_s
        return ArrivedKV(expected.request_id, ticket, *what, is_stored=expected.is_stored)

    def _skips(self, ticket: Ticket) -> bool:
        """Return whether one of both sides leaves a request out. P's word for it came through other hands, so
        it is ignored where this side leaves none out."""
        rate = self._settings.sampling_rate
        return not is_sampled(ticket.request_id, rate) or (not ticket.sampled and rate < 1)

    def _read(self, blocks: Blocks, num_tokens: int, first_row: int = 0) -> tuple[Digests, PartRows | None]:
        """Return digests of what lies in these blocks, and its rows if they are to be kept."""
        digests = self._caches.digests(blocks, num_tokens, first_row)
        rows = self._caches.rows(blocks, num_tokens, first_row) if self._settings.keep_rows else None
        return digests, rows

    def take_verified(self) -> list[str]:
        """Return the requests that this worker has come to a verdict on since the last call."""
        return self._verifier.take_ended()

    def proof_results(self, request_id: str) -> dict[str, Any]:
        """Return what was found of a request at D, as JSON, once. It is "pending" while the request is
        expected or being verified, "none" where nothing is known of it (any more)."""
        is_pending = request_id in self._expected or self._verifier.is_waiting(request_id)
        found = None if is_pending else self._verifier.pop(request_id)
        if found is None:
            status = "pending" if is_pending else "none"
            return {"status": status, "why": "", "bytes_checked": 0, "bytes_mismatched": 0, "mismatch": None}
        wrong = found.mismatch
        transfers = self.transfer_log.pop(request_id) if self.transfer_log is not None else []
        return {
            "status": found.status,
            "why": found.why,
            "bytes_checked": found.num_bytes,
            "bytes_mismatched": 0 if wrong is None else wrong.num_bytes_mismatched,
            "words": {
                "equal": found.num_equal,
                "mismatch": found.num_wrong,
                "unverified": found.num_unverified,
            },
            "digest_ms": found.digest_s * 1e3,
            "fetch_ms": found.fetch_s * 1e3,
            "mismatch": None if wrong is None else _as_json(wrong),
            "transfers": transfers,
        }

    def kept_rows(self, request_id: str) -> dict[tuple[int, str, int], Any]:
        """Return the rows that P kept of a request, once: (layer, field, unit) -> uint8 [rows, bytes]."""
        record = self.records.pop_last(request_id)
        rows = {} if record is None or record.rows is None else record.rows
        return {
            (layer, name, unit): values
            for (layer, _), fields in rows.items()
            for (name, unit), values in fields.items()
        }

    def forget(self) -> None:
        """Forget all records and results."""
        self.records.clear()
        self._verifier.clear()
        if self.transfer_log is not None:
            self.transfer_log.clear()

    def close(self) -> None:
        """Stop serving and verifying."""
        self._verifier.close()
        if self._server is not None:
            self._server.close()
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()


def _as_json(mismatch: KVMismatch) -> dict[str, Any]:
    return {
        "layer": mismatch.layer,
        "group": mismatch.group,
        "field": mismatch.field,
        "unit": mismatch.head,
        "unit_name": mismatch.unit_name,
        "token": mismatch.token,
        "classification": mismatch.classification,
    }
