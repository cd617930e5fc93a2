"""The requests of one cell on its engines: placed, streamed, handed over; who fails is a row with an error.

Runs inside the coordinator's actor. It sees requests and events, never a token loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayk.actors.attempts import Attempt, Engines, FormAgain, next_attempt
from rayk.actors.deployment_metrics import report_request
from rayk.actors.engines import EngineHandle, bug_behind
from rayk.actors.planting import as_it_arrives
from rayk.actors.request_run import RequestRun, Route, RunRules, note_failure
from rayk.actors.sampled import with_seed
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import CapturedRows
from rayk.kv.usage import Ledger
from rayk.metrics import Meter
from rayk.sched.dispatcher import Dispatcher, DispatchRules, Place
from rayk.sched.policies import get_policy
from rayk.sched.recovery import Recovery
from rayk.sched.request_describer import RequestDescriber, new_secret
from rayk.specs import Cell
from rayk.transfer.ticket import Reservation
from rayk.types.errors import DeadlineExceeded, RaykError
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
    offload: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> what it stored, loaded and swapped; of those that lived to tell."""
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host tier -> what it says of itself; of those that live to tell."""
    tiers_before: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same before the first request: tiers outlive cells, and count on."""
    tier_losses: list[str] = field(default_factory=list)
    """What host tiers died of."""
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
        meter: Meter | None = None,
    ) -> None:
        """`form_again`: makes a new engine in place of a lost one. `meter`: is told of requests' times."""
        self._cell = cell
        self._repeat = repeat
        self._outcome = outcome
        self._capture = capture
        self._meter = meter or Meter()
        self._engines = Engines(cell, engines, form_again and partial(self._form_again, form_again))
        self._describer = RequestDescriber(cell.policy, cell.policy_settings, new_secret())
        self.dispatcher = Dispatcher(
            get_policy(cell.policy, cell.policy_settings),
            DispatchRules(
                hands_over=cell.decode is not None, places_at_once=True, restarts=self._engines.restarts
            ),
            tier_of=self._engines.tier_of,
        )
        for engine in engines:
            self._open(engine)
        self._num_reservations = 0
        self._streams = asyncio.Semaphore(MAX_STREAMS)
        self._rules = RunRules(
            is_push=cell.spec.transfer.mode == "push",
            request_s=cell.deadlines.request_s,
            transfer_s=cell.deadlines.transfer_s,
            recomputes=cell.failure_policy == "recompute",
            via_host=cell.spec.transfer.path == "host",
        )

    async def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Connect the engines and run all prompts together. A failed request is a row with an error."""
        async with self._engines.watched():
            await self._engines.connect()
            due_ns = self._cell.due_ns(len(prompts), self._repeat)
            started_ns = time.monotonic_ns()
            requests = enumerate(zip(prompts, due_ns, strict=True))
            await asyncio.gather(*(self._request(i, tuple(p), started_ns, due) for i, (p, due) in requests))

    async def _request(self, index: int, prompt: tuple[int, ...], started_ns: int, due_ns: int) -> None:
        """From its arrival on. It counts from when it was due, however late it is got to."""
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
            arrival_ns=started_ns + due_ns,
            due_ns=due_ns,
        )
        self._outcome.requests.append(row)
        engines = self._engines
        try:
            await _until(row.arrival_ns)
            attempt = self._place(request, self._cell.session_of(index))
            async with self._streams:
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
        finally:
            report_request(self._meter, row)
            self.dispatcher.ended((row.request_id,), time.monotonic_ns())

    async def _attempts(self, attempt: Attempt, row: RequestRow) -> None:
        """Place a request, and again as the failure policy says. Raises the error it does not survive."""
        recovery = Recovery(self._cell.spec.failure_policy, len(self._engines.prefill))
        request_run = RequestRun(self._rules, row, self, captures=self._capture)
        while True:
            met: list[EngineHandle] = []
            try:
                await request_run.attempt(self._way(attempt, met))
            except RaykError as found:
                error = await bug_behind(found, met, EngineHandle.death)
                again = next_attempt(recovery, self._engines, attempt, error)
                row.failure = row.failure or str(error)
                if again is None:
                    raise error from None
                attempt = again
                row.num_attempts = recovery.num_attempts
            else:
                if row.failure is not None:
                    row.recovered_by = recovery.policy
                return

    async def _form_again(self, form: FormAgain, lost: EngineHandle, *, was_serving: bool) -> EngineHandle:
        """A new life of a lost engine: it may be lost as well."""
        try:
            engine = await form(lost, was_serving=was_serving)
        except RaykError as error:
            self.dispatcher.not_formed(lost.name, error)
            raise
        self._open(engine)
        return engine

    def _open(self, engine: EngineHandle) -> None:
        """Place requests on an engine until it dies."""
        self.dispatcher.open(engine.name, engine.role, engine.config.tp, time.monotonic_ns())
        engine.died.add_done_callback(lambda _: self.dispatcher.lost(engine.name))

    def _place(self, request: Request, session: str | None) -> Attempt:
        """Engines by the cell's policy, among those that live. Where none does, an attempt finds that out and
        the failure policy says what comes next."""
        limit = request.sampling.max_tokens
        asked = self._describer.describe(
            request.request_id, request.prompt_token_ids, max_tokens=limit, session=session
        )
        (action,) = self.dispatcher.arrive(self._cell.cell_id, asked, time.monotonic_ns())
        assert isinstance(action, Place), action
        placed = action.placement
        prefill, decode = ([e.name for e in side] for side in (self._engines.prefill, self._engines.decode))
        return Attempt(
            request,
            p=prefill.index(placed.prefill) if placed.prefill is not None else 0,
            d=decode.index(placed.decode) if placed.decode is not None else 0,
            computes_all=placed.prefill is None,
        )

    def _way(self, attempt: Attempt, met: list[EngineHandle]) -> Route:
        """An attempt, with engines as they are when it comes to them. `met`: filled with those."""
        has_decode = bool(self._engines.decode)

        async def find(role: str, index: int) -> EngineHandle:
            met.append(await self._engines.live(role, index))
            return met[-1]

        return Route(
            request=attempt.request,
            prefill=None if attempt.computes_all else partial(find, "prefill", attempt.p),
            decode=partial(find, "decode", attempt.d) if has_decode else None,
            number=attempt.number,
        )

    # What runs of requests tell: request_run.RunLog.

    def delivered(self, row: RequestRow, event: RequestEvent) -> None:
        """The row has it."""
        if event.token_ids:
            self.dispatcher.prefilled(row.request_id)

    def transferred(self, rows: Sequence[TransferRow], num_kv_bytes_checked: int) -> None:
        """Keep the rows."""
        self._outcome.transfers += rows
        self._outcome.num_kv_bytes_checked += num_kv_bytes_checked

    def captured(self, row: RequestRow, rows: list[CapturedRows]) -> None:
        """Keep them for the check of values."""
        self._outcome.captured[row.prompt_index] = rows

    def reserved(self, reservation: Reservation) -> Reservation:
        """As it arrives: a fault may be planted on its way."""
        self._num_reservations += 1
        return as_it_arrives(self._cell, reservation, self._num_reservations)

    def _fail(self, row: RequestRow, error: RaykError) -> None:
        note_failure(row, error)
        self._outcome.errors.append(error)


async def _until(due_ns: int) -> None:
    """Wait, where there is anything to wait for: requests that are due at once keep their order."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)
