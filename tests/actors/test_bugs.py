"""What becomes of errors that nobody raises on purpose: told as what they are, logged whole, never tried
again. No Ray, but for one test of processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from ray.exceptions import RayTaskError

from rayk.actors import deployment as deployment_module
from rayk.actors import fleet_link as link_module
from rayk.actors import launch
from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.coordinator import Coordinator
from rayk.actors.engines import EngineHandle
from rayk.actors.failures import translate
from rayk.actors.fleet import Fleet
from rayk.actors.members import Member
from rayk.actors.pool import WorkerPool
from rayk.actors.router import Router
from rayk.experiments.verdict import Findings
from rayk.lines.line import LineService
from rayk.models.families import load_config
from rayk.serve.errors import api_error
from rayk.serve.fleet_part import FleetPart
from rayk.serve.supervisor import Supervisor
from rayk.specs import expand, load_spec
from rayk.specs import serving as serving_module
from rayk.specs.experiment import TransferSpec
from rayk.specs.serving import EngineEntry, ServerSettings
from rayk.types.config import EngineConfig
from rayk.types.errors import EngineDied, InternalError, RaykError
from rayk.types.serving import ModelCard
from rayk.types.tasks import lasting
from tests.actors import in_threads
from tests.actors.cells import cell_deployment
from tests.actors.served import Served, complete, settings_for
from tests.handover.cases import NUM_TOKENS, Model
from tests.markers import nixl, thorough
from tests.markers import ray as ray_mark
from tests.specs.models import decoder, spec

LIMIT_S = 60.0
CARD = ModelCard(model_id="m", folder="m", vocab_size=500, max_positions=64)
ENTRY = EngineEntry(name="prefill0", role="aggregated", config=EngineConfig(model="m"))
SETTINGS = ServerSettings(model=CARD, engines=(ENTRY,))
PAIR = ServerSettings(
    model=CARD,
    engines=tuple(replace(ENTRY, name=f"{role}0", role=role) for role in ("prefill", "decode")),
)


def test_a_front_tells_of_a_fleets_bug_and_does_not_ask_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    async def place(front: str) -> None:
        asked.append(front)
        raise KeyError("no such assignment")

    async def run() -> None:
        service = LineService(calls={"place": place})
        address = await service.open("127.0.0.1")
        line = SimpleNamespace(remote=lambda: asyncio.sleep(0, address))
        monkeypatch.setattr(link_module.ray, "get_actor", lambda *_, **__: SimpleNamespace(line=line))
        router = Router("fleet", SETTINGS)
        with pytest.raises(InternalError, match="KeyError: 'no such assignment'") as caught:
            await router._link.call("place", "f", until=time.monotonic() + LIMIT_S)
        assert not router._may_try_again(caught.value, 1)
        assert router._may_try_again(EngineDied("prefill0", "killed"), 1)
        await router._link.close()
        await service.close()

    asyncio.run(run())
    assert asked == ["f"]
    assert "in place\n    raise KeyError" in caplog.text, "where it was raised"


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (KeyError("layer"), InternalError),
        (AssertionError(), InternalError),
        (OSError("no disk"), EngineDied),
        (json.JSONDecodeError("half a file", "{", 1), EngineDied),
    ],
)
def test_what_a_worker_raises_is_a_bug_unless_its_machine_may_be_to_blame(
    cause: Exception, kind: type[RaykError]
) -> None:
    found = translate(RayTaskError("form", "the remote traceback", cause), "prefill0", 1)
    assert type(found) is kind
    if isinstance(found, InternalError):
        assert found.where == "prefill0 rank 1"
        assert "the remote traceback" in found.trace


@pytest.mark.parametrize(
    "last", [KeyError("a place"), InternalError("prefill0", "KeyError: 'layer'")], ids=["here", "there"]
)
def test_an_engine_is_formed_again_until_a_bug_is_met_which_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, last: Exception
) -> None:
    """And the driver, which asks how the fleet is, starts no other one."""
    monkeypatch.setattr(serving_module, "PAUSES_S", (0.0,))
    failures: list[Exception] = [EngineDied("prefill0", "killed"), EngineDied("prefill0", "killed"), last]
    tries = []

    async def replace(_member: Member) -> int:
        tries.append(len(failures))
        raise failures.pop(0)

    async def run() -> None:
        fleet = Fleet("rayk/fleet/m", SETTINGS)
        monkeypatch.setattr(fleet, "replace_workers", replace)
        member = fleet.members["prefill0"]
        member.handle = EngineHandle("prefill0", "aggregated", 1, ENTRY.config, [])
        member.handle.declare_dead("killed")
        watch = lasting(fleet.look_after(member), "the watch", fleet._on_bug)
        await asyncio.wait({watch}, timeout=LIMIT_S)

        async def health() -> Any:
            try:
                return await fleet.health()
            except RaykError as error:
                raise RayTaskError("health", "", error).as_instanceof_cause() from None

        part = FleetPart("rayk/fleet/m", SETTINGS)
        part._actor = SimpleNamespace(health=SimpleNamespace(remote=health))
        monkeypatch.setattr(part, "start", lambda: asyncio.sleep(0))
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        supervisor = Supervisor((part,), asyncio.Event(), lambda _: None)
        with pytest.raises(InternalError, match="KeyError"):
            await asyncio.wait_for(supervisor.run(lambda: never, lambda: None), LIMIT_S)

    asyncio.run(run())
    assert tries == [3, 2, 1]


def test_a_watch_over_an_engine_that_breaks_down_is_missed() -> None:
    class Broken:
        """No worker: whoever asks it finds that out."""

    async def run() -> None:
        member = Member(ENTRY, "aggregated")
        member.handle = EngineHandle("prefill0", "aggregated", 1, ENTRY.config, [Broken()])
        with pytest.raises(AttributeError):
            await asyncio.wait_for(member.until_lost(LIMIT_S, hears=True), LIMIT_S)

    asyncio.run(run())


def test_a_cell_waits_for_no_engine_whose_forming_met_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    async def replace_workers(_member: Member) -> int:
        raise ZeroDivisionError("workers")

    restart = {"kind": "restart", "role": "prefill", "point": "notify"}
    (cell,) = expand(load_spec(spec(faults=[restart])).spec, decoder(), device="cpu")

    async def run() -> None:
        engines = cell_deployment(cell)
        monkeypatch.setattr(engines, "replace_workers", replace_workers)
        async with engines.watched():
            engines.members["prefill0"].life.declare_dead("killed")
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await asyncio.wait_for(engines.live("prefill0"), LIMIT_S)

    asyncio.run(run())


def test_a_cell_that_meets_a_bug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Awaitable[Any]:
        raise TypeError("unlike")

    async def run() -> InternalError:
        coordinator = Coordinator("rayk/coordinator/x", WorkerPool("x", keep=True))
        monkeypatch.setattr(coordinator, "_form", broken)
        cell: Any = SimpleNamespace(
            deadlines=SimpleNamespace(cell_s=LIMIT_S),
            prefill=SimpleNamespace(model="m", device="cpu"),
            vllm=(),
            spec=SimpleNamespace(offload=SimpleNamespace(settings=lambda: None)),
        )
        outcome = await coordinator.run_cell(cell, [], 0, capture=False)
        [error] = outcome.errors
        assert isinstance(error, InternalError)
        return error

    error = asyncio.run(run())
    assert str(error) == "a bug in the coordinator: TypeError: unlike"
    assert "in broken" in error.trace


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> in_threads.Pool:
    return in_threads.make_pool(monkeypatch)


IN_A_LOOP = [
    pytest.param("p1 d2", "decode0", 1, 2, "pull", id="follower of D"),
    pytest.param("p2 d1", "prefill0", 0, 1, "pull", id="P"),
    pytest.param("p2 d1", "prefill0", 1, 1, "pull", id="follower of P"),
    pytest.param("p1 d1", "decode0", 0, 1, "pull", id="D"),
    pytest.param("p2 d1", "prefill0", 1, 1, "push", id="follower of a P that pushes"),
    pytest.param("p1 d2", "decode0", 1, 1, "push", id="follower of a D that is pushed to"),
    pytest.param("a2", "prefill0", 1, 3, "pull", id="aggregated"),
]
"""Engines, where and at which step a bug is met, and how KV is moved."""


async def until_formed_again(fleet: Fleet, lost: str) -> None:
    """That engine has its second life, all take requests, and nobody holds any of their blocks."""
    async with asyncio.timeout(in_threads.LIMIT_S):
        while not fleet.members[lost].num_restarts:
            await asyncio.sleep(0.01)
        while not all(m.state == "ready" for m in fleet.members.values()):
            await asyncio.sleep(0.01)
        while any(free != count - 1 for free, count in (await fleet.blocks()).values()):
            await asyncio.sleep(0.01)
    assert {m.name for m in fleet.members.values() if m.num_restarts} == {lost}


@pytest.mark.parametrize(("engines", "engine", "rank", "step", "mode"), IN_A_LOOP)
def test_a_bug_in_a_loop_ends_the_request_it_met_and_no_other_engine(
    qwen3: Model,
    pool: in_threads.Pool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engines: str,
    engine: str,
    rank: int,
    step: int,
    mode: Literal["pull", "push"],
) -> None:
    pool.plan.steps[engine, rank] = (step, KeyError("a layer"))

    async def run() -> None:
        transfer = TransferSpec(mode=mode)
        settings = settings_for(qwen3.path, engines, hang_s=LIMIT_S, transfer=transfer)
        async with in_threads.served(pool, settings, monkeypatch) as (fleet, router):
            got = await complete(router, qwen3.prompts[1], NUM_TOKENS)
            assert str(got.error) == f"a bug in the loop of {engine} rank {rank}: KeyError: 'a layer'"
            assert isinstance(got.error, InternalError)
            assert "in failing\n    raise error" in got.error.trace
            answer = api_error(got.error)
            assert (answer.status, answer.code) == (500, "internal_error")
            await until_formed_again(fleet, engine)
            assert fleet._bug is None, "the server goes on"
            # Asked for later than the engine was formed again, the answer is the same.
            asked = SimpleNamespace(name=engine, epoch=next(e for n, e, _ in pool.plan.forms if n == engine))
            assert await router._link.death(fleet._life, asked, 0.0) == got.error  # type: ignore[arg-type]
            assert await router._link.death("another", asked, 0.0) is None  # type: ignore[arg-type]
            got = await complete(router, qwen3.prompts[1], NUM_TOKENS, "again")
            assert got.error is None
            assert got.token_ids == qwen3.expected[1]

    asyncio.run(run())
    assert caplog.text.count("a bug in") == 1, "its traceback is told once"


@pytest.mark.parametrize("whose", ["decode0", "prefill0", ""])
def test_an_engine_that_is_formed_again_does_not_answer_for_its_partners_bug(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """But for its own, and for one that ended neither's loop: to form it once more would end the same."""
    monkeypatch.setattr(deployment_module, "WHY_S", LIMIT_S if whose == "prefill0" else 0.01)
    found = InternalError(f"the loop of {whose} rank 0", "KeyError: 'a peer'")

    async def run() -> None:
        fleet = Fleet("rayk/fleet/m", PAIR)
        for name, member in fleet.members.items():
            member.handle = EngineHandle(name, member.role, 1, ENTRY.config, [])
            member.state = "ready"

        async def connect(*_: EngineHandle) -> None:
            if whose:  # the watch is told later than whoever called
                died = fleet.members[whose].life.died
                asyncio.get_running_loop().call_soon(died.set_exception, found)
            raise found

        monkeypatch.setattr(fleet, "_connect", connect)
        member = fleet.members["decode0"]
        if whose == "prefill0":
            await fleet.connect_to_others(member, "decode")
            assert not fleet._linked
        else:
            with pytest.raises(InternalError):
                await fleet.connect_to_others(member, "decode")

    asyncio.run(run())


