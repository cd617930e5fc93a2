"""One request on its way through its engines: prefilled, handed over, decoded; its row says what happened.

Runs on an event loop, inside the coordinator's actor for a cell's requests and in a server's front for
those of clients. It sees requests and events, never a token loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rayk.actors.diagnosis import diagnose
from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.push_flow import reserved
from rayk.actors.tiers import relay
from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import CapturedRows
from rayk.handover.engine_request import EngineRequest
from rayk.offload.messages import StoreAnswer
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError
from rayk.types.request import Request
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.stage_clock import StageClock

NO_MORE = EventInfo()
"""The info of an event that has none."""

FindEngine = Callable[[], Awaitable[EngineHandle]]
"""An engine once it takes requests, asked for when it is needed: it may be formed anew meanwhile. Raises what
it died of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRules:
    """What holds for all requests of a deployment."""

    is_push: bool
    request_s: float
    transfer_s: float
    recomputes: bool
    """Whether a decode engine goes on by itself where a transfer fails."""
    via_host: bool = False
    """Whether KV goes through the host tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The engines of one attempt."""

    request: Request
    """The request under the id of this attempt, by which the engines know it."""
    prefill: FindEngine | None
    """Finds the prefill engine; None: the decode engine computes the prompt itself."""
    decode: FindEngine | None
    """Finds the decode engine; None: the prefill engine decodes, too (aggregated)."""
    number: int = 0
    """The attempt's number, from 0."""


class RunLog(Protocol):
    """Receives what happens to requests on their way."""

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

    def reserved(self, reservation: Reservation) -> Reservation:
        """Return what to tell the prefill engine of the blocks to push into."""
        ...


