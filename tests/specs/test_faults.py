"""What planted faults must end in, when the spec does not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.handover.planted_state import SPOILS
from rayk.models.families import load_config
from rayk.specs import expand, load_spec, plan_cells
from rayk.specs.faults import check_fault, check_fits_model
from rayk.types.errors import SpecError
from rayk.types.fault_table import STATE_POINTS
from tests.models.tiny import write_checkpoint
from tests.specs.models import decoder, spec


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], "PASS"),
        ([{"kind": "kill", "point": "prefill"}], "ENGINE_ERROR"),
        ([{"kind": "kill", "point": "transfer"}], "ENGINE_ERROR"),
        ([{"kind": "early_reuse"}], "TRANSFER_ERROR"),
        ([{"kind": "kill", "point": "decode"}, {"kind": "flip_bit"}], "KV_MISMATCH"),
        ([{"kind": "flip_bit", "expect": "PASS"}], "PASS"),
    ],
)
def test_the_gravest_expected_verdict_wins(faults: list[dict[str, Any]], expected: str) -> None:
    (cell,) = expand(load_spec(spec(faults=faults)).spec, decoder(), device="cpu")
    assert cell.expected_verdict == expected


def test_a_fault_of_a_request_that_is_not_there_is_refused() -> None:
    loaded = load_spec(spec(faults=[{"kind": "flip_bit", "request": 99}]))
    with pytest.raises(SpecError, match=r"fault flip_bit: request 99 of \d+ prompts"):
        plan_cells(loaded, decoder(), device="cpu")


def test_every_point_of_a_state_can_be_planted():
    assert {*SPOILS, "stale_state"} == set(STATE_POINTS)


STATES = "point: swap_taps, shift_taps, state_dtype, stale_state"


@pytest.mark.parametrize(
    ("model", "point", "layer", "problem", "mend"),
    [
        ("jamba", "k_norm", 1, "JambaForCausalLM does not norm its keys", "point: store_kv"),
        ("jamba", "rope", 4, "layer 4 has no positions", "point: store_kv"),
        (
            "jamba",
            "swap_taps",
            0,
            "mamba1 keeps no taps of B and C, nor of q and k",
            "point: shift_taps, state_dtype, stale_state",
        ),
        (
            "jamba",
            "store_kv",
            6,
            "there is no layer 6: the model has layers 0 to 5",
            "layer: 1, 4",
        ),
        ("mamba2", "rope", 0, "layer 0 of 4 keeps no keys and values", STATES),
        ("bamba", "store_kv", 0, "layer 0 of 6 keeps no keys and values", f"{STATES}; or layer: 2, 5"),
        (
            "bamba",
            "stale_state",
            2,
            "layer 2 of 6 keeps no state",
            "point: rope, store_kv; or layer: 0, 1, 3, 4",
        ),
        (
            "deepseek_v3",
            "k_norm",
            0,
            "layer 0 keeps latents, whose keys are not normed",
            "point: rope, store_kv",
        ),
        ("nemotron_h", "rope", 1, "layer 1 of 9 keeps no keys and values", "another point, or another model"),
    ],
)
def test_a_refused_point_names_those_that_fit(
    checkpoint: Callable[..., Path], model: str, point: str, layer: int, problem: str, mend: str
) -> None:
    fault = {"kind": "wrong_kv", "point": point, "layer": layer}
    loaded = load_spec(spec(faults=[fault], checks=["kv_values"]))
    with pytest.raises(SpecError) as caught:
        plan_cells(loaded, load_config(checkpoint(model)), device="cpu")
    assert caught.value.problem == f"fault wrong_kv at {point}: {problem}"
    assert caught.value.mend == mend


@pytest.mark.parametrize(
    ("model", "layer", "mend"),
    [
        ("jamba", 2, "dtype: float32, or layer: 0"),
        ("granitemoehybrid", 3, "dtype: float32, or layer: 0"),
        ("qwen3_next", 4, "dtype: float32, or layer: 0, 1"),
    ],
)
def test_a_state_that_kv_values_does_not_judge_cannot_be_spoiled(
    checkpoint: Callable[..., Path], model: str, layer: int, mend: str
) -> None:
    def plan(dtype: str = "bfloat16", **changes: Any) -> Any:
        fault = {"kind": "wrong_kv", "point": "stale_state", "layer": layer, **changes}
        loaded = load_spec(spec(faults=[fault], dtype=dtype, checks=["kv_values"]))
        return plan_cells(loaded, load_config(checkpoint(model)), device="cpu")

    with pytest.raises(
        SpecError, match=rf"not judge the state of layer {layer} in bfloat16: it foll"
    ) as caught:
        plan()
    assert caught.value.mend == mend
    assert plan("float32")
    assert plan(layer=0)
    # Whoever says what it ends in knows.
    assert plan(expect="PASS")


DRAFTED = {"method": "draft", "model": "d"}


@pytest.mark.parametrize(
    ("fault", "changes", "word"),
    [
        ({"point": "shifted"}, {}, "no drafter that keeps KV"),
        ({"point": "shifted"}, {"speculative": {"method": "ngram"}}, "no drafter that keeps KV"),
        ({"point": "shifted", "role": "prefill"}, {"speculative": DRAFTED}, "at the prefill engine"),
        ({"point": "moved"}, {"speculative": DRAFTED}, "cannot strike at 'moved'"),
        ({"point": "shifted", "layer": 1}, {"speculative": DRAFTED}, "does not heed `layer`"),
        ({"point": "shifted"}, {"speculative": DRAFTED, "checks": ["tokens"]}, "named by check drafts"),
        ({"point": "shifted"}, {"mode": "aggregated", "speculative": DRAFTED}, "aggregated cells have none"),
    ],
)
def test_wrong_drafts_that_cannot_be_meant_are_refused(
    fault: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    settings = {"checks": ["tokens", "drafts"], "faults": [{"kind": "wrong_drafts", **fault}]}
    loaded = load_spec(spec(**settings | changes))
    (cell,) = expand(loaded.spec, decoder(), device="cpu")
    assert cell.expected_verdict == "DRAFT_MISMATCH"
    with pytest.raises(SpecError, match=word):
        check_fault(cell.faults[0], cell, loaded)


def test_drafters_of_one_layer_have_no_other(tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1)
    config = load_config(write_checkpoint(tmp_path / "large", "llama").path)
    faults = [{"kind": "wrong_drafts", "point": "wrong_layer"}]
    drafts = {"method": "draft", "model": str(small.path)}
    loaded = load_spec(spec(checks=["drafts"], faults=faults, speculative=drafts))
    (cell,) = expand(loaded.spec, config, device="cpu")
    with pytest.raises(SpecError, match="the drafter has one layer"):
        check_fits_model(cell, config, loaded)
