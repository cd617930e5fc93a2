"""What engines report of real runs against what is counted beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from rayk.costs.features import in_window
from rayk.engine.costs import StepCosts
from rayk.engine.stats import StepStats, phase_of
from rayk.metrics import LABEL_VALUES, METRICS, Meter
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.rows import TransferRow
from rayk.types.speculative import SpeculativeConfig
from tests.handover.cases import NUM_TOKENS, Model
from tests.markers import one_per, thorough
from tests.metrics.recording import Recorder
from tests.pd import Pair, make_request, wait_until

Recorders = dict[tuple[str, int], Recorder]


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def recorded() -> tuple[Recorders, Callable[[str, int], Meter]]:
    """Recorders by the first letter of an engine's name, and rank; and what makes meters into them."""
    found: Recorders = {}

    def make_meter(engine: str, rank: int) -> Meter:
        role = "prefill" if engine.startswith("p") else "decode"
        recorder = Recorder(model="m", engine=engine, role=role, rank=str(rank))
        found[engine[0], rank] = recorder
        return Meter(recorder)

    return found, make_meter


def flush(pair: Pair) -> None:
    """Everything that was gathered so far is told: each rank's loop has turned after it was due."""
    for side in (pair.p, pair.d):
        for loop in side.engine.loops:
            assert loop._stats is not None
            at = loop._stats.meter._due
            wait_until(lambda m=loop._stats, at=at: m.meter._due > at)  # type: ignore[misc]
            wait_until(lambda m=loop._stats: not m.meter._observed)  # type: ignore[misc]


@thorough
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_each_stage_tells_of_its_place_its_steps_and_what_it_read(qwen3: Model, push: bool) -> None:
    """Requests and their tokens are the leader's, which is on the last stage."""
    recorders, make_meter = recorded()
    stages = {"pp": 2}, {"pp": 3}
    with Pair.open(qwen3.path, tp=(2, 1), changes=stages, make_meter=make_meter, push=push) as pair:
        requests = [make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(qwen3.prompts)]
        done = pair.complete(requests)
        assert [c.token_ids for c in done] == qwen3.expected
        pair.check_all_free()
        flush(pair)
        rows = [row for c in done for row in c.info["transfers"]]
        steps = {s: [loop.times.num_steps for loop in getattr(pair, s).engine.loops] for s in "pd"}
    for side, places in (("p", [(1, 0), (1, 1), (0, 0), (0, 1)]), ("d", [(2, 0), (1, 0), (0, 0)])):
        assert len(set(steps[side])) == 1
        for rank, (stage, tp_rank) in enumerate(places):
            told = recorders[side, rank]
            labels = {"rank": str(rank), "stage": str(stage), "tp_rank": str(tp_rank), "dcp_rank": "0"}
            assert told.gauge("rayk_engine_rank_info", **labels) == 1
            assert told.sum("rayk_steps_total") == steps[side][rank] > 0
            assert bool(told.sum("rayk_generation_tokens_total")) == (rank == 0)
            read = [row for row in rows if side == "d" and row.consumer_rank == rank]
            assert told.sum("rayk_nixl_bytes_total") == sum(row.bytes for row in read)
            assert bool(read) == (side == "d")


