"""Searches whose best plan is known by how the costs were made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pytest

from rayk.costs.book import CostBook
from rayk.costs.hull import Hull
from rayk.planner.command import check_engines, planned_server
from rayk.planner.front import on_front
from rayk.planner.machine import PlanMachine
from rayk.planner.plan import Plan
from rayk.planner.trial import PlanWorld, Trial, run_trial
from rayk.reports.plan_text import plan_texts
from rayk.reports.plans import PlanResult, read_plans
from rayk.reports.report import write_html
from rayk.specs.plan import load_plan
from rayk.types.errors import OutsideHull, SpecError, UserError
from tests.house import ROOT
from tests.planner.plans import book, make_plan, plan_spec

DECODE_BOUND = book(decode={"one": 5.0, "requests": 5.0}, prefill={"one": 2.0, "tokens": 0.02})
PREFILL_BOUND = book(decode={"one": 1.0}, prefill={"one": 2.0, "tokens": 0.5})
EVEN = book(decode={"one": 2.0, "requests": 1.0}, prefill={"one": 2.0, "tokens": 0.2})
ONLY_PD = {"mode": "disaggregated"}


def best_of(found: PlanResult) -> dict[str, Any]:
    best = {str(name): value for name, value in found.plans.iloc[0].to_dict().items()}
    assert best["is_best"]
    assert found.best == best["plan_id"]
    return best


def test_expensive_decode_steps_get_more_decode_engines(tmp_path: Path) -> None:
    found = make_plan(tmp_path, DECODE_BOUND, search=ONLY_PD).run()
    best = best_of(found)
    assert (best["prefill_engines"], best["decode_engines"]) == (1, 3)
    assert best["limit"] == "decode"
    assert found.is_met


@pytest.mark.thorough
def test_expensive_prompts_get_more_prefill_engines(tmp_path: Path) -> None:
    best = best_of(make_plan(tmp_path, PREFILL_BOUND, search=ONLY_PD).run())
    assert (best["prefill_engines"], best["decode_engines"]) == (3, 1)
    assert best["limit"] == "prefill"


@pytest.mark.thorough
def test_long_prompts_go_apart_where_they_would_hold_tokens_up(tmp_path: Path) -> None:
    """A prompt of 66 ms between two tokens breaks a TPOT of 8 ms that engines apart keep; without that limit
    fewer aggregated engines, which move no KV, do."""
    asked: dict[str, Any] = {
        "traffic": {"input_tokens": 128, "output_tokens": 4, "rate": 8},
        "search": {"max_batch_tokens": 128},
    }
    tight = make_plan(tmp_path, PREFILL_BOUND, slo={"ttft": "400ms", "tpot": "8ms"}, **asked).run()
    assert best_of(tight)["mode"] == "disaggregated"
    loose = make_plan(tmp_path, PREFILL_BOUND, slo={"ttft": "400ms", "tpot": "400ms"}, **asked).run()
    assert best_of(loose)["mode"] == "aggregated"
    assert best_of(loose)["num_gpus"] < best_of(tight)["num_gpus"]


@pytest.mark.thorough
def test_engines_whose_blocks_are_short_get_a_higher_tp(tmp_path: Path) -> None:
    """A token keeps 1,024 bytes of KV, and the weights leave two engines of TP 1 room for one request each,
    where one engine of TP 2 has room for many: its weights are half as large on each rank."""
    many: dict[str, Any] = {
        "search": {"tp": [1, 2], "mode": "aggregated", "num_blocks": "auto"},
        "cpu": {"slots": 2},
    }
    roomy = make_plan(tmp_path, DECODE_BOUND, **many).run()
    assert best_of(roomy)["prefill_tp"] == 1
    weights = 570_000  # bytes at TP 1, in float32
    short = {**many, "cpu": {"slots": 2, "memory_gib": (weights + 3 * 16 * 1024 + 4096) / 2**30}}
    found = make_plan(tmp_path, DECODE_BOUND, **short).run()
    best = best_of(found)
    assert best["prefill_tp"] == 2, found.plans[["plan_id", "max_rate", "prefill_num_blocks"]]


@pytest.mark.thorough
def test_the_fewest_gpus_that_keep_up_are_what_all_plans_simulated_say(tmp_path: Path) -> None:
    """Every plan of the space is simulated by itself: none with fewer GPUs keeps the SLO."""
    plan = make_plan(
        tmp_path,
        EVEN,
        traffic={"rate": 120, "process": "poisson", "num_requests": 60},
        search={"mode": ["aggregated"], "max_seqs": [2, 4]},
    )
    found = plan.run()
    best = best_of(found)
    assert found.is_met
    world = PlanWorld(spec=plan.inputs.spec, config=plan.inputs.config, costs=plan.inputs.costs)
    kept = {}
    for family in plan.inputs.space.families:
        for candidate in plan.inputs.space.counts(family):
            result = run_trial(world, Trial(candidate=candidate, rate=120, num_requests=60))
            if result.good_share >= 0.9:
                kept[candidate.plan_id] = candidate.num_gpus
    assert best["plan_id"] in kept
    assert best["num_gpus"] == min(kept.values())
    front = found.front
    assert not front.empty
    assert front["met"].all()


@pytest.mark.thorough
def test_the_highest_rate_is_where_a_dense_scan_finds_it(tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, EVEN, search={"mode": "aggregated", "num_prefill": 2}, traffic={"process": "poisson"}
    )
    best = best_of(plan.run())
    (candidate,) = [c for f in plan.inputs.space.families for c in plan.inputs.space.counts(f)]
    world = PlanWorld(spec=plan.inputs.spec, config=plan.inputs.config, costs=plan.inputs.costs)
    num = round(best["num_requests"] / 0.9)  # a tenth is the warm-up, and not counted

    def good(rate: float) -> float:
        return run_trial(world, Trial(candidate=candidate, rate=rate, num_requests=num)).good_share

    scanned = [best["max_rate"] * (0.9 + 0.02 * n) for n in range(11)]
    kept = [rate for rate in scanned if good(rate) >= 0.9]
    assert kept == scanned[: len(kept)]
    assert 0 < len(kept) < len(scanned)
    assert max(kept) == pytest.approx(best["max_rate"], rel=0.05)
    assert best["good_share"] >= 0.9


@pytest.mark.thorough
def test_equal_seeds_find_equal_plans_on_any_number_of_processes(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "traffic": {"rate": 30, "process": "poisson", "num_requests": 20},
        "search": {"mode": ["aggregated"], "num_prefill": 1},
    }
    one = make_plan(tmp_path, EVEN, **asked).run()
    other = make_plan(tmp_path, EVEN, num_jobs=2, **asked).run()
    assert one.plans.equals(other.plans)
    timed = {"search", "environment"}
    assert {k: v for k, v in one.facts.items() if k not in timed} == {
        k: v for k, v in other.facts.items() if k not in timed
    }
    asked["traffic"]["seed"] = 5
    assert not one.plans["ttft_ms_p90"].equals(make_plan(tmp_path, EVEN, **asked).run().plans["ttft_ms_p90"])


def bounded(most: int) -> CostBook:
    """Make a book that was measured up to so many tokens a step."""
    return book(decode={"one": 2.0}, prefill={"one": 2.0}, hull=Hull(bounds={"num_tokens": (1, most)}))


def test_steps_that_nobody_measured_are_refused_unless_told(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "traffic": {"rate": 10, "num_requests": 10},
        "search": {"mode": "aggregated", "num_prefill": 1},
    }
    assert make_plan(tmp_path, bounded(64), **asked).run().facts["trust"]["num_outside_hull"] == 0
    with pytest.raises(OutsideHull, match="num_tokens 32 is outside of 1 to 16"):
        make_plan(tmp_path, bounded(16), **asked).run()
    found = make_plan(tmp_path, bounded(16), extrapolates=True, **asked).run()
    assert found.facts["trust"]["num_outside_hull"] >= 9
    assert best_of(found)["outside_hull"] > 0


def test_only_plans_outside_of_the_tables_are_left_out(tmp_path: Path) -> None:
    """Steps of 16 tokens were measured, of 32 were not: the plan with small chunks is predicted."""
    asked: dict[str, Any] = {
        "traffic": {"rate": 10, "num_requests": 10},
        "search": {"mode": "aggregated", "num_prefill": 1, "max_batch_tokens": [16, 64]},
    }
    found = make_plan(tmp_path, bounded(16), **asked).run()
    assert best_of(found)["max_batch_tokens"] == 16
    (other,) = found.plans[~found.plans["is_best"]].to_dict("records")
    assert "outside of what was measured" in other["why_not"]
    assert "1 of 2 plans" in found.facts["trust"]["doubts"][0]


def test_a_data_sheet_marks_all_that_comes_of_it(tmp_path: Path) -> None:
    """TP that needs a link, memory and peaks come from a sheet, and nothing that follows passes for
    measured."""
    sheet = tmp_path / "small.yaml"
    sheet.write_text(
        "name: small\ntflops: {float32: 0.01}\nmemory_gb_per_s: 1\nmemory_gb: 0.01\nlink_gb_per_s: 1\n"
    )
    spec = plan_spec(tmp_path, search={"mode": ["aggregated"], "num_blocks": "auto"})
    del spec["cpu"], spec["costs"]
    spec |= {"gpus": "2xsmall", "hardware": str(sheet)}
    spec["traffic"] |= {"rate": 5, "num_requests": 10}
    found = Plan(spec).run(tmp_path / "out")
    assert found.facts["trust"]["unmeasured"]
    assert found.plans["unmeasured"].all()
    assert best_of(found)["num_gpus"] == 1
    assert found.facts["best_text"].endswith("1 GPU")
    assert "UNMEASURED" in (tmp_path / "out" / "report.html").read_text()
    lines = [line for _, line in plan_texts(found.plans, found.facts)]
    assert "UNMEASURED" in lines[0]
    for gpus, why in (
        ("2xH100", "GPUs are H100, and the data sheet is of small"),
        ("0xsmall", "no number of GPUs"),
    ):
        with pytest.raises(SpecError, match=why):
            Plan(spec | {"gpus": gpus})
    sheet.write_text(sheet.read_text().replace("memory_gb: 0.01\n", ""))
    with pytest.raises(SpecError, match="the memory of SMALL is not known"):
        Plan(spec)


def test_the_example_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a released model's config and a data sheet: engines of every TP asked for, on one node of 8."""
    monkeypatch.chdir(ROOT)
    inputs = Plan("jobs/plan.yaml").inputs
    assert inputs.machine.nodes == (8,)
    tried = {(f.mode, f.prefill_tp, f.decode_tp) for f in inputs.space.families}
    assert tried == {("aggregated", tp, None) for tp in (1, 2, 4)} | {
        ("disaggregated", p, d) for p in (1, 2, 4) for d in (1, 2, 4)
    }


