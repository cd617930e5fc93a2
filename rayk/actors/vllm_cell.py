"""The requests of one cell on vLLM's engines: what CellRun does on rayk's own.

A prefill engine computes a prompt and one token, as vLLM's proxies have it; the decode engine fetches the KV
and generates all tokens, the first one again. All of it runs inside the coordinator's actor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.cell_run import run_requests
from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.vllm_engine import END_S
from rayk.handover.commands import CapturedRows
from rayk.metrics import Meter
from rayk.specs import Cell
from rayk.types.errors import (
    DeadlineExceeded,
    EngineDied,
    KVMismatch,
    RaykError,
    TransferError,
    Unsupported,
)
from rayk.types.request import Request, SamplingParams
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.stage_clock import StageClock

LOG = logging.getLogger("rayk")
PROOF_POLL_S = 0.05
NUM_HANDSHAKES = 4
LATE = ("handshake", "zmq.error.Again")
"""What vLLM logs of a handshake that was not answered within its fixed 5 s."""
_NOT_MADE_FOR = re.compile(
    r"(?:AssertionError|NotImplementedError): "
    r"(.*(?:is not divisible by|are not supported|is not supported|does not support).*)"
    r"|RuntimeError: (NIXL compatibility hash mismatch.*)"
)
"""How vLLM's connector says in its handshake that it was not written for such a pair of engines, or that they
are of unlike versions or settings."""
PROMPT_ALONE = SamplingParams(max_tokens=1, ignore_eos=True)
HANDED_ON = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a request says of itself whose KV another engine is to fetch."""
_request_numbers = itertools.count()


