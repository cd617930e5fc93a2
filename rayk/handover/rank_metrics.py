"""What one rank tells of its transfers when they end, and rank 0 of the requests that they were parts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayk.types.errors import KVMismatch
from rayk.types.rows import TransferRow, moving_ns
from rayk.types.verdicts import verdict_of

if TYPE_CHECKING:
    from rayk.handover.commands import RankNews
    from rayk.metrics import BufferedSink, MetricsSink
    from rayk.transfer.consumer import TransferOutcome


def report_news(sink: MetricsSink, news: RankNews) -> None:
    """Report what a rank tells its leader."""
    for outcome in news.outcomes:
        _report_outcome(sink, outcome)
    if news.expired:
        sink.add("rayk_nixl_num_kv_expired_reqs_total", len(news.expired))


def report_totals(
    sink: BufferedSink, num_unsent: int, struck: Sequence[Mapping[tuple[str, str], int]]
) -> None:
    """Report what is counted elsewhere. `struck`: planted faults by kind and point, of unlike kinds."""
    sink.total("rayk_nixl_num_failed_notifications_total", num_unsent)
    for counts in struck:
        for (kind, point), number in counts.items():
            sink.total("rayk_faults_total", number, kind=kind, point=point)


def _report_outcome(sink: MetricsSink, outcome: TransferOutcome) -> None:
    if outcome.rows:
        _report_rows(sink, outcome.rows)
    if outcome.error is not None:
        sink.add("rayk_nixl_num_failed_transfers_total", reason=verdict_of(outcome.error))
    if outcome.num_bytes_checked:
        sink.add("rayk_kv_digest_checks_total")
        sink.add("rayk_kv_bytes_checked_total", outcome.num_bytes_checked)
    if isinstance(outcome.error, KVMismatch):
        sink.add("rayk_kv_mismatches_total")
        sink.add("rayk_kv_mismatched_words_total", max(1, len(outcome.wrong_words)))


def _report_rows(sink: MetricsSink, rows: Sequence[TransferRow]) -> None:
    """All that came to this rank of one request. Its reads are posted one after the other, from whichever
    ranks: they take from the first post to the last completion."""
    mode = rows[0].mode
    num_bytes, num_descriptors = sum(r.bytes for r in rows), sum(r.num_descriptors for r in rows)
    post_s, transfer_s = sum(r.post_ns for r in rows) / 1e9, moving_ns(rows) / 1e9
    sink.add("rayk_nixl_transfers_total", mode=mode)
    sink.add("rayk_nixl_bytes_total", num_bytes, mode=mode)
    sink.add("rayk_nixl_descriptors_total", num_descriptors, mode=mode)
    sink.add("rayk_nixl_descriptors_posted_total", _num_posted(rows), mode=mode)
    sink.add("rayk_nixl_post_seconds_total", post_s, mode=mode)
    sink.add("rayk_nixl_wait_seconds_total", max(0.0, transfer_s - post_s), mode=mode)
    if any(r.staged for r in rows):
        sink.add("rayk_nixl_staged_total", mode=mode)
    sink.observe("rayk_nixl_xfer_time_seconds", transfer_s)
    sink.observe("rayk_nixl_post_time_seconds", post_s)
    sink.observe("rayk_nixl_bytes_transferred", num_bytes)
    sink.observe("rayk_nixl_num_descriptors", num_descriptors)


def _num_posted(rows: Sequence[TransferRow]) -> int:
    """Descriptors that the transport was given; as many as were asked for where nothing is merged."""
    return sum(r.num_descriptors if (n := r.num_descriptors_merged) is None else n for r in rows)
