"""Quantised cells are judged by the steps the engine took: right engines pass, and small wrongs are seen that
flipped steps would excuse."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.judge import CellJudge
from rayk.experiments.logprobs import LOGPROB_FLOOR, compare_logprobs
from rayk.kernels.quantise import QuantisedKV
from rayk.models.families import load_config
from rayk.oracle.cache import AnswerStore
from rayk.oracle.checkpoint import read_marker
from rayk.specs import load_spec, plan_cells
from rayk.transfer.consumer import Consumption
from rayk.types.errors import KVMismatch
from rayk.types.rows import CellRow, RequestRow
from tests.engine.test_quantised import SETTINGS, scales_of, with_scales
from tests.pd import Pair, make_request
from tests.specs.models import spec

NUM_TOKENS = 8
Change = Callable[[Pair], None]


def judged(
    path: Path,
    tp: tuple[int, int],
    name: str,
    at_d: Change | None = None,
    captured: Callable[[Any], None] = lambda rows: None,
) -> tuple[CellRow, int]:
    """The row of a cell whose decode engine, or whose captured rows, were changed so; and how many reasons
    its log probabilities give without what was stored."""
    checks = ["tokens", "logprobs", "kv_values", "kv_bytes"]
    sides = {"prefill": {"tp": tp[0]}, "decode": {"tp": tp[1]}}
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 0}
    asked = spec(
        model=str(path), dtype="float32", checks=checks, sampling=sampling, **sides, **SETTINGS[name]
    )
    ((cell, _),) = plan_cells(load_spec(asked), load_config(path), device="cpu")
    probe = read_marker(path)["probes"][2]["prompt"]
    prompts = [probe[:5], probe[20:57], probe[60:170]]
    outcome = CellOutcome(num_kv_bytes_checked=1)
    with Pair.open(path, tp=tp, **SETTINGS[name]) as pair:
        if at_d is not None:
            at_d(pair)
        for i, prompt in enumerate(prompts):
            request = make_request(f"r{i}", prompt, NUM_TOKENS, logprobs=0, prompt_logprobs=0)
            done = pair.prefill(request, capture=True)
            outcome.captured[i] = done.info["captured"]
            captured(outcome.captured[i])
            pair.d.engine.collect(pair.start_decode(request, done), into=done)
            assert done.error is None, done.error
            outcome.requests.append(row_of(i, prompt, done))
    with tempfile.TemporaryDirectory() as folder:  # checkpoints are others', too
        judge = CellJudge(str(path), load_config(path), AnswerStore(Path(folder)))
        row = judge.judge(cell, prompts, [outcome])
        unaided = compare_logprobs(outcome.requests, judge._references(cell), cell.sampling)
    return row, len(unaided.reasons)


def row_of(index: int, prompt: list[int], done: Any) -> RequestRow:
    return RequestRow(
        cell_id="c", repeat=0, request_id=f"r{index}", prompt_index=index, prompt_token_ids=prompt,
        output_token_ids=done.token_ids, num_prompt_tokens=len(prompt), arrival_ns=0,
        output_logprobs=[p.logprob for p in done.logprobs],
        prompt_logprobs=[p and p.logprob for p in done.prompt_logprobs],
    )  # fmt: skip


@pytest.fixture
def scaled(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """With scales that are not 1, other ones in every layer."""
    return with_scales(checkpoint("qwen3"), tmp_path / "scaled", ("k_scale", "v_scale"), scales_of)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_a_checkpoints_scales_are_those_of_the_reference(scaled: Path, name: str) -> None:
    row, _ = judged(scaled, (1, 2), name)
    assert row.verdict in ("PASS", "NEAR_TIE"), row.reason
    assert row.num_token_mismatches == 0
    # All prompt tokens but the first of each, but for those behind a step that nobody knows.
    assert row.measured["num_prompt_logprobs_settled"] == 4 + 36 + 109
    assert row.measured["max_settled_prompt_logprob_error"] < 1e-4
    assert row.measured["num_logprobs_settled"] >= 3


def scale_of_layer(scale: float, side: str, layer: int = 1) -> Change:
    """Rank 0 has another scale of one layer than it says."""

    def change(pair: Pair) -> None:
        cache = pair.d.engine.ranks[0].decoder.attention_layers[layer].kv_cache
        assert isinstance(cache, QuantisedKV)
        object.__setattr__(cache, f"{side}_scale", scale * getattr(cache, f"{side}_scale"))

    return change


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_a_scale_off_by_a_little_at_the_decode_engine_is_seen(scaled: Path, name: str) -> None:
    """Digests are of bytes, and so right: only what D says of its tokens is wrong, by less than what flipped
    steps may do to it."""
    row, unaided = judged(scaled, (1, 2), name, at_d=scale_of_layer(1.05, "v"))
    assert row.verdict == "TOKEN_MISMATCH"
    assert "no step could flip; bound 0.002" in row.reason
    assert unaided == 0, "measured bounds excuse it"


def test_scales_of_the_wrong_head_are_seen(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token, exchanged at D after all was proven."""
    real = Consumption._verify

    def verify(consumption: Consumption) -> KVMismatch | None:
        found = real(consumption)
        view = consumption.views[1]
        seen = next(f.view.view(torch.uint8) for f in view.fields if f.name == "v_scale")
        table = consumption.block_tables[view.group.index]
        ids, slots, _ = view.places(table, consumption.ticket.num_tokens)
        seen[ids[4], :, slots[4]] = seen[ids[4], :, slots[4]].roll(1, 0)
        return found

    monkeypatch.setattr(Consumption, "_verify", verify)
    row, _ = judged(checkpoint("qwen3"), (1, 1), "fp8_e4m3_token_head")
    assert row.verdict == "TOKEN_MISMATCH"
    assert row.measured["max_settled_logprob_error"] > LOGPROB_FLOOR
    assert row.measured["max_settled_prompt_logprob_error"] < 1e-4, "P is right"


def test_a_row_that_is_a_step_off_is_seen(checkpoint: Callable[..., Path]) -> None:
    """Where the value is nowhere near the border between the two: of 16 elements one at most is."""

    def next_step(captured: Any) -> None:
        captured[0][2]["k", 1][3] += 1

    row, unaided = judged(checkpoint("qwen3"), (1, 1), "fp8_e4m3", captured=next_step)
    assert row.verdict == "KV_MISMATCH"
    assert "layer 2, k of head 1, token 3: no rounding of what the layers below make" in row.reason
    assert "(1 rows)" in row.reason
    assert unaided == 0