@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_a_hand_over_is_counted_as_its_rows_count_it(qwen3: Model, push: bool) -> None:
    recorders, make_meter = recorded()
    with Pair.open(qwen3.path, tp=(2, 1), make_meter=make_meter, push=push) as pair:
        requests = [make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(qwen3.prompts)]
        done = pair.complete(requests)
        assert [c.token_ids for c in done] == qwen3.expected
        pair.check_all_free()
        flush(pair)
        rows = [row for c in done for row in c.info["transfers"]]
        num_checked = sum(c.info["num_kv_bytes_checked"] for c in done)
        steps = {s: [loop.times.num_steps for loop in getattr(pair, s).engine.loops] for s in "pd"}
    p, d = recorders["p", 0], recorders["d", 0]
    for rank in range(2):
        places = {"stage": "0", "tp_rank": str(rank), "dcp_rank": "0"}
        assert recorders["p", rank].gauge("rayk_engine_rank_info", rank=str(rank), **places) == 1
    mode = "push" if push else "pull"
    assert d.sum("rayk_nixl_bytes_total", mode=mode) == sum(r.bytes for r in rows) > 0
    assert d.sum("rayk_nixl_descriptors_total") == sum(r.num_descriptors for r in rows) > 0
    assert d.sum("rayk_nixl_descriptors_posted_total") == sum(map(posted, rows))
    assert d.sum("rayk_nixl_transfers_total") == len(requests)
    assert d.sum("rayk_kv_bytes_checked_total") == num_checked > 0
    assert d.sum("rayk_kv_digest_checks_total") == len(requests)
    assert d.sum("rayk_kv_mismatches_total") == d.sum("rayk_nixl_num_failed_transfers_total") == 0
    assert sum(d.observed["rayk_nixl_bytes_transferred"]) == sum(r.bytes for r in rows)
    assert len(d.observed["rayk_nixl_xfer_time_seconds"]) == len(requests)
    num_prompt = sum(map(len, qwen3.prompts))
    assert (p.sum("rayk_prompt_tokens_total"), d.sum("rayk_prompt_tokens_total")) == (num_prompt, 0)
    num_sampled = sum(len(c.token_ids) for c in done)
    assert p.sum("rayk_generation_tokens_total") == len(requests)
    assert d.sum("rayk_generation_tokens_total") == num_sampled - len(requests)
    assert dict(p.counters["rayk_requests_total"]) == endings(p, handed_over=len(requests))
    assert dict(d.counters["rayk_requests_total"]) == endings(d, length=len(requests))
    for (side, rank), recorder in recorders.items():
        assert recorder.sum("rayk_steps_total") == steps[side][rank] > 0
        assert recorder.count("rayk_step_seconds") == steps[side][rank], "each of them"
        assert recorder.count("rayk_iteration_tokens") == (0 if rank else steps[side][rank])
        busy_s = recorder.sum("rayk_step_busy_seconds_total")
        assert 0 < recorder.sum("rayk_model_seconds_total") <= busy_s
        assert recorder.folded_sums["rayk_step_seconds"] == pytest.approx(busy_s)
    assert d.sum("rayk_steps_total", phase="decode") == d.sum("rayk_steps_total")
    assert p.sum("rayk_steps_total", phase="prefill") == p.sum("rayk_steps_total")
    assert all(recorders["p", rank].sum("rayk_collective_seconds_total") > 0 for rank in (0, 1))
    assert d.sum("rayk_collective_seconds_total") == 0, "a rank alone waits for nobody"


def posted(row: TransferRow) -> int:
    return row.num_descriptors if row.num_descriptors_merged is None else row.num_descriptors_merged


def endings(recorder: Recorder, **counted: int) -> dict[tuple[tuple[str, str], ...], int]:
    """Every way to end is there, from 0."""
    reasons = LABEL_VALUES["finish_reason"] - {"refused"}
    return {
        tuple(sorted((recorder.known | {"finish_reason": reason}).items())): counted.get(reason, 0)
        for reason in reasons
    }


