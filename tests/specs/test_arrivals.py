"""When requests of a cell arrive, what policies are told, and which cells that makes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayk.sched.policy import PolicySettings
from rayk.specs import Cell, expand, load_spec, plan_cells
from rayk.specs.experiment import PolicySpec
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


def cells(**changes: Any) -> list[Cell]:
    return expand(load_spec(spec(**changes)).spec, decoder(), device="cpu")


def ids(**changes: Any) -> list[str]:
    return [cell.cell_id for cell in cells(**changes)]


# --- arrivals ---------------------------------------------------------------------------------------


def test_without_a_rate_all_requests_arrive_at_once() -> None:
    (cell,) = cells(arrival={"process": "gamma", "seed": 3})
    assert cell.due_ns(4, 0) == [0, 0, 0, 0]


def test_times_are_those_of_the_seed_in_every_cell_and_anew_in_every_repeat() -> None:
    one, two = cells(arrival={"rate": 5.0, "seed": 2}, matrix={"decode.tp": [1, 2]})
    assert one.due_ns(50, 0) == two.due_ns(50, 0)
    assert one.due_ns(50, 0)[:20] == one.due_ns(20, 0)
    assert one.due_ns(50, 0) != one.due_ns(50, 1)
    (other,) = cells(arrival={"rate": 5.0, "seed": 3})
    assert other.due_ns(50, 0) != one.due_ns(50, 0)
    (twice,) = cells(arrival={"rate": 10.0, "seed": 2})
    stretched = 2 * np.array(twice.due_ns(50, 0))
    assert np.abs(stretched - np.array(one.due_ns(50, 0))).max() <= 2, "the same gaps at another rate"


@pytest.mark.parametrize(
    ("arrival", "deviation"),
    [
        ({"process": "poisson"}, 1.0),
        ({"process": "constant"}, 0.0),
        ({"process": "gamma", "burstiness": 0.25}, 2.0),
        ({"process": "gamma", "burstiness": 16}, 0.25),
    ],
)
def test_gaps_have_the_mean_and_deviation_asked_for(arrival: dict[str, Any], deviation: float) -> None:
    (cell,) = cells(arrival={"rate": 20.0, **arrival})
    num = 10_000
    gaps_s = np.diff([0, *cell.due_ns(num, 0)]) / 1e9
    assert (gaps_s >= 0).all()
    assert abs(gaps_s.mean() - 0.05) <= 5 * 0.05 * deviation / num**0.5 + 1e-9
    assert abs(gaps_s.std() / 0.05 - deviation) <= 0.1 * deviation + 1e-6


def test_what_arrivals_do_not_heed_makes_no_cells() -> None:
    matrix = {
        "arrival.rate": [None, 2.0],
        "arrival.process": ["constant", "poisson", "gamma"],
        "arrival.burstiness": [0.5, 2.0],
        "arrival.seed": [0, 1],
    }
    found = cells(matrix=matrix)
    named = [tuple(c.axes[key] for key in matrix) for c in found]
    assert named == [
        (None, None, None, None),
        (2.0, "constant", None, None),
        (2.0, "poisson", None, 0),
        (2.0, "poisson", None, 1),
        *((2.0, "gamma", burstiness, seed) for burstiness in (0.5, 2.0) for seed in (0, 1)),
    ]
    assert found[0].cell_id == "p1-d1"
    assert found[-1].cell_id.startswith("p1-d1-arrival.rate=2.0-arrival.process=gamma-arrival.burstiness=2.0")


def test_a_load_that_the_cells_deadline_cuts_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    prompts = "prompts: {random: {count: 30, input_tokens: 5}}\n"
    text = f"model: m\n{prompts}arrival:\n  rate: 2\n  process: constant\n"
    path.write_text(text + "deadlines: {cell_s: 15}\n", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        plan_cells(load_spec(path), decoder(), device="cpu")
    assert caught.value.where == f"{path}:4"
    assert "last of 30 requests arrives after 15.0 s" in caught.value.problem
    assert "cell_s: 40" in caught.value.mend
    path.write_text(text + "deadlines: {cell_s: 15.1}\n", encoding="utf-8")
    assert plan_cells(load_spec(path), decoder(), device="cpu")


@pytest.mark.parametrize(
    ("changes", "problem", "mend"),
    [
        ({"arrival": {"rate": 0}}, "arrival.rate must be greater than or equal to 0.000001, got 0", ""),
        ({"arrival": {"rate": float("inf")}}, "arrival.rate", ""),
        ({"arrival": {"rate": 1, "process": "poison"}}, "got 'poison'", "'poisson'"),
        ({"arrival": {"rate": 1, "burstines": 2}}, "unknown key 'burstines'", "burstiness"),
        ({"arrival": {"rate": 1, "burstiness": 0}}, "arrival.burstiness", ""),
        ({"policy": "least_laoded"}, "got 'least_laoded'", "'least_loaded'"),
        ({"policy_settings": {"block_token": 16}}, "unknown key 'block_token'", "'block_tokens'"),
        ({"policy_settings": {"block_tokens": 0}}, "policy_settings.block_tokens", ""),
        ({"policy_settings": {"move_cost": -0.1}}, "policy_settings.move_cost", ""),
        ({"policy_settings": {"move_cost": float("nan")}}, "policy_settings.move_cost", ""),
        (
            {"matrix": {"policy_settings": [{"move_cost": 1}]}},
            "unknown axis 'policy_settings'",
            "policy_settings.move_cost",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], problem: str, mend: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(spec(**changes))
    assert problem in str(caught.value)
    assert mend in caught.value.mend


# --- policies ---------------------------------------------------------------------------------------


def test_the_grammar_says_what_policies_can_be_told() -> None:
    assert PolicySpec().settings() == PolicySettings()
    assert list(PolicySpec.model_fields) == list(asdict(PolicySettings()))
    told = {"output_cost": 2.5, "move_cost": 0, "block_tokens": 8, "local_prompt_tokens": 0}
    (cell,) = cells(policy="conditional", policy_settings=told, engine={"prefix_caching": True})
    assert cell.policy_settings == PolicySettings(
        output_cost=2.5, move_cost=0.0, block_tokens=8, local_prompt_tokens=0
    )


def test_without_prefix_caches_policies_remember_none() -> None:
    (without,), (with_them,) = cells(), cells(engine={"prefix_caching": True})
    assert without.policy_settings.index_blocks == 0
    assert with_them.policy_settings == PolicySettings()


def test_a_host_tier_is_weighed_as_far_as_it_has_room() -> None:
    """Keys and values of 2 heads of 16 numbers in 2 layers: a GiB holds so many tokens."""
    (none,), (tier,) = cells(), cells(offload={"host_gib": 1})
    assert (none.host_tokens, none.policy_settings.host_blocks) == (0, 0)
    row_bytes = 2 * 2 * 16 * 4 * 2
    assert tier.host_tokens == 2**30 // row_bytes
    assert tier.policy_settings == PolicySettings(index_blocks=0, host_blocks=tier.host_tokens // 64)
    (less,) = cells(offload={"host_gib": 1}, policy_settings={"host_blocks": 7})
    assert less.policy_settings.host_blocks == 7
    (never,) = cells(offload={"host_gib": 1, "load": "never"})
    assert never.policy_settings.host_blocks == 0


def test_sessions_are_numbered_and_heeded_by_affinity_alone() -> None:
    prompts = {"random": {"count": 5}}
    matrix = {"policy": ["round_robin", "session_affinity"], "prompts.num_sessions": [None, 2]}
    found = cells(prompts=prompts, matrix=matrix)
    assert [c.axes["prompts.num_sessions"] for c in found] == [None, None, 2]
    assert [found[2].session_of(i) for i in range(3)] == ["session 0", "session 1", "session 0"]
    assert found[1].session_of(0) is None


def test_what_a_policy_does_not_heed_makes_no_cells() -> None:
    matrix = {
        "mode": ["disaggregated", "aggregated"],
        "policy": ["round_robin", "least_loaded", "conditional"],
        "policy_settings.output_cost": [1.0, 3.0],
        "policy_settings.local_prompt_tokens": [8, 16],
    }
    named = [tuple(c.axes[key] for key in matrix) for c in cells(matrix=matrix)]
    whole = ("aggregated", "disaggregated")[::-1]
    assert set(named) == {
        *((mode, "round_robin", None, None) for mode in whole),
        *((mode, "least_loaded", cost, None) for mode in whole for cost in (1.0, 3.0)),
        *(("disaggregated", "conditional", cost, num) for cost in (1.0, 3.0) for num in (8, 16)),
        *(("aggregated", "conditional", cost, None) for cost in (1.0, 3.0)),
    }
    assert len(named) == len(set(named))
    assert ids(policy="least_loaded") == ["p1-d1-policy=least_loaded"]
