"""Layers that share keys and values: what config.json says of them, their weights, and their logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rayk.models.families import parse_config
from rayk.models.families.raw import RawConfig
from rayk.models.families.sharing import shared_sources
from rayk.models.unused import unused_tensors
from rayk.parallel.local import LocalComm
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.markers import one_per, sweep
from tests.models.released import small
from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import CLASSES, LONGROPE, Checkpoint, Paged, assert_right, load, write_checkpoint

TYPES = ["full_attention", "sliding_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 21}
REUSE_TWO = {"kv_sharing_targets": [None, None, 0, 1]}

LLAMA4_LAYERS = {"num_hidden_layers": 6, "no_rope_layers": [1, 0, 1, 1, 0, 1]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_kv_shared_layers": 2, "attention_bias": True}),
    "qwen2": ("qwen2", {"head_dim": "absent", **REUSE_TWO}),
    "qwen3": ("qwen3", {"num_kv_shared_layers": 2, "layer_types": TYPES * 2, **WINDOW}),
    "mistral": ("mistral", {"sliding_window": 21, **REUSE_TWO}),
    "phi3": ("phi3", {"sliding_window": 21, **REUSE_TWO}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "num_kv_shared_layers": 1},
    ),
    "gemma2": ("gemma2", {"num_kv_shared_layers": 2}),
    "gemma3": ("gemma3", {"layer_types": TYPES * 2, "kv_sharing_targets": [None, None, 0, None]}),
    "cohere2": ("cohere2", {"layer_types": TYPES * 2, "num_kv_shared_layers": 1}),
    "gpt_oss": ("gpt_oss", {"layer_types": TYPES * 2, **REUSE_TWO}),
    # A chunked layer and one that sees everything; the weightless norm is of queries alone there.
    "llama4": ("llama4", {"kv_sharing_targets": [None, None, 0, None, 1, None], **LLAMA4_LAYERS}),
}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, overrides = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(folder, family, **{"num_hidden_layers": 4, **overrides})


@sweep(2)
@one_per()
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    assert checkpoint.config.sharing_layers
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


def test_sharing_shows_in_the_logits(tmp_path: Path) -> None:
    """Else the test above would hold without it."""
    family, overrides = VARIANTS["qwen3"]
    checkpoint = write_checkpoint(tmp_path, family, **{"num_hidden_layers": 4, **overrides})
    checkpoint.model.config.num_kv_shared_layers = 0
    checkpoint.exact.config.num_kv_shared_layers = 0
    with pytest.raises(AssertionError), torch.inference_mode():
        assert_right(
            checkpoint, prompts()[1], Paged(load(checkpoint, LocalComm()), 1).step(prompts()[1:2])[0]
        )


@pytest.mark.parametrize("checkpoint", ["llama", "qwen3"], indirect=True)
def test_tensors_of_keys_and_values_that_nobody_makes_are_not_needed(checkpoint: Checkpoint) -> None:
    """A checkpoint may hold them or not, even in shapes of no use; others must be of use."""
    file = checkpoint.path / "model.safetensors"
    stored = load_file(file)
    unused = [n for n in stored if re.search(r"layers\.[23]\.self_attn\.(k_proj|v_proj|k_norm)\.", n)]
    assert len(unused) == (8 if "llama" in str(checkpoint.path) else 6)
    with torch.inference_mode():
        wanted = Paged(load(checkpoint, LocalComm()), 3).step(prompts())
    for changed in (
        {n: t for n, t in stored.items() if n not in unused},
        {n: torch.full((3, 5), torch.nan) if n in unused else t for n, t in stored.items()},
    ):
        save_file(changed, file)
        with torch.inference_mode():
            found = Paged(load(checkpoint, LocalComm()), 3).step(prompts())
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.2.self_attn.q_proj.weight"):
        save_file({n: t for n, t in stored.items() if n != name}, file)
        with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
            load(checkpoint, LocalComm())
    save_file(stored | {"model.layers.2.self_attn.k_scale": torch.ones(1)}, file)
    assert "model.layers.*.self_attn.k_scale" in unused_tensors(checkpoint.path, checkpoint.config)
    save_file(stored, file)


def gemma3n_config(kinds: list[str], num_shared: int) -> Any:
    return transformers.Gemma3nTextConfig(
        num_hidden_layers=len(kinds), layer_types=kinds, num_kv_shared_layers=num_shared,
        activation_sparsity_pattern=[0.0] * len(kinds), intermediate_size=8, hidden_size=16,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=8, vocab_size_per_layer_input=8,
        hidden_size_per_layer_input=4, laurel_rank=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "num_shared"),
    [(TYPES * 3, 2), (TYPES * 3, 4), ((["sliding_attention"] * 4 + ["full_attention"]) * 3, 7)],
)
def test_the_last_layers_reuse_as_in_the_family_that_has_the_key(kinds: list[str], num_shared: int) -> None:
    """Targets as transformers' own gemma3n finds them: those whose layers store for others, by type."""
    values = {**small("qwen3"), **WINDOW, "num_hidden_layers": len(kinds), "layer_types": kinds}
    config = parse_config(values | {"num_kv_shared_layers": num_shared})
    theirs = gemma3n_config(kinds, num_shared).kv_sharing_modes
    assert [i for i, mode in enumerate(theirs) if mode == "reuse"] == list(config.sharing_layers)
    stores = {kinds[i]: i for i, mode in enumerate(theirs) if mode not in (None, "reuse")}
    assert {kinds[i]: config.layers[i].kv_source for i in config.sharing_layers} == stores
    assert len(config.fast_prefill_layers) == num_shared


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_shared_layers": 4}, r"`num_kv_shared_layers` 4 leaves none of 4 layers.*\n.*at most 3"),
    ({"num_kv_shared_layers": 9}, r"leaves none of 4 layers"),
    ({"num_kv_shared_layers": -1}, r"`num_kv_shared_layers` must be an integer of zero or more, not -1"),
    ({"num_kv_shared_layers": "two"}, r"must be an integer of zero or more, not 'two'"),
    ({"num_kv_shared_layers": 3}, r"layer 1 \(window 21, chunk None\) would reuse.*layers 0 to 0.*none"),
    ({"num_kv_shared_layers": 2, **REUSE_TWO}, "`num_kv_shared_layers` and `kv_sharing_targets` both say"),
    ({"kv_sharing_targets": [None, None, 0]}, r"`kv_sharing_targets` must list 4 layers"),
    ({"kv_sharing_targets": {"3": 1}}, r"must list 4 layers"),
    ({"kv_sharing_targets": [None, None, "0", None]}, r"`kv_sharing_targets`\[2\] must be the number"),
    ({"kv_sharing_targets": [None, None, False, None]}, r"`kv_sharing_targets`\[2\] must be the number"),
    (
        {"kv_sharing_targets": [None, None, 1, None]},
        r"layer 2 \(window None\) reuses .* layer 1 \(window 21\)",
    ),
    ({"kv_sharing_targets": [2, None, None, None]}, r"layer 0 reuses .* layer 2, which does not come before"),
    ({"kv_sharing_targets": [None, None, 2, None]}, r"layer 2 .* layer 2, which does not come before it"),
    ({"kv_sharing_targets": [None, None, -2, None]}, r"of layer -2, of layers 0 to 3"),
    ({"kv_sharing_targets": [None, None, 4, None]}, r"of layer 4, of layers 0 to 3"),
]


