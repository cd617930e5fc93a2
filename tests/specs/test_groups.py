"""What a spec is refused for the KV groups that its engines would form, before any actor starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayk.kv.layout import LAYOUTS
from rayk.models.config import DecoderConfig
from rayk.specs import expand, load_spec, plan_cells
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec
from tests.specs.test_engines import hybrid, plan

UNLIKE = "LHBNC holds groups of one shape only: mamba2 has 8 heads of"


def chunked(*chunks: int | None) -> DecoderConfig:
    """A layer for each length of chunk; None sees everything."""
    config = decoder(windows=(None,) * len(chunks))
    layers = tuple(replace(layer, chunk=chunk) for layer, chunk in zip(config.layers, chunks, strict=True))
    return replace(config, layers=layers)


def unsupported(config: DecoderConfig, **changes: Any) -> list[str | None]:
    return [cell.unsupported for cell in expand(load_spec(spec(**changes)).spec, config, device="cpu")]


def test_a_layout_that_cannot_hold_the_models_groups_is_unsupported_from_the_start():
    """The cell says so itself: no engine is formed to find out."""
    matrix = {"prefill.layout": ["BHLNC", "LHBNC"], "decode.layout": ["auto", "LHBNC"]}
    plain, decode, prefill, both = unsupported(hybrid(), matrix=matrix)
    assert plain is None
    assert decode is not None
    assert decode.startswith(f"decode: {UNLIKE}")
    others = ", ".join(name for name in LAYOUTS if name != "LHBNC")
    assert decode.endswith(f"mend: any other layout ({others})")
    assert prefill == both == decode.replace("decode:", "prefill:")
    (alone,) = unsupported(hybrid(), matrix={"mode": "aggregated", "prefill.layout": "LHBNC"})
    assert alone == decode.removeprefix("decode: ")
    assert [cell.unsupported for cell in plan(matrix={"prefill.layout": "LHBNC"})] == [prefill]


def test_groups_of_one_shape_are_held_by_every_layout():
    for config in (decoder(), decoder(windows=(None, 50)), chunked(None, 24), hybrid(("mamba2",) * 2)):
        assert unsupported(config, matrix={"prefill.layout": list(LAYOUTS)}) == [None] * len(LAYOUTS)


def test_a_tp_size_the_model_cannot_run_at_comes_first():
    (why,) = unsupported(hybrid(), matrix={"prefill.tp": 3, "prefill.layout": "LHBNC"})
    assert why == "prefill: TP 3 does not divide the model's 8 Mamba heads"


def test_a_layout_must_hold_quantised_groups_too():
    """Attention has two stretches, keys and values, states have others."""
    (why,) = unsupported(hybrid(), kv_dtype="nvfp4", prefill={"layout": "LHBNC"})
    assert why is not None
    assert "LHBNC holds groups of one shape only" in why
    assert unsupported(hybrid(), kv_dtype="nvfp4", prefill={"layout": "BHLNC"}) == [None]


def test_a_layout_must_hold_the_kernel_blocks_of_each_group():
    """Of two stretches each, padded by themselves. The cell says it, as the engine would."""
    config = decoder(windows=(None, 50))
    for sizes, kinds in (({"full": 4, "sliding": 2}, True), ({"full": 4, "sliding": 4}, False)):
        engine = {"layout": "LHBNC", "kernel_block_sizes": sizes}
        (why,) = unsupported(config, kv_dtype="nvfp4", prefill=engine)
        assert (why is not None and "sliding has kernel blocks of 2 rows" in why) == kinds, why


@pytest.mark.parametrize("hybrid_kv", [True, False])
@pytest.mark.parametrize(
    ("side", "setting"),
    [("engine", "kernel_block_size"), ("decode", "kernel_block_size"), ("prefill", "kernel_block_sizes")],
)
def test_kernel_blocks_must_divide_chunks(side: str, setting: str, hybrid_kv: bool):
    """Of 24 and of 40 positions, which have 8 in common, in blocks of 16."""
    kind = "chunked" if hybrid_kv else "full"
    settings: dict[str, Any] = {"engine": {"hybrid_kv": hybrid_kv}, "decode": {}, "prefill": {}}
    settings[side][setting] = 16 if setting == "kernel_block_size" else {kind: 16}
    loaded = load_spec(spec(**settings))
    with pytest.raises(SpecError) as caught:
        plan_cells(loaded, chunked(24, None, 40), device="cpu")
    assert caught.value.where == loaded.where(f"{side}.{setting}")
    assert caught.value.problem.endswith(
        "kernel_block_size 16 does not divide the chunks of 24 and 40 positions that layers of "
        f"{kind} groups see"
    )
    assert caught.value.mend.startswith("a divisor of 8,")
    for size in (1, 2, 4, 8, None):
        engine = {"kernel_block_size": size, "hybrid_kv": hybrid_kv}
        assert plan_cells(load_spec(spec(engine=engine)), chunked(24, None, 40), device="cpu")


def test_a_fault_that_needs_two_slots_is_refused_where_chunks_leave_one():
    """Chunks of 7 begin with kernel blocks of one token, in blocks of 16; full layers keep theirs."""
    changes = {"checks": ["kv_bytes", "kv_values"]}
    for layer, hybrid_kv, refused in ((0, True, True), (1, True, False), (1, False, True)):
        fault = {"kind": "wrong_kv", "point": "store_kv", "layer": layer}
        loaded = load_spec(spec(faults=[fault], engine={"hybrid_kv": hybrid_kv}, **changes))
        if not refused:
            assert plan_cells(loaded, chunked(7, None), device="cpu")
            continue
        with pytest.raises(SpecError, match=f"one slot in the group of layer {layer}"):
            plan_cells(loaded, chunked(7, None), device="cpu")


def test_kernel_blocks_of_groups_without_chunks_are_not_held_to_them():
    sizes = {"kernel_block_sizes": {"chunked": 8, "full": 16}}
    assert plan_cells(load_spec(spec(engine=sizes)), chunked(24, None, 40), device="cpu")