def test_requests_that_come_before_the_watch_knows_of_the_bug_end_with_it(
    qwen3: Model, pool: in_threads.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.plan.steps["prefill0", 0] = (3, RuntimeError("The size of tensor a (4) must match b (5)"))
    pool.plan.may_be_noticed.clear()

    async def run() -> None:
        settings = settings_for(qwen3.path, "a1", hang_s=LIMIT_S)
        async with in_threads.served(pool, settings, monkeypatch) as (fleet, router):
            found = [await complete(router, qwen3.prompts[0], NUM_TOKENS, f"r{i}") for i in range(3)]
            assert [type(got.error) for got in found] == [InternalError] * 3
            assert [len(got.token_ids) for got in found] == [2, 0, 0]
            pool.plan.may_be_noticed.set()
            await until_formed_again(fleet, "prefill0")
            got = await complete(router, qwen3.prompts[0], NUM_TOKENS, "last")
            assert (got.error, got.token_ids) == (None, qwen3.expected[0])

    asyncio.run(run())


@pytest.mark.parametrize(
    "death",
    [
        in_threads.Killed(),
        OSError("no memory for that"),
        RuntimeError("CUDA error: uncorrectable ECC error"),
    ],
    ids=lambda death: type(death).__name__,
)
def test_what_the_machine_did_to_a_rank_is_tried_again(
    qwen3: Model, pool: in_threads.Pool, monkeypatch: pytest.MonkeyPatch, death: BaseException
) -> None:
    pool.plan.steps["decode0", 1] = (3, death)

    async def run() -> None:
        settings = settings_for(qwen3.path, "p1 d2", hang_s=LIMIT_S)
        async with in_threads.served(pool, settings, monkeypatch) as (fleet, router):
            got = await complete(router, qwen3.prompts[1], NUM_TOKENS)
            assert (got.error, got.token_ids) == (None, qwen3.expected[1])
            await until_formed_again(fleet, "decode0")

    asyncio.run(run())


@pytest.mark.parametrize("is_bug", [True, False])
def test_a_cell_says_what_its_loop_died_of(qwen3: Model, pool: in_threads.Pool, is_bug: bool) -> None:
    """And has another engine go on only where that is no bug, though the policy would."""
    pool.plan.steps["prefill0", 1] = (1, KeyError("a layer") if is_bug else in_threads.Killed())
    changes = {
        "model": str(qwen3.path),
        "prompts": {"random": {"count": 1, "input_tokens": [5]}},
        "sampling": {"max_tokens": 4},
        "mode": "disaggregated",
        "prefill": {"tp": 2, "num_engines": 2},
        "failure_policy": "migrate",
    }
    (cell,) = expand(load_spec(spec(**changes)).spec, load_config(str(qwen3.path)), device="cpu")

    async def run() -> CellOutcome:
        return await in_threads.coordinator_of(pool).run_cell(cell, [qwen3.prompts[0]], 0, capture=False)

    try:
        outcome = asyncio.run(run())
    finally:
        pool.free_all()
    (row,) = outcome.requests
    findings = Findings()
    findings.add_errors(outcome.errors, outcome.survived)
    if is_bug:
        assert (row.num_attempts, row.recovered_by) == (1, None)
        told = "a bug in the loop of prefill0 rank 1: KeyError: 'a layer'"
        assert (row.error, *findings.judge()) == (told, "ENGINE_ERROR", told)
    else:
        assert (row.error, row.num_attempts, row.recovered_by) == (None, 2, "migrate")
        assert row.output_token_ids == qwen3.expected[0][:4]
    assert outcome.ledgers["decode0"].num_held == outcome.ledgers["prefill1"].num_held == 0


@ray_mark
@nixl
@thorough
@pytest.mark.timeout(300)
def test_a_bug_in_a_workers_loop_reaches_the_front(ray_address: str, qwen3: Model) -> None:
    """Of rank 1 of D, then of P: in processes of their own."""

    def plant(actor: Any) -> None:
        def failing(_batch: Any) -> None:
            raise KeyError("a layer")

        actor._worker._rank.step = failing

    async def run(server: Served) -> None:
        async with server.router() as router:
            for name, rank in (("decode0", 1), ("prefill0", 0)):
                _, cards = server.ask("roster")
                (card,) = (c for c in cards if c.name == name)
                await card.workers[rank].__ray_call__.remote(plant)
                before = server.epochs()
                got = await complete(router, qwen3.prompts[1], NUM_TOKENS)
                assert str(got.error) == f"a bug in the loop of {name} rank {rank}: KeyError: 'a layer'"
                assert isinstance(got.error, InternalError)
                assert "in failing" in got.error.trace
                await server.until_ready(lambda old=before: server.epochs() != old)
                assert {n for n, epoch in server.epochs().items() if epoch != before[n]} == {name}
                await server.until_free()
            got = await complete(router, qwen3.prompts[1], NUM_TOKENS)
            assert (got.error, got.token_ids) == (None, qwen3.expected[1])

    with launch.connect(ray_address):
        server = Served("rayk/fleet/bugs", settings_for(qwen3.path, "p1 d2"))
        try:
            asyncio.run(run(server))
        finally:
            server.close()
