"""What engines tell of one request, written into its row: tokens, stages, transfers, what a host tier did.

Events come in, nothing is asked: whoever takes a request through its engines (a coordinator, a front, a
simulation) hands them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Protocol

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import CapturedRows
from rayk.transfer.ticket import TransferTicket
from rayk.types.clock import Clock, host_clock
from rayk.types.errors import RaykError
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.stage_clock import StageClock


class Telling(Protocol):
    """An engine that events come from."""

    @property
    def role(self) -> str:
        """One of aggregated, prefill, decode."""

    @property
    def clock_offset_ns(self) -> int:
        """What is added to its times, so that they are of the clock of the row."""


class RecordLog(Protocol):
    """Receives what is told of requests."""

    def prefilled(self, attempt: str) -> None:
        """Take note of an attempt's first token, even if an earlier attempt delivered it."""
        ...

    def delivered(self, row: RequestRow, event: RequestEvent) -> None:
        """Take an event that no earlier attempt has delivered."""
        ...

    def transferred(self, rows: Sequence[TransferRow], num_kv_bytes_checked: int) -> None:
        """Take the rows of transfers that moved a request's KV."""
        ...

    def captured(self, row: RequestRow, rows: list[CapturedRows]) -> None:
        """Take a copy of a prompt's KV rows, where that was asked for."""
        ...


class RequestRecord:
    """Fills the row of a request, through all of its attempts."""

    def __init__(self, row: RequestRow, log: RecordLog, clock: Clock = host_clock) -> None:
        self.row = row
        self._clock = clock
        self.stages = StageClock(row)
        self._log = log
        self._attempt, self._number = "", 0
        self._unsent = ""
        """The stage that ends when the attempt's first message leaves; empty once it has."""
        self._computes = False
        """Whether the engine that has the request is to compute its prompt."""
        self._phase = ""
        """What the engine does with it since a step first took it: prefill or decode."""
        self._num_told = 0
        """Output tokens that the engine has told, or been told."""
        self._prefilled = ""
        """The last attempt whose first token came."""

    def begin(self, attempt: str, number: int) -> None:
        """An attempt begins: the name by which engines know it, and its number, from 0."""
        self._attempt, self._number = attempt, number
        self._unsent = "retry" if number else "queue"

    def sent(self) -> None:
        """End the stage that lasts until the attempt's first message leaves, which is now."""
        if self._unsent:
            self.stages.end(self._unsent, self._clock())
        self._unsent = ""

    def enter(self, num_told: int, *, computes: bool) -> None:
        """The request is sent to an engine, which goes on behind `num_told` output tokens. `computes`: it
        computes the prompt itself."""
        self._num_told, self._computes, self._phase = num_told, computes, ""
        self.sent()

    def hear(self, engine: Telling, event: RequestEvent) -> None:
        """Take what the engine tells, its error aside."""
        row = self.row
        self._note_stages(engine, event)
        if event.token_ids and self._prefilled != self._attempt:
            self._prefilled = self._attempt
            self._log.prefilled(self._attempt)
        self.take(engine, _undelivered(event, len(row.output_token_ids) - self._num_told))
        self._num_told += len(event.token_ids)
        if event.finish_reason is not None and event.error is None and event.payload is None:
            row.finish_reason = str(event.finish_reason)
            if row.token_times_ns:
                self.stages.end("decode", row.token_times_ns[-1])

    def _note_stages(self, engine: Telling, event: RequestEvent) -> None:
        """Record the stages that an engine's event ends. A failed attempt ends none: its time counts as
        `retry`, if there is another attempt."""
        if event.error is not None:
            return
        stages, info, offset_ns = self.stages, event.info, engine.clock_offset_ns
        at_ns = event.time_ns + offset_ns
        if info is None:
            self._note_prefilled(event, at_ns)
            return
        if info.submitted_ns is not None:
            stages.end("dispatch" if info.stage_ns is None else "handover", info.submitted_ns + offset_ns)
        self._note_tier(info, offset_ns)
        if info.stage_ns is not None:
            assert info.taken_ns is not None
            stages.end("notice", info.taken_ns + offset_ns)
            for stage, length_ns in info.stage_ns.items():
                stages.lasted(stage, length_ns)
            self._computes = info.failure is not None  # the decode engine goes on by itself
            stages.end("retry" if self._computes else "notice", at_ns)
        self._note_steps(event, info, offset_ns)

    def _note_tier(self, info: EventInfo, offset_ns: int) -> None:
        """Record what the engine waited for before it queued the request."""
        ends = {"prefill_queue": info.asked_ns, "lookup": info.found_ns, "load": info.loaded_ns}
        for stage, end_ns in ends.items():
            if end_ns is not None:
                self.stages.end(stage, end_ns + offset_ns)

    def _note_steps(self, event: RequestEvent, info: EventInfo, offset_ns: int) -> None:
        """Record when the engine first computed, when the request was swapped out, and its first token."""
        stages, at_ns = self.stages, event.time_ns + offset_ns
        if info.first_step_ns is not None:
            self._phase = "prefill" if self._computes else "decode"
            stages.end(f"{self._phase}_queue", info.first_step_ns + offset_ns)
        if info.swap_ns is not None:
            stages.end(self._phase or "decode", at_ns - info.swap_ns)
            stages.end("swap", at_ns)
        self._note_prefilled(event, at_ns)

    def _note_prefilled(self, event: RequestEvent, at_ns: int) -> None:
        """Record the first token, and the ticket with which the request leaves after it."""
        if self._phase == "prefill" and event.token_ids:
            self.stages.end("prefill", at_ns)
            self._phase = "decode"
        if isinstance(event.payload, TransferTicket):
            self.stages.end("ticket", at_ns - max(event.payload.digest_ns, default=0))
            self.stages.end("digest", at_ns)

    def take(self, engine: Telling, event: RequestEvent) -> None:
        """Write an event into the row, which has none of its tokens yet."""
        row = self.row
        time_ns = event.time_ns + engine.clock_offset_ns
        row.output_token_ids += event.token_ids
        row.token_times_ns += [time_ns] * len(event.token_ids)
        note_sampling(row, event)
        if event.info is not None:
            self._take_info(engine, event, event.info, time_ns)
        self._log.delivered(row, event)

    def took(self, engine: Telling, token_ids: Sequence[int], times_ns: Sequence[int]) -> None:
        """Take tokens of which the engine has no more to say than when it had each: as an event of each
        would, but that the log is not told. For who tells of many at once."""
        row, offset_ns = self.row, engine.clock_offset_ns
        known = max(0, len(row.output_token_ids) - self._num_told)
        self._num_told += len(token_ids)
        row.output_token_ids += token_ids[known:]
        times_ns = times_ns[known:]
        row.token_times_ns += [at_ns + offset_ns for at_ns in times_ns] if offset_ns else times_ns

    def _take_info(self, engine: Telling, event: RequestEvent, info: EventInfo, time_ns: int) -> None:
        row = self.row
        if info.stage_ns is not None and event.error is None:
            row.exposed_ns = time_ns - row.token_times_ns[0]
        self.moved(engine, info.transfers or (), info.num_kv_bytes_checked or 0)
        if info.failure is not None:  # the decode engine went on by itself
            row.failure = row.failure or str(info.failure)
            row.num_valid_tokens = info.num_valid_tokens
            row.num_attempts += 1
        self._take_offload(info)
        row.drafted_by_position = _summed(row.drafted_by_position, info.drafted_at or ())
        row.accepted_by_position = _summed(row.accepted_by_position, info.accepted_at or ())
        row.draft_kv = info.draft_kv or row.draft_kv
        row.num_draft_rows_recomputed += info.num_draft_rows_recomputed or 0
        row.proposals += [(at, list(tokens)) for at, tokens in info.proposals or ()]
        if info.captured is not None:
            self._log.captured(row, list(info.captured))
        if info.num_cached_tokens is not None:
            row.num_cached_tokens = info.num_cached_tokens
        if engine.role != "prefill" and info.num_recomputed_tokens is not None:
            row.num_recomputed_tokens = info.num_recomputed_tokens
        if row.num_recomputed_tokens and row.kv_path == "remote":
            row.kv_path = "recomputed"

    def _take_offload(self, info: EventInfo) -> None:
        """Record what a host tier did for the request."""
        row = self.row
        if info.num_host_tokens is not None:
            row.num_host_tokens = info.num_host_tokens
        if info.num_disk_tokens is not None:
            row.num_disk_tokens = info.num_disk_tokens
        row.num_swaps += info.num_swaps or 0  # of each engine that is done with it
        row.load_ns += info.load_ns or 0
        row.swap_ns += info.swap_ns or 0
        row.offload_failure = info.offload_failure or row.offload_failure

    def moved(self, engine: Telling, transfers: Sequence[TransferRow], num_checked: int) -> None:
        """Take transfers of the request, told by an engine, or by a host tier on its node."""
        row = self.row
        for transfer in transfers:
            transfer.cell_id, transfer.repeat = row.cell_id, row.repeat
            transfer.request_id, transfer.retries = row.request_id, self._number
            transfer.shift(engine.clock_offset_ns - row.arrival_ns)
        if transfers or num_checked:
            self._log.transferred(transfers, num_checked)


