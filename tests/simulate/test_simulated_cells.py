"""Cells of aggregated engines in virtual time: rows, tables and the page are those of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.costs.hull import Hull
from rayk.reports import ResultWriter, load
from rayk.simulate import Arrival, SimOutcome, cell_arrivals, cell_row, prediction_facts, simulate_cell
from rayk.types.errors import OutsideHull, UserError
from tests.simulate.cells import BOOK, DISPATCH_NS, MODEL, STEP_NS, TOKEN_NS, sim_cell


def simulated(prompts: list[tuple[int, ...]], *, arrivals: Any = None, **changes: Any) -> SimOutcome:
    cell = sim_cell(**changes)
    return simulate_cell(cell, MODEL, cell_arrivals(cell, prompts, **(arrivals or {})), BOOK)


def test_a_request_takes_what_its_steps_take() -> None:
    """Chunks of 8, 8 and 4 tokens, then a token a step."""
    engine = {"max_batch_tokens": 8}
    (row,) = simulated([tuple(range(20))], engine=engine, sampling={"max_tokens": 3}).requests
    steps = [STEP_NS + TOKEN_NS * n for n in (8, 8, 4, 1, 1)]
    assert row.token_times_ns == [DISPATCH_NS + sum(steps[:n]) for n in (3, 4, 5)]
    assert row.stage_ns == {
        "queue": 0,
        "dispatch": DISPATCH_NS,
        "prefill_queue": 0,
        "prefill": sum(steps[:3]),
        "decode": sum(steps[3:]),
    }
    assert (row.finish_reason, row.kv_path, row.prefill_engine) == ("length", "local", "prefill0")


def test_an_output_ends_where_it_ended_in_the_run() -> None:
    prompts = [(1, 2, 3), (4, 5, 6)]
    rows = simulated(prompts, arrivals={"num_output_tokens": [2, 4]}, sampling={"max_tokens": 4}).requests
    assert [len(row.output_token_ids) for row in rows] == [2, 4]
    assert [row.finish_reason for row in rows] == ["stop", "length"]
    assert rows[0].output_token_ids[-1] == MODEL.eos_token_ids[0]
    assert MODEL.eos_token_ids[0] not in rows[1].output_token_ids


def test_engines_share_requests_as_the_policy_says() -> None:
    """Ten requests on three engines in turn; stages add up to latencies, and nothing is left behind."""
    outcome = simulated(
        [tuple(range(i, i + 30)) for i in range(10)],
        prefill={"num_engines": 3},
        engine={"max_batch_tokens": 16, "max_seqs": 2},
        sampling={"max_tokens": 16},
        arrivals={"due_ns": [i * 700_000 for i in range(10)]},
    )
    assert [row.prefill_engine for row in outcome.requests] == [f"prefill{i % 3}" for i in range(10)]
    assert outcome.end_ns == max(row.token_times_ns[-1] for row in outcome.requests)
    for row in outcome.requests:
        assert sum(row.stage_ns.values()) == row.token_times_ns[-1] - row.arrival_ns
    steps = Counter(step.engine for step in outcome.steps)
    assert steps == {name: account.num_steps for name, account in outcome.engines.items()}
    assert sum(step.num_tokens for step in outcome.steps) == 10 * (30 + 15)
    assert max(account.max_waiting for account in outcome.engines.values()) > 0


def test_the_first_steps_are_kept_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are taken at once are written at once, some of them in vain."""
    how: dict[str, Any] = {"prefill": {"num_engines": 2}, "sampling": {"max_tokens": 30}}
    prompts = [(1, 2, 3), (4, 5, 6, 7)]
    steps = simulated(prompts, **how).steps
    assert len(steps) == 60
    monkeypatch.setattr("rayk.simulate.fleet.MAX_STEP_ROWS", 10)
    assert simulated(prompts, **how).steps == steps[:10]


def test_no_more_requests_stream_than_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayk.simulate.entry.MAX_STREAMS", 2)
    rows = simulated([(1, 2, 3)] * 6).requests
    ends = sorted(row.token_times_ns[-1] for row in rows)
    begins = sorted(row.arrival_ns + row.stage_ns["queue"] for row in rows)
    assert begins == [0, 0, *ends[:4]]


def test_a_request_lasts_no_longer_than_it_may() -> None:
    rows = simulated(
        [(1, 2, 3), (4, 5, 6)], deadlines={"request_s": 0.01}, sampling={"max_tokens": 50}
    ).requests
    assert [row.finish_reason for row in rows] == ["error", "error"]
    assert [len(row.output_token_ids) for row in rows] == [9, 9]


