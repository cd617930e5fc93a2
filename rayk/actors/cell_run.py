"""The requests of one cell on its engines: placed, streamed, handed over; who fails is a row with an error.

Runs inside the coordinator's actor. It sees requests and events, never a token loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayk.actors.commands import Capture, CapturedRows, Connect, Describe, Diagnose, Wire
from rayk.actors.engines import EngineHandle
from rayk.actors.sampled import note_sampling, with_seed
from rayk.engine.leader import RequestEvent
from rayk.sched.policies import get_policy
from rayk.specs import Cell
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError
from rayk.types.request import Request
from rayk.types.rows import RequestRow, TransferRow

CONTROL_S = 30.0
"""Deadline for a command."""
WIRE_S = 15.0
"""How long a producer may take to answer a first read. Idle engines look at the network every 50 ms."""
MAX_STREAMS = 96
"""Requests of one cell in flight at once: each holds a thread of its worker's io group while it streams."""


@dataclass(kw_only=True)
class CellOutcome:
    """Everything a cell left behind. Filled by the coordinator; judged elsewhere."""

    requests: list[RequestRow] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)
    errors: list[RaykError] = field(default_factory=list)
    """Of requests and engines, in order of appearance."""
    captured: dict[int, list[CapturedRows]] = field(default_factory=dict)
    """Prompt index -> the prefill engine's rows, where kv_values is checked."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> backend, comm, layout, block sizes..."""
    num_kv_bytes_checked: int = 0
    wall_ns: int = 0