def test_drafts_are_counted_as_their_request_tells_of_them(qwen3: Model) -> None:
    recorders, make_meter = recorded()
    drafts = SpeculativeConfig(method="ngram", num_tokens=3, prompt_lookup_min=1)
    with Pair.open(qwen3.path, make_meter=make_meter, speculative=drafts) as pair:
        request = make_request("r", [7, 8, 9] * 10, NUM_TOKENS)
        flush(pair)
        d, prefix = recorders["d", 0], "rayk_spec_decode_num_"
        by_position = f"{prefix}accepted_tokens_per_pos_total"
        assert {d.sum(by_position, position=str(n)) for n in range(3)} == {0}
        assert len(d.counters[by_position]) == 3, "they are there before the first is accepted"
        decoded = pair.decode(request, pair.prefill(request))
        flush(pair)
        drafted, accepted = decoded.info["drafted_at"], decoded.info["accepted_at"]
        # A prompt that says the same ten times has what follows its last token.
        assert drafted[0] >= 1
        assert d.sum(f"{prefix}drafts_total") == drafted[0]
        assert d.sum(f"{prefix}draft_tokens_total") == sum(drafted)
        assert d.sum(f"{prefix}accepted_tokens_total") == sum(accepted)
        assert [d.sum(by_position, position=str(n)) for n in range(len(accepted))] == list(accepted)
        assert recorders["p", 0].sum(f"{prefix}drafts_total") == 0, "one token is nothing to draft for"
        steps = d.sum("rayk_steps_total", phase="decode")
        assert steps == NUM_TOKENS - 1 - sum(accepted), "a step with drafts is no prefill"
    with Pair.open(qwen3.path, make_meter=make_meter) as pair:
        flush(pair)
        assert not [n for n in recorders["d", 0].counters if n.startswith(prefix)]


def test_requests_that_are_not_drafted_for_are_counted(qwen3: Model) -> None:
    """D's drafter lacks rows of what P prefilled without one."""
    recorders, make_meter = recorded()
    drafts = SpeculativeConfig(method="draft", model=str(qwen3.path), num_tokens=3, draft_kv="none")
    changes: tuple[dict[str, object], ...] = ({}, {"speculative": drafts})
    with Pair.open(qwen3.path, make_meter=make_meter, num_blocks=100, changes=changes) as pair:
        flush(pair)
        d, prefix = recorders["d", 0], "rayk_spec_decode_num_undrafted_"
        assert (d.sum(f"{prefix}requests_total"), d.sum(f"{prefix}tokens_total")) == (0, 0)
        for i in range(2):
            request = make_request(f"r{i}", qwen3.prompts[i], NUM_TOKENS)
            pair.decode(request, pair.prefill(request))
        flush(pair)
        assert d.sum(f"{prefix}requests_total") == 2
        assert d.sum("rayk_spec_decode_num_drafts_total") == 0
        assert not [n for n in recorders["p", 0].counters if n.startswith(prefix)]


def test_blocks_add_up_to_the_pool_while_leased_and_after(qwen3: Model) -> None:
    recorders, make_meter = recorded()
    with Pair.open(qwen3.path, make_meter=make_meter, prefix_caching=True) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        flush(pair)
        p = recorders["p", 0]

        def pool(state: str) -> float:
            return p.gauge("rayk_kv_blocks", group="pool", state=state)

        num_blocks = pair.p.num_blocks
        num_leased = num_blocks - pair.p.num_free_blocks
        assert (pool("leased"), pool("used")) == (num_leased, 0)
        assert num_leased == 19, "300 tokens in blocks of 16"
        assert p.gauge("rayk_kv_blocks", group="0", state="leased") == num_leased
        assert p.gauge("rayk_kv_cache_usage_perc") == num_leased / num_blocks
        decoded = pair.decode(request, prefilled)
        assert decoded.error is None
        pair.check_all_free()
        flush(pair)
        (moved,) = decoded.info["transfers"]
        assert recorders["d", 0].sum("rayk_nixl_descriptors_total") == moved.num_descriptors
        assert recorders["d", 0].sum("rayk_nixl_descriptors_posted_total") == posted(moved)
        assert posted(moved) < moved.num_descriptors, "blocks that follow each other went as one"
        assert (pool("leased"), pool("used")) == (0, 0)
        assert pool("cached") == 300 // 16, "whole blocks can be found again"
        assert pool("free") + pool("cached") == num_blocks == p.gauge("rayk_kv_pool_blocks")
        # The same prompt again: all but its last block's tokens come from the cache.
        pair.prefill(make_request("again", qwen3.prompts[2], NUM_TOKENS))
        flush(pair)
        assert p.sum("rayk_prefix_cache_queries_total") == 2 * 300
        assert p.sum("rayk_prefix_cache_hits_total") == 300 // 16 * 16
        assert p.sum("rayk_prompt_tokens_total") == 300 + 300 % 16


