"""Explaining engines that deal tokens and stage layers, unlike on both sides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rayk.explain.drawing import strips
from rayk.explain.explanation import explain_pair, locate
from rayk.types.errors import UserError

LAYERS, INTERLEAVE = 3, 4
PREFILL = {"tp": 4, "dcp": 2, "dcp_interleave": INTERLEAVE, "pp": 2}
DECODE = {"tp": 2, "pp": 3}


@pytest.fixture(scope="module")
def model(checkpoint: Any) -> str:
    return str(checkpoint("llama", overrides={"num_key_value_heads": 1, "num_hidden_layers": LAYERS}))


def test_every_layer_and_token_is_read_from_a_rank_that_keeps_it(model: str) -> None:
    """Ranks count from the last stage on; layers are dealt 2, 1 and 1, 1, 1."""
    found = explain_pair(model, {"prefill": PREFILL, "decode": DECODE}, num_tokens=64)
    assert found.supported
    drawn = strips(found)
    assert len(drawn) == LAYERS * 2
    for strip, (layer, deal) in zip(drawn, itertools.product(range(LAYERS), range(2)), strict=True):
        tokens = "tokens 0-3 of each 8" if deal == 0 else "tokens 4-7 of each 8"
        assert strip.title.endswith(f"layer {layer}, {tokens}")
        stage = 0 if layer == 2 else 1  # in the order of ranks
        holders = {rank for rank in range(8) if rank // 4 == stage and rank % 4 % 2 == deal}
        assert {rank for rank, units in enumerate(strip.producers) if units} == holders
        readers = {rank for rank in range(6) if rank // 2 == LAYERS - 1 - layer}
        assert {rank for rank, units in enumerate(strip.consumers) if units} == readers
        assert {rank for rank, _ in strip.sources} == readers
        assert set(strip.sources.values()) <= holders
    row_bytes = found.sides["decode"].groups[0].page_bytes // 16
    assert found.bytes == 2 * LAYERS * 64 * row_bytes  # two decode ranks keep each layer's one head


def test_a_push_takes_as_many_layers_at_once_as_the_largest_stage_has(model: str) -> None:
    settings = {
        "prefill": {"pp": 2, "pp_layers": [2, 1]},
        "transfer": {"mode": "push", "push_layers": LAYERS},
    }
    transfer = explain_pair(model, settings).transfer
    assert transfer is not None
    assert [push.layers for push in transfer.push_layers] == [2]


def test_what_no_engine_computes_is_not_supported(checkpoint: Any) -> None:
    """Though its pages could be planned."""
    model = str(checkpoint("gemma3n"))
    found = explain_pair(model, {"decode": {"pp": 2}})
    assert not found.supported
    assert found.reason.startswith("decode: layer 5 shares layer 2's keys and values: ")
    assert found.reason.endswith("; pp_layers: [2, 4]")
    assert explain_pair(model, {"decode": {"pp": 2, "pp_layers": [2, 4]}}).supported


def test_places_of_dealt_tokens_and_staged_layers_and_back(model: str) -> None:
    settings = {"prefill": PREFILL, "decode": DECODE}
    for layer, token in itertools.product(range(LAYERS), (0, 3, 4, 13, 31)):
        text = f"layer={layer},block=2,head=0,token={token},field=v"
        rank = (0 if layer == 2 else 4) + token // INTERLEAVE % 2
        (place,) = locate(model, settings, side="prefill", rank=rank, byte=None, find=text)
        (back,) = locate(
            model, settings, side="prefill", rank=rank, byte=place["byte"] + place["num_bytes"] - 1, find=None
        )
        assert (back["layer"], back["block"], back["row"], back["field"]) == (layer, 2, token, "v")
        with pytest.raises(
            UserError, match=f"does not hold head 0 of layer {layer} for token {token}"
        ) as told:
            locate(model, settings, side="prefill", rank=rank ^ 1, byte=None, find=text)
        assert told.value.mend == f"--rank {rank}"