def _summed(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Add counts by position; the shorter has none at the last ones."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


def note_sampling(row: RequestRow, event: RequestEvent) -> None:
    """Add an event's log probabilities and stop reason to its request's row.

    The best tokens beside each are told only if the request asked for any.
    """
    if event.logprobs is not None:
        row.output_logprobs = [*(row.output_logprobs or ()), *(t.logprob for t in event.logprobs)]
        if any(t.top for t in event.logprobs):
            row.output_top_logprobs = [
                *(row.output_top_logprobs or ()),
                *(list(t.top) for t in event.logprobs),
            ]
    if event.prompt_logprobs is not None:
        row.prompt_logprobs = [None if t is None else t.logprob for t in event.prompt_logprobs]
        if any(t is not None and t.top for t in event.prompt_logprobs):
            row.prompt_top_logprobs = [None if t is None else list(t.top) for t in event.prompt_logprobs]
    if event.stop_reason is not None:
        row.stop_reason = str(event.stop_reason)


def note_failure(row: RequestRow, error: RaykError) -> None:
    row.error = str(error)
    row.finish_reason = "error"
    if row.exposed_ns is not None and row.token_times_ns[-1] < row.token_times_ns[0] + row.exposed_ns:
        row.exposed_ns = None  # no decode step followed


def _undelivered(event: RequestEvent, num_known: int) -> RequestEvent:
    """Cut off the first `num_known` tokens of an event, which an earlier attempt delivered."""
    if num_known <= 0 or not event.token_ids:
        return event
    logprobs = None if event.logprobs is None else event.logprobs[num_known:]
    return replace(event, token_ids=event.token_ids[num_known:], logprobs=logprobs)