def test_a_lease_that_nobody_releases_is_counted_on_every_rank(qwen3: Model) -> None:
    recorders, make_meter = recorded()
    with Pair.open(qwen3.path, tp=(2, 1), lease_s=0.3, make_meter=make_meter) as pair:
        pair.prefill(make_request("r", qwen3.prompts[2], NUM_TOKENS))
        wait_until(lambda: pair.p.handover.num_expired_leases == 1)
        flush(pair)
    assert [recorders["p", r].sum("rayk_nixl_num_kv_expired_reqs_total") for r in (0, 1)] == [1, 1]


def share(num_computed: int, num_tokens: int, *, last: bool = True) -> ScheduledRequest:
    return ScheduledRequest(
        request_id="r",
        row=0,
        num_computed_tokens=num_computed,
        token_ids=(1,) * num_tokens,
        new_block_ids=(),
        needs_logits=last,
    )


@pytest.mark.parametrize(
    ("shares", "phase"),
    [
        ([(0, 5), (16, 3)], "prefill"),
        ([(0, 1)], "prefill"),
        ([(7, 1), (9, 1)], "decode"),
        ([(7, 1), (0, 4)], "mixed"),
    ],
)
def test_phases(shares: list[tuple[int, int]], phase: str) -> None:
    batch = ScheduledBatch(step=1, requests=tuple(share(*s) for s in shares))
    assert phase_of(batch) == phase


def matrices(path: Path) -> dict[str, int]:
    """Name -> elements of every matrix in the checkpoint."""
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                shape = weights.get_slice(name).get_shape()
                if len(shape) == 2:
                    found[name] = shape[0] * shape[1]
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_costs_are_those_of_the_matrices_and_of_each_pair_of_tokens(qwen3: Model, tp: int) -> None:
    config = json.loads((qwen3.path / "config.json").read_text())
    head_size, num_heads = config["head_dim"], config["num_attention_heads"]
    num_layers, num_kv = config["num_hidden_layers"], config["num_key_value_heads"]
    sizes = matrices(qwen3.path)
    linear = sum(n for name, n in sizes.items() if ".layers." in name)
    head = config["vocab_size"] * config["hidden_size"]
    shares = [(0, 7, True), (20, 1, True), (3, 5, False)]
    pairs = sum(sum(before + i + 1 for i in range(n)) for before, n, _ in shares)
    num_tokens, num_seen = 13, 7 + 21 + 8
    flops = 2 * (linear * num_tokens + head * 2) + 4 * num_layers * num_heads * head_size * pairs
    kv_bytes = num_layers * num_kv * 2 * head_size * 4 * num_seen
    batch = ScheduledBatch(step=1, requests=tuple(share(b, n, last=s) for b, n, s in shares))
    with Pair.open(qwen3.path, tp=(tp, 1), connect=False) as pair:
        counted = [StepCosts(rank).count(batch) for rank in pair.p.engine.ranks]
    assert sum(c[0] for c in counted) == flops
    assert sum(c[1] for c in counted) == (linear + head) * 4 + kv_bytes


@pytest.mark.parametrize("window", [1, 4, 7, 100])
def test_tokens_of_a_window_are_counted_one_by_one(window: int) -> None:
    shares = [(0, 3), (0, 9), (3, 4), (50, 1), (6, 6)]
    batch = ScheduledBatch(step=1, requests=tuple(share(*s) for s in shares))
    pairs = num_read = 0
    for before, n in shares:
        seen = [range(max(0, at - window + 1), at + 1) for at in range(before, before + n)]
        pairs += sum(map(len, seen))
        num_read += len(set().union(*seen))
    assert in_window(batch, window) == (pairs, num_read)


