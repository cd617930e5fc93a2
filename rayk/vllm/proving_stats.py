"""The proving connector's counts as vLLM carries them from workers to /metrics and its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

INNER, INNER_CLASS, PROOF = "inner", "inner_class", "proof"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class ProvingStats(KVConnectorStats):  # type: ignore[misc]
    """The inner connector's stats, if any, and the proof's counts since the last step.

    `data`: {"proof": `Counts.take`'s lists or None, "inner": KVConnectorStats or None, "inner_class": the
    inner connector's class as MODULE:NAME}.
    """

    def to_dict(self) -> dict[str, Any]:
        """Write the counts in the form in which they cross to the front process."""
        inner = self.data.get(INNER)
        return {**self.data, INNER: None if inner is None else inner.to_dict()}

    def is_empty(self) -> bool:
        inner = self.data.get(INNER)
        return not self.data.get(PROOF) and (inner is None or inner.is_empty())

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ProvingStats:
        """Add another worker's counts, or another interval's."""
        mine, theirs = self.data.get(INNER), other.data.get(INNER)
        inner = mine.aggregate(theirs) if mine is not None and theirs is not None else mine or theirs
        proof = _joined(self.data.get(PROOF), other.data.get(PROOF))
        self.data = {**other.data, **self.data, INNER: inner, PROOF: proof}
        return self

    def reduce(self) -> dict[str, Any]:
        """Sum the counts up for vLLM's log."""
        proof: Mapping[str, Any] = self.data.get(PROOF) or {}
        told = {f"KV proofs {status}": n for status, n in _summed(proof.get("proofs", ())).items()}
        for name in ("digest", "fetch"):
            if times := proof.get(f"{name}_s"):
                told[f"Avg proof {name} (ms)"] = round(sum(times) / len(times) * 1e3, 3)
        inner = self.data.get(INNER)
        return told if inner is None else {**inner.reduce(), **told}


def _joined(mine: dict[str, Any] | None, theirs: dict[str, Any] | None) -> dict[str, Any] | None:
    if mine is None or theirs is None:
        return mine or theirs
    return {key: [*mine[key], *theirs[key]] for key in mine}


def _summed(rows: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key, number in rows:
        counts[key] = counts.get(key, 0) + number
    return counts


class ProvingMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The proof's series, beside the inner connector's."""

    def __init__(
        self,
        inner: KVConnectorPromMetrics | None,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._inner = inner

        def counter(name: str, what: str, *labels: str) -> Any:
            return self._counter_cls(
                name=f"vllm:kv_proof_{name}", documentation=what, labelnames=[*labelnames, *labels]
            )

        def histogram(name: str, what: str) -> Any:
            return self._histogram_cls(
                name=f"vllm:kv_proof_{name}_seconds",
                documentation=what,
                buckets=_SECONDS,
                labelnames=labelnames,
            )

        self._proofs = counter(
            "requests",
            "Proofs, one per request and rank. made: P's digest; equal, mismatch, unverified: D's verdict; "
            "local: D loaded nothing of P's; skipped: not sampled.",
            "status",
        )
        self._words = counter("words", "Digest words that D compared, by verdict.", "status")
        self._wrong = counter(
            "mismatched_words",
            "Digest words that differ, by layer, field and head.",
            "layer",
            "field",
            "head",
        )
        self._first = counter(
            "first_mismatch",
            "Requests and ranks whose first wrong coordinate is this.",
            "layer",
            "field",
            "head",
            "token",
            "classification",
        )
        self._digest = histogram("digest", "Time to digest a request's KV on one rank.")
        self._fetch = histogram("fetch", "Time to fetch P's digests and compare, beside the engine's steps.")
        for status in ("equal", "mismatch", "unverified"):  # A count of zero is told, too.
            for values in per_engine_labelvalues.values():
                self._proofs.labels(*values, status)
                self._words.labels(*values, status)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what a step counted."""
        inner = transfer_stats_data.get(INNER)
        if self._inner is not None and inner is not None:
            self._inner.observe(inner, engine_idx)
        proof: Mapping[str, Any] = transfer_stats_data.get(PROOF) or {}
        values = self.per_engine_labelvalues[engine_idx]
        for name, series in (
            ("proofs", self._proofs),
            ("words", self._words),
            ("wrong", self._wrong),
            ("first", self._first),
        ):
            for *labels, number in proof.get(name, ()):
                series.labels(*values, *map(str, labels)).inc(number)
        for name, series in (("digest_s", self._digest), ("fetch_s", self._fetch)):
            for seconds in proof.get(name, ()):
                series.labels(*values).observe(seconds)
