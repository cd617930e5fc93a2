"""Settings of states, kernel blocks and layers' backends: how they are written, what of them is refused."""

from __future__ import annotations

from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.groups import group_layers
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig, LayerConfig, Mamba2Config
from rayk.models.formats import Fp8, Quantisation, Scheme
from rayk.models.kv_specs import kv_cache_specs
from rayk.specs import Cell, dump_spec, expand, load_spec, plan_cells
from rayk.specs.engines import with_compared_weights
from rayk.specs.experiment import AXES
from rayk.types.config import EngineOptions
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


def mamba(num_groups: int = 2) -> Mamba2Config:
    return Mamba2Config(
        num_heads=8,
        head_size=32,
        num_groups=num_groups,
        state_size=32,
        conv_width=4,
        conv_bias=True,
        proj_bias=False,
        gate="gate_norm",
        norm_eps=1e-5,
    )


def hybrid(mixers: tuple[str, ...] = ("mamba2", "attention", "mamba2", "mamba2"), **changes: Any) -> Any:
    """A model of these mixers; states of 34 KB, attention's blocks of 16 tokens of 4 KB."""
    config = decoder(windows=(None,) * len(mixers), mamba2=mamba(), **changes)
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(config.layers, mixers, strict=True))
    return replace(config, layers=layers)


def block_sizes(config: DecoderConfig, state_block_size: int | None = None) -> dict[str, int]:
    """By kind of group, of an engine whose attention asks for 16."""
    specs = kv_cache_specs(config, block_size=16, dtype="float32", state_block_size=state_block_size)
    return {g.spec.kind: g.spec.block_size for g in group_layers(specs)}


GROWN = block_sizes(hybrid())["full"]
"""Tokens of attention's blocks beside states."""


def plan(config: DecoderConfig | None = None, **changes: Any) -> list[Cell]:
    planned = plan_cells(load_spec(spec(**changes)), config or hybrid(), device="cpu")
    return [cell for cell, _ in planned]


@pytest.mark.parametrize("option", fields(EngineOptions), ids=lambda option: option.name)
def test_every_option_of_engines_is_a_key_of_specs(option: Field[Any]) -> None:
    """Numbers and flags are given, too: to both sides, then the default to the one that may differ."""
    name, default = option.name, option.default

    def values(**changes: Any) -> list[Any]:
        (cell,) = expand(load_spec(spec(**changes)).spec, decoder(), device="cpu")
        return [getattr(engine, name) for engine in cell.engines]

    assert f"engine.{name}" in AXES
    assert values() == [default, default]
    if not isinstance(default, int):
        return
    value = 2 * default if type(default) is int else not default
    assert values(engine={name: value}) == [value, value]
    if f"decode.{name}" in AXES:
        assert values(engine={name: value}, decode={name: default}) == [value, default]


def test_settings_reach_the_engines_of_both_sides() -> None:
    engine = {
        "state_block_size": 64,
        "kernel_block_sizes": {"full": 8},
        "layer_backends": {1: "reference"},
    }
    (cell,) = plan(engine=engine)
    for side in (cell.prefill, cell.decode):
        assert side is not None
        assert side.state_block_size == 64
        assert side.kernel_block_sizes == (("full", 8),)
        assert side.layer_backends == ((1, "reference"),)
    (default,) = plan()
    assert default.prefill.state_block_size is None
    assert default.prefill.kernel_block_sizes == default.prefill.layer_backends == ()


def test_a_side_may_have_its_own() -> None:
    (cell,) = plan(
        engine={"state_block_size": 64, "layer_backends": {1: "reference"}, "kernel_block_size": 4},
        prefill={"state_block_size": 8, "layer_backends": {}},
        decode={"kernel_block_sizes": {"full": 2}},
    )
    assert cell.decode is not None
    assert (cell.prefill.state_block_size, cell.decode.state_block_size) == (8, 64)
    assert cell.prefill.layer_backends == ()
    assert cell.decode.layer_backends == ((1, "reference"),)
    assert (cell.prefill.kernel_block_sizes, cell.decode.kernel_block_sizes) == ((), (("full", 2),))


