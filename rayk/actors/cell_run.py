"""The requests of one cell on its engines: placed, streamed, handed over; who fails is a row with an error.

Runs inside the coordinator's actor. It sees requests and events, never a token loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from rayk.actors.cell_deployment import CellDeployment, as_it_arrives
from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.deployment_metrics import report_request
from rayk.actors.engines import EngineHandle, bug_behind
from rayk.actors.request_run import RequestRun, Route, RunRules
from rayk.engine.leader import RequestEvent
from rayk.engine.noise import derived_seed
from rayk.handover.commands import CapturedRows
from rayk.handover.request_record import note_failure
from rayk.metrics import Meter
from rayk.sched.dispatcher import Place
from rayk.sched.request_describer import RequestDescriber, new_secret
from rayk.specs import Cell
from rayk.specs.cells import MAX_STREAMS
from rayk.transfer.ticket import Reservation
from rayk.types.errors import DeadlineExceeded, RaykError
from rayk.types.request import Request, SamplingParams
from rayk.types.rows import RequestRow, TransferRow


class CellRun:
    def __init__(
        self,
        cell: Cell,
        repeat: int,
        outcome: CellOutcome,
        engines: CellDeployment,
        capture: bool,
        meter: Meter | None = None,
    ) -> None:
        """`meter` gets the times of requests."""
        self._cell = cell
        self._repeat = repeat
        self._outcome = outcome
        self._capture = capture
        self._meter = meter or Meter()
        self._engines = engines
        self._describer = RequestDescriber(cell.policy, cell.policy_settings, new_secret())
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
            await self._engines.connect_all()
            self._outcome.moments["engines are connected"] = time.monotonic_ns()
            self._engines.is_serving = True
            await run_requests(
                self._cell, self._repeat, self._outcome, prompts, self._run_one, meter=self._meter
            )

    async def _run_one(self, index: int, request: Request, row: RequestRow) -> None:
        engines = self._engines
        attempts = [self._place(request, self._cell.session_of(index))]
        try:
            async with self._streams, asyncio.timeout(self._cell.deadlines.request_s):
                await self._run(request, attempts, row)
        except TimeoutError:
            engines.abort(row.request_id, row.num_attempts)
            raise
        finally:
            engines.dispatcher.ended((attempts[-1].name,), time.monotonic_ns())

    async def _run(self, request: Request, attempts: list[Place], row: RequestRow) -> None:
        """Take a request through the engines where it was placed, and again as the dispatcher decides. Raises
        the error it does not survive."""
        request_run = RequestRun(self._rules, row, self, captures=self._capture)
        while True:
            met: list[EngineHandle] = []
            try:
                await request_run.attempt(self._route(request, attempts, met))
            except RaykError as found:
                error = await bug_behind(found, met, EngineHandle.death)
                again = self._engines.failed(attempts[-1], error)
                row.failure = row.failure or str(error)
                if again is None:
                    raise error from None
                attempts.append(again)
                row.num_attempts = len(attempts)
            else:
                if row.failure is not None:
                    row.recovered_by = self._cell.failure_policy
                return

    def _place(self, request: Request, session: str | None) -> Place:
        limit = request.sampling.max_tokens
        asked = self._describer.describe(
            request.request_id,
            request.prompt_token_ids,
            cache_salt=request.cache_salt,
            max_tokens=limit,
            session=session,
        )
        self._engines.note_deaths()
        (action,) = self._engines.dispatcher.arrive(self._cell.cell_id, asked, time.monotonic_ns())
        assert isinstance(action, Place), action
        return action

    def _route(self, request: Request, attempts: Sequence[Place], met: list[EngineHandle]) -> Route:
        """Return the route of the last attempt. `met` gets the engines that it finds on its way."""

        async def find(name: str) -> EngineHandle:
            met.append(await self._engines.live(name))
            return met[-1]

        name, engines = attempts[-1].name, attempts[-1].placement
        return Route(
            request=replace(request, request_id=name),
            prefill=None if engines.prefill is None else partial(find, engines.prefill),
            decode=None if engines.decode is None else partial(find, engines.decode),
            number=len(attempts) - 1,
        )

    # What runs of requests tell: request_run.RunLog.

    def prefilled(self, attempt: str) -> None:
        """Tell the dispatcher that the attempt's prefill engine has less to do."""
        self._engines.dispatcher.prefilled(attempt)

    def delivered(self, row: RequestRow, event: RequestEvent) -> None:
        """Do nothing: the row has the event already."""

    def transferred(self, rows: Sequence[TransferRow], num_kv_bytes_checked: int) -> None:
        self._outcome.transfers += rows
        self._outcome.num_kv_bytes_checked += num_kv_bytes_checked

    def captured(self, row: RequestRow, rows: list[CapturedRows]) -> None:
        """Keep them for the check of values."""
        self._outcome.captured[row.prompt_index] = rows

    def reserved(self, reservation: Reservation) -> Reservation:
        """Change the reservation where a planted fault says so."""
        self._num_reservations += 1
        return as_it_arrives(self._cell, reservation, self._num_reservations)