@pytest.mark.parametrize(("values", "problem"), BAD, ids=[str(values) for values, _ in BAD])
def test_bad_values_are_named_with_the_file(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)^here/config.json: .*{problem}") as caught:
        parse_config({**small("qwen3"), **WINDOW, "layer_types": TYPES * 2, **values}, "here/config.json")
    assert caught.value.where == "here/config.json"


def test_a_layer_that_shares_cannot_be_shared_with() -> None:
    with pytest.raises(CheckpointError, match="layer 3 reuses .* layer 2, which has none of its own"):
        parse_config({**small("llama"), "kv_sharing_targets": [None, None, 1, 2]})


@pytest.mark.parametrize("values", [{}, {"num_kv_shared_layers": 0}, {"num_kv_shared_layers": None}])
def test_nothing_is_shared_unless_told(values: dict[str, Any]) -> None:
    for family in ("llama", "qwen3"):
        config = parse_config(small(family) | values)
        assert config.sharing_layers == ()
        assert len(config.fast_prefill_layers) == 0
    assert parse_config(small("llama") | {"kv_sharing_targets": [None] * 4}).sharing_layers == ()


def test_only_the_trailing_run_is_fast() -> None:
    """F0 L1 | reuse 0, reuse 1 | F4 L5 | reuse 4, reuse 5."""
    values = {"num_hidden_layers": 8, "layer_types": TYPES * 4}
    targets = [None, None, 0, 1, None, None, 4, 5]
    config = parse_config({**small("qwen3"), **WINDOW, **values, "kv_sharing_targets": targets})
    assert config.sharing_layers == (2, 3, 6, 7)
    assert list(config.fast_prefill_layers) == [6, 7]
    assert config.attention_layers == (0, 1, 4, 5)


def test_the_keys_may_stand_with_the_text_model() -> None:
    text = transformers.Gemma3TextConfig(num_hidden_layers=8, layer_types=TYPES * 4).to_dict()
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text | {"num_kv_shared_layers": 2},
    }
    assert parse_config(raw).sharing_layers == (6, 7)
    assert parse_config(raw | {"num_kv_shared_layers": 4}).sharing_layers == (4, 5, 6, 7)


def test_a_family_with_a_rule_of_its_own_keeps_it() -> None:
    values = gemma3n_config(TYPES * 3, 2).to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    assert parse_config(values).sharing_layers == (4, 5)
    for count in (0, 2):
        sharing = {"num_kv_shared_layers": count, "kv_sharing_targets": [None] * 5 + [1]}
        with pytest.raises(
            UnsupportedArchitecture, match="`kv_sharing_targets` is not supported in family gemma3n"
        ):
            parse_config(values | sharing)


RECURRENT = ("mamba2", "jamba", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_next")


@pytest.mark.parametrize("key", ["num_kv_shared_layers", "kv_sharing_targets"])
@pytest.mark.parametrize("family", [*RECURRENT, "deepseek_v3"])
def test_families_that_keep_something_else_are_refused_by_name(family: str, key: str) -> None:
    config_class, architecture = CLASSES[family]
    values = getattr(transformers, config_class)().to_dict() | {"architectures": [architecture]}
    sharing: dict[str, Any] = {"num_kv_shared_layers": 1, "kv_sharing_targets": [None, 0]}
    with pytest.raises(
        UnsupportedArchitecture, match=rf"`{key}` is not supported in family {family}: the mixer"
    ):
        parse_config(values | {key: sharing[key]})


def test_types_of_layers_are_their_windows_and_chunks() -> None:
    """As gemma3n and llama4 use it."""
    layers = parse_config({**small("qwen3"), **WINDOW, "layer_types": TYPES * 2}).layers
    raw = RawConfig({}, "config.json")
    assert shared_sources(raw, layers, 1) == (None, None, None, 1)
    assert shared_sources(raw, layers, 2) == (None, None, 0, 1)
