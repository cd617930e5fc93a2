"""`fast_prefill` and chunked local attention in a spec: what reaches the engines, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import engine_groups
from rayk.specs import Cell, load_spec, plan_cells
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


def plan(config: DecoderConfig | None = None, **changes: Any) -> list[Cell]:
    return [cell for cell, _ in plan_cells(load_spec(spec(**changes)), config or decoder(), device="cpu")]


def test_it_is_an_axis_of_both_sides_and_of_each() -> None:
    def found(cells: list[Cell]) -> list[tuple[bool, bool | None]]:
        return [(c.prefill.fast_prefill, c.decode and c.decode.fast_prefill) for c in cells]

    both = plan(matrix={"engine.fast_prefill": [False, True]})
    assert found(both) == [(False, False), (True, True)]
    assert [c.axes["engine.fast_prefill"] for c in both] == [False, True]
    assert [c.cell_id for c in both] == ["p1-d1", "p1-d1-engine.fast_prefill=true"]
    own = plan(matrix={"prefill.fast_prefill": [False, True]}, engine={"fast_prefill": True})
    assert found(own) == [(False, True), (True, True)], "false at a side is a value"
    assert found(plan(mode="aggregated", engine={"fast_prefill": True})) == [(True, None)]
    assert found(plan()) == [(False, False)]


@pytest.mark.parametrize("key", ["engine", "prefill"])
@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_prompt_logprobs_are_refused_with_both_names_and_the_mend(key: str, mode: str) -> None:
    changes: dict[str, Any] = {key: {"fast_prefill": True}, "sampling": {"prompt_logprobs": 0}, "mode": mode}
    with pytest.raises(SpecError) as caught:
        plan(**changes)
    assert "sampling.prompt_logprobs" in caught.value.problem
    assert f"{key}.fast_prefill: true" in caught.value.problem
    assert f"{key}: {{fast_prefill: false}}" in caught.value.mend
    (cell,) = plan(**changes | {key: {"fast_prefill": False}})
    assert cell.sampling.prompt_logprobs == 0


def test_decode_engines_tell_nothing_of_prompts() -> None:
    (cell,) = plan(decode={"fast_prefill": True}, sampling={"prompt_logprobs": 2})
    assert cell.decode is not None
    assert (cell.prefill.fast_prefill, cell.decode.fast_prefill) == (False, True)


@pytest.mark.parametrize("changes", [{"checks": ["logprobs"]}, {"dtype": "bfloat16"}])
def test_the_check_of_logprobs_leaves_prompts_out(changes: dict[str, Any]) -> None:
    slow, fast = plan(matrix={"engine.fast_prefill": [False, True]}, **changes)
    assert "logprobs" in fast.checks
    assert (slow.sampling.logprobs, slow.sampling.prompt_logprobs) == (0, 0)
    assert (fast.sampling.logprobs, fast.sampling.prompt_logprobs) == (0, None)


def test_layers_that_share_attend_and_keep_nothing() -> None:
    """They may have a backend of their own, but no wrong keys."""
    config = decoder((None,) * 4)
    layers = (*config.layers[:2], *(replace(layer, kv_source=1) for layer in config.layers[2:]))
    config = replace(config, layers=layers)
    (cell,) = plan(config, engine={"layer_backends": {3: "reference"}}, mode="aggregated")
    assert cell.prefill.layer_backends == ((3, "reference"),)
    fault = {"kind": "wrong_kv", "point": "store_kv", "layer": 2}
    with pytest.raises(SpecError, match="layer 2 of 4 keeps no keys and values") as caught:
        plan(config, faults=[fault], checks=["kv_values"])
    assert caught.value.mend == "layer: 0, 1"


def chunked() -> DecoderConfig:
    """Three layers that see chunks of 24 positions, and one that sees everything."""
    config = decoder((None,) * 4)
    return replace(
        config, layers=(*(replace(layer, chunk=24) for layer in config.layers[:3]), config.layers[3])
    )


def test_chunked_layers_with_and_without_groups_of_their_own() -> None:
    cells = plan(chunked(), matrix={"engine.hybrid_kv": [True, False]}, mode="aggregated")
    kinds = [[g.spec.kind for g in engine_groups(cell.prefill, chunked())] for cell in cells]
    assert set(kinds[0]) == {"full", "chunked"}
    assert set(kinds[1]) == {"full"}


def test_a_pool_is_checked_by_what_chunks_keep() -> None:
    """1000 tokens in blocks of 16 are 63 blocks of full attention, and a few of each group of chunks."""
    prompts = {"random": {"count": 1, "input_tokens": [1000]}}
    changes: dict[str, Any] = {"prompts": prompts, "sampling": {"max_tokens": 8}, "mode": "aggregated"}
    engine = {"num_blocks": 85, "max_batch_tokens": 16}
    assert plan(chunked(), engine=engine, **changes)
    with pytest.raises(SpecError, match="over the prefill engine's pool of 60"):
        plan(chunked(), engine=engine | {"num_blocks": 61}, **changes)


def test_kernel_blocks_of_chunked_groups_have_their_own_name() -> None:
    def asked(rows: int, **engine: Any) -> list[Cell]:
        return plan(chunked(), engine={"kernel_block_sizes": {"chunked": rows}, **engine}, mode="aggregated")

    assert asked(8)[0].prefill.kernel_block_sizes == (("chunked", 8),)
    with pytest.raises(SpecError, match="kernel_block_size 16 does not divide the chunks of 24"):
        asked(16)
    with pytest.raises(SpecError, match="names chunked groups, and the model has none"):
        asked(8, hybrid_kv=False)