def test_equal_seeds_give_equal_rows() -> None:
    prompts = [tuple(range(i, i + 9)) for i in range(5)]
    cell = sim_cell(arrival={"rate": 200.0})

    def rows() -> SimOutcome:
        return simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), BOOK, noise=True, seed=3)

    assert rows().requests == rows().requests
    assert rows().steps == rows().steps


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mode": "disaggregated", "transfer": {"mode": "push"}}, "pushes"),
        ({"mode": "disaggregated", "decode": {"kv_dtype": "fp8_e4m3"}}, "KV formats"),
        ({"engine": {"pp": 2}}, "pipelines"),
        ({"speculative": {"method": "mtp"}, "mode": "disaggregated"}, "hand-overs of drafters on ranks"),
        ({"speculative": {"method": "mtp"}, "engine": {"prefix_caching": True}}, "prefix caches of drafters"),
        ({"offload": {"host_gib": 1, "disk_folder": "/tmp/pages"}}, "a disk tier"),
        ({"offload": {"host_gib": 1, "outbox_mib": 8}}, "outboxes"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"not simulated: {named}"):
        simulated([(1, 2)], **changes)


def test_the_report_opens_it(tmp_path: Path) -> None:
    cell = sim_cell()
    outcome = simulate_cell(cell, MODEL, cell_arrivals(cell, [(1, 2, 3)] * 4), BOOK)
    outcome.num_outside_hull = 3
    assert BOOK.any_engine is not None
    costs = replace(BOOK, folder="costs/", any_engine=replace(BOOK.any_engine, kind="unmeasured"))
    environment = prediction_facts(costs, [outcome])
    writer = ResultWriter(tmp_path, spec_yaml="name: plan\nmodel: m\n", environment=environment)
    writer.write_cell(cell_row(cell, [outcome]), outcome.requests, outcome.transfers)
    page = writer.finish().read_text()
    writer.close()
    assert "PREDICTED, not measured: times are those of the cost tables in costs/" in page
    assert "UNMEASURED" in page
    assert "This measures what is predicted here" in page
    assert "3 steps lay outside" in page
    assert "1 of 1 cells PREDICTED" in page
    cells = load(tmp_path).cells
    assert list(cells["verdict"]) == ["PREDICTED"]
    assert bool(cells["met"].all())
    assert cells["tpot_ms_p50"][0] == pytest.approx((STEP_NS + 4 * TOKEN_NS) / 1e6)


class Session:
    """Turns of one session: each comes 5 ms after the end of the one before."""

    def __init__(self, num_turns: int) -> None:
        self.left = num_turns
        self.due_ns: int | None = 0
        self.ends_ns: list[int] = []

    def next_due_ns(self) -> int | None:
        return self.due_ns

    def take(self) -> Arrival:
        assert self.due_ns is not None
        at_ns, self.due_ns = self.due_ns, None
        self.left -= 1
        return Arrival(at_ns=at_ns, index=self.left, prompt=(1, 2, 3), max_tokens=2)

    def ended(self, index: int, now_ns: int) -> None:
        assert index == self.left
        self.ends_ns.append(now_ns)
        self.due_ns = now_ns + 5_000_000 if self.left else None


def test_a_request_may_come_because_another_ended() -> None:
    session = Session(3)
    rows = simulate_cell(sim_cell(), MODEL, session, BOOK).requests
    took_ns = DISPATCH_NS + 2 * STEP_NS + 4 * TOKEN_NS
    assert session.ends_ns == [n * took_ns + (n - 1) * 5_000_000 for n in (1, 2, 3)]
    assert [row.arrival_ns for row in rows] == [n * (took_ns + 5_000_000) for n in range(3)]


def test_steps_outside_of_the_tables_are_refused_or_counted() -> None:
    assert BOOK.any_engine is not None
    table = replace(BOOK.any_engine.prefill, hull=Hull(bounds={"num_tokens": (1, 5)}))
    book = replace(BOOK, any_engine=replace(BOOK.any_engine, prefill=table))
    cell = sim_cell()
    prompts = [(1, 2, 3), (4, 5, 6)]
    with pytest.raises(OutsideHull, match="num_tokens 6 is outside of 1 to 5"):
        simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), book)
    apart = simulate_cell(cell, MODEL, cell_arrivals(cell, prompts, due_ns=[0, 10**9]), book)
    assert apart.num_outside_hull == 0
    found = simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), book, strict=False)
    assert found.num_outside_hull == 1


def test_rows_leave_as_requests_end() -> None:
    """A million requests need no more memory than those under way."""
    cell = sim_cell(engine={"max_seqs": 2})
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    kept = simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), BOOK)
    left: list[Any] = []
    outcome = simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), BOOK, sink=left.append)
    assert outcome.requests == []
    assert sorted(left, key=lambda row: row.prompt_index) == kept.requests
