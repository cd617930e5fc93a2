"""Which drafters are found, what they keep, and what is refused, with words that mend it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.kv.specs import FullAttentionSpec, MlaSpec
from rayk.models.drafters.config import drafter_of, drafter_specs
from rayk.models.drafters.refusals import refuse_speculative
from rayk.models.families import load_config, parse_config
from rayk.models.families.eagle3 import read_eagle3
from rayk.oracle.eagle3 import write_eagle3
from rayk.oracle.mtp import add_mtp
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, Unsupported, UnsupportedArchitecture, UserError
from rayk.types.speculative import SpeculativeConfig
from tests.models.drafting import engine_of, find, load_both
from tests.models.tiny import Checkpoint, write_checkpoint

DEEPSEEK = {"num_nextn_predict_layers": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    saved = write_checkpoint(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", **DEEPSEEK)
    add_mtp(saved.path, saved.model, 2, seed=0, dtype=torch.float32)
    return saved


@pytest.fixture
def head(llama: Checkpoint, tmp_path: Path) -> Path:
    return write_eagle3(tmp_path / "head", llama.path)


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_layers_are_numbered_on_from_the_models(llama: Checkpoint, head: Path, deepseek: Checkpoint) -> None:
    eagle3 = find(llama, method="eagle3", model=str(head))
    assert (eagle3.keys, eagle3.taps, eagle3.depths) == (((6, "attention"),), (2, 3, 3), 1)
    mtp = find(deepseek, method="mtp", num_tokens=2)
    assert (mtp.keys, mtp.taps, mtp.depths) == (((3, "attention"), (4, "attention")), (), 2)
    small = find(llama, method="draft", model=str(llama.path))
    assert small.keys == tuple((6 + i, "attention") for i in range(6))
    assert [d.takes_hidden for d in (eagle3, mtp, small)] == [True, True, False]


def test_every_token_is_kept_in_the_engines_format(
    llama: Checkpoint, head: Path, deepseek: Checkpoint, tmp_path: Path
) -> None:
    engine = engine_of(llama.path, dtype="bfloat16", kv_dtype="fp8_e4m3")
    (spec,) = drafter_specs(find(llama, method="eagle3", model=str(head)), engine).values()
    assert isinstance(spec, FullAttentionSpec)
    assert (spec.block_size, spec.num_kv_heads, spec.head_size_k, spec.num_query_heads) == (8, 2, 16, 8)
    assert spec.dtype != "bfloat16"
    kept = drafter_specs(find(deepseek, method="mtp", num_tokens=1), engine_of(deepseek.path))
    assert set(map(type, kept.values())) == {MlaSpec}
    windows = write_checkpoint(tmp_path / "windows", "mistral", sliding_window=21)
    kept = drafter_specs(find(llama, method="draft", model=str(windows.path)), engine_of(llama.path))
    assert {type(spec) for spec in kept.values()} == {FullAttentionSpec}


@pytest.mark.parametrize(("family", "key"), [("deepseek_v3", 1), ("qwen3_next", 1), ("llama", 0)])
def test_mtp_layers_are_those_that_config_json_states(tmp_path: Path, family: str, key: int) -> None:
    saved = write_checkpoint(tmp_path, family)
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("num_nextn_predict_layers", None)
    assert len(parse_config(values).mtp_layers) == key
    if key:
        assert len(parse_config(values | {"num_nextn_predict_layers": 3}).mtp_layers) == 3
        assert parse_config(values | {"num_nextn_predict_layers": 0}).mtp_layers == ()
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
            parse_config(values | {"num_nextn_predict_layers": "two"})
    assert saved.config.num_layers == len(saved.config.layers)


@pytest.mark.parametrize(
    ("values", "taps"),
    [
        ({}, None),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}}, None),
    ],
)
def test_which_hidden_states_a_head_takes(head: Path, values: dict[str, Any], taps: Any) -> None:
    change_config(head, **values)
    assert read_eagle3(head).taps == taps


def refused(kind: type[Exception], words: str, mend: str, checkpoint: Checkpoint, **settings: Any) -> None:
    with pytest.raises(kind) as caught:
        find(checkpoint, **settings)
    assert words in str(caught.value), caught.value
    assert mend in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("values", "kind", "words", "mend"),
    [
        ({"vocab_size": 264}, UserError, "`vocab_size` is 264, the model's 263", "trained for this model"),
        (
            {"hidden_size": 32},
            UserError,
            "states of 32 elements, the model's have 64",
            "trained for this model",
        ),
        ({"target_hidden_size": 96}, UserError, "states of 96 elements", "trained for this model"),
        ({"draft_vocab_size": 300}, CheckpointError, "`draft_vocab_size` 300 is more than", ""),
        ({"draft_vocab_size": "many"}, CheckpointError, "`draft_vocab_size` must be a positive integer", ""),
        ({"num_hidden_layers": 2}, UnsupportedArchitecture, "`num_hidden_layers` other than 1", "1"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            UnsupportedArchitecture,
            "is no EAGLE-3 head",
            "method: draft",
        ),
        ({"architectures": []}, UnsupportedArchitecture, "is no EAGLE-3 head", "Eagle3LlamaForCausalLM"),
        ({"eagle_config": []}, CheckpointError, "`eagle_config` must be an object", ""),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            UnsupportedArchitecture,
            "use_aux_hidden_state",
            "",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, CheckpointError, "must list 3 layers, not [1, 2]", ""),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, -1]}, CheckpointError, "must list 3 layers", ""),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]},
            UserError,
            "layers 1, 2, 7 of a model of 6",
            "three layers",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    llama: Checkpoint, head: Path, values: dict[str, Any], kind: type[Exception], words: str, mend: str
) -> None:
    change_config(head, **values)
    refused(kind, words, mend, llama, method="eagle3", model=str(head))


def test_default_hidden_states_need_three_layers(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)
    head = write_eagle3(tmp_path / "head", saved.path)
    refused(
        UserError, "2, 1, -1 of a model of 2 layers", "layer_ids", saved, method="eagle3", model=str(head)
    )


def test_models_that_a_drafter_cannot_be_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    hybrid = write_checkpoint(tmp_path / "hybrid", "qwen3_next")
    refused(UserError, "layer 0 keeps no row", "attend to all", llama, method="draft", model=str(hybrid.path))
    other = write_checkpoint(tmp_path / "other", "llama", vocab_size=300)
    refused(
        UserError,
        "300 tokens, the model's 263",
        "own tokenizer",
        llama,
        method="draft",
        model=str(other.path),
    )
    refused(UserError, "without a model", "model: the folder", llama, method="draft")
    refused(
        CheckpointError, "no such folder", "config.json", llama, method="eagle3", model=str(tmp_path / "none")
    )
    refused(
        CheckpointError,
        "no config.json",
        "rayk checkpoint eagle3",
        llama,
        method="eagle3",
        model=str(tmp_path),
    )


def test_eagle3_of_several_residual_streams_is_refused(llama: Checkpoint, head: Path, tmp_path: Path) -> None:
    streams = write_checkpoint(tmp_path / "model", "gemma3n")
    fitting = replace(streams.config, vocab_size=263, hidden_size=64)
    with pytest.raises(UserError, match="several residual streams"):
        drafter_of(SpeculativeConfig(method="eagle3", model=str(head)), fitting, engine_of(streams.path))


def test_mtp_without_such_layers_is_refused(llama: Checkpoint, deepseek: Checkpoint, tmp_path: Path) -> None:
    refused(UserError, "has no multi-token prediction layers", "deepseek_v3, qwen3_next", llama, method="mtp")
    bare = write_checkpoint(tmp_path / "bare", "deepseek_v3")
    assert bare.config.mtp_layers
    refused(UserError, "no tensor model.layers.3.eh_proj.weight", "another method", bare, method="mtp")
    refused(
        UserError, "3 tokens of 2 MTP layers, one of each", "at most 2", deepseek, method="mtp", num_tokens=3
    )
    two = write_checkpoint(tmp_path / "two", "qwen3_next", num_nextn_predict_layers=2)
    refused(UserError, "one MTP layer is supported here", "num_nextn_predict_layers: 1", two, method="mtp")


def test_tp_sizes_of_a_drafter(llama: Checkpoint, head: Path, tmp_path: Path) -> None:
    def sized(tp: int | None, engine_tp: int) -> int:
        return find(llama, engine_tp, method="eagle3", model=str(head), tp=tp).tp

    assert [sized(None, 4), sized(1, 4), sized(4, 4)] == [1, 1, 4]
    with pytest.raises(UserError, match="whole on each rank") as caught:
        sized(2, 4)
    assert "speculative.tp: 1 or speculative.tp: 4" in caught.value.mend
    change_config(head, num_attention_heads=6)
    with pytest.raises(Unsupported, match="TP 4 does not divide the model's 6 query heads"):
        sized(4, 4)
    assert sized(1, 4) == 1


def break_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = torch.nan


def break_twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def break_far(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][2] = 263


def break_flags(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].logical_not()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("d2t"), "tensor d2t is missing"),
        (lambda tensors: tensors.pop("fc.weight"), "tensor fc.weight is missing"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].float()), "tensor d2t has dtype F32"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"][:-1].clone()), "tensor d2t has shape [64]"),
        (lambda tensors: tensors.update({"fc.weight": torch.ones(64, 64)}), "fc.weight has shape [64, 64]"),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.q_proj.weight": torch.ones(128, 64)}),
            "midlayer.self_attn.q_proj.weight has shape [128, 64], config.json asks for [128, 128]",
        ),
        (break_nan, "tensor midlayer.mlp.up_proj.weight holds NaN or infinities"),
        (break_twice, "two tokens of the head are one of the model's"),
        (break_far, "would be token 265 of a vocabulary of 263"),
        (break_flags, "tensors d2t and t2d name unlike tokens"),
    ],
)
def test_damaged_heads_are_refused(llama: Checkpoint, head: Path, change: Any, words: str) -> None:
    change_tensors(head, change)
    with pytest.raises(CheckpointError) as caught:
        load_both(llama, find(llama, method="eagle3", model=str(head)), LocalComm())
    assert words in str(caught.value), caught.value
    assert str(head) in caught.value.where


def test_damaged_mtp_layers_are_refused(deepseek: Checkpoint, tmp_path: Path) -> None:
    for name in ("infinite", "missing"):
        shutil.copytree(deepseek.path, tmp_path / name)

    def break_norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.4.hnorm.weight"][0] = torch.inf

    change_tensors(tmp_path / "infinite", break_norm)
    change_tensors(
        tmp_path / "missing", lambda tensors: tensors.pop("model.layers.4.shared_head.norm.weight")
    )
    for name, words in (
        ("infinite", r"layers\.4\.hnorm\.weight holds NaN or infinities"),
        ("missing", r"layers\.4\.shared_head\.norm\.weight is missing"),
    ):
        saved = replace(deepseek, path=tmp_path / name)
        with pytest.raises(CheckpointError, match=words):
            load_both(saved, find(saved, method="mtp", num_tokens=1), LocalComm())


def test_names_that_other_writers_give_a_heads_layer(llama: Checkpoint, head: Path) -> None:
    before = load_both(llama, find(llama, method="eagle3", model=str(head)), LocalComm())[1]
    hidden = torch.randn(3, 64)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("midlayer.", "model.layers.0.")] = tensors.pop(name)

    change_tensors(head, rename)
    after = load_both(llama, find(llama, method="eagle3", model=str(head)), LocalComm())[1]
    assert torch.equal(before.logits(hidden), after.logits(hidden))


ALONE = EngineConfig(model="m")


@pytest.mark.parametrize(
    ("settings", "engine", "words", "mend"),
    [
        ({"method": "eagle3"}, {"pp": 2}, "pp: 2", "pp: 1, or method: ngram"),
        ({"method": "draft"}, {"tp": 2, "dcp": 2}, "dcp: 2", "dcp: 1, or method: ngram"),
        ({"method": "mtp", "prompt_lookup_max": 5}, {}, "prompt_lookup_max is for method ngram", "leave"),
        ({"method": "draft", "prompt_lookup_min": 1}, {}, "prompt_lookup_min is for method ngram", "leave"),
        ({"method": "mtp", "model": "x"}, {}, "model is for method draft or eagle3", "leave `model` out"),
        (
            {"method": "ngram", "model": "x"},
            {},
            "model is for method draft or eagle3, not ngram",
            "leave `model` out",
        ),
        ({"method": "ngram", "tp": 1}, {}, "tp is for method draft or eagle3 or mtp", "leave `tp` out"),
        ({"method": "ngram", "prompt_lookup_min": 6}, {}, "prompt_lookup_min 6 is more than", "at most 4"),
    ],
)
def test_settings_that_do_not_belong_together(
    llama: Checkpoint, settings: dict[str, Any], engine: dict[str, Any], words: str, mend: str
) -> None:
    with pytest.raises(UserError) as caught:
        refuse_speculative(SpeculativeConfig(**settings), replace(ALONE, **engine), llama.config)
    assert words in caught.value.problem
    assert mend in caught.value.mend


def test_fast_prefill_leaves_hidden_states_out(llama: Checkpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma3n")
    sharing = load_config(tmp_path)
    assert sharing.fast_prefill_layers
    fast = replace(ALONE, fast_prefill=True)
    with pytest.raises(UserError, match="no hidden states of most of a prompt's tokens") as caught:
        refuse_speculative(SpeculativeConfig(method="eagle3"), fast, sharing)
    assert "fast_prefill: false" in caught.value.mend
    refuse_speculative(SpeculativeConfig(method="draft"), fast, sharing)
    refuse_speculative(SpeculativeConfig(method="eagle3"), fast, llama.config)
    refuse_speculative(SpeculativeConfig(method="ngram"), replace(fast, pp=2), sharing)
