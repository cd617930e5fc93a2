"""Quiet steps taken at once, against worlds that take each by itself: equal rows, token times and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rayk.costs import CostBook, EngineCosts
from rayk.costs.hull import Hull
from rayk.costs.table import Gap, GapTable, LinearCost, ReadCosts, StepTable, TransferTable
from rayk.models.config import DecoderConfig
from rayk.simulate import Arrival, SimOutcome, simulate_cell
from rayk.simulate.engine import SimEngine
from rayk.specs import Cell
from rayk.types.errors import OutsideHull
from tests.simulate.cells import BOOK, MODEL, sim_cell
from tests.specs.models import decoder

MODELS = (MODEL, decoder((None, 12)), decoder((8, 8)))
TERMS = ("one", "requests", "tokens>3", "seen", "pairs>40")


def picture(outcome: SimOutcome) -> dict[str, Any]:
    """All that is told of a run."""
    return {
        "requests": outcome.requests,
        "transfers": outcome.transfers,
        "steps": sorted(outcome.steps, key=lambda row: (row.engine, row.step)),
        "engines": outcome.engines,
        "end": outcome.end_ns,
        "outside": outcome.num_outside_hull,
    }


def book(model: DecoderConfig, *, is_flat: bool, gap_ns: int, reach: int) -> CostBook:
    """Costs by which steps of several engines end at one time, or at times of their own."""
    costs = EngineCosts.flat(1_000) if is_flat else EngineCosts.flat(0, host_ns=70, request_host_ns=11.3)
    if not is_flat:
        constants = (1_000.3, 31.1, 7.7, 3.07, 1.003)
        terms = (*TERMS, "seen@0") if model is not MODEL else TERMS
        hull = Hull(bounds={"num_seen": (0, reach)})
        ratios = (0.8, 1.0, 1.3)
        table = StepTable(terms=terms, constants=(*constants, 0.3)[: len(terms)], hull=hull, ratios=ratios)
        costs = replace(costs, decode=table, prefill=table)
    gap = Gap(quantiles=(gap_ns,))
    gaps = GapTable(dispatch=gap, handover=gap, release=gap, answer=Gap(quantiles=(gap_ns, 3 * gap_ns)))
    wait = LinearCost(fixed_ns=gap_ns, byte_ns=3.0)
    reads = {f"nixl {d} 1:1 auto:auto": ReadCosts(post=LinearCost(), wait=wait) for d in ("cpu", "cuda")}
    return replace(BOOK, any_engine=costs, gaps=gaps, transfers=TransferTable(reads=reads))


@st.composite
def cells(draw: st.DrawFn) -> tuple[Cell, DecoderConfig, list[Arrival], CostBook, dict[str, Any]]:
    """A cell, who comes, what it costs, and how it is simulated."""
    model = draw(st.sampled_from(MODELS))
    engine = {
        "num_blocks": draw(st.sampled_from([16, 24, 200])),
        "max_seqs": draw(st.sampled_from([2, 3, 8])),
        "max_batch_tokens": draw(st.sampled_from([4, 16, 64])),
        "prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.sampled_from(["never", "always"])),
    }
    prefills = {"num_engines": draw(st.integers(1, 3))}
    pair = {"mode": "disaggregated", "decode": {"block_size": 4, "num_engines": draw(st.integers(1, 3))}}
    cell = sim_cell(
        model,
        draw(st.sampled_from(["cpu", "cuda"])),
        engine=engine,
        prefill=prefills,
        **draw(st.sampled_from([{}, pair])),
        deadlines={"request_s": draw(st.sampled_from([30e-6, 1.0]))},
        policy=draw(st.sampled_from(["round_robin", "least_loaded"])),
    )
    every = draw(st.sampled_from([500, 1_000]))
    arrivals, at_ns = [], 0
    for index in range(draw(st.integers(3, 12))):
        at_ns += every * draw(st.integers(0, 12))
        prompt = (7,) * draw(st.sampled_from([0, 8])) + tuple(range(index, index + draw(st.integers(1, 9))))
        num = draw(st.one_of(st.none(), st.integers(1, 20)))
        arrivals.append(
            Arrival(at_ns=at_ns, index=index, prompt=prompt, max_tokens=30, num_output_tokens=num)
        )
    flat, gap_ns = draw(st.booleans()), draw(st.sampled_from([0, 500]))
    costs = book(model, is_flat=flat, gap_ns=gap_ns, reach=draw(st.sampled_from([60, 10_000])))
    return cell, model, arrivals, costs, {"noise": draw(st.booleans()), "strict": False}


def test_a_fast_world_is_as_one_that_takes_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []
    carry_out = SimEngine._carry_out

    def noted(self: SimEngine, span: Any, num_steps: int) -> None:
        spans.append((num_steps, len(span.ends_ns)))
        carry_out(self, span, num_steps)

    monkeypatch.setattr(SimEngine, "_carry_out", noted)

    # A failing cell is small as it is, and each that is tried to make it smaller takes two simulations.
    @settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(cells())
    def hold_equal(drawn: Any) -> None:
        cell, model, arrivals, costs, how = drawn
        fast, slow = (
            picture(simulate_cell(cell, model, arrivals, costs, fast=is_fast, **how))
            for is_fast in (True, False)
        )
        assert fast == slow

    hold_equal()
    assert sum(taken > 3 for taken, _ in spans) > 200, "there were spans to take"
    assert sum(taken < planned for taken, planned in spans) > 100, "some were cut"


def test_a_step_outside_of_the_tables_is_met_where_it_comes() -> None:
    """The tenth token would be the first of such a step: a request that ends before never meets it."""
    costs = book(MODEL, is_flat=False, gap_ns=0, reach=20)
    for is_fast in (True, False):
        for num, is_outside in ((16, False), (20, True)):
            arrivals = [Arrival(at_ns=0, index=0, prompt=(1, 2, 3, 4, 5), max_tokens=num)]
            if is_outside:
                with pytest.raises(OutsideHull, match="num_seen 21"):
                    simulate_cell(sim_cell(), MODEL, arrivals, costs, fast=is_fast)
            else:
                assert len(simulate_cell(sim_cell(), MODEL, arrivals, costs, fast=is_fast).requests) == 1


def test_a_lonely_request_takes_few_events() -> None:
    """200 tokens: an arrival, a dispatch, a prefill, and a span or two."""
    arrivals = [Arrival(at_ns=0, index=0, prompt=(1, 2, 3), max_tokens=200)]
    fast, slow = (simulate_cell(sim_cell(), MODEL, arrivals, BOOK, fast=f) for f in (True, False))
    assert fast.num_events < 15 < 200 < slow.num_events


def test_steps_are_taken_at_once_while_reads_wait_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine with blocks for three requests of ten: the others wait until one ends."""
    pair: dict[str, Any] = {"mode": "disaggregated", "decode": {"block_size": 4}}
    cell = sim_cell(engine={"num_blocks": 24, "max_seqs": 8}, **pair)
    arrivals = [
        Arrival(at_ns=0, index=i, prompt=tuple(range(i, i + 9)), max_tokens=24 + i % 3) for i in range(10)
    ]
    waiting: list[int] = []
    carry_out = SimEngine._carry_out

    def noted(self: SimEngine, span: Any, num_steps: int) -> None:
        waiting.extend([self.handover.receiving.num_awaited] * num_steps)
        carry_out(self, span, num_steps)

    monkeypatch.setattr(SimEngine, "_carry_out", noted)
    fast, slow = (picture(simulate_cell(cell, MODEL, arrivals, BOOK, fast=f)) for f in (True, False))
    assert fast == slow
    assert sum(num > 0 for num in waiting) > 20
