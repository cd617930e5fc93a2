"""Tables from data sheets say what the roofline says, step by step, of models with published sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.gpu.engine import LLAMA_8B
from rayk.costs import CostBook, StepFeatures, step_features, step_of, windows_of
from rayk.costs.roofline import Hardware
from rayk.costs.sheets import peaks_of
from rayk.costs.table import engine_key, read_name
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.planner.hardware import known_hardware, rank_sizes, read_hardware, roofline_book
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from tests.costs.test_tables import batch
from tests.markers import thorough
from tests.models.released_large import LARGE

# A byte takes as long as 100 flops.
MACHINE = Hardware(
    name="round",
    tflops={"bfloat16": 100.0},
    memory_gb_per_s=1000.0,
    link_gb_per_s=100.0,
    network_gb_per_s=10.0,
    launch_us=0.0,
    allreduce_us=0.0,
    turn_us=7.0,
    flops_share=1.0,
    bandwidth_share=1.0,
)
FLOP_NS, BYTE_NS = 1e-5, 1e-3
LAYERS, HIDDEN, VOCAB, QUERY_HEADS, KV_HEADS, HEAD = 126, 16384, 128256, 128, 8, 128  # Llama-3.1-405B
ELEMENTS = LAYERS * HIDDEN * (2 * QUERY_HEADS * HEAD + 2 * KV_HEADS * HEAD + 3 * 53248)
"""Of its matrices but embeddings and head."""


def released(name: str, folder: Path) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(LARGE[name]))
    return read_config(folder)


def step_ns(book: CostBook, config: DecoderConfig, tp: int, *shares: tuple[int, int]) -> float:
    engine = EngineConfig(model="", dtype="bfloat16", device="cuda", tp=tp)
    return book.find(engine_key(config, engine)).step_ns(step_features(batch(*shares), windows_of(config)))


def test_a_dense_model_is_bound_by_memory_until_enough_tokens(tmp_path: Path) -> None:
    config = released("Llama-3.1-405B", tmp_path)
    book = roofline_book(MACHINE, config, tp=(1,), dtype="auto", block_size=16)
    weights_ns = 2 * (ELEMENTS + VOCAB * HIDDEN) * BYTE_NS
    kv_bytes = 2 * LAYERS * KV_HEADS * HEAD * 2
    for requests, context in ((1, 999), (64, 4095)):
        expected = weights_ns + requests * (context + 1) * kv_bytes * BYTE_NS
        found = step_ns(book, config, 1, *[(1, context)] * requests)
        # Norms have weights as well.
        assert found == pytest.approx(expected, rel=1e-4)
    # 2048 tokens of one prompt: arithmetic, and the logits of one token.
    pairs = 2048 * 2049 / 2
    attention_ns = 4 * LAYERS * QUERY_HEADS * HEAD * pairs * FLOP_NS + 2048 * kv_bytes * BYTE_NS
    expected = 2 * ELEMENTS * 2048 * FLOP_NS + 2 * VOCAB * HIDDEN * BYTE_NS + attention_ns
    assert step_ns(book, config, 1, (2048, 0)) == pytest.approx(expected, rel=1e-3)


def test_ranks_share_the_work_and_pay_for_adding_up(tmp_path: Path) -> None:
    config = released("Llama-3.1-405B", tmp_path)
    book = roofline_book(MACHINE, config, tp=(1, 8), dtype="bfloat16", block_size=16)
    whole, eighth = (step_ns(book, config, tp, *[(1, 1000)] * 8) for tp in (1, 8))
    adding_ns = 2 * LAYERS * 8 * (2 * HIDDEN * 2) * 7 / 8 / 100  # at 100 GB/s
    assert eighth == pytest.approx(whole / 8 + adding_ns, rel=1e-3)
    slow = roofline_book(
        replace(MACHINE, allreduce_us=10.0), config, tp=(8,), dtype="bfloat16", block_size=16
    )
    assert step_ns(slow, config, 8, (1, 1)) - step_ns(book, config, 8, (1, 1)) == pytest.approx(
        2 * LAYERS * 1e4
    )


@thorough
def test_few_tokens_leave_most_experts_alone(tmp_path: Path) -> None:
    config = released("Qwen3-235B-A22B-FP8", tmp_path)
    sizes = rank_sizes(config, 1, "bfloat16")
    # 94 layers of 128 experts, 8 of them chosen, 3 matrices of 4096 x 1536 each.
    assert sizes.expert_elements == 94 * 128 * 3 * 4096 * 1536
    assert sizes.expert_share == 8 / 128
    book = roofline_book(MACHINE, config, tp=(1,), dtype="bfloat16", block_size=16)
    one, two, many = (step_ns(book, config, 1, *[(1, 1)] * n) for n in (1, 2, 16))
    experts_ns = 2 * sizes.expert_elements / 16 * BYTE_NS
    assert two - one == pytest.approx(experts_ns, rel=0.01)
    assert many - one == pytest.approx(15 * experts_ns, rel=0.01)


@thorough
def test_states_windows_and_latents_are_read_by_their_own_sizes(tmp_path: Path) -> None:
    hybrid = rank_sizes(released("Nemotron-H-56B", tmp_path), 1, "bfloat16")
    assert hybrid.state_bytes == 54 * (3 * (16384 + 4096) * 2 + 256 * 64 * 256 * 4)
    config = released("gpt-oss-120b", tmp_path)
    halves = {a.window: a.kv_bytes for a in rank_sizes(config, 1, "bfloat16").attending}
    assert halves == {0: 18 * 2 * 8 * 64 * 2, None: 18 * 2 * 8 * 64 * 2}
    assert windows_of(config) == (128,)
    for tp in (1, 8):
        (latents,) = rank_sizes(released("DeepSeek-V3", tmp_path), tp, "bfloat16").attending
        assert latents.kv_bytes == 61 * (512 + 64) * 2, "every rank has all latents"


def test_a_derived_book_says_that_it_is_unmeasured_on_disk_as_well(tmp_path: Path) -> None:
    config = released("Llama-3.1-405B", tmp_path)
    book = roofline_book(MACHINE, config, tp=(8,), dtype="bfloat16", block_size=16)
    book.save(tmp_path / "costs")
    again = CostBook.load(tmp_path / "costs")
    assert not again.is_measured
    (costs,) = again.engines.values()
    assert costs.source == "data sheets: round"
    assert costs.host_ns == 7_000
    engine = EngineConfig(model="", dtype="bfloat16", device="cuda", tp=8)
    assert again.transfers.reads[read_name(engine, engine)].wait.byte_ns == pytest.approx(0.1)
    far = StepFeatures(
        num_requests=1, num_tokens=1, num_logits=1, num_prefills=0, num_pairs=10**9, num_seen=10**9
    )
    assert costs.step_ns(far) > 0, "it holds everywhere"


def test_a_data_sheet_in_yaml_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    text = "name: H200\ntflops: {bfloat16: 989}\nmemory_gb_per_s: 4800\n"
    path.write_text(text)
    found = read_hardware(path)
    assert (found.tflops, found.memory_gb_per_s, found.launch_us) == ({"bfloat16": 989}, 4800, 5.0)
    config = released("Llama-3.1-405B", tmp_path)
    for asked, why in (({"dtype": "float32"}, "no peak in float32"), ({"tp": (2,)}, "link_gb_per_s")):
        options = {"tp": (1,), "dtype": "bfloat16", "block_size": 16} | asked
        with pytest.raises(UserError, match=why):
            roofline_book(found, config, **options)
    for change, why in (
        ("launch_ms: 1\n", "unknown key launch_ms"),
        ("flops_share: 0\n", "over 0"),
        ("bandwidth_share: 75\n", "at most 1"),
        ("turn_us: -500\n", "turn_us must be a number from 0 on"),
    ):
        path.write_text(text + change)
        with pytest.raises(UserError, match=why):
            read_hardware(path)


@pytest.mark.parametrize("name", known_hardware())
def test_the_sheets_that_rayk_brings_say_what_the_table_of_devices_says(name: str) -> None:
    devices = {
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "b200": "NVIDIA B200",
        "mi300x": "AMD Instinct MI300X",
    }
    sheet = read_hardware(name)
    assert read_hardware(name.upper()) == sheet
    for dtype in ("bfloat16", "float16", "float32"):
        peaks = peaks_of(devices[name], dtype)
        assert peaks is not None
        assert sheet.tflops[dtype] == pytest.approx(peaks.flops_per_s / 1e12)
        assert sheet.memory_gb_per_s == pytest.approx(peaks.bytes_per_s / 1e9)
    assert sheet.memory_gb > 0
    assert sheet.link_gb_per_s > sheet.network_gb_per_s > 0


def test_an_h100_takes_about_what_was_measured_of_one(tmp_path: Path) -> None:
    """jobs/benchmarks/results/gpu_day.md, engine, graphs; docs/costs.md has the predicted beside it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = read_config(tmp_path)
    book = roofline_book(read_hardware("h100"), config, tp=(1,), dtype="bfloat16", block_size=16)
    (costs,) = book.engines.values()
    for shares, measured_ms in (([(1, 319)], 6.393), ([(1, 319)] * 64, 8.055), ([(8192, 0)], 229.3)):
        step = step_of(shares)
        assert costs.step_ns(step) + costs.turn_ns(step) == pytest.approx(measured_ms * 1e6, rel=0.05)