class CellRun:
    """See the module."""

    def __init__(
        self, cell: Cell, repeat: int, outcome: CellOutcome, engines: list[EngineHandle], capture: bool
    ) -> None:
        self._cell = cell
        self._repeat = repeat
        self._outcome = outcome
        self._capture = capture
        self._prefill = [e for e in engines if e.role != "decode"]
        self._decode = [e for e in engines if e.role == "decode"]
        self._policy = get_policy(cell.policy)
        self._streams = asyncio.Semaphore(MAX_STREAMS)
        self._ticket_ns: dict[str, int] = {}
        """When each request's ticket came here."""
        self._ready_ns: dict[str, int] = {}
        """When each request could decode: its KV was proven, or (aggregated) its first token was there."""

    async def connect(self) -> None:
        """Handshake every decode engine with every prefill engine, and have the network set up."""
        engines = self._prefill + self._decode if self._decode else []
        described = await asyncio.gather(*(e.call(Describe(), CONTROL_S) for e in engines))
        for engine, descriptions in zip(engines, described, strict=True):
            engine.descriptions = tuple(descriptions)
        for d in self._decode:
            for p in self._prefill:
                await d.call(Connect(p.descriptions, d.descriptions), CONTROL_S)
                await d.call(Wire(p.name, WIRE_S), CONTROL_S)

    async def requests(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run all prompts together. A failed request is a row with an error."""
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
        place = self._policy.place(request, len(self._prefill), max(1, len(self._decode)))
        try:
            async with self._streams:
                row.stage_ns["queue"] = time.monotonic_ns() - row.arrival_ns
                async with asyncio.timeout(self._cell.deadlines.request_s):
                    await self._place(request, row, *place)
        except TimeoutError:
            for engine in (self._prefill[place[0]], *self._decode[place[1] : place[1] + 1]):
                engine.leader.abort.options(concurrency_group="control").remote(request.request_id)
            self._fail(row, DeadlineExceeded(f"request {request.request_id}", self._cell.deadlines.request_s))
        except RaykError as error:
            self._fail(row, error)
        except asyncio.CancelledError:
            self._fail(row, DeadlineExceeded(f"cell {self._cell.cell_id}", self._cell.deadlines.cell_s))
            raise

    async def _place(self, request: Request, row: RequestRow, p: int, d: int) -> None:
        prefill = self._prefill[p]
        row.prefill_engine = prefill.name
        mode = "prefill" if self._decode else "whole"
        ticket = await self._stream(prefill, row, request, mode=mode, capture=self._capture)
        if ticket is None:
            row.decode_engine = row.decode_engine or (None if self._decode else prefill.name)
            row.kv_path = "none" if self._decode else "local"
            return
        self._ticket_ns[request.request_id] = time.monotonic_ns()
        row.stage_ns["digest"] = self._ticket_ns[request.request_id] - row.token_times_ns[-1]
        decode = self._decode[d]
        row.decode_engine, row.kv_path = decode.name, "remote"
        try:
            await self._stream(
                decode,
                row,
                request,
                mode="decode",
                ticket=ticket,
                output_token_ids=tuple(row.output_token_ids),
                transfer_s=self._cell.deadlines.transfer_s,
                reserve_s=self._cell.deadlines.request_s,
            )
        except KVMismatch as mismatch:
            raise await self._diagnose(prefill, decode, ticket, mismatch) from None
        finally:
            if row.finish_reason is None:  # nobody will release the lease of a request that failed
                prefill.leader.settle.options(concurrency_group="control").remote(request.request_id)

    async def _stream(
        self, engine: EngineHandle, row: RequestRow, request: Request, **arguments: Any
    ) -> TransferTicket | None:
        """Follow a request on one engine; its ticket if it leaves with one. Raises its error."""
        async for events in engine.stream(self._cell.deadlines.request_s, request, **arguments):
            for event in events:
                self._take(engine, row, event)
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
        raise DeadlineExceeded(f"the end of {request.request_id} on {engine.name}", 0.0)

    def _take(self, engine: EngineHandle, row: RequestRow, event: RequestEvent) -> None:
        time_ns = event.time_ns + engine.clock_offset_ns
        row.output_token_ids += event.token_ids
        row.token_times_ns += [time_ns] * len(event.token_ids)
        note_sampling(row, event)
        if event.token_ids and "prefill" not in row.stage_ns:
            row.stage_ns["prefill"] = time_ns - row.arrival_ns - row.stage_ns["queue"]
            self._ready_ns[row.request_id] = time_ns
        info = event.info
        if "stage_ns" in info:
            stages: dict[str, int] = info["stage_ns"]
            waited = time_ns - self._ticket_ns[row.request_id] - sum(stages.values())
            row.stage_ns |= {**stages, "handover": max(0, waited)}
            self._ready_ns[row.request_id] = time_ns
        self._outcome.num_kv_bytes_checked += info.get("num_kv_bytes_checked", 0)
        for transfer in info.get("transfers", ()):
            transfer.cell_id, transfer.repeat = row.cell_id, row.repeat
            self._outcome.transfers.append(transfer)
        if "captured" in info:
            self._outcome.captured[row.prompt_index] = info["captured"]
        if engine.role != "prefill":
            row.num_recomputed_tokens = info.get("num_recomputed_tokens", 0)
        if row.num_recomputed_tokens and row.kv_path == "remote":
            row.kv_path = "recomputed"

    async def _diagnose(
        self, prefill: EngineHandle, decode: EngineHandle, ticket: TransferTicket, mismatch: KVMismatch
    ) -> KVMismatch:
        """Fetch both sides' rows and name the first wrong byte; what the digests said if that fails."""
        try:
            capture = Capture(ticket.request_id, ticket.num_tokens, ticket.block_tables)
            parts = await prefill.call(capture, CONTROL_S)
            found = await decode.call(Diagnose(ticket.request_id, tuple(parts)), CONTROL_S)
        except RaykError:
            return mismatch
        finally:
            decode.leader.settle.options(concurrency_group="control").remote(ticket.request_id)
        exact = [m for per_rank in found for m in per_rank]
        if not exact:
            mismatch.classification += (
                "; by now both sides are equal: the producer's bytes changed after its digest"
            )
            return mismatch
        exact.sort(key=lambda m: (m.group, m.layer, m.field, m.head, m.token))
        first: KVMismatch = exact[0]
        first.num_bytes_mismatched = sum(m.num_bytes_mismatched for m in exact)
        return first

    def _fail(self, row: RequestRow, error: RaykError) -> None:
        row.error = str(error)
        row.finish_reason = "error"
        self._outcome.errors.append(error)
