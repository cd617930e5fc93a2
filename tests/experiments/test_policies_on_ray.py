"""Policies and arrivals in an experiment: where requests went, when, and that every token is right."""

from __future__ import annotations

import json

import pytest

from rayk import Experiment, load
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]

NUM, RATE = 9, 8.0
LENGTHS = [5, 37, 300]


@pytest.fixture(scope="module")
def run(ray_address, checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("policies") / "run"
    Experiment(
        {
            "name": "policies",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": NUM, "input_tokens": LENGTHS, "seed": 4}},
            "sampling": {"max_tokens": 8, "ignore_eos": True},
            "arrival": {"rate": RATE, "process": "constant"},
            "policy_settings": {"local_prompt_tokens": 37},
            "prefill": {"num_engines": 2},
            "decode": {"tp": 2},
            "matrix": {"policy": ["conditional", "least_loaded", "prefix_aware", "session_affinity"]},
            "checks": ["tokens", "kv_bytes"],
        }
    ).run(out, address=ray_address)
    return load(out)


def of(run, policy):
    (name,) = run.cells.loc[run.cells["policy"] == policy, "cell_id"]
    return run.requests[run.requests["cell_id"] == name].sort_values("prompt_index")


def test_every_token_and_every_byte_is_right(run, reference, checkpoint):
    assert run.cells["verdict"].tolist() == ["PASS"] * 4
    assert (run.cells["num_kv_bytes_checked"] > 0).all()
    prompts = [list(map(int, p)) for p in run.requests["prompt_token_ids"]]
    expected = reference(checkpoint("qwen3")).generate(prompts, max_tokens=8, ignore_eos=True)
    found = [list(ids) for ids in run.requests["output_token_ids"]]
    assert found == [list(answer.token_ids) for answer in expected]


def test_requests_came_over_time(run):
    assert (run.cells["wall_s"] > NUM / RATE).all()
    assert (run.requests["ttft_ms"] > 0).all()
    assert (run.requests["stage_queue_ns"] >= 0).all()


def test_short_prompts_were_computed_where_they_were_decoded(run):
    rows = of(run, "conditional")
    short = rows["num_prompt_tokens"] <= 37
    assert short.tolist() == [True, True, False] * 3
    assert set(rows.loc[short, "kv_path"]) == {"local"}
    assert rows.loc[short, "prefill_engine"].isna().all()
    assert set(rows.loc[~short, "kv_path"]) == {"remote"}
    assert rows.loc[~short, "prefill_engine"].notna().all()
    assert set(rows["decode_engine"]) == {"decode0"}


def test_every_other_policy_hands_over_and_uses_both_prefill_engines(run):
    for policy in ("least_loaded", "prefix_aware", "session_affinity"):
        rows = of(run, policy)
        assert set(rows["kv_path"]) == {"remote"}
        assert set(rows["prefill_engine"]) == {"prefill0", "prefill1"}


SHARED, OWN = 96, 5
"""Tokens of the prompts' common beginning, six blocks, and of what follows."""


def test_requests_go_where_their_beginning_is_cached(ray_address, checkpoint, reference, tmp_path):
    """Each prefill engine computes one prompt at a time: of all but its first, it holds the beginning."""
    beginnings = [list(range(10 + b, 10 + b + SHARED)) for b in range(2)]
    prompts = [[*beginnings[i % 2], *(200 + OWN * i + k for k in range(OWN))] for i in range(8)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in prompts), encoding="utf-8")
    result = Experiment(
        {
            "name": "cached",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"file": str(path)},
            "sampling": {"max_tokens": 4, "ignore_eos": True},
            "arrival": {"rate": 10.0, "seed": 1},
            "engine": {"prefix_caching": True},
            "policy_settings": {"block_tokens": 16},
            "prefill": {"num_engines": 2, "max_seqs": 1},
            "policy": "prefix_aware",
            "checks": ["tokens", "kv_bytes"],
        }
    ).run(tmp_path / "run", address=ray_address)
    assert result.cells["verdict"].tolist() == ["PASS"], result.cells["reason"].tolist()
    rows = result.requests.sort_values("prompt_index")
    pairs = {(engine, i % 2) for i, engine in enumerate(rows["prefill_engine"])}
    assert rows["num_cached_tokens"].sum() == SHARED * (len(prompts) - len(pairs))
    expected = reference(checkpoint("qwen3")).generate(prompts, max_tokens=4, ignore_eos=True)
    assert [list(ids) for ids in rows["output_token_ids"]] == [list(a.token_ids) for a in expected]
