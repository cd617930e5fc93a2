"""Requests of a cell start when they are due, and where engines live. No Ray: attempts are played."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.cell_run import CellRun
from rayk.actors.engines import EngineHandle
from rayk.reports.columns import request_record
from rayk.sched.dispatcher import Place
from rayk.specs import Cell, expand, load_spec
from rayk.types.errors import DeadlineExceeded, EngineDied
from rayk.types.request import Request
from rayk.types.rows import RequestRow
from tests.actors.cells import cell_deployment
from tests.pd import HANG_S
from tests.specs.models import decoder, spec

PROMPTS = [[i] * 5 for i in range(1, 7)]


def one_cell(**changes: Any) -> Cell:
    (cell,) = expand(load_spec(spec(mode="aggregated", **changes)).spec, decoder(), device="cpu")
    return cell


class Played:
    """Runs a cell whose attempts only note when and where they began."""

    def __init__(self, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cell = cell
        self.outcome = CellOutcome()
        self.began_ns: dict[int, int] = {}
        self.placed: dict[int, str | None] = {}
        self.engines: list[EngineHandle] = []
        self.block_s = 0.0
        """How long each attempt keeps the event loop from everything else."""

        async def run_request(run: CellRun, request: Request, attempts: list[Place], row: RequestRow) -> None:
            del run, request
            self.began_ns[row.prompt_index] = time.monotonic_ns()
            self.placed[row.prompt_index] = attempts[-1].placement.prefill
            time.sleep(self.block_s)  # noqa: ASYNC251 - it is to be late
            self.at(row.prompt_index)

        monkeypatch.setattr(CellRun, "_run", run_request)

    def at(self, index: int) -> None:
        """Hook for tests."""

    async def run(self, repeat: int = 0) -> list[RequestRow]:
        deployment = cell_deployment(self.cell, self.outcome)
        self.engines = deployment.lives
        await CellRun(self.cell, repeat, self.outcome, deployment, capture=False).run(PROMPTS)
        return self.outcome.requests


@pytest.mark.parametrize("block_s", [0.0, 0.06])
def test_requests_start_when_due_and_count_from_then(monkeypatch: pytest.MonkeyPatch, block_s: float) -> None:
    cell = one_cell(arrival={"rate": 40.0, "process": "gamma", "burstiness": 0.5, "seed": 1})
    played = Played(cell, monkeypatch)
    played.block_s = block_s
    rows = asyncio.run(played.run(repeat=2))
    due_ns = cell.due_ns(len(PROMPTS), 2)
    assert [r.prompt_index for r in rows] == list(range(len(PROMPTS)))
    first_ns = rows[0].arrival_ns
    # However late the loop gets to them.
    assert [r.arrival_ns - first_ns for r in rows] == [due - due_ns[0] for due in due_ns]
    assert [request_record(r)["due_ms"] for r in rows] == [due / 1e6 for due in due_ns]
    assert all(played.began_ns[r.prompt_index] >= r.arrival_ns for r in rows)
    assert list(played.began_ns) == list(range(len(PROMPTS)))


def test_without_a_rate_all_start_at_once_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(one_cell(), monkeypatch)
    rows = asyncio.run(played.run())
    assert len({r.arrival_ns for r in rows}) == 1
    assert {r.due_ns for r in rows} == {0}
    assert list(played.began_ns) == list(range(len(PROMPTS)))


def test_what_never_arrived_is_a_row_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(one_cell(arrival={"rate": 1e-3, "process": "constant"}), monkeypatch)

    async def cut_off() -> None:
        async with asyncio.timeout(0.1):
            await played.run()

    with pytest.raises(TimeoutError):
        asyncio.run(cut_off())
    assert [r.finish_reason for r in played.outcome.requests] == ["error"] * len(PROMPTS)
    assert all("cell" in str(r.error) for r in played.outcome.requests)
    assert all(isinstance(e, DeadlineExceeded) for e in played.outcome.errors)
    assert played.began_ns == {}


def test_requests_of_a_session_meet_on_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = one_cell(
        prompts={"random": {"count": 6}, "num_sessions": 3},
        prefill={"num_engines": 3},
        policy="session_affinity",
    )
    played = Played(cell, monkeypatch)
    asyncio.run(played.run())
    engines = [{played.placed[i], played.placed[i + 3]} for i in range(3)]
    assert all(len(one) == 1 for one in engines)
    assert len(set.union(*engines)) > 1, "as these names happen to fall"


def test_who_comes_after_a_death_goes_to_those_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    arrival = {"rate": 50.0, "process": "constant"}
    cell = one_cell(arrival=arrival, prefill={"num_engines": 2}, policy="prefix_aware")
    played = Played(cell, monkeypatch)
    told: list[str] = []

    def at(index: int) -> None:
        if index == 2:
            played.engines[1].declare_dead("for once")

    monkeypatch.setattr(played, "at", at)
    monkeypatch.setattr(
        "rayk.sched.policies.prefix_aware.PrefixAware.lost", lambda _, name: told.append(name)
    )
    asyncio.run(played.run())
    assert {played.placed[i] for i in range(3)} == {"prefill0", "prefill1"}
    assert {played.placed[i] for i in range(3, 6)} == {"prefill0"}
    assert told == ["prefill1"]


@pytest.mark.parametrize("lost", ["prefill0", "decode1"])
def test_no_request_comes_before_an_engine_was_lost_while_others_connect(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Whether it is connected just then or waits for its turn."""
    restart = {"kind": "restart", "role": "decode" if lost == "prefill0" else "prefill", "point": "notify"}
    changes = {"decode": {"num_engines": 2}, "faults": [restart]}
    (cell,) = expand(load_spec(spec(**changes)).spec, decoder(), device="cpu")

    async def run() -> None:
        engines = cell_deployment(cell)

        async def connect(p: EngineHandle, d: EngineHandle) -> None:
            member = engines.members[lost]
            member.life.declare_dead("killed")
            while member.state != "lost":
                await asyncio.sleep(0)
            p.raise_if_dead()

        monkeypatch.setattr(engines, "_connect", connect)
        with pytest.raises(EngineDied, match=f"{lost} .*killed"):
            async with asyncio.timeout(HANG_S), engines.watched():
                await engines.connect_all()

    asyncio.run(run())