@pytest.mark.thorough
def test_a_large_fleet_is_tried_by_a_smaller_one_and_then_as_it_is(tmp_path: Path) -> None:
    """Numbers of requests tell which fleet was simulated: 12 for each engine of it."""
    asked: dict[str, Any] = {
        "cpu": {"slots": 30},
        "traffic": {"rate": 100, "num_requests": 20},
        "search": {"mode": "aggregated", "num_prefill": 30},
    }
    plan = make_plan(tmp_path, EVEN, **asked)
    (family,) = plan.inputs.space.families
    fleet = plan.inputs.space.of(family, 30)
    stand_in = fleet.shrunk(24)
    assert stand_in is not None
    assert stand_in.num_engines == 24
    pair = plan.inputs.space.of(family, 200, 100).shrunk(24)
    assert pair is not None
    assert (pair.num_prefill, pair.num_decode) == (8, 4)
    found = plan.run()
    assert found.is_met
    assert best_of(found)["num_requests"] == 0.9 * 12 * 30  # not of the 24 that stood in for them
    assert found.facts["sensitivity"][1]["num_requests"] == 12 * 24 - 12 * 24 // 10
    assert not any("smaller fleet" in note for note in found.facts["search"]["notes"])
    world = PlanWorld(spec=plan.inputs.spec, config=plan.inputs.config, costs=plan.inputs.costs)
    trial = Trial(candidate=fleet, rate=1200, num_requests=240, stand_in=stand_in)
    small, whole = run_trial(world, trial), run_trial(world, replace(trial, stand_in=None, num_requests=300))
    assert small.ttft_ms[0] == pytest.approx(whole.ttft_ms[0], rel=0.1)
    assert small.output_tokens_per_s == pytest.approx(whole.output_tokens_per_s, rel=0.1)


