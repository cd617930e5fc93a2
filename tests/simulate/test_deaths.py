"""Simulated engines die and come back: what becomes of their requests is what becomes of real ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from rayk.costs.table import HostTable
from rayk.simulate import EngineDeath, SimOutcome, cell_arrivals, simulate_cell
from rayk.specs import Cell
from rayk.specs.cells import expected_of
from rayk.specs.experiment import FaultSpec
from rayk.specs.serving import ServerSettings, settings_of
from rayk.types.errors import UserError
from rayk.types.fault_table import FAILURE_POLICIES
from rayk.types.rows import RequestRow
from rayk.types.serving import ModelCard
from tests.markers import one_per
from tests.simulate.cells import (
    BOOK,
    DISPATCH_NS,
    HANDOVER_NS,
    MODEL,
    RELEASE_NS,
    STEP_NS,
    TOKEN_NS,
    pair_book,
    pair_cell,
    sim_cell,
)

PROMPTS = [tuple(range(i, i + 9)) for i in range(6)]
FORM_S = 0.2
FORMING = replace(BOOK, host=HostTable(form_s=FORM_S))
CARD = ModelCard(model_id="m", folder="m", vocab_size=MODEL.vocab_size, max_positions=MODEL.max_positions)
DEATH_S = 0.006
"""Between the first tokens of PROMPTS and the last ones, of two engines and of one."""


def simulated(*deaths: EngineDeath, due_ns: list[int] | None = None, **changes: Any) -> SimOutcome:
    cell = sim_cell(**{"sampling": {"max_tokens": 12}, **changes})
    arrivals = cell_arrivals(cell, PROMPTS, due_ns=due_ns)
    return simulate_cell(cell, MODEL, arrivals, FORMING, deaths=deaths)


def server_of(num_engines: int, **others: Any) -> ServerSettings:
    cell = sim_cell()
    return settings_of(cell, CARD, [cell.prefill] * num_engines, [], **others)


def handed_over(
    at_s: float, engine: str, kind: str, engines: tuple[int, int], policy: str, device: str
) -> tuple[SimOutcome, Cell]:
    """Simulate prefill and decode engines, of which one dies."""
    cell = pair_cell(
        device=device,
        prefill={"num_engines": engines[0]},
        decode={"num_engines": engines[1]},
        engine={"max_batch_tokens": 16},
        sampling={"max_tokens": 6},
        failure_policy=policy,
        transfer={"lease_s": 1},
    )
    deaths = [EngineDeath(at_s=at_s, engine=engine, returns=kind == "restart")] if kind else []
    arrivals = cell_arrivals(cell, PROMPTS, due_ns=[i * 1_000_000 for i in range(len(PROMPTS))])
    book = replace(pair_book(cell), host=HostTable(form_s=0.02))
    return simulate_cell(cell, MODEL, arrivals, book, deaths=deaths), cell


def whole(outcome: SimOutcome, **changes: Any) -> None:
    """Every request has the tokens that it would have had, each once and after the one before."""
    for row, as_ever in zip(outcome.requests, simulated(**changes).requests, strict=True):
        assert row.error is None
        assert row.output_token_ids == as_ever.output_token_ids
        assert row.token_times_ns == sorted(row.token_times_ns)
        assert sum(row.stage_ns.values()) == row.token_times_ns[-1] - row.arrival_ns


@pytest.mark.parametrize("kind", ["kill", "restart"])
@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("policy", FAILURE_POLICIES)
@pytest.mark.parametrize("at_s", [0.0001, 0.0012, DEATH_S])
def test_a_death_ends_as_the_table_of_faults_says(
    policy: str, num_engines: int, kind: str, at_s: float
) -> None:
    """Before requests reach the engine, in its first step, and between later ones."""
    changes: dict[str, Any] = {"failure_policy": policy, "prefill": {"num_engines": num_engines}}
    death = EngineDeath(at_s=at_s, engine="prefill0", returns=kind == "restart")
    outcome = simulated(death, **changes)
    fault = FaultSpec(kind=kind, point="prefill", role="prefill")
    expected = expected_of(fault, sim_cell(**changes).spec)
    on_it = [row for row in outcome.requests if row.prompt_index % num_engines == 0]
    failed = [row for row in outcome.requests if row.error is not None]
    assert failed == (on_it if expected.verdict == "ENGINE_ERROR" else [])
    assert {row.error for row in failed} <= {"engine prefill0 died: it was killed"}
    recovered = [row for row in outcome.requests if row.recovered_by == policy]
    assert recovered == (on_it if expected.is_recovered else [])
    assert {row.num_attempts for row in recovered} <= {2}
    for row in failed:
        assert (len(row.output_token_ids) > 0) == (at_s == DEATH_S), "what was delivered stays"
        assert all(at_ns <= at_s * 1e9 for at_ns in row.token_times_ns)
    if not failed:
        whole(outcome, **changes)
    assert outcome.engines["prefill0"].num_deaths == 1


@pytest.mark.parametrize(("engines", "device"), [((1, 1), "cpu"), ((2, 2), "cuda")], ids=str)
@pytest.mark.parametrize("kind", ["kill", "restart"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("policy", FAILURE_POLICIES)
@one_per("policy")
def test_deaths_at_any_time_of_hand_overs_end_as_the_table_of_faults_says(
    policy: str, role: str, kind: str, engines: tuple[int, int], device: str
) -> None:
    """No request is lost where the table promises that, and none that need not be elsewhere."""
    num_failed = num_recovered = 0
    as_ever, cell = handed_over(0.0, f"{role}0", "", engines, policy, device)
    fault = FaultSpec(kind=kind, point="prefill" if role == "prefill" else "decode", role=role)
    expected = expected_of(fault, cell.spec)
    for at_s in (0.0009 * i for i in range(14)):
        outcome, _ = handed_over(at_s, f"{role}0", kind, engines, policy, device)
        for row, whole_row in zip(outcome.requests, as_ever.requests, strict=True):
            assert row.token_times_ns == sorted(row.token_times_ns)
            if row.error is None:
                assert row.output_token_ids == whole_row.output_token_ids
                num_recovered += row.recovered_by == policy
                continue
            num_failed += 1
            assert row.output_token_ids == whole_row.output_token_ids[: len(row.output_token_ids)]
            assert f"{role}0" in row.error
    assert (num_failed == 0) == (expected.verdict == "PASS")
    if expected.is_recovered:
        assert num_recovered > 0
    if policy == "fail":
        assert num_recovered == 0


def test_requests_of_a_cell_wait_for_the_engine_that_is_formed_again() -> None:
    death = EngineDeath(at_s=DEATH_S, engine="prefill0")
    late_ns = int(DEATH_S * 1e9) + 1
    outcome = simulated(death, due_ns=[0] * 5 + [late_ns])
    *early, late = outcome.requests
    assert all(row.error for row in early)
    assert late.error is None
    assert (late.num_attempts, late.recovered_by) == (1, None)
    assert late.stage_ns["queue"] == int(FORM_S * 1e9) - 1
    again = simulated(replace(death, back_s=0.05), due_ns=[0] * 5 + [late_ns]).requests[-1]
    assert again.stage_ns["queue"] == 50_000_000 - 1


def test_nobody_is_placed_on_an_engine_that_is_dead_for_good() -> None:
    death = EngineDeath(at_s=DEATH_S, engine="prefill0", returns=False)
    late_ns = int(DEATH_S * 1e9) + 1
    rows = simulated(death, due_ns=[late_ns] * 6, prefill={"num_engines": 2}).requests
    assert {(row.prefill_engine, row.error) for row in rows} == {("prefill1", None)}


def test_a_servers_engine_is_formed_again_each_time_and_no_request_is_lost() -> None:
    """Also one that is killed again while it is formed: the second try comes after a pause of 0.5 s."""
    cell = sim_cell(sampling={"max_tokens": 12})
    deaths = [EngineDeath(at_s=at_s, engine="prefill0") for at_s in (DEATH_S, DEATH_S + 0.1, 3.0)]
    outcome = simulate_cell(
        cell,
        MODEL,
        cell_arrivals(cell, PROMPTS),
        FORMING,
        server=server_of(1, failure_policy="migrate"),
        deaths=deaths,
    )
    whole(outcome)
    assert {row.num_attempts for row in outcome.requests} == {2}
    assert {row.recovered_by for row in outcome.requests} == {"migrate"}
    back_ns = int((DEATH_S + 0.1 + 0.5 + FORM_S) * 1e9)
    for row in outcome.requests:
        later = [at for at in row.token_times_ns if at > DEATH_S * 1e9]
        assert back_ns < later[0] < back_ns + 4 * STEP_NS
        assert row.stage_ns["retry"] > 0.7e9
    assert outcome.engines["prefill0"].num_deaths == 3
    assert outcome.end_ns >= (3.0 + FORM_S) * 1e9


def test_requests_that_lost_their_engine_wait_where_there_is_no_room_for_others() -> None:
    cell = sim_cell(sampling={"max_tokens": 12})
    server = server_of(1, failure_policy="migrate", max_running=6, max_waiting=0)
    deaths = [EngineDeath(at_s=DEATH_S, engine="prefill0", back_s=3.0)]
    prompts, due_ns = [*PROMPTS, (1, 2, 3)], [0] * 6 + [1_000_000_000]
    arrivals = cell_arrivals(cell, prompts, due_ns=due_ns)
    *lost, late = simulate_cell(cell, MODEL, arrivals, FORMING, server=server, deaths=deaths).requests
    assert [row.error for row in lost] == [None] * 6
    assert late.finish_reason == "refused"


def test_blocks_lent_to_an_engine_that_died_come_free_at_once() -> None:
    """The prefill engine has blocks for one prompt; the second one waits for those of the first."""
    cell = pair_cell(
        prefill={"num_blocks": 4},
        decode={"num_engines": 2},
        sampling={"max_tokens": 3},
        transfer={"lease_s": 9},
    )
    died_s = (DISPATCH_NS + STEP_NS + 9 * TOKEN_NS + HANDOVER_NS) / 1e9
    deaths = [EngineDeath(at_s=died_s, engine="decode0", returns=False)]
    arrivals = cell_arrivals(cell, PROMPTS[:2])
    first, second = simulate_cell(cell, MODEL, arrivals, pair_book(cell), deaths=deaths).requests
    assert first.error == "engine decode0 died: it was killed"
    assert second.error is None
    assert 0 < second.token_times_ns[0] - died_s * 1e9 < RELEASE_NS + 3 * STEP_NS


def test_a_server_that_hands_over_loses_no_request() -> None:
    """Engines of both roles die, some of them again and again; leases of the dead are nobody's."""
    cell = pair_cell(
        prefill={"num_engines": 2},
        decode={"num_engines": 2},
        engine={"max_batch_tokens": 16, "num_blocks": 24},
        sampling={"max_tokens": 20},
        transfer={"lease_s": 1},
    )
    assert cell.decode is not None
    server = settings_of(cell, CARD, [cell.prefill] * 2, [cell.decode] * 2, failure_policy="migrate")
    book = replace(pair_book(cell), host=HostTable(form_s=0.02))
    prompts, draw = [tuple(range(i, i + 9)) for i in range(60)], random.Random(1)
    due_ns = [i * 500_000 for i in range(60)]
    names = [entry.name for entry in server.engines]
    deaths = [EngineDeath(at_s=draw.uniform(0, 0.25), engine=draw.choice(names)) for _ in range(40)]

    def rows(*dying: EngineDeath) -> list[RequestRow]:
        arrivals = cell_arrivals(cell, prompts, due_ns=due_ns)
        return simulate_cell(cell, MODEL, arrivals, book, server=server, deaths=dying).requests

    found = rows(*deaths)
    assert [row.error for row in found] == [None] * 60
    assert [row.output_token_ids for row in found] == [row.output_token_ids for row in rows()]
    assert sum(row.recovered_by == "migrate" for row in found) > 20