class VllmCellRun:
    """Runs the requests of one cell."""

    def __init__(
        self,
        cell: Cell,
        repeat: int,
        outcome: CellOutcome,
        engines: Sequence[EngineHandle],
        capture: bool,
        meter: Meter | None = None,
    ) -> None:
        self._cell = cell
        self._repeat = repeat
        self._outcome = outcome
        self._prefill, self._decode = engines[: cell.num_prefill_engines], engines[cell.num_prefill_engines :]
        self._capture = capture
        self._meter = meter or Meter()
        self._is_proven = all(config.connector and config.is_proven for config in cell.vllm)

    async def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run all prompts together. A failed request is a row with an error."""
        await run_requests(self._cell, self._repeat, self._outcome, prompts, self._run_one, meter=self._meter)

    async def _run_one(self, index: int, request: Request, row: RequestRow) -> None:
        limit_s = self._cell.deadlines.request_s
        run = VllmRequestRun(row, limit_s, self._outcome, captures=self._capture, proves=self._is_proven)
        prefill = self._prefill[index % len(self._prefill)]
        try:
            async with asyncio.timeout(limit_s):
                if self._decode:
                    await run.hand_over(prefill, self._decode[index % len(self._decode)], request)
                else:
                    await run.whole(prefill, request)
        except (TransferError, DeadlineExceeded, TimeoutError):
            await run.ask_last_proof()
            run.abort()
            raise
        except asyncio.CancelledError:
            run.abort()
            raise


class VllmRequestRun:
    """Takes one request through vLLM's engines and fills its row."""

    def __init__(
        self, row: RequestRow, limit_s: float, outcome: CellOutcome, *, captures: bool, proves: bool
    ) -> None:
        self._row = row
        self._limit_s = limit_s
        self._outcome = outcome
        self._captures = captures
        self._proves = proves
        self._name = f"rayk-{next(_request_numbers)}"
        """A name that no other request of this process has: engines outlive cells."""
        self._received_as = self._name
        """Its name on the decode engine."""
        self._met: list[EngineHandle] = []
        self._receiver: EngineHandle | None = None
        """The engine that was asked to fetch its KV."""
        self._found: dict[int, dict[str, Any]] = {}
        """What the receiver's ranks found of its KV, by rank: each tells it once."""
        self._is_noted = False
        self._stages = StageClock(row)

    async def whole(self, engine: EngineHandle, request: Request) -> None:
        """Have one engine compute the prompt and decode. Raises what ends the request."""
        row = self._row
        row.prefill_engine = row.decode_engine = engine.name
        row.kv_path = "local"
        told = await self._generate(engine, request, request.sampling, None)
        self._take(engine, told)
        self._stages.end("prefill", row.token_times_ns[0])
        self._stages.end("decode", row.token_times_ns[-1])
        if self._captures:
            # The rows of the prompt are wanted: compute it once more, and nothing behind it.
            self._name = f"{self._name}-rows"
            await self._generate(engine, request, PROMPT_ALONE, {"rayk_proof": True})
            await self._take_rows(engine)

    async def hand_over(self, prefill: EngineHandle, decode: EngineHandle, request: Request) -> None:
        """Have one engine compute the prompt, another one decode. Raises what ends the request."""
        row = self._row
        row.prefill_engine, row.decode_engine = prefill.name, decode.name
        asked = replace(PROMPT_ALONE, prompt_logprobs=request.sampling.prompt_logprobs)
        of_prompt = None
        if asked.prompt_logprobs is not None and prefill.facts.get("keeps_states"):
            # vLLM's P leaves the last token of a model with states to D, which counts on it, but not where P
            # tells of the prompt (nixl/base_scheduler.py, _truncate_request_for_prefill): ask that apart.
            name, self._name = self._name, f"{self._name}-prompt"
            of_prompt = await self._generate(prefill, request, asked, None)
            self._name, asked = name, PROMPT_ALONE
        first = await self._generate(prefill, request, asked, HANDED_ON)
        self._stages.end("prefill", first["times_ns"][0] + prefill.clock_offset_ns)
        row.prompt_logprobs, row.prompt_top_logprobs = _of_prompt(of_prompt or first)
        row.num_cached_tokens = first["num_cached_tokens"]
        given = first["kv_transfer_params"]
        row.kv_path = "remote"
        told = await self._receive(decode, request, given)
        told |= {"num_cached_tokens": row.num_cached_tokens, "prompt_logprobs": None}
        self._take(decode, told)
        self._stages.end("read", row.token_times_ns[0])
        self._stages.end("decode", row.token_times_ns[-1])
        if self._proves:
            await self._prove(prefill, decode)
        if self._captures:  # they serve the proof, too
            await self._take_rows(prefill)

    def abort(self) -> None:
        """Stop it wherever it is."""
        for engine in self._met:
            for name in {self._name, self._received_as}:
                engine.leader.ask.remote(CONTROL_S, "abort", request_id=name)

    async def _receive(
        self, decode: EngineHandle, request: Request, given: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Have an engine fetch the KV and generate. Try once more where the handshake before it came too
        late: all engines of a small machine may wait for its cores."""
        self._receiver = decode
        sampling = replace(request.sampling, prompt_logprobs=None)
        for attempt in range(1, NUM_HANDSHAKES):
            try:
                return await self._generate(decode, request, sampling, given, self._received_as)
            except TransferError as error:
                if not all(word in error.reason for word in LATE):
                    raise
                LOG.warning("%s: once more: %s", self._row.request_id, error.reason)
                # vLLM matches names without such an end.
                self._received_as = f"{self._name}-{attempt:08x}"
        return await self._generate(decode, request, sampling, given, self._received_as)

    async def _generate(
        self,
        engine: EngineHandle,
        request: Request,
        sampling: SamplingParams,
        given: dict[str, Any] | None,
        name: str = "",
    ) -> dict[str, Any]:
        self._met.append(engine)
        if len(self._met) == 1:
            self._stages.end("queue", time.monotonic_ns())
        told, _ = await self._ask(
            engine,
            self._limit_s,
            "generate",
            request_id=name or self._name,
            prompt=list(request.prompt_token_ids),
            sampling=vllm_sampling(sampling),
            kv_transfer_params=given,
        )
        if told["finish_reason"] not in ("stop", "length") or not told["token_ids"]:
            why = f": {told['why']}" if told.get("why") else ""
            reason = f"{engine.name} ends it with finish reason {told['finish_reason']}{why}"
            if given is not None:
                if refused := _NOT_MADE_FOR.search(why):
                    raise Unsupported(f"vLLM refuses: {refused[1] or refused[2]}")
                raise TransferError(self._row.request_id, reason, self._row.prefill_engine or "", engine.name)
            raise EngineDied(engine.name, f"{reason} ({self._row.request_id})")
        return told

    async def _ask(
        self, engine: EngineHandle, limit_s: float, op: str, **arguments: Any
    ) -> tuple[dict[str, Any], bytes]:
        answer = engine.leader.ask.remote(limit_s, op, **arguments)
        found: tuple[dict[str, Any], bytes] = await engine.guard(answer, op, limit_s + END_S)
        return found

    def _take(self, engine: EngineHandle, told: dict[str, Any]) -> None:
        row = self._row
        row.output_token_ids = list(told["token_ids"])
        row.token_times_ns = [t + engine.clock_offset_ns for t in told["times_ns"]]
        row.finish_reason = told["finish_reason"]
        row.stop_reason = None if told["stop_reason"] is None else str(told["stop_reason"])
        row.num_cached_tokens = told["num_cached_tokens"]
        if told["logprobs"] is not None:
            row.output_logprobs = [pairs[0][1] for pairs in told["logprobs"]]
            if any(len(pairs) > 1 for pairs in told["logprobs"]):
                row.output_top_logprobs = [_tops(pairs) for pairs in told["logprobs"]]
        if told["prompt_logprobs"] is not None:
            row.prompt_logprobs, row.prompt_top_logprobs = _of_prompt(told)

    async def _take_rows(self, engine: EngineHandle) -> None:
        """Wait for the prompt's rows where it was computed; they are copied in the step after its last."""
        until = time.monotonic() + CONTROL_S
        while True:
            told, content = await self._ask(engine, CONTROL_S, "rows", request_id=self._name)
            if content:
                break
            if time.monotonic() > until:
                raise DeadlineExceeded(f"rows of {self._row.request_id} on {engine.name}", CONTROL_S)
            await asyncio.sleep(PROOF_POLL_S)
        self._outcome.captured[self._row.prompt_index] = captured_rows(told["workers"], content)

    async def _prove(self, prefill: EngineHandle, decode: EngineHandle) -> None:
        """Ask every rank that received KV what it found. Raises TransferError where it cannot tell."""
        while "pending" in (statuses := await self._ask_proof(decode)):
            await asyncio.sleep(PROOF_POLL_S)
        self._note_found()
        row, found = self._row, self._found
        if found and all(f["status"] == "local" for f in found.values()):  # nothing of P's was loaded
            row.kv_path = "local"
        unverified = [f["why"] for f in found.values() if f["status"] == "unverified"]
        unverified += [f"rank {r} knows nothing of it" for r in range(len(statuses)) if r not in found]
        if unverified:
            reason = f"what arrived cannot be verified: {unverified[0]}"
            raise TransferError(row.request_id, reason, prefill.name, decode.name)

    async def _ask_proof(self, decode: EngineHandle) -> list[str]:
        """Ask the receiver's ranks what they found, and keep it. Returns the status of each."""
        told, _ = await self._ask(decode, CONTROL_S, "proof", request_id=self._received_as)
        self._found |= {r: f for r, f in enumerate(told["workers"]) if f["status"] not in ("pending", "none")}
        return [f["status"] for f in told["workers"]]

    def _note_found(self) -> None:
        """Add what ranks found to the cell's outcome."""
        self._is_noted = True
        for rank, found in sorted(self._found.items()):
            self._outcome.num_kv_bytes_checked += found["bytes_checked"]
            self._outcome.transfers += [self._transfer(rank, moved) for moved in found["transfers"]]
        mismatches = [f for f in self._found.values() if f["mismatch"] is not None]
        if mismatches:
            self._outcome.errors.append(_mismatch(self._row.request_id, mismatches))

    async def ask_last_proof(self) -> None:
        """Ask once what the receiver found of a request that failed: wrong KV counts all the same."""
        if not self._proves or self._receiver is None or self._is_noted:
            return
        try:
            await self._ask_proof(self._receiver)
        except RaykError as error:
            LOG.warning("%s failed, and what arrived is not told: %s", self._row.request_id, error)
        self._note_found()

    def _transfer(self, consumer_rank: int, moved: dict[str, Any]) -> TransferRow:
        row = self._row
        return TransferRow(
            cell_id=row.cell_id,
            repeat=row.repeat,
            request_id=row.request_id,
            producer_rank=moved["producer_rank"],
            consumer_rank=consumer_rank,
            group=moved["group"],
            bytes=moved["bytes"],
            num_descriptors=moved["descriptors"],
            post_ns=moved["post_ns"],
            transfer_ns=moved["transfer_ns"],
        )


def vllm_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Translate the sampling parameters into vLLM's names."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }


def captured_rows(workers: Sequence[Sequence[Sequence[Any]]], content: bytes) -> list[CapturedRows]:
    """Return each worker's rows, from what `WorkerExtension.rayk_rows` says of each and the bytes of all."""
    found, begin = [], 0
    for shapes in workers:
        captured: CapturedRows = {}
        for layer, field, unit, num_rows, row_bytes in shapes:
            end = begin + num_rows * row_bytes
            rows = np.frombuffer(content[begin:end], dtype=np.uint8).reshape(num_rows, row_bytes)
            captured.setdefault(layer, {})[field, unit] = rows
            begin = end
        found.append(captured)
    return found


Pairs = Sequence[tuple[int, float]]
"""(token id, log probability) of the token itself, then of the best ones."""


def _tops(pairs: Pairs) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in pairs[1:]]


def _of_prompt(
    told: dict[str, Any],
) -> tuple[list[float | None] | None, list[list[tuple[int, float]] | None] | None]:
    """Return the log probabilities of the prompt's tokens, and of the best ones where any were asked for."""
    prompt: Sequence[Pairs | None] | None = told["prompt_logprobs"]
    if prompt is None:
        return None, None
    tops = [None if pairs is None else _tops(pairs) for pairs in prompt]
    return [None if pairs is None else pairs[0][1] for pairs in prompt], tops if any(tops) else None


def _mismatch(request_id: str, found: Sequence[dict[str, Any]]) -> KVMismatch:
    """Report the first wrong byte of all ranks, and count the wrong bytes of all."""
    first = min((f["mismatch"] for f in found), key=lambda m: (m["group"], m["layer"], m["field"], m["unit"]))
    return KVMismatch(
        request_id,
        layer=first["layer"],
        group=first["group"],
        field=first["field"],
        head=first["unit"],
        token=first["token"],
        classification=first["classification"],
        num_bytes_checked=sum(f["bytes_checked"] for f in found),
        num_bytes_mismatched=sum(f["bytes_mismatched"] for f in found),
        unit_name=first["unit_name"],
    )