RunOne = Callable[[int, Request, RequestRow], Awaitable[None]]
"""Takes a request through its engines: the index of its prompt, what is asked for, and the row to fill.
Raises what ends it, and TimeoutError when it has lasted as long as the cell lets a request last."""


async def run_requests(
    cell: Cell,
    repeat: int,
    outcome: CellOutcome,
    prompts: Sequence[Sequence[int]],
    run_one: RunOne,
    *,
    meter: Meter,
) -> None:
    """Run each prompt of a cell from when it is due. A failed request is a row with an error."""
    started_ns = time.monotonic_ns()

    def fail(row: RequestRow, error: RaykError) -> None:
        note_failure(row, error)
        outcome.errors.append(error)

    async def run(index: int, prompt: Sequence[int], due_ns: int) -> None:
        request, row = begin_request(cell, repeat, index, tuple(prompt))
        # It counts from when it was due, however late it is got to.
        row.arrival_ns, row.due_ns = started_ns + due_ns, due_ns
        outcome.requests.append(row)
        try:
            await until(row.arrival_ns)
            await run_one(index, request, row)
        except TimeoutError:
            fail(row, DeadlineExceeded(f"request {row.request_id}", cell.deadlines.request_s))
        except RaykError as error:
            fail(row, error)
        except asyncio.CancelledError:
            fail(row, DeadlineExceeded(f"cell {cell.cell_id}", cell.deadlines.cell_s))
            raise
        finally:
            report_request(meter, row)

    due_ns = cell.due_ns(len(prompts), repeat)
    await asyncio.gather(*(run(i, p, due) for i, (p, due) in enumerate(zip(prompts, due_ns, strict=True))))


def begin_request(cell: Cell, repeat: int, index: int, prompt: tuple[int, ...]) -> tuple[Request, RequestRow]:
    """Make the request of a cell's prompt, and the row that records its outcome."""
    request = Request(
        request_id=f"{cell.cell_id}/{repeat}/{index}",
        prompt_token_ids=prompt,
        sampling=with_seed(cell.sampling, index, repeat),
    )
    row = RequestRow(
        cell_id=cell.cell_id,
        repeat=repeat,
        request_id=request.request_id,
        prompt_index=index,
        prompt_token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        seed=request.sampling.seed if request.sampling.temperature else None,
    )
    return request, row


def with_seed(sampling: SamplingParams, prompt_index: int, repeat: int) -> SamplingParams:
    """Return the sampling parameters of one request of a cell.

    A seed that nobody gave depends on the prompt's index and the repeat alone, so that every cell and every
    run of the spec draws the same tokens.
    """
    if not sampling.temperature or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=derived_seed(prompt_index, repeat))


async def until(due_ns: int) -> None:
    """Wait until a time, but do not yield if it has passed: requests due at once keep their order."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)