def test_a_server_that_fails_requests_tells_what_their_engine_died_of() -> None:
    cell = sim_cell(sampling={"max_tokens": 12})
    deaths = [EngineDeath(at_s=DEATH_S, engine="prefill0")]
    server = server_of(2, failure_policy="fail")
    rows = simulate_cell(
        cell, MODEL, cell_arrivals(cell, PROMPTS), FORMING, server=server, deaths=deaths
    ).requests
    assert [row.finish_reason for row in rows] == ["error", "length"] * 3
    assert {row.error for row in rows[::2]} == {"engine prefill0 died: it was killed"}


def test_after_its_death_an_engine_has_an_empty_cache() -> None:
    cell = sim_cell(engine={"prefix_caching": True}, sampling={"max_tokens": 2}, failure_policy="migrate")
    prompt = tuple(range(9))
    due_ns = [0, 20_000_000, 60_000_000, 80_000_000]
    deaths = [EngineDeath(at_s=0.05, engine="prefill0", back_s=0.001)]
    arrivals = cell_arrivals(cell, [prompt] * 4, due_ns=due_ns)
    rows = simulate_cell(cell, MODEL, arrivals, BOOK, deaths=deaths).requests
    assert [row.num_cached_tokens for row in rows] == [0, 8, 0, 8]


def test_only_engines_that_exist_can_die() -> None:
    with pytest.raises(UserError, match="no engine 'decode0' dies"):
        simulated(EngineDeath(at_s=1, engine="decode0"))


def test_deaths_are_the_same_every_time() -> None:
    deaths = [EngineDeath(at_s=0.003 * i, engine=f"prefill{i % 2}") for i in range(1, 6)]
    changes: dict[str, Any] = {"failure_policy": "migrate", "prefill": {"num_engines": 2}}
    assert simulated(*deaths, **changes).requests == simulated(*deaths, **changes).requests