def test_layers_are_numbers_in_yaml_and_texts_in_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(
        "model: m\nprompts: {random: {}}\nengine:\n  layer_backends: {10: cpu, 2: reference}\n"
        "matrix:\n  decode.layer_backends: [{}, {3: cpu}]\nexclude: [{decode.layer_backends: {3: cpu}}]\n"
    )
    loaded = load_spec(path).spec
    assert loaded.engine.layer_backends == {"2": "reference", "10": "cpu"}
    assert list(loaded.engine.layer_backends) == ["2", "10"], "in the order of the layers"
    again = tmp_path / "again.yaml"
    again.write_text(dump_spec(loaded))
    assert load_spec(again).spec == loaded
    (cell,) = expand(loaded, decoder(), device="cpu")
    assert cell.decode is not None
    assert (cell.prefill.layer_backends, cell.decode.layer_backends) == (
        ((2, "reference"), (10, "cpu")),
        (),
    )


@pytest.mark.parametrize("rule", [{"layer_backends": {1: "cpu"}}, {"layer_backends": {"1": "cpu"}}])
def test_a_rule_in_python_may_say_layers_either_way(rule: dict[str, Any]) -> None:
    matrix = {"engine.layer_backends": [{}, {1: "cpu"}, {1: "reference"}]}
    excluded = [{f"engine.{k}": v for k, v in rule.items()}]
    assert [c.prefill.layer_backends for c in plan(matrix=matrix, exclude=excluded)] == [
        (),
        ((1, "reference"),),
    ]


def test_they_may_be_axes_and_cells_are_named_by_them() -> None:
    matrix = {
        "engine.state_block_size": [None, 8, 64],
        "engine.kernel_block_sizes": [{}, {"full": 8}],
        "engine.layer_backends": [{}, {1: "reference"}, {1: "cpu-torch"}],
    }
    cells = plan(matrix=matrix)
    assert len({c.cell_id for c in cells}) == len(cells) == 18
    assert cells[-1].prefill.state_block_size == 64
    assert cells[-1].prefill.layer_backends == ((1, "cpu-torch"),)
    assert cells[-1].axes["engine.layer_backends"] == {"1": "cpu-torch"}
    assert "engine.kernel_block_sizes=full=8" in cells[-1].cell_id
    (overridden,) = expand(
        load_spec(spec(), ["engine.layer_backends={1: reference}", "engine.state_block_size=5"]).spec,
        hybrid(),
        device="cpu",
    )
    assert overridden.prefill.layer_backends == ((1, "reference"),)
    assert overridden.prefill.state_block_size == 5


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"state_block_size": 0}, "engine.state_block_size must be greater than or equal to 1, got 0"),
        ({"kernel_block_sizes": {"ful": 8}}, "one of 'full', 'sliding', 'chunked' or 'mla', got 'ful'"),
        ({"kernel_block_sizes": {"full": 0}}, "greater than or equal to 1, got 0"),
        ({"kernel_block_sizes": 8}, "engine.kernel_block_sizes must be a valid dictionary, got 8"),
        ({"layer_backends": {"one": "cpu"}}, "engine.layer_backends: 'one' is not the number of a layer"),
        ({"layer_backends": {-1: "cpu"}}, "engine.layer_backends: -1 is not the number of a layer"),
        ({"layer_backends": {1: "cqu"}}, "got 'cqu'"),
    ],
)
def test_values_that_are_none(engine: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(spec(engine=engine))
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("config", "engine", "problem", "mend"),
    [
        (
            hybrid(),
            {"layer_backends": {0: "reference"}},
            "layer_backends names layer 0, and that has no",
            "layers with attention: 1",
        ),
        (hybrid(), {"layer_backends": {9: "cpu"}}, "names layer 9", "layers with attention: 1"),
        (hybrid(("mamba2",)), {"layer_backends": {0: "cpu"}}, "layer 0", "the model has no attention"),
        (hybrid(), {"kernel_block_sizes": {"sliding": 8}}, "names sliding groups", "it has full"),
        (
            hybrid(("mamba2",)),
            {"kernel_block_sizes": {"full": 8}},
            "full groups",
            "it keeps states only, whose blocks are whole",
        ),
        (
            hybrid(),
            {"kernel_block_sizes": {"full": GROWN - 1}},
            f"size {GROWN - 1} does not divide block_size {GROWN}, to which blocks of 16 grow in full groups",
            f"a divisor of {GROWN}",
        ),
    ],
)
def test_settings_that_the_model_has_no_place_for(
    config: DecoderConfig, engine: dict[str, Any], problem: str, mend: str
) -> None:
    with pytest.raises(SpecError) as caught:
        plan(config, engine=engine)
    assert problem in caught.value.problem
    assert caught.value.mend == mend
    assert caught.value.where == "spec"