@pytest.mark.parametrize("share_of_long", [0.01, 0.048, 0.3])
def test_quantiles_of_steps_are_those_of_all_steps(share_of_long: float) -> None:
    """Short and long steps, mixed: each quantile lies in the bucket that the steps themselves, sorted, have
    it in; and the phases do not take each other's place."""
    rng, times = np.random.default_rng(5), {}
    recorder = Recorder(model="m", engine="e", role="decode", rank="0")
    meter = Meter(recorder)
    stats = StepStats(meter)
    for phase, shares in (("decode", (7, 1)), ("prefill", (0, 9))):
        batch = ScheduledBatch(step=1, requests=(share(*shares),))
        long = rng.random(5000) < share_of_long
        busy_ns = np.where(long, 20e6, 0.8e6) * rng.uniform(0.9, 1.1, 5000)
        for ns in busy_ns.astype(int).tolist():
            stats.stepped(batch, ns, ns // 2)
            meter.tick()
        times[phase] = busy_ns.astype(int) / 1e9
    meter.flush()
    borders = (0.0, *METRICS["rayk_step_seconds"].buckets, float("inf"))
    assert recorder.count("rayk_step_seconds", phase="mixed") == 0
    for phase, seconds in times.items():
        (counts,) = (c for k, c in recorder.folded["rayk_step_seconds"].items() if ("phase", phase) in k)
        assert sum(counts) == len(seconds)
        for q in (0.5, 0.9, 0.95, 0.99):
            exact = np.quantile(seconds, q, method="inverted_cdf")
            bucket = int(np.searchsorted(np.cumsum(counts), q * len(seconds)))
            assert borders[bucket] < exact <= borders[bucket + 1], (q, exact)


class KnownCosts:
    """In place of StepCosts: every step costs the same."""

    def count(self, batch: ScheduledBatch) -> tuple[int, int]:
        return 98_940_000_000, 2_400_000_000


@pytest.mark.parametrize(
    ("device", "dtype", "shares"),
    [
        ("NVIDIA H200", "bfloat16", (0.1, 0.5)),
        ("NVIDIA H200", "float32", (98.94 / 66.9, 0.5)),
        ("NVIDIA H100 80GB HBM3", "float16", (0.1, 2.4 / 3.35)),
        ("NVIDIA H100 PCIe", "bfloat16", (98.94 / 756, 2.4 / 2.039)),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", (98.94 / 312, 2.4 / 1.555)),
        ("AMD Instinct MI300X", "float16", (98.94 / 1307.4, 2.4 / 5.3)),
        ("cpu", "float32", None),
        ("NVIDIA T4", "float16", None),
        ("NVIDIA H20", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA H200", "float64", None),
    ],
)
def test_utilisation_is_of_a_known_devices_peak_in_its_dtype(
    device: str, dtype: str, shares: tuple[float, float] | None
) -> None:
    """Data sheets: an H200 does 989.4 TFLOP/s in BF16 (dense), 66.9 in FP32, and reads 4.8 TB/s; a part of an
    H100 does not do what a whole one does. Steps take 1 ms."""
    recorder = Recorder(model="m", engine="e", role="decode", rank="0")
    meter = Meter(recorder)
    stats = StepStats(meter, costs=KnownCosts(), device=device, dtype=dtype)  # type: ignore[arg-type]
    for _ in range(3):
        stats.stepped(ScheduledBatch(step=1, requests=(share(7, 1),)), 1_200_000, 1_000_000)
    meter.flush()
    assert recorder.gauge("rayk_model_flops_per_second") == pytest.approx(98.94e12)
    assert recorder.gauge("rayk_model_bytes_per_second") == pytest.approx(2.4e12)
    names = ("rayk_model_flops_utilization", "rayk_model_bandwidth_utilization")
    if shares is None:
        assert not recorder.gauges.keys() & set(names)
    else:
        assert tuple(recorder.gauge(name) for name in names) == pytest.approx(shares)
    meter.flush()
    assert recorder.gauge("rayk_model_flops_per_second") == 0, "no step since"
