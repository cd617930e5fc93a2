"""The requests of one cell on its engines: placed, streamed, handed over; who fails is a row with an error.

Runs inside the coordinator's actor. It sees requests and events, never a token loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayk.actors.attempts import Attempt, Engines, FormAgain, next_attempt
from rayk.actors.commands import CapturedRows
from rayk.actors.diagnosis import diagnose
from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.push_flow import reserved
from rayk.actors.sampled import note_sampling, with_seed
from rayk.actors.struck import as_it_arrives
from rayk.engine.leader import RequestEvent
from rayk.kv.manager import Ledger
from rayk.sched.policies import get_policy
from rayk.specs import Cell
from rayk.transfer.recovery import Recovery
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError
from rayk.types.request import Request
from rayk.types.rows import RequestRow, TransferRow

MAX_STREAMS = 96
"""Requests of one cell in flight at once: each holds a thread of its worker's io group while it streams."""


@dataclass(kw_only=True)
class CellOutcome:
    """Everything a cell left behind. Filled by the coordinator; judged elsewhere."""

    requests: list[RequestRow] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)
    errors: list[RaykError] = field(default_factory=list)
    """Of requests and engines, in order of appearance."""
    survived: list[RaykError] = field(default_factory=list)
    """Of engines that died or were lost while all their requests were saved."""
    captured: dict[int, list[CapturedRows]] = field(default_factory=dict)
    """Prompt index -> the prefill engine's rows, where kv_values is checked."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> backend, comm, layout, block sizes..."""
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Engine name -> what came of its blocks; of those that lived to tell."""
    num_kv_bytes_checked: int = 0
    wall_ns: int = 0


class CellRun:
    """See the module."""

    def __init__(
        self,
        cell: Cell,
        repeat: int,
        outcome: CellOutcome,
        engines: list[EngineHandle],
        capture: bool,
        form_again: FormAgain | None = None,
    ) -> None:
        """`form_again`: makes a new engine in place of a lost one."""
        self._cell = cell
        self._repeat = repeat
        self._outcome = outcome
        self._capture = capture
        self._engines = Engines(cell, engines, form_again)
        self._policy = get_policy(cell.policy)
        self._num_reservations = 0
        self._streams = asyncio.Semaphore(MAX_STREAMS)
        self._ticket_ns: dict[str, int] = {}
        """When each request's ticket came here."""
        self._ready_ns: dict[str, int] = {}
        """When each request could decode: its KV was proven, or (aggregated) its first token was there."""

    async def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Connect the engines and run all prompts together. A failed request is a row with an error."""
        async with self._engines.watched():
            await self._engines.connect()
            await asyncio.gather(*(self._request(i, tuple(p)) for i, p in enumerate(prompts)))

    async def _request(self, index: int, prompt: tuple[int, ...]) -> None:
        request = Request(
            request_id=f"{self._cell.cell_id}/{self._repeat}/{index}",
            prompt_token_ids=prompt,
            sampling=with_seed(self._cell.sampling, index, self._repeat),
        )
        row = RequestRow(
            cell_id=self._cell.cell_id,
            repeat=self._repeat,
            request_id=request.request_id,
            prompt_index=index,
            prompt_token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            seed=request.sampling.seed if request.sampling.temperature else None,
            arrival_ns=time.monotonic_ns(),
        )
        self._outcome.requests.append(row)
        engines = self._engines
        place = self._policy.place(request, len(engines.prefill), max(1, len(engines.decode)))
        attempt = Attempt(request, *place)
        try:
            async with self._streams:
                row.stage_ns["queue"] = time.monotonic_ns() - row.arrival_ns
                async with asyncio.timeout(self._cell.deadlines.request_s):
                    await self._attempts(attempt, row)
        except TimeoutError:
            engines.abort(row.request_id, row.num_attempts)
            self._fail(row, DeadlineExceeded(f"request {request.request_id}", self._cell.deadlines.request_s))
        except RaykError as error:
            self._fail(row, error)
        except asyncio.CancelledError:
            self._fail(row, DeadlineExceeded(f"cell {self._cell.cell_id}", self._cell.deadlines.cell_s))
            raise

    async def _attempts(self, attempt: Attempt, row: RequestRow) -> None:
        """Place a request, and again as the failure policy says. Raises the error it does not survive."""
        recovery = Recovery(self._cell.spec.failure_policy, len(self._engines.prefill))
        while True:
            try:
                await self._attempt(attempt, row)
            except RaykError as error:
                again = next_attempt(recovery, self._engines, attempt, error)
                row.failure = row.failure or str(error)
                if again is None:
                    raise
                attempt = again
                row.num_attempts = recovery.num_attempts
            else:
                if row.failure is not None:
                    row.recovered_by = recovery.policy
                return

    async def _attempt(self, attempt: Attempt, row: RequestRow) -> None:
        """One way of a request through its engines. Raises what ends it."""
        if attempt.computes_all:
            await self._compute_all(attempt, row)
            return
        if self._engines.decode and self._cell.spec.transfer.mode == "push":
            prefill = await self._engines.live("prefill", attempt.p)
            decode = await self._engines.live("decode", attempt.d)
            async with reserved(self._cell, prefill, decode, attempt.request, row) as reservation:
                self._num_reservations += 1
                reservation = as_it_arrives(self._cell, reservation, self._num_reservations)
                await self._prefill(attempt, row, reservation=reservation)
        else:
            await self._prefill(attempt, row)

    async def _prefill(self, attempt: Attempt, row: RequestRow, **given: Any) -> None:
        """From the prompt on. `given`: more for the prefill engine."""
        request = attempt.request
        prefill = await self._engines.live("prefill", attempt.p)
        row.prefill_engine = prefill.name
        has_decode = bool(self._engines.decode)
        if not has_decode:
            given["output_token_ids"] = tuple(row.output_token_ids)
        mode = "prefill" if has_decode else "whole"
        ticket = await self._stream(prefill, row, attempt, mode=mode, capture=self._capture, **given)
        if ticket is None:
            row.decode_engine = row.decode_engine or (None if has_decode else prefill.name)
            row.kv_path = "none" if has_decode else "local"
            return
        self._ticket_ns[row.request_id] = time.monotonic_ns()
        row.stage_ns["digest"] = max(0, self._ticket_ns[row.request_id] - row.token_times_ns[-1])
        try:
            await self._decode(attempt, row, prefill, ticket)
        finally:
            if row.finish_reason is None:  # nobody will release the lease of a request that failed
                prefill.leader.settle.options(concurrency_group="control").remote(request.request_id)

    async def _decode(
        self, attempt: Attempt, row: RequestRow, prefill: EngineHandle, ticket: TransferTicket
    ) -> None:
        decode = await self._engines.live("decode", attempt.d)
        row.decode_engine, row.kv_path = decode.name, "remote"
        try:
            await self._stream(
                decode,
                row,
                attempt,
                mode="decode",
                ticket=ticket,
                output_token_ids=tuple(row.output_token_ids),
                transfer_s=self._cell.deadlines.transfer_s,
                reserve_s=self._cell.deadlines.request_s,
                recompute=self._cell.failure_policy == "recompute",
            )
        except KVMismatch as mismatch:
            raise await diagnose(prefill, decode, ticket, mismatch, CONTROL_S) from None

    async def _compute_all(self, attempt: Attempt, row: RequestRow) -> None:
        """The decode engine does without any KV from elsewhere."""
        decode = await self._engines.live("decode", attempt.d)
        row.decode_engine, row.kv_path = decode.name, "recomputed"
        row.num_valid_tokens = 0
        tokens = tuple(row.output_token_ids)
        await self._stream(decode, row, attempt, mode="whole", capture=self._capture, output_token_ids=tokens)
        row.num_recomputed_tokens = max(row.num_recomputed_tokens, row.num_prompt_tokens)

    async def _stream(
        self, engine: EngineHandle, row: RequestRow, attempt: Attempt, **arguments: Any
    ) -> TransferTicket | None:
        """Follow a request on one engine; its ticket if it leaves with one. Raises its error."""
        # Of the output: an engine that was told of tokens goes on behind them, another one begins anew.
        index = len(arguments.get("output_token_ids", ()))
        async for events in engine.stream(self._cell.deadlines.request_s, attempt.request, **arguments):
            for event in events:
                self._take(engine, row, _undelivered(event, len(row.output_token_ids) - index), attempt)
                index += len(event.token_ids)
                if event.error is not None:
                    raise event.error
                if event.payload is not None:
                    assert isinstance(event.payload, TransferTicket)
                    return event.payload
                if event.finish_reason is not None:
                    row.finish_reason = str(event.finish_reason)
                    if row.token_times_ns:
                        row.stage_ns["decode"] = row.token_times_ns[-1] - self._ready_ns[row.request_id]
                    return None
        raise DeadlineExceeded(f"the end of {attempt.request.request_id} on {engine.name}", 0.0)

    def _take(self, engine: EngineHandle, row: RequestRow, event: RequestEvent, attempt: Attempt) -> None:
        time_ns = event.time_ns + engine.clock_offset_ns
        row.output_token_ids += event.token_ids
        row.token_times_ns += [time_ns] * len(event.token_ids)
        note_sampling(row, event)
        if event.token_ids and "prefill" not in row.stage_ns:
            before = row.stage_ns["queue"] + row.stage_ns.get("reserve", 0)
            row.stage_ns["prefill"] = time_ns - row.arrival_ns - before
            self._ready_ns[row.request_id] = time_ns
        info = event.info
        if "stage_ns" in info:
            stages: dict[str, int] = info["stage_ns"]
            waited = time_ns - self._ticket_ns[row.request_id] - sum(stages.values())
            # Blocks to push into were reserved before the prompt was computed.
            stages["reserve"] += row.stage_ns.get("reserve", 0)
            row.stage_ns |= {**stages, "handover": max(0, waited)}
            if event.error is None:
                row.exposed_ns = time_ns - row.token_times_ns[0]
            self._ready_ns[row.request_id] = time_ns
        self._outcome.num_kv_bytes_checked += info.get("num_kv_bytes_checked", 0)
        for transfer in info.get("transfers", ()):
            transfer.cell_id, transfer.repeat = row.cell_id, row.repeat
            transfer.request_id, transfer.retries = row.request_id, attempt.number
            self._outcome.transfers.append(transfer)
        if "failure" in info:  # the decode engine went on by itself
            row.failure = row.failure or str(info["failure"])
            row.num_valid_tokens = info["num_valid_tokens"]
            row.num_attempts += 1
            # Where its read never began, nobody releases its lease.
            lender = next(e for e in self._engines.prefill if e.name == row.prefill_engine)
            lender.leader.settle.options(concurrency_group="control").remote(attempt.request.request_id)
        if "captured" in info:
            self._outcome.captured[row.prompt_index] = info["captured"]
        if engine.role != "prefill" and "num_recomputed_tokens" in info:
            row.num_recomputed_tokens = info["num_recomputed_tokens"]
        if row.num_recomputed_tokens and row.kv_path == "remote":
            row.kv_path = "recomputed"

    def _fail(self, row: RequestRow, error: RaykError) -> None:
        row.error = str(error)
        row.finish_reason = "error"
        if row.exposed_ns is not None and row.token_times_ns[-1] < row.token_times_ns[0] + row.exposed_ns:
            row.exposed_ns = None  # no decode step followed
        self._outcome.errors.append(error)


def _undelivered(event: RequestEvent, num_known: int) -> RequestEvent:
    """An event without the first `num_known` of its tokens: an earlier attempt delivered them."""
    if num_known <= 0 or not event.token_ids:
        return event
    logprobs = None if event.logprobs is None else event.logprobs[num_known:]
    return replace(event, token_ids=event.token_ids[num_known:], logprobs=logprobs)