def test_a_plan_s_folder_is_read_back_and_has_a_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = make_plan(
        tmp_path,
        EVEN,
        traffic={"rate": 30, "num_requests": 20},
        search={"mode": "aggregated", "num_prefill": [1, 2]},
    )
    found = plan.run(out)
    back = read_plans(out)
    pd.testing.assert_frame_equal(back.plans, found.plans)
    assert {k: v for k, v in back.facts.items() if k != "version"} == found.facts
    page = (out / "report.html").read_text()
    assert "What should I start?" in page
    write_html(out)
    with pytest.raises(UserError, match="a plan is here"):
        plan.run(out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"traffic": {"rate": 1e6}}, "no plan takes the rate, by the estimate"),
        ({"slo": {"ttft": "1ms"}}, "a prompt alone takes"),
        ({"search": {"tp": [3]}}, "TP 3"),
        ({"cpu": {"slots": 4, "memory_gib": 1e-6}}, "weights do not fit"),
        ({"traffic": {"input_tokens": 5000}}, "4,096 positions"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Of a rate that is too high the best is told all the same; of the others there is none."""
    changes.setdefault("search", {})
    changes["search"] = {"mode": "aggregated", **changes["search"]}
    if "rate" in changes.get("traffic", {}):
        found = make_plan(tmp_path, EVEN, **changes).run()
        assert not found.is_met
        assert any(said in note for note in found.facts["search"]["notes"])
        return
    with pytest.raises(UserError, match=said):
        make_plan(tmp_path, EVEN, **changes).run()


def test_a_command_starts_the_engines_that_were_simulated(tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path,
        EVEN,
        search={
            "tp": [1, 2],
            "mode": ["aggregated", "disaggregated"],
            "block_size": [16, 32],
            "max_seqs": [3, 4],
        },
        engine={"prefix_caching": True, "kernel_block_sizes": {"full": 16}},
        transfer={"staging": "never"},
        policy_settings={"output_cost": 2.0},
    )
    tried = 0
    for family in plan.inputs.space.families:
        for candidate in list(plan.inputs.space.counts(family))[:3]:
            server = planned_server(plan.inputs.spec, candidate, plan.inputs.config)
            check_engines(server.settings, candidate)
            engines = [e.config for e in server.settings.engines]
            assert all(e.prefix_caching and e.kernel_block_sizes == (("full", 16),) for e in engines)
            assert server.settings.policy_settings.output_cost == 2.0
            tried += 1
    assert tried > 20
    other = plan.inputs.space.of(candidate.family, candidate.num_prefill + 1, candidate.num_decode)
    with pytest.raises(AssertionError):
        check_engines(server.settings, other)


def test_traces_and_sessions_are_planned(tmp_path: Path) -> None:
    """Sessions of a trace, whose turns begin with the turn before: a prefix cache finds them."""
    lines = [
        {
            "session_id": f"s{n % 3}",
            "timestamp": 40 * n,
            "input_length": 64 + 32 * (n // 3),
            "output_length": 4,
        }
        for n in range(12)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    spec = plan_spec(tmp_path, search={"mode": "aggregated", "num_prefill": 1, "num_blocks": 512})
    spec["traffic"] = {"trace": {"file": str(trace)}}
    spec["engine"] = {"prefix_caching": True}
    found = Plan(spec, costs=EVEN).run()
    assert best_of(found)["cached_share"] > 0.3
    assert found.facts["rate"] == pytest.approx(12 / 0.44)
    assert [row["change"][:5] for row in found.facts["sensitivity"]] == [
        "as as",
        *["traff"] * 2,
        *["costs"] * 2,
    ]
    assert set(found.plans["policy"]) == {"least_loaded"}, "one engine leaves a policy nothing to choose"
    spec["traffic"]["rate"] = 3
    with pytest.raises(SpecError, match="a trace has it"):
        Plan(spec, costs=EVEN)


def test_engines_stay_within_nodes_as_brute_force_places_them() -> None:
    draw = Random(1)
    for _ in range(300):
        nodes = tuple(draw.choice([1, 2, 4, 6, 8]) for _ in range(draw.randrange(1, 4)))
        engines = [(draw.choice([1, 2, 4, 8]), draw.randrange(0, 4)) for _ in range(2)]
        ranks = [tp for tp, num in engines for _ in range(num)]

        def fits(left: list[int], free: list[int]) -> bool:
            if not left:
                return True
            return any(
                fits(left[1:], [f - left[0] * (i == n) for i, f in enumerate(free)])
                for n in range(len(free))
                if free[n] >= left[0]
            )

        machine = PlanMachine(name="", nodes=nodes, rank_bytes=0)
        assert machine.holds(engines) == fits(sorted(ranks, reverse=True), list(nodes)), (nodes, engines)


def test_policies_go_with_what_engines_keep(tmp_path: Path) -> None:
    asked = plan_spec(tmp_path)
    assert load_plan(asked).spec.policies == ["least_loaded"]
    asked["engine"] = {"prefix_caching": True}
    assert load_plan(asked).spec.policies == ["least_loaded", "prefix_aware"]
    asked["traffic"] |= {"num_sessions": 4}
    assert load_plan(asked).spec.policies == ["least_loaded", "prefix_aware", "session_affinity"]


def test_the_front_is_what_brute_force_says() -> None:
    draw = Random(0)
    for _ in range(200):
        points = [(draw.randrange(6), draw.randrange(6)) for _ in range(draw.randrange(1, 12))]

        def is_beaten(p: tuple[int, int], points: list[tuple[int, int]] = points) -> bool:
            return any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)

        assert on_front(points) == [not is_beaten(p) for p in points]
