"""Router: completes prompts on a fleet's engines. It lives in a front; tokens come straight from engines.

Implements types.serving.Completer and EngineControl. A request whose engine, transfer or fleet is lost is
placed again behind the tokens that were delivered; the client's stream goes on without repeated or missing
ones.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rayk.actors.deployment_metrics import beat, begin_outcomes, report_request
from rayk.actors.engines import EngineHandle, bug_behind
from rayk.actors.fleet_link import FleetLink
from rayk.actors.ray_metrics import make_meter
from rayk.actors.request_run import RequestRun, Route, RunRules
from rayk.actors.serving import Assignment
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import CapturedRows
from rayk.handover.request_record import note_failure
from rayk.sched.policy import PlacementRequest
from rayk.sched.recovery import attempt_id, may_place_again, pause_s
from rayk.sched.request_describer import RequestDescriber
from rayk.specs.serving import ServerSettings
from rayk.transfer.ticket import Reservation
from rayk.types.admission import seeded
from rayk.types.errors import (
    DeadlineExceeded,
    EngineDied,
    Overloaded,
    RaykError,
    ServerEnded,
    UserError,
)
from rayk.types.request import FinishReason, Request
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.serving import Delta, EngineState, Health, ModelCard, ServerRequest
from rayk.types.tasks import lasting

NAMESPACE = "rayk"
ENDED = "the server ends"
"""Why a request is cancelled that somebody still waits for."""
HEALTH_S = 5.0
"""A fleet that does not say how it is for so long is not well."""
ROLE_S = 60.0
"""A change of roles connects engines, which takes as long as their start."""


class Router:
    """Completes requests on one event loop, and is closed there."""

    def __init__(self, fleet: str, settings: ServerSettings, *, namespace: str = NAMESPACE) -> None:
        """`fleet`: the name of its actor, which need not exist yet, in this namespace."""
        self.name = secrets.token_hex(4)
        self._settings = settings
        needs_tiers = settings.transfer.path == "host"
        self._link = FleetLink(fleet, namespace, self.name, self.end_all, needs_tiers=needs_tiers)
        self._tasks: set[asyncio.Task[None]] = set()
        """Requests that are under way."""
        self._rules = RunRules(
            is_push=settings.transfer.mode == "push",
            request_s=settings.request_s,
            transfer_s=settings.transfer_s,
            recomputes=settings.failure_policy == "recompute",
            via_host=settings.transfer.path == "host",
        )
        self._describer = RequestDescriber(settings.policy, settings.policy_settings, settings.prefix_secret)
        self._numbers = itertools.count()
        self._courier: asyncio.Task[None] | None = None
        self._meter = make_meter(settings.model.folder)
        begin_outcomes(self._meter)
        self._meter.flush()
        self._beat: asyncio.Task[None] | None = None

    @property
    def model(self) -> ModelCard:
        return self._settings.model

    async def generate(self, server_request: ServerRequest) -> AsyncIterator[Delta]:
        request = self._named(server_request.request)
        if self._courier is None:
            self._courier = lasting(self._link.carry(self._settings.front_s / 5), "the way to the fleet")
            self._beat = lasting(beat(self._meter), "metrics")
        stream = _Stream(self._link)
        task = asyncio.create_task(self._drive(server_request, request, stream))
        task.add_done_callback(lambda _: stream.end())
        self._tasks.add(task)
        try:
            while (delta := await stream.next()) is not None:
                yield delta
                if delta.finish_reason is not None:
                    return
            if task.cancelled():
                raise ServerEnded
            task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def end_all(self) -> None:
        """End every request that is under way, with ServerEnded."""
        for task in self._tasks:
            task.cancel(ENDED)

    async def health(self) -> Health:
        """Return the fleet's health; a fleet that does not answer counts as not ready."""
        try:
            async with asyncio.timeout(HEALTH_S):
                found: Health = await self._link.call("health", until=time.monotonic())
        except (RaykError, TimeoutError) as error:
            return Health(is_ready=False, reason=str(error) or "the engines do not say how they are")
        return found

    async def engines(self) -> tuple[EngineState, ...]:
        found: tuple[EngineState, ...] = await self._told(HEALTH_S, "engines")
        return found

    async def set_role(self, engine: str, role: str) -> None:
        await self._told(ROLE_S, "set_role", engine, role)

    async def _told(self, within_s: float, method: str, *args: Any) -> Any:
        """Return the fleet's answer. Raises what it raises, EngineDied where it is not there,
        DeadlineExceeded."""
        try:
            async with asyncio.timeout(within_s):
                return await self._link.call(method, *args, until=time.monotonic())
        except TimeoutError:
            raise DeadlineExceeded(f"{method} of the fleet", within_s) from None

    async def close(self) -> None:
        """Abort what is under way, and tell the fleet that this front ends."""
        tasks = [task for task in (self._courier, self._beat) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._courier = self._beat = None
        self._meter.flush()
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._link.call("leave", self.name, until=time.monotonic())
        except (RaykError, TimeoutError):
            pass  # then it misses the front by itself
        await self._link.close()

    def _named(self, request: Request) -> Request:
        """Name the request for engines, which know those of many fronts, and seed all its attempts alike."""
        return seeded(replace(request, request_id=f"{request.request_id}@{self.name}.{next(self._numbers)}"))

    async def _drive(self, server_request: ServerRequest, request: Request, stream: _Stream) -> None:
        """Take one request to its end, over all its attempts. Raises what ends it."""
        limit_s = min(self._settings.request_s, server_request.deadline_s or self._settings.request_s)
        until = time.monotonic() + limit_s
        row = RequestRow(
            cell_id="",
            repeat=0,
            request_id=request.request_id,
            prompt_index=0,
            prompt_token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            arrival_ns=time.monotonic_ns(),
        )
        try:
            async with asyncio.timeout(limit_s):
                await self._attempts(
                    server_request, request, RequestRun(self._rules, row, stream), stream, until
                )
        except TimeoutError:
            error = DeadlineExceeded(f"request {server_request.request.request_id}", limit_s)
            note_failure(row, error)
            raise error from None
        except RaykError as error:
            note_failure(row, error)
            if isinstance(error, UserError | Overloaded):
                row.finish_reason = "refused"
            raise
        except asyncio.CancelledError as error:
            if ENDED in error.args:
                note_failure(row, ServerEnded())
            raise
        finally:
            # Who has the last token cancels this.
            report_request(self._meter, row)

    async def _attempts(
        self,
        server_request: ServerRequest,
        request: Request,
        request_run: RequestRun,
        stream: _Stream,
        until: float,
    ) -> None:
        asked = self._describer.describe(
            request.request_id,
            request.prompt_token_ids,
            cache_salt=request.cache_salt,
            max_tokens=request.sampling.max_tokens,
            session=server_request.session,
        )
        for number in itertools.count():
            name = attempt_id(request.request_id, number)
            attempt = replace(request, request_id=name)
            stream.attempt = name
            engines: list[EngineHandle] = []
            try:
                assignment = await self._place(
                    server_request, replace(asked, request_id=name), until, again=number > 0
                )
                await self._run_attempt(assignment, attempt, request_run, engines, number)
            except RaykError as error:
                if not self._may_try_again(error, number + 1):
                    raise
            else:
                return
            finally:
                self._link.ended(name)
                if not stream.is_over:
                    for engine in engines:
                        engine.leader.abort.options(concurrency_group="control").remote(name)
            await asyncio.sleep(pause_s(number))

    async def _place(
        self, server_request: ServerRequest, asked: PlacementRequest, until: float, *, again: bool
    ) -> Assignment:
        left_s = max(0.0, until - time.monotonic())
        place = partial(self._link.call, "place", self.name, asked, until=until)
        assignment: Assignment = await place(priority=server_request.priority, deadline_s=left_s, again=again)
        return assignment

    async def _run_attempt(
        self,
        assignment: Assignment,
        attempt: Request,
        request_run: RequestRun,
        engines: list[EngineHandle],
        number: int,
    ) -> None:
        """Run one attempt. `engines` receives those that it meets."""

        async def find(key: tuple[str, int]) -> EngineHandle:
            engine = await self._link.engine(assignment.fleet, key)
            engines.append(engine)
            return engine

        route = Route(
            request=attempt,
            prefill=None if assignment.prefill is None else partial(find, assignment.prefill),
            decode=None if assignment.decode is None else partial(find, assignment.decode),
            number=number,
        )
        try:
            await request_run.attempt(route)
        except RaykError as error:
            raise await bug_behind(error, engines, partial(self._link.death, assignment.fleet)) from None
        row = request_run.row
        if row.finish_reason == FinishReason.ABORT:
            # Nobody here asked for that: the fleet took this front for gone.
            row.finish_reason = None
            raise EngineDied(engines[-1].name, "it was told to abort the request")

    def _may_try_again(self, error: RaykError, num_attempts: int) -> bool:
        """Return whether to ask the fleet for another place; the fleet decides where that is."""
        settings = self._settings
        return may_place_again(settings.failure_policy, error, num_attempts, settings.max_attempts)


class _Stream:
    """What comes back of one request, in order. Implements request_run.RunLog."""

    def __init__(self, link: FleetLink) -> None:
        self.attempt = ""
        """The one that is under way."""
        self.is_over = False
        """Whether its last news are here."""
        self._link = link
        self._news: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._has_prompt_logprobs = False

    async def next(self) -> Delta | None:
        """Join what came since the last call to one delta; None at the end."""
        delta = await self._news.get()
        while delta is not None and delta.finish_reason is None and not self._news.empty():
            more = self._news.get_nowait()
            if more is None:
                self.end()  # next time
                break
            delta = _joined(delta, more)
        return delta

    def end(self) -> None:
        """Let the stream end after what has come."""
        self._news.put_nowait(None)

    def prefilled(self, attempt: str) -> None:
        self._link.prefilled(attempt)

    def delivered(self, row: RequestRow, event: RequestEvent) -> None:
        """Hand the event to the client."""
        is_aborted = event.finish_reason is FinishReason.ABORT
        finish_reason = None if is_aborted else event.finish_reason
        prompt_logprobs = None if self._has_prompt_logprobs else event.prompt_logprobs
        if not event.token_ids and prompt_logprobs is None and finish_reason is None:
            return
        self._has_prompt_logprobs |= prompt_logprobs is not None
        self.is_over = finish_reason is not None
        self._news.put_nowait(
            Delta(
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=finish_reason,
                stop_reason=event.stop_reason,
                num_cached_tokens=row.num_cached_tokens if self.is_over else None,
                num_drafted=sum(row.drafted_by_position) if self.is_over else 0,
                num_accepted=sum(row.accepted_by_position) if self.is_over else 0,
            )
        )

    def transferred(self, rows: Sequence[TransferRow], num_kv_bytes_checked: int) -> None:
        """Do nothing: a server keeps no rows of transfers."""

    def captured(self, row: RequestRow, rows: list[CapturedRows]) -> None:
        """Refuse: a server captures nothing."""
        raise AssertionError("a server captures nothing")

    def reserved(self, reservation: Reservation) -> Reservation:
        return reservation


def _joined(first: Delta, second: Delta) -> Delta:
    """Join two deltas, including the end of the later one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