def test_a_sides_own_setting_is_named_where_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(
        "model: m\nprompts: {random: {input_tokens: [5]}}\nengine: {layer_backends: {1: cpu}}\n"
        "decode:\n  layer_backends: {2: cpu}\n"
    )
    with pytest.raises(SpecError, match="decode: layer_backends names layer 2") as caught:
        plan_cells(load_spec(path), hybrid(), device="cpu")
    assert caught.value.where == f"{path}:5"


def test_a_layers_backend_must_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SpecError, match="layer_backends: triton cannot run on device cpu"):
        plan(engine={"layer_backends": {1: "triton"}})
    with pytest.raises(SpecError, match="layer_backends: cpu cannot run on device cuda"):
        plan(device="cuda", engine={"layer_backends": {1: "cpu"}})


@pytest.mark.parametrize("kernel", [8, 16, GROWN // 2, GROWN])
def test_kernel_blocks_may_be_any_part_of_a_grown_block(kernel: int) -> None:
    assert plan(engine={"kernel_block_sizes": {"full": kernel}})
    assert plan(engine={"kernel_block_size": kernel})


def test_every_mixer_is_asked_whether_it_can_be_split() -> None:
    config = hybrid()
    by_tp = {c.prefill.tp: c.unsupported for c in plan(config, matrix={"prefill.tp": [1, 2, 8, 3]})}
    assert by_tp[1] is by_tp[2] is by_tp[8] is None
    assert by_tp[3] is not None
    assert "TP 3" in by_tp[3]
    uneven = replace(config, mamba2=replace(mamba(), num_heads=6))
    (cell,) = plan(uneven, mode="aggregated", prefill={"tp": 4})
    assert cell.unsupported == "TP 4 does not divide the model's 6 Mamba heads"


@pytest.mark.parametrize("state_block_size", [None, 10])
def test_the_pool_check_counts_states_and_grown_blocks(state_block_size: int | None) -> None:
    """The smallest pool it lets through is one in which the manager can serve the request in chunks."""
    config = hybrid()
    engine: dict[str, Any] = {"max_batch_tokens": 32, "state_block_size": state_block_size}
    prompts = {"random": {"input_tokens": [400]}}

    def passes(num_blocks: int) -> bool:
        try:
            plan(config, prompts=prompts, engine={**engine, "num_blocks": num_blocks})
        except SpecError as error:
            sizes = f"{GROWN} tokens (full)" if state_block_size is None else "10 tokens (mamba2)"
            assert sizes in error.problem  # noqa: PT017 - the same text at every size
            return False
        return True

    smallest = next(n for n in range(2, 60) if passes(n))
    specs = kv_cache_specs(config, block_size=16, dtype="float32", state_block_size=state_block_size)
    groups = group_layers(specs)
    assert block_sizes(config, state_block_size) == {"mamba2": state_block_size or 1024, "full": GROWN}
    assert GROWN > 16
    for num_blocks, enough in ((smallest, True), (smallest - 1, False)):
        assert _serves(KVCacheManager(groups, num_blocks), 424, 32) == enough


def _serves(manager: KVCacheManager, num_tokens: int, chunk: int) -> bool:
    computed = 0
    while computed < num_tokens:
        computed = min(num_tokens, computed + chunk)
        if manager.extend("r", computed) is None:
            return False
        manager.trim("r", computed)
    return True


def test_layers_without_a_cache_have_no_backend() -> None:
    config = hybrid()
    bare = LayerConfig(mixer="none", rope=None, mlp=config.layers[0].mlp)
    with pytest.raises(SpecError, match="layer 3"):
        plan(replace(config, layers=(*config.layers[:3], bare)), engine={"layer_backends": {3: "cpu"}})


def test_weights_are_dequantised_where_the_reference_s_are() -> None:
    """Inputs rounded to fp8 would be taken for a fault. What compares no values with transformers may keep
    them."""
    released = Quantisation(method="fp8", schemes=(Scheme(Fp8((128, 128), "group")),))

    def weights(config: DecoderConfig, **changes: Any) -> list[str]:
        loaded = load_spec(spec(**changes))
        ((cell, _),) = plan_cells(loaded, config, device="cpu")
        return [engine.weights for engine in with_compared_weights(cell, config, loaded).engines]

    quantised = decoder(quantisation=released)
    assert weights(quantised) == ["dequantised"] * 2
    assert weights(quantised, checks=["kv_bytes"]) == ["auto"] * 2
    assert weights(decoder(), engine={"weights": "kept"}) == ["kept"] * 2
    assert weights(quantised, checks=["kv_bytes"], decode={"weights": "kept"}) == ["auto", "kept"]
    with pytest.raises(SpecError, match="decode: weights: kept, and check `tokens`"):
        weights(quantised, decode={"weights": "kept"})
