"""Experiments on a real cluster: real workers, real transfers, real deaths."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from pathlib import Path

import pandas as pd
import pytest

from rayk import Experiment, load
from rayk.experiments.startup import PLAN, SENT
from rayk.reports import exit_code
from rayk.types.errors import DeviceError
from tests.experiments.conftest import wait_until, worker_processes
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(400)]

LAYERS, KV_HEADS, HEAD_SIZE = 4, 2, 16
PROMPT_TOKENS = 5 + 37 + 300
KV_BYTES = PROMPT_TOKENS * LAYERS * KV_HEADS * 2 * HEAD_SIZE * 4
"""Float32 K and V of all prompts, each KV head once."""


TIER = {"offload.host_gib": 0.05, "offload.load": "always", "offload.swap": "always"}
MECHANISMS = {
    "push": {"transfer.mode": "push", "transfer.push_layers": 1, "decode.tp": 2},
    "staged": {"transfer.staging": "always", "prefill.tp": 2, "prefill.layout": "LBHNC"},
    "quantised": {"kv_dtype": "fp8_e4m3", "decode.tp": 2},
    "prefix": {"engine.prefix_caching": True, "prefill.max_seqs": 1, "decode.tp": 2},
    "fast prefill": {"engine.fast_prefill": True, "decode.tp": 2},
    "offload": {"transfer.path": "host", "decode.tp": 2, **TIER},
    "swap": {"mode": "aggregated", "engine.num_blocks": 27, "sampling.max_tokens": 96, **TIER},
}
"""One cell of each; engines of the cells before have started its workers."""


@pytest.fixture(scope="module")
def whole_run(ray_address, checkpoint, tmp_path_factory):
    """Each prompt begins like the next longer one."""
    folder = tmp_path_factory.mktemp("matrix")
    tokens = [3 + n * 7 % 500 for n in range(300)]
    lines = (json.dumps({"prompt_token_ids": tokens[:length]}) for length in (5, 37, 300))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    shares = checkpoint("qwen3", overrides={"kv_sharing_targets": [None, None, 0, 1]})
    fast_prefill = MECHANISMS["fast prefill"] | {"model": str(shares)}
    matrix = [
        {"prefill.tp": 1, "decode.tp": 4, "prefill.layout": "LBNHC", "decode.layout": "BHLNC"},
        {"prefill.tp": 2, "decode.tp": 1, "prefill.num_engines": 2, "decode.layout": "LHBNC"},
        {"mode": "aggregated", "prefill.tp": 2},
        {"prefill.tp": 3, "decode.tp": 1},
        *(MECHANISMS | {"fast prefill": fast_prefill}).values(),
    ]
    experiment = Experiment(
        {
            "name": "matrix",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"file": str(folder / "prompts.jsonl")},
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            "matrix": matrix,
            "checks": ["tokens", "kv_bytes", "kv_values"],
        }
    )
    # transformers writes keys and values of every layer: k_proj, v_proj, k_norm of the two that share.
    with pytest.warns(UserWarning, match="6 tensors not used: "):
        experiment.run(folder / "run", address=ray_address)
    return load(folder / "run"), folder / "run"


def _part(result, cells):
    """The rows of some cells."""
    requests, transfers = (
        rows[rows["cell_id"].isin(cells["cell_id"])] for rows in (result.requests, result.transfers)
    )
    return dataclasses.replace(result, cells=cells, requests=requests, transfers=transfers)


@pytest.fixture(scope="module")
def matrix_run(whole_run):
    """Pairs of engines."""
    result, out = whole_run
    return _part(result, result.cells[: -len(MECHANISMS)]), out


@pytest.fixture(scope="module")
def mechanisms(whole_run):
    """The others, by name."""
    result, _ = whole_run
    rows = result.cells[-len(MECHANISMS) :]
    return {name: _part(result, rows[n : n + 1]) for n, name in enumerate(MECHANISMS)}


def test_every_cell_passes_and_the_impossible_one_is_unsupported(matrix_run):
    result, _ = matrix_run
    verdicts = dict(zip(result.cells["cell_id"], result.cells["verdict"], strict=True))
    assert sorted(verdicts.values()) == ["PASS", "PASS", "PASS", "UNSUPPORTED"]
    (reason,) = result.cells.loc[result.cells["verdict"] == "UNSUPPORTED", "reason"]
    assert "TP 3" in reason
    assert exit_code(result.cells) == 0
    assert exit_code(result.cells, strict=True) == 1


def test_every_byte_of_kv_was_compared_on_every_rank_that_holds_it(matrix_run):
    cells = matrix_run[0].cells.set_index("cell_id")
    checked = cells["num_kv_bytes_checked"]
    (replicated,) = [i for i in checked.index if "p1-d4" in i]
    (single,) = [i for i in checked.index if "p2-d1" in i]
    # TP 4 holds each of two KV heads twice.
    assert checked[replicated] == 2 * KV_BYTES
    assert checked[single] == KV_BYTES
    assert cells.loc[[replicated, single], "num_kv_bytes_mismatched"].tolist() == [0, 0]
    assert set(cells.loc[single, "checks_done"]) == {"tokens", "kv_bytes", "kv_values"}
    assert cells.loc[replicated, "num_kv_values_checked"] == KV_BYTES // 4


def test_tokens_in_the_tables_are_the_references(matrix_run, reference, checkpoint):
    requests = matrix_run[0].requests
    prompts = [list(map(int, p)) for p in requests["prompt_token_ids"]]
    expected = reference(checkpoint("qwen3")).generate(prompts, max_tokens=12, ignore_eos=True)
    for found, answer in zip(requests["output_token_ids"], expected, strict=True):
        assert list(found) == list(answer.token_ids)
    assert len(requests) == 9
    assert requests["error"].isna().all()
    assert set(requests["finish_reason"]) == {"length"}
    assert (requests["ttft_ms"] > 0).all()
    assert (requests["e2e_ms"] >= requests["ttft_ms"]).all()


def test_requests_take_turns_on_the_engines_of_a_side(matrix_run):
    requests = matrix_run[0].requests
    engines = requests[requests["cell_id"].str.contains("p2-d1")].sort_values("prompt_index")
    assert engines["prefill_engine"].tolist() == ["prefill0", "prefill1", "prefill0"]
    assert set(engines["decode_engine"]) == {"decode0"}
    assert set(engines["kv_path"]) == {"remote"}
    assert set(requests["num_recomputed_tokens"]) == {0}, "no prompt token is computed twice"
    whole = requests[requests["cell_id"].str.contains("agg")]
    assert set(whole["kv_path"]) == {"local"}


def test_transfers_name_every_pair_of_ranks(matrix_run):
    transfers = matrix_run[0].transfers
    replicated = transfers[transfers["cell_id"].str.contains("p1-d4")]
    assert set(zip(replicated["producer_rank"], replicated["consumer_rank"], strict=True)) == {
        (0, rank) for rank in range(4)
    }
    assert set(transfers["transport"]) == {"nixl/UCX"}
    assert set(transfers["verdict"]) == {"OK"}
    # Whole blocks move: at least the valid bytes, less than a block more per prompt and replica.
    moved = replicated["bytes"].sum()
    assert 2 * KV_BYTES <= moved <= 2 * KV_BYTES * (5 + 37 + 300 + 3 * 15) / PROMPT_TOKENS


def test_the_results_say_what_ran(matrix_run):
    result, out = matrix_run
    cells = result.cells.set_index("cell_id")
    (name,) = [i for i in cells.index if "p1-d4" in i]
    assert cells.loc[name, "prefill.effective_layout"] == "LBNHC"
    assert cells.loc[name, "prefill.comm"] == "local"
    assert cells.loc[name, "decode.comm"] in ("shm", "gloo")
    environment = json.loads((out / "environment.json").read_text())
    assert environment["packages"]["ray"]
    assert len(environment["workers"]) == 2 + 2 + 4
    assert all(
        re.fullmatch(r"rayk/[a-z0-9-]+-[0-9a-f]{6}/(prefill[01]|decode0)/r[0-3]", n)
        for n in environment["workers"]
    )
    assert (out / "report.html").stat().st_size > 100_000
    told = environment["startup"]
    stages = [stage["stage"] for stage in told["stages"]]
    coordinators = ["workers are there", "engines are formed", "engines are connected", SENT]
    assert (stages[0], stages[-4:]) == (PLAN, coordinators)
    assert told["first_request_s"] == pytest.approx(sum(s["wall_s"] for s in told["stages"]), abs=0.1)
    assert all(ranks[0]["load"] > 0 for ranks in told["rank_cpu_s"].values())
    asked = environment["reference"]
    assert asked["answers_kept"] + asked["answers_computed"] > 0
    assert asked["refused"] == []


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_passes_every_check(mechanisms, name):
    (cell,) = mechanisms[name].cells.to_dict("records")
    # Of quantised KV a last bit may flip a step, and so a token whose rival was as good.
    right = ("PASS", "NEAR_TIE") if name == "quantised" else ("PASS",)
    assert cell["verdict"] in right, cell["reason"]
    assert cell["num_blocks_held"] == 0
    assert cell["num_blocks_leased"] == cell["num_blocks_freed"]
    assert cell["num_kv_bytes_checked"] > 0


def test_every_mechanism_was_at_work(mechanisms):
    cells = {name: part.cells.iloc[0] for name, part in mechanisms.items()}
    moved = {name: part.transfers for name, part in mechanisms.items()}
    assert set(moved["push"]["mode"]) == {"push"}
    assert (moved["push"]["num_writes"] >= LAYERS).all()
    assert moved["staged"]["staged"].all()
    assert (moved["staged"]["repack_ms"] > 0).all()
    assert cells["quantised"]["num_kv_bytes_checked"] == KV_BYTES // 4
    # The longest prompt found two blocks of the one before it.
    assert cells["prefix"]["num_cached_tokens"] == 32
    shared = LAYERS // 2
    assert cells["fast prefill"]["num_token_layers"] == PROMPT_TOKENS * (LAYERS - shared) + 3 * shared
    assert cells["offload"]["host_relayed_bytes"] > 0
    assert set(moved["offload"]["purpose"]) >= {"relay", "handover"}
    assert cells["swap"]["num_swaps"] >= 1
    assert "swap" in set(moved["swap"]["purpose"])


@thorough
def test_models_of_one_matrix_run_with_their_own_weights(ray_address, checkpoint, reference, tmp_path):
    """The same workers serve one model after the other; each row of the results names its own."""
    paths = {name: checkpoint(name) for name in ("mamba2", "deepseek_v3")}
    prompts = {"random": {"count": 2, "input_tokens": [5, 37], "seed": 3}}
    Experiment(
        {
            "name": "models",
            "model": str(paths["mamba2"]),
            "device": "cpu",
            "prompts": prompts,
            "sampling": {"max_tokens": 6, "ignore_eos": True},
            "engine": {"num_blocks": 64},
            "matrix": [
                {"model": [str(p) for p in paths.values()], "prefill.tp": 2, "decode.layout": "LHBNC"},
                {"model": [str(p) for p in paths.values()], "mode": "aggregated"},
            ],
            "checks": ["tokens", "kv_bytes", "kv_values"],
        }
    ).run(tmp_path / "run", address=ray_address)
    result = load(tmp_path / "run")
    cells = result.cells
    assert cells["verdict"].tolist() == ["PASS"] * 4
    assert set(zip(cells["model"], cells["mode"], strict=True)) == {
        (str(path), mode) for path in paths.values() for mode in ("aggregated", "disaggregated")
    }
    assert (cells["num_kv_values_checked"] > 0).all()
    assert set(result.requests["num_recomputed_tokens"]) == {0}
    for cell_id, model in zip(cells["cell_id"], cells["model"], strict=True):
        rows = result.requests[result.requests["cell_id"] == cell_id]
        asked = [list(map(int, p)) for p in rows["prompt_token_ids"]]
        answers = reference(Path(model)).generate(asked, max_tokens=6, ignore_eos=True)
        assert [list(t) for t in rows["output_token_ids"]] == [list(a.token_ids) for a in answers]
        assert len(rows) == 2


def test_no_worker_is_left_behind(matrix_run):
    wait_until(lambda: not worker_processes(), "workers end with their run")


@thorough
def test_planted_faults_end_in_their_verdicts_and_other_cells_run(spec, ray_address, tmp_path):
    faults = [
        {"kind": "kill", "point": "prefill", "step": 1},
        {"kind": "kill", "point": "transfer", "role": "prefill"},
        {"kind": "kill", "point": "transfer", "role": "decode", "rank": 0},
        {"kind": "kill", "point": "decode", "step": 3},
        {"kind": "flip_bit", "request": 1, "seed": 77},
        {"kind": "early_reuse", "request": 2},
    ]
    matrix = {"prefill.tp": 2, "decode.tp": 1, "faults": [*([f] for f in faults), []]}
    result = Experiment(spec(matrix)).run(tmp_path / "run", address=ray_address)
    cells = result.cells
    found = cells[["verdict", "expected_verdict"]].to_numpy().tolist()
    assert [v for v, _ in found] == [
        "ENGINE_ERROR",
        "ENGINE_ERROR",
        "ENGINE_ERROR",
        "ENGINE_ERROR",
        "KV_MISMATCH",
        "TRANSFER_ERROR",
        "PASS",
    ]
    assert all(verdict == expected for verdict, expected in found)
    assert exit_code(cells) == 0
    assert cells["wall_s"].max() < 80, "no cell waited for its deadline"
    assert "tokens" not in cells["checks_done"][0], "no request ended"
    assert pd.isna(cells["num_token_mismatches"][0])
    flipped = cells["reason"][4]
    assert "layer 0, group 0, k, head 0, token 0: one flipped bit in byte 9" in flipped
    assert cells["num_kv_bytes_mismatched"][4] == 1
    assert "was reused while being read" in cells["reason"][5]
    assert "tokens" in cells["reason"][5]
    _check_undamaged_requests(result.requests, cells)
    wait_until(lambda: not worker_processes(), "workers end with their run")


def _check_undamaged_requests(requests: pd.DataFrame, cells: pd.DataFrame) -> None:
    """One bad transfer harms one request; no token follows unproven KV."""
    for cell, hit in ((4, 1), (5, 2)):
        rows = requests[requests["cell_id"] == cells["cell_id"][cell]].sort_values("prompt_index")
        lengths = [len(t) for t in rows["output_token_ids"]]
        assert lengths[hit] == 1, "only the prefill engine's own token was delivered"
        assert [n for i, n in enumerate(lengths) if i != hit] == [12, 12]
        assert rows["error"].notna().tolist() == [i == hit for i in range(3)]


@thorough
def test_requests_over_their_deadline_leave_nothing_behind(spec, ray_address, tmp_path):
    matrix = {"prefill.tp": 1, "decode.tp": 1, "deadlines.request_s": [0.1, 60.0]}
    many = {"random": {"count": 30, "input_tokens": [300, 304]}}
    result = Experiment(spec(matrix, prompts=many, sampling={"max_tokens": 40})).run(
        tmp_path / "run", address=ray_address
    )
    # A lease or a block that stayed behind would be a TRANSFER_ERROR or an ENGINE_ERROR.
    assert result.cells["verdict"].tolist() == ["TIMEOUT", "PASS"]
    late, whole = (result.requests[result.requests["cell_id"] == c] for c in result.cells["cell_id"])
    assert (late["finish_reason"] == "error").any()
    assert set(whole["finish_reason"]) <= {"length", "stop"}


@thorough
def test_a_hung_worker_is_a_timeout_and_the_next_cell_runs(spec, ray_address, tmp_path):
    out = tmp_path / "run"
    slow = {
        "prompts": {"random": {"count": 8, "input_tokens": [300]}},
        "sampling": {"max_tokens": 1500, "ignore_eos": True},
        "checks": ["kv_bytes"],
    }
    matrix = [
        {"decode.layout": "BHLNC", "deadlines.cell_s": 8.0},
        {"decode.layout": "LBHNC", "sampling.max_tokens": 12},
    ]
    experiment = Experiment(spec(matrix, **slow))
    done: list[object] = []
    runner = threading.Thread(target=lambda: done.append(experiment.run(out, address=ray_address)))
    runner.start()
    wait_until(lambda: _decode_pid(out) is not None, "the workers are known", 60)
    pid = _decode_pid(out)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    runner.join(150)
    assert done, "the run ended"
    cells = load(out).cells
    assert cells["verdict"][0] == "TIMEOUT"
    assert "deadline" in cells["reason"][0]
    assert cells["wall_s"][0] < 8 + 60
    assert cells["verdict"][1] == "PASS", f"on a fresh worker: {cells['reason'][1]}"
    assert len(load(out).requests.query("cell_id == @cells.cell_id[1]")) == 8
    wait_until(lambda: not worker_processes(), "even the stopped worker is gone")


def _decode_pid(out: Path) -> int | None:
    try:
        workers = json.loads((out / "environment.json").read_text()).get("workers", {})
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return next((pid for name, pid in workers.items() if "decode0" in name), None)


def test_too_few_gpus_is_bad_input_before_any_worker(spec, ray_address, tmp_path):
    wanted = spec({"prefill.tp": 2, "decode.tp": 1}, device="cuda")
    with pytest.raises(DeviceError, match=r"3 workers of 1 GPU need 3 GPUs; the cluster has 2"):
        Experiment(wanted).run(tmp_path / "run", address=ray_address)
    assert not worker_processes()


@thorough
def test_workers_share_gpus_and_stay_for_smaller_engines(ray_address):
    from rayk.actors import launch
    from rayk.actors.nodes import EngineDemand, worker_resources

    def demands(**num_workers: int) -> list[EngineDemand]:
        share = worker_resources("cuda", 0.5)
        return [EngineDemand(name=n, num_workers=k, resources=share) for n, k in num_workers.items()]

    with launch.connect(ray_address):
        import ray

        coordinator = launch.start_coordinator("rayk/coordinator/shares", keep_workers=True)
        try:
            pids = ray.get(coordinator.prepare.remote(demands(prefill0=1, decode0=3)))
            assert set(pids) == {
                f"rayk/shares/{n}" for n in ("prefill0/r0", *(f"decode0/r{i}" for i in range(3)))
            }
            assert len(set(pids.values())) == 4, "a process each"
            wait_until(lambda: not ray.available_resources().get("GPU"), "four halves of two GPUs")
            fewer = demands(prefill0=1, decode0=2)
            assert ray.get(coordinator.prepare.remote(fewer)) == pids, "the same workers"
            ray.get(coordinator.shutdown.remote())
        finally:
            ray.kill(coordinator)
    wait_until(lambda: not worker_processes(), "workers end with their groups")
