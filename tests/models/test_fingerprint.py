"""The fingerprint changes with anything that changes the KV, and with nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from rayk.models import fingerprint as module
from rayk.models.config import GdnConfig, Mamba1Config, Mamba2Config, MlaConfig
from rayk.models.families import load_config, parse_config
from rayk.models.fingerprint import fingerprint, weights_digest, whole_weights_digest
from rayk.models.formats import Mxfp4, Quantisation, Scheme
from rayk.models.kv_specs import kv_cache_specs
from rayk.types.errors import CheckpointError
from tests.models import released
from tests.models.released import small
from tests.models.released_llama4 import LLAMA_4_SCOUT
from tests.models.tiny import Checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("one"), "mistral", sliding_window=21)


def differing(a: dict[str, str], b: dict[str, str]) -> set[str]:
    assert list(a) == list(b), "fields and their order are fixed"
    return {key for key in a if a[key] != b[key]}


def test_same_weights_in_other_files_elsewhere(saved: Checkpoint, tmp_path: Path) -> None:
    saved.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, two = (fingerprint(p, load_config(p)) for p in (saved.path, tmp_path))
    assert differing(one, two) == set()


def test_one_byte_of_weights(saved: Checkpoint, tmp_path: Path) -> None:
    original = (saved.path / "model.safetensors").read_bytes()
    before = weights_digest(saved.path)
    shutil.copytree(saved.path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    for at in (len(original) - 1, len(original) // 2, len(original) - 70_000):
        changed = bytearray(original)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert weights_digest(tmp_path / "copy") != before, at
    file.write_bytes(original)
    assert weights_digest(tmp_path / "copy") == before


def test_what_outlives_engines_depends_on_every_byte(
    saved: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a large tensor is not sampled, in whatever files and pieces it is read."""
    saved.model.save_pretrained(tmp_path, max_shard_size="100KB")
    before = whole_weights_digest(saved.path)
    assert whole_weights_digest(tmp_path) == before
    original = (saved.path / "model.safetensors").read_bytes()
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 8)
    assert whole_weights_digest(saved.path) == before
    sampled = weights_digest(saved.path)
    shutil.copytree(saved.path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    num_missed = 0
    for at in range(len(original) - 1, len(original) - 40_000, -1999):
        changed = bytearray(original)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert whole_weights_digest(tmp_path / "copy") != before, at
        num_missed += weights_digest(tmp_path / "copy") == sampled
    assert num_missed > 10


def test_names_shapes_and_dtypes_count(tmp_path: Path) -> None:
    digests = []
    for tensors in (
        {"a": torch.zeros(4, 2), "b": torch.ones(3)},
        {"a": torch.zeros(2, 4), "b": torch.ones(3)},
        {"a": torch.zeros(4, 2), "c": torch.ones(3)},
        {"a": torch.zeros(4, 2, dtype=torch.int32), "b": torch.ones(3)},
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        digests.append(weights_digest(tmp_path))
    assert len(set(digests)) == 4


def test_large_tensors_are_sampled_over_their_whole_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 40)
    file = tmp_path / "data"
    data = hashlib.shake_256(b"x").digest(5000)
    file.write_bytes(b"#" * 7 + data)
    with file.open("rb") as handle:
        pieces = list(module._samples(handle, 7, 5000))
    assert len(pieces) == module.NUM_SAMPLES
    assert all(len(piece) == 40 and piece in data for piece in pieces)
    assert pieces[0] == data[:40]
    assert pieces[-1] == data[-40:]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"rope_theta": 10001.0}, {"rope"}),
        ({"sliding_window": 51}, {"windows"}),
        ({"sliding_window": None}, {"windows"}),
        ({"num_hidden_layers": 5}, {"num_layers"}),
        ({"rms_norm_eps": 1e-6}, {"norm"}),
        ({"num_key_value_heads": 4}, {"num_kv_heads"}),
        ({"head_dim": 32}, {"head_sizes", "rope", "attention_settings"}),
        ({"vocab_size": 301}, {"vocab_size"}),
        ({"intermediate_size": 140}, {"mlps"}),
        ({"max_position_embeddings": 4096, "torch_dtype": "float16"}, set()),
    ],
)
def test_each_setting_shows_in_its_field(
    saved: Checkpoint, changes: dict[str, object], fields: set[str]
) -> None:
    before = fingerprint(saved.path, parse_config(small("mistral")))
    after = fingerprint(saved.path, parse_config(small("mistral", **changes)))
    assert differing(before, after) == fields


