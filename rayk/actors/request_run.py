"""One request on its way through its engines: prefilled, handed over, decoded; its row says what happened.

Runs on an event loop, inside the coordinator's actor for a cell's requests and in a server's front for
those of clients. It sees requests and events, never a token loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from rayk.actors.diagnosis import diagnose
from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.push_flow import reserved
from rayk.actors.tiers import relay
from rayk.handover.engine_request import EngineRequest
from rayk.handover.request_record import RecordLog, RequestRecord
from rayk.offload.messages import StoreAnswer
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.types.errors import DeadlineExceeded, KVMismatch
from rayk.types.request import Request
from rayk.types.rows import RequestRow

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


class RunLog(RecordLog, Protocol):
    """Receives what happens to requests on their way."""

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
        self._record = RequestRecord(row, log)
        self._lender: EngineHandle | None = None

    async def attempt(self, route: Route) -> None:
        """Take one route through the engines, after the tokens that earlier attempts delivered. Raises what
        ends it."""
        self._record.begin(route.request.request_id, route.number)
        if route.prefill is None:
            await self._compute_all(route)
        elif route.decode is not None and self._rules.is_push:
            prefill, decode = await route.prefill(), await route.decode()
            self._record.sent()
            stages = self._record.stages
            async with reserved(self._rules.request_s, prefill, decode, route.request, stages) as given:
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
                self._settle(route)

    def _settle(self, route: Route) -> None:
        """Have the engine that lent the request's blocks free them."""
        assert self._lender is not None, "somebody lent it"
        settle = self._lender.leader.settle.options(concurrency_group="control")
        settle.remote(route.request.request_id)

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
            for transfer in answer.transfers:
                transfer.purpose = "relay"
            # The tier lies on the prefill engine's node.
            self._record.moved(prefill, answer.transfers, answer.num_bytes_checked)

        again = await relay(prefill, decode, ticket, route.request, self._rules.transfer_s, stored)
        self._record.stages.end("relay", time.monotonic_ns())
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
        # Of the output: an engine that was told of tokens goes on behind them, another one begins anew.
        self._record.enter(len(asked.output_token_ids), computes=asked.mode != "decode")
        async for events in engine.stream(self._rules.request_s, asked):
            for event in events:
                self._record.hear(engine, event)
                if event.info is not None and event.info.failure is not None:
                    # Where its read never began, nobody releases its lease.
                    self._settle(route)
                if event.error is not None:
                    raise event.error
                if event.payload is not None:
                    assert isinstance(event.payload, TransferTicket)
                    return event.payload
                if event.finish_reason is not None:
                    return None
        raise DeadlineExceeded(f"the end of {route.request.request_id} on {engine.name}", 0.0)