class RequestRun:
    """Takes one request through all its attempts and fills its row."""

    def __init__(self, rules: RunRules, row: RequestRow, log: RunLog, *, captures: bool = False) -> None:
        """`captures`: the prefill engine copies the prompt's KV rows out."""
        self.row = row
        self._rules = rules
        self._log = log
        self._captures = captures
        self._stages = StageClock(row)
        self._unsent = ""
        """The stage that ends when the attempt's first message leaves; empty once it has."""
        self._computes = False
        """Whether the engine that has the request is to compute its prompt."""
        self._phase = ""
        """What the engine does with it since a step first took it: prefill or decode."""
        self._lender: EngineHandle | None = None
        self._prefilled = ""
        """The last attempt whose first token came."""

    async def attempt(self, route: Route) -> None:
        """Take one route through the engines, after the tokens that earlier attempts delivered. Raises what
        ends it."""
        self._unsent = "retry" if route.number else "queue"
        if route.prefill is None:
            await self._compute_all(route)
        elif route.decode is not None and self._rules.is_push:
            prefill, decode = await route.prefill(), await route.decode()
            self._sent()
            async with reserved(self._rules.request_s, prefill, decode, route.request, self._stages) as given:
                await self._prefill(route, route.prefill, self._log.reserved(given))
        else:
            await self._prefill(route, route.prefill)

    async def _prefill(self, route: Route, find: FindEngine, reservation: Reservation | None = None) -> None:
        """Run the attempt from its prefill on. `reservation` is of blocks to push into."""
        row = self.row
        prefill = self._lender = await find()
        row.prefill_engine = prefill.name
        is_whole = route.decode is None
        asked = EngineRequest(
            request=route.request,
            mode="whole" if is_whole else "prefill",
            output_token_ids=tuple(row.output_token_ids) if is_whole else (),
            capture=self._captures,
            via_host=self._rules.via_host,
            reservation=reservation,
        )
        ticket = await self._stream(prefill, route, asked)
        if ticket is None:
            row.decode_engine = row.decode_engine or (prefill.name if is_whole else None)
            row.kv_path = "local" if is_whole else "none"
            return
        try:
            await self._decode(route, prefill, ticket)
        finally:
            if row.finish_reason is None:  # nobody will release the lease of a request that failed
                prefill.leader.settle.options(concurrency_group="control").remote(route.request.request_id)

    async def _decode(self, route: Route, prefill: EngineHandle, ticket: TransferTicket) -> None:
        assert route.decode is not None, "a ticket is for somebody"
        decode = await route.decode()
        self.row.decode_engine, self.row.kv_path = decode.name, "remote"
        if self._rules.via_host:
            ticket = await self._relay(route, prefill, decode, ticket)
        asked = EngineRequest(
            request=route.request,
            mode="decode",
            ticket=ticket,
            output_token_ids=tuple(self.row.output_token_ids),
            transfer_s=self._rules.transfer_s,
            reserve_s=self._rules.request_s,
            recompute=self._rules.recomputes,
        )
        try:
            await self._stream(decode, route, asked)
        except KVMismatch as mismatch:
            if self._rules.via_host:
                raise  # the prefill engine's blocks are others' by now
            raise await diagnose(prefill, decode, ticket, mismatch, CONTROL_S) from None

    async def _relay(
        self, route: Route, prefill: EngineHandle, decode: EngineHandle, ticket: TransferTicket
    ) -> TransferTicket:
        """Store the KV in the host tier, where the decode engine reads it."""

        def stored(answer: StoreAnswer) -> None:
            told = EventInfo(transfers=answer.transfers, num_kv_bytes_checked=answer.num_bytes_checked)
            for transfer in answer.transfers:
                transfer.purpose = "relay"
            # The tier lies on the prefill engine's node.
            self._take_transfers(prefill, told, route)

        again = await relay(prefill, decode, ticket, route.request, self._rules.transfer_s, stored)
        self._stages.end("relay", time.monotonic_ns())
        return again

    async def _compute_all(self, route: Route) -> None:
        """Have the decode engine compute the prompt, without any KV from elsewhere."""
        assert route.decode is not None, "somebody has to"
        row, decode = self.row, await route.decode()
        row.decode_engine, row.kv_path = decode.name, "recomputed" if route.number else "local"
        tokens = tuple(row.output_token_ids)
        asked = EngineRequest(request=route.request, capture=self._captures, output_token_ids=tokens)
        await self._stream(decode, route, asked)
        if route.number:
            row.num_valid_tokens = 0
            row.num_recomputed_tokens = max(row.num_recomputed_tokens, row.num_prompt_tokens)

    async def _stream(
        self, engine: EngineHandle, route: Route, asked: EngineRequest
    ) -> TransferTicket | None:
        """Follow the request on one engine; return its ticket if it leaves with one. Raises its error."""
        row = self.row
        # Of the output: an engine that was told of tokens goes on behind them, another one begins anew.
        index = len(asked.output_token_ids)
        self._computes, self._phase = asked.mode != "decode", ""
        self._sent()
        async for events in engine.stream(self._rules.request_s, asked):
            for event in events:
                self._note_stages(engine, event)
                if event.token_ids and self._prefilled != route.request.request_id:
                    self._prefilled = route.request.request_id
                    self._log.prefilled(self._prefilled)
                self._take(engine, _undelivered(event, len(row.output_token_ids) - index), route)
                index += len(event.token_ids)
                if event.error is not None:
                    raise event.error
                if event.payload is not None:
                    assert isinstance(event.payload, TransferTicket)
                    return event.payload
                if event.finish_reason is not None:
                    row.finish_reason = str(event.finish_reason)
                    if row.token_times_ns:
                        self._stages.end("decode", row.token_times_ns[-1])
                    return None
        raise DeadlineExceeded(f"the end of {route.request.request_id} on {engine.name}", 0.0)

    def _sent(self) -> None:
        """End the stage that lasts until the attempt's first message leaves."""
        if self._unsent:
            self._stages.end(self._unsent, time.monotonic_ns())
        self._unsent = ""

    def _note_stages(self, engine: EngineHandle, event: RequestEvent) -> None:
        """Record the stages that an engine's event ends. A failed attempt ends none: its time counts as
        `retry`, if there is another attempt."""
        if event.error is not None:
            return
        stages, info, offset_ns = self._stages, event.info or NO_MORE, engine.clock_offset_ns
        at_ns = event.time_ns + offset_ns
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
        self._note_steps(event, offset_ns)
        if isinstance(event.payload, TransferTicket):
            stages.end("ticket", at_ns - max(event.payload.digest_ns, default=0))
            stages.end("digest", at_ns)

    def _note_tier(self, info: EventInfo, offset_ns: int) -> None:
        """Record what the engine waited for before it queued the request."""
        ends = {"prefill_queue": info.asked_ns, "lookup": info.found_ns, "load": info.loaded_ns}
        for stage, end_ns in ends.items():
            if end_ns is not None:
                self._stages.end(stage, end_ns + offset_ns)

    def _note_steps(self, event: RequestEvent, offset_ns: int) -> None:
        """Record when the engine first computed, when the request was swapped out, and its first token."""
        stages, info, at_ns = self._stages, event.info or NO_MORE, event.time_ns + offset_ns
        if info.first_step_ns is not None:
            self._phase = "prefill" if self._computes else "decode"
            stages.end(f"{self._phase}_queue", info.first_step_ns + offset_ns)
        if info.swap_ns is not None:
            stages.end(self._phase or "decode", at_ns - info.swap_ns)
            stages.end("swap", at_ns)
        if event.token_ids and self._phase == "prefill":
            stages.end("prefill", at_ns)
            self._phase = "decode"

    def _take(self, engine: EngineHandle, event: RequestEvent, route: Route) -> None:
        row, info = self.row, event.info or NO_MORE
        time_ns = event.time_ns + engine.clock_offset_ns
        row.output_token_ids += event.token_ids
        row.token_times_ns += [time_ns] * len(event.token_ids)
        note_sampling(row, event)
        if info.stage_ns is not None and event.error is None:
            row.exposed_ns = time_ns - row.token_times_ns[0]
        self._take_transfers(engine, info, route)
        if info.failure is not None:  # the decode engine went on by itself
            row.failure = row.failure or str(info.failure)
            row.num_valid_tokens = info.num_valid_tokens
            row.num_attempts += 1
            # Where its read never began, nobody releases its lease.
            assert self._lender is not None, "somebody lent it"
            settle = self._lender.leader.settle.options(concurrency_group="control")
            settle.remote(route.request.request_id)
        self._take_offload(info)
        if info.captured is not None:
            self._log.captured(row, list(info.captured))
        if info.num_cached_tokens is not None:
            row.num_cached_tokens = info.num_cached_tokens
        if engine.role != "prefill" and info.num_recomputed_tokens is not None:
            row.num_recomputed_tokens = info.num_recomputed_tokens
        if row.num_recomputed_tokens and row.kv_path == "remote":
            row.kv_path = "recomputed"
        self._log.delivered(row, event)

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

    def _take_transfers(self, engine: EngineHandle, info: EventInfo, route: Route) -> None:
        row, transfers, num_checked = self.row, info.transfers or (), info.num_kv_bytes_checked or 0
        for transfer in transfers:
            transfer.cell_id, transfer.repeat = row.cell_id, row.repeat
            transfer.request_id, transfer.retries = row.request_id, route.number
            transfer.shift(engine.clock_offset_ns - row.arrival_ns)
        if transfers or num_checked:
            self._log.transferred(transfers, num_checked)


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