ROPE = released.PHI_4_MINI["rope_scaling"]
YARN = released.GPT_OSS_20B["rope_scaling"]


@pytest.mark.parametrize(
    ("raw", "changes", "fields"),
    [
        (released.GEMMA_2_2B, {"attn_logit_softcapping": 49.0}, {"attention_settings"}),
        (released.GEMMA_3_1B, {"rope_local_base_freq": 10001}, {"rope"}),
        (released.GEMMA_3_1B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope"}),
        (released.GEMMA_3_1B, {"sliding_window_pattern": 5}, {"windows", "rope"}),
        (released.GEMMA_3_1B, {"query_pre_attn_scalar": 255}, {"attention_settings"}),
        (released.GEMMA_3_1B, {"hidden_size": 1148}, {"block"}),
        (released.GEMMA_3_1B, {"hidden_activation": "silu"}, {"mlps"}),
        (released.GEMMA_3_1B, {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, set()),
        (released.PHI_4_MINI, {"rope_scaling": ROPE | {"short_factor": [1.0] * 47 + [2.0]}}, {"rope"}),
        (released.PHI_4_MINI, {"rope_scaling": ROPE | {"long_factor": [2.0] * 48}}, set()),
        (released.PHI_4_MINI, {"max_position_embeddings": 65536}, {"rope"}),
        (released.GPT_OSS_20B, {"rope_scaling": YARN | {"truncate": True}}, {"rope"}),
        (released.GPT_OSS_20B, {"rope_scaling": YARN | {"beta_fast": 31.0}}, {"rope"}),
        (released.GPT_OSS_20B, {"rope_scaling": YARN | {"attention_factor": 1.0}}, {"rope"}),
        (released.GPT_OSS_20B, {"num_experts_per_tok": 2}, {"mlps"}),
        (released.GPT_OSS_20B, {"swiglu_limit": 6.0}, {"mlps"}),
        (released.COMMAND_R7B, {"layer_norm_eps": 1e-6}, {"norm"}),
        (released.COMMAND_R7B, {"logit_scale": 0.5}, set()),
        (LLAMA_4_SCOUT, {"attention_chunk_size": 4096}, {"chunks"}),
        (LLAMA_4_SCOUT, {"no_rope_layer_interval": 3}, {"chunks", "rope", "temperatures"}),
        (LLAMA_4_SCOUT, {"floor_scale": 4096}, {"temperatures"}),
        (LLAMA_4_SCOUT, {"attn_scale": 0.2}, {"temperatures"}),
        (LLAMA_4_SCOUT, {"use_qk_norm": False}, {"attention_settings"}),
        (LLAMA_4_SCOUT, {"interleave_moe_layer_step": 2}, {"mlps"}),
        (LLAMA_4_SCOUT, {"num_experts_per_tok": 2}, {"mlps"}),
    ],
)
def test_each_setting_of_one_family(
    saved: Checkpoint, raw: dict[str, Any], changes: dict[str, Any], fields: set[str]
) -> None:
    raw = {k: v for k, v in raw.items() if k != "quantization_config"}
    before, after = (fingerprint(saved.path, parse_config(values)) for values in (raw, raw | changes))
    assert differing(before, after) == fields


def test_what_families_differ_in_shows(saved: Checkpoint) -> None:
    config = parse_config(released.COMMAND_R7B)
    before = fingerprint(saved.path, config)
    rope = config.layers[0].rope
    assert rope is not None
    turned = dataclasses.replace(config.layers[0], rope=dataclasses.replace(rope, pairing="half"))
    for changes, field in (
        ({"layers": (turned, *config.layers[1:])}, "rope"),
        ({"block": "sequential"}, "block"),
        ({"sinks": True}, "attention_settings"),
        ({"attention_soft_cap": 50.0}, "attention_settings"),
        ({"norm": dataclasses.replace(config.norm, kind="rms")}, "norm"),
        ({"norm": dataclasses.replace(config.norm, offset=1.0)}, "norm"),
    ):
        after = fingerprint(saved.path, dataclasses.replace(config, **changes))
        assert differing(before, after) == {field}


def test_every_setting_shows_but_for_those_that_change_nothing_cached(saved: Checkpoint) -> None:
    """One that is added later shows, too, until somebody says that it may not."""
    config = parse_config(small("mistral"))
    before = fingerprint(saved.path, config)
    others = {
        "num_layers": {"num_layers": config.num_layers + 1, "layers": (*config.layers, config.layers[0])},
        "num_query_heads": {"num_query_heads": 2 * config.num_query_heads},
        "norm": {"norm": dataclasses.replace(config.norm, eps=1.0)},
        "layers": {"layers": (dataclasses.replace(config.layers[0], mlp=None), *config.layers[1:])},
        **{name: {name: settings_of(kind)} for name, kind in MIXERS.items()},
        "quantisation": {"quantisation": Quantisation(method="mxfp4", schemes=(Scheme(Mxfp4()),))},
    }
    unseen = set()
    for field in dataclasses.fields(config):
        changes = others.get(field.name) or {field.name: another(getattr(config, field.name))}
        if not differing(before, fingerprint(saved.path, dataclasses.replace(config, **changes))):
            unseen.add(field.name)
    assert unseen == {
        *("family", "dtype", "max_positions", "stated_positions", "mtp_layers"),
        *("tie_embeddings", "logit_scale", "final_soft_cap"),
        *("bos_token_id", "eos_token_ids", "pad_token_id"),
    }


MIXERS = {"mla": MlaConfig, "mamba1": Mamba1Config, "mamba2": Mamba2Config, "gdn": GdnConfig}


def settings_of(kind: Any) -> Any:
    """Any at all."""
    return kind(**{f.name: 1 for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING})


def another(value: Any) -> Any:
    """Something else that may stand in its place."""
    kinds = {
        bool: lambda v: not v,
        int: lambda v: v * 2 or 2,
        float: lambda v: v + 1,
        tuple: lambda v: (*v, 1),
    }
    return kinds.get(type(value), lambda v: 2 if v is None else v + "x")(value)


def test_layers_that_differ_are_told_apart(saved: Checkpoint) -> None:
    settings = {"use_sliding_window": True, "sliding_window": 40}
    prints = [
        fingerprint(saved.path, parse_config(small("qwen3", **settings, max_window_layers=n)))
        for n in (0, 1, 2)
    ]
    assert [p["windows"] for p in prints] == ["40", "[[1, null], [3, 40]]", "[[2, null], [2, 40]]"]


def test_unreadable_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        weights_digest(tmp_path)


def test_kv_specs_follow_the_layers() -> None:
    raw = small("qwen3", use_sliding_window=True, sliding_window=40, max_window_layers=3)
    config = parse_config(raw)
    full = FullAttentionSpec(16, 2, 16, 16, "float32", 8)
    sliding = SlidingWindowSpec(16, 2, 16, 16, "float32", 8, 40)
    assert kv_cache_specs(config, block_size=16, dtype="float32", hybrid_kv=True) == {
        (0, "attention"): full, (1, "attention"): full, (2, "attention"): full, (3, "attention"): sliding,
    }  # fmt: skip
    flat = kv_cache_specs(config, block_size=16, dtype="float32", hybrid_kv=False)
    assert flat == {(layer, "attention"): full for layer in range(4)}
    other = dataclasses.replace(full, block_size=8, dtype="bfloat16")
    assert kv_cache_specs(config, block_size=8, dtype="bfloat16")[0, "attention"] == other
