"""The checkpoint writer: what it promises of the weights, the files and bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rayk.models.families import FAMILIES as READABLE
from rayk.oracle.checkpoint import MARKER, SUPPORTED, read_marker, write_checkpoint
from rayk.oracle.files import checkpoint_hash, is_whole, replaced_folder
from rayk.oracle.reference import Reference
from rayk.oracle.tiny import FAMILIES, HYBRID, family_values, make_config
from rayk.types.errors import UnsupportedArchitecture, UserError
from tests.conftest import CheckpointFactory
from tests.families import ATTENTION
from tests.markers import one_per, sweep, thorough
from tests.overrides import LINEAR_ROPE, YARN

MakeReference = Callable[..., Reference]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in SUPPORTED),
    ("qwen3", {"overrides": dict(HYBRID)}),
    ("llama", {"tie": True}),
    ("llama", {"overrides": dict(LINEAR_ROPE)}),
    ("qwen3", {"overrides": dict(YARN)}),
]

# About 30 kB of weights, for tests of files.
SMALL = {
    "hidden_size": 16,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 22,
    "vocab_size": 300,
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def write_small(folder: Path, **options: Any) -> Path:
    overrides = SMALL | options.pop("overrides", {})
    return write_checkpoint("qwen3", folder, overrides=overrides, **options)


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_promise_holds_on_disk(
    checkpoint: CheckpointFactory, reference: MakeReference, family: str, options: dict[str, Any]
) -> None:
    """The saved files, read back by transformers, give the promised output and margins."""
    path = checkpoint(family, **options)
    marker = read_marker(path)
    assert [len(p["prompt"]) for p in marker["probes"]] == [5, 37, 300]
    outputs = reference(path).generate([p["prompt"] for p in marker["probes"]], 24)
    for probe, output in zip(marker["probes"], outputs, strict=True):
        assert list(output.token_ids) == probe["output"]
        assert output.finish_reason == "length"
        assert len(set(output.token_ids)) >= 12
        assert min(output.margins) > 0.03
        assert min(output.margins) == pytest.approx(probe["margin"], abs=1e-3)
        assert 3.0 < probe["logit_std"] < 5.0
    assert marker["margin"] == min(p["margin"] for p in marker["probes"])


@pytest.mark.parametrize("family", SUPPORTED)
def test_float32_noise_is_far_below_the_margin(checkpoint: CheckpointFactory, family: str) -> None:
    path = checkpoint(family)
    marker = read_marker(path)
    single, double = Reference(path), Reference(path, "float64")
    for probe in marker["probes"]:
        narrow = single.teacher_force(probe["prompt"], probe["output"])
        wide = double.teacher_force(probe["prompt"], probe["output"])
        for a, b in zip(narrow, wide, strict=True):
            assert a.argmax_id == b.argmax_id == a.chosen_id
            noise = max(abs(x - y) for x, y in zip(a.top_logits, b.top_logits, strict=True))
            assert noise < marker["margin"] / 10


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_tensor_is_drawn(checkpoint: CheckpointFactory, family: str) -> None:
    drawn = tensors(checkpoint(family))
    assert drawn
    for name, tensor in drawn.items():
        assert float(tensor.std()) > 0.005, name
        assert len(tensor.unique()) > 0.9 * tensor.numel() or tensor.numel() > 1000, name
    tied = FAMILIES[family].get("tie_word_embeddings", False)
    assert ("lm_head.weight" in drawn) == (not tied)
    if family == "qwen2":
        assert sum(name.endswith("_proj.bias") for name in drawn) == 12


@one_per()
@pytest.mark.parametrize("family", ATTENTION)
def test_a_wrong_cache_changes_the_output(checkpoint: CheckpointFactory, family: str) -> None:
    """Attention carries enough that one lost block of 16 tokens, or one lost head, shows."""
    from transformers import AutoModelForCausalLM, DynamicCache

    path = checkpoint(family)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    probe = read_marker(path)["probes"][1]

    def decode(damage: Callable[[torch.Tensor], None]) -> list[int]:
        cache, output = DynamicCache(), [probe["output"][0]]
        with torch.no_grad():
            model(torch.tensor([probe["prompt"]]), past_key_values=cache)
            for layer in cache.layers:
                damage(layer.keys)
                damage(layer.values)
            while len(output) < 24:
                step = model(torch.tensor([[output[-1]]]), past_key_values=cache)
                output.append(int(step.logits[0, -1].argmax()))
        return output

    def lose_last_block(tensor: torch.Tensor) -> None:
        tensor[:, :, 32:] = 0

    def lose_head(tensor: torch.Tensor) -> None:
        tensor[:, 1] = 0

    assert decode(lambda tensor: None) == probe["output"]
    assert decode(lose_last_block) != probe["output"]
    assert decode(lose_head) != probe["output"]


def test_dimensions_are_awkward(checkpoint: CheckpointFactory) -> None:
    for family in ATTENTION:
        config = json.loads((checkpoint(family) / "config.json").read_text())
        assert config["num_attention_heads"] == 8
        assert config["num_key_value_heads"] == 2
        assert config["vocab_size"] % 2 == 1
        # Experts are dealt out whole.
        awkward = "num_local_experts" if family == "gpt_oss" else "intermediate_size"
        sizes = config[awkward]
        assert all(size % 4 for size in (sizes if isinstance(sizes, list) else [sizes]))
    for family in ("qwen3", "gemma3", "gemma3n", "gpt_oss"):
        config = json.loads((checkpoint(family) / "config.json").read_text())
        assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    for family in ("mistral", "gemma3", "gemma3n", "gpt_oss", "cohere2"):
        config = json.loads((checkpoint(family) / "config.json").read_text())
        # Crossed during the decode that follows the prompt of 37 tokens.
        assert 37 < config["sliding_window"] < 37 + 24
        assert config["sliding_window"] % 16 != 0
        kinds = set(config.get("layer_types", ["sliding_attention"]))
        assert kinds == {"sliding_attention"} | ({"full_attention"} if family != "mistral" else set())


def test_hybrid_has_both_kinds_of_layers(checkpoint: CheckpointFactory) -> None:
    path = checkpoint("qwen3", overrides=dict(HYBRID))
    config = json.loads((path / "config.json").read_text())
    assert config["layer_types"] == ["full_attention"] * 2 + ["sliding_attention"] * 2


TEXT = 'Grüße! 你好\n\n\t "x" 🎉 a\u200bb  <html> \x00\x7f 𝔘 [user] ' + "".join(map(chr, range(1, 700)))


@pytest.mark.parametrize("family", SUPPORTED)
def test_tokenizer_round_trips_text(checkpoint: CheckpointFactory, family: str) -> None:
    from transformers import AutoTokenizer

    path = checkpoint(family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    # AutoTokenizer gives qwen2 a normaliser of its own.
    text = unicodedata.normalize("NFC", TEXT) if family == "qwen2" else TEXT + "e\u0301"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer("the prefill engine reads the prompt").input_ids) < 20, "no merges"
    assert (ids[0] == tokenizer.bos_token_id) == (
        family in ("cohere2", "gemma2", "gemma3", "gemma3n", "llama", "mistral")
    )
    for token in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{token}_token_id") == config[f"{token}_token_id"]


def test_chat_template(checkpoint: CheckpointFactory) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen3"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|bos|>[user]\nhi\n<|eos|>[assistant]\n"


@thorough
def test_same_parameters_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = write_small(tmp_path / "a"), write_small(tmp_path / "b")
    assert checkpoint_hash(first) == checkpoint_hash(second)
    assert checkpoint_hash(write_small(tmp_path / "c", seed=1)) != checkpoint_hash(first)


def test_a_finished_folder_is_kept_and_other_parameters_replace_it(tmp_path: Path) -> None:
    path = write_small(tmp_path / "model")
    inode = path.stat().st_ino
    assert write_small(tmp_path / "model").stat().st_ino == inode
    write_small(tmp_path / "model", seed=1)
    assert path.stat().st_ino != inode
    assert read_marker(path)["parameters"]["seed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "scratch folders are left"


def test_another_familys_folder_is_kept(tmp_path: Path) -> None:
    path = write_small(tmp_path / "model")
    before = checkpoint_hash(path)
    with pytest.raises(
        UserError, match=r"another family \(qwen3, not llama\)\n  mend: choose another folder"
    ):
        write_checkpoint("llama", path, overrides=SMALL)
    assert checkpoint_hash(path) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("whole") / "model", max_shard_size="10KB")


@sweep(3)
@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: second_shard(folder).unlink(),
        lambda folder: cut(second_shard(folder)),
        lambda folder: second_shard(folder).write_bytes(b""),
        lambda folder: cut(folder / "model.safetensors.index.json"),
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
    ],
    ids=["config", "tokenizer", "weights", "cut-weights", "empty-weights", "cut-index", "index"],
)
def test_a_folder_that_lacks_something_is_not_whole(
    shards: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = Path(shutil.copytree(shards, tmp_path / "model"))
    assert is_whole(path)
    damage(path)
    assert not is_whole(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(second_shard(folder)),
        lambda folder: cut(folder / MARKER),
        lambda folder: note(folder, transformers="4.0.0"),
    ],
    ids=["cut-weights", "cut-marker", "release"],
)
def test_a_damaged_or_outdated_folder_is_written_again(
    shards: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = Path(shutil.copytree(shards, tmp_path / "model"))
    damage(path)
    assert checkpoint_hash(path) != checkpoint_hash(shards)
    write_small(path, max_shard_size="10KB")
    assert checkpoint_hash(path) == checkpoint_hash(shards)
    assert is_whole(path)


@pytest.mark.parametrize("name", ["config.json", "model-00002", "tokenizer.json"])
def test_a_folder_that_somebody_changed_is_neither_left_nor_lost(
    shards: Path, tmp_path: Path, name: str
) -> None:
    """Whole, and of the same parameters by what it says of itself: yet not what the command gives."""
    path = Path(shutil.copytree(shards, tmp_path / "model"))
    file = next(file for file in path.iterdir() if file.name.startswith(name))
    changed = bytearray(file.read_bytes())
    # Of a tensor or a text, the length as it was.
    changed[-3] ^= 1
    file.write_bytes(changed)
    for options in ({}, {"seed": 1}):
        with pytest.raises(
            UserError, match=f"changed after it was written: {file.name}\n  mend: `rayk checkpoint --force`"
        ):
            write_small(path, max_shard_size="10KB", **options)
        assert file.read_bytes() == changed
    write_small(path, max_shard_size="10KB", force=True)
    assert checkpoint_hash(path) == checkpoint_hash(shards)


def note(folder: Path, **changes: object) -> None:
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(marker | changes, indent=1))


@pytest.mark.parametrize("family", SUPPORTED)
def test_config_classes_leave_the_parameters_alone(family: str) -> None:
    """A finished folder is recognised by the values that were asked for, not by what became of them."""
    before = deepcopy(family_values(family, {}))
    config = make_config(family, family_values(family, {}))
    assert family_values(family, {}) == before
    assert config.vocab_size == before["vocab_size"]


def test_recognising_a_finished_folder_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write_small(tmp_path / "model")
    script = (
        "import sys; from rayk.oracle.checkpoint import write_checkpoint\n"
        f"write_checkpoint('qwen3', {str(path)!r}, overrides={SMALL!r})\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not written by this command"):
        write_small(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        write_small(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@thorough
def test_sharded_and_tied_files(tmp_path: Path) -> None:
    whole = write_small(tmp_path / "whole")
    sharded = write_small(tmp_path / "sharded", max_shard_size="10KB")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert not (whole / "model.safetensors.index.json").exists()
    one, many = tensors(whole), tensors(sharded)
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert "lm_head.weight" in one
    assert "lm_head.weight" not in tensors(write_small(tmp_path / "tied", tie=True))


def test_dtype_on_disk(tmp_path: Path) -> None:
    path = write_small(tmp_path / "half", dtype="bfloat16")
    assert {t.dtype for t in tensors(path).values()} == {torch.bfloat16}
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    probe = read_marker(path)["probes"][0]
    assert list(Reference(path).generate([probe["prompt"]], 24)[0].token_ids) == probe["output"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "phi3", "cohere2"])
def test_half_precision_weights_keep_the_promise(
    checkpoint: CheckpointFactory, reference: MakeReference, family: str, dtype: str
) -> None:
    path = checkpoint(family, dtype=dtype)
    drawn, marker = tensors(path), read_marker(path)
    assert {t.dtype for t in drawn.values()} == {getattr(torch, dtype)}
    assert all(bool(t.isfinite().all()) for t in drawn.values())
    prompts = [probe["prompt"] for probe in marker["probes"]]
    outputs = reference(path).generate(prompts, 24)
    assert [list(o.token_ids) for o in outputs] == [probe["output"] for probe in marker["probes"]]
    assert min(min(o.margins) for o in outputs) > 0.03


def test_short_models_promise_what_fits(tmp_path: Path) -> None:
    path = write_small(tmp_path / "short", overrides={"max_position_embeddings": 64})
    assert [len(p["prompt"]) for p in read_marker(path)["probes"]] == [5, 37]


def test_old_rope_keys_replace_the_family_rope(tmp_path: Path) -> None:
    overrides = SMALL | {"rope_theta": 5000.0}
    path = write_checkpoint("llama", tmp_path / "model", overrides=overrides)
    config = json.loads((path / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "default"}


@thorough
def test_old_gemma3_keys(tmp_path: Path) -> None:
    """Of released checkpoints: one scaling, for full layers, and a base of their own for sliding ones."""
    old = {"rope_theta": 50000.0, "rope_local_base_freq": 500.0, "sliding_window_pattern": 3}
    overrides = SMALL | old | {"num_hidden_layers": 3, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    path = write_checkpoint("gemma3", tmp_path / "model", overrides=overrides)
    config = json.loads((path / "config.json").read_text())
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    assert config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]


def test_unknown_family_names_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="did you mean 'qwen3'") as caught:
        write_checkpoint("qwen33", tmp_path / "model")
    assert caught.value.supported == tuple(sorted(READABLE))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"hiden_size": 32}}, "did you mean 'hidden_size'"),
        ({"overrides": {"vocab_size": 200}}, "use 259 or more"),
        ({"overrides": {"vocab_size": "many"}}, "a whole number"),
        ({"overrides": {"hidden_size": "wide"}}, "hidden_size=wide, .*transformers cannot build or run it"),
        ({"overrides": {"num_attention_heads": 0}}, "num_attention_heads=0"),
        ({"dtype": "int4"}, "bfloat16, float16, float32"),
        ({"max_shard_size": "100"}, "e.g. 100KB"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_small(tmp_path / "model", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("mamba2", {"n_groups": 3}), ("jamba", {"num_hidden_layers": 1}), ("mamba2", {"num_heads": 3})],
    ids=str,
)
def test_values_that_transformers_cannot_run(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """They show in the config, in the model or in its first step; the message names them."""
    (key,) = overrides
    with pytest.raises(
        UserError, match=f"{family} with {key}={overrides[key]}: transformers cannot build or run it"
    ):
        write_checkpoint(family, tmp_path / "model", overrides=overrides)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_writer_is_not_blamed_on_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fail)
    with pytest.raises(ValueError, match="^a bug"):
        write_checkpoint("qwen3", tmp_path / "model")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "model", Path("/proc/model")):
        with pytest.raises(UserError, match=f"{folder}: cannot make a folder here"):
            write_small(folder)


def test_writers_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for _ in range(20):
            with replaced_folder(tmp_path / "model", marker="marker") as scratch:
                (scratch / "marker").write_text(str(writer))
                (scratch / "weights").write_text(str(writer))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    files = {p.name: p.read_text() for p in (tmp_path / "model").iterdir()}
    assert files.keys() == {"marker", "weights"}
    assert files["marker"] == files["weights"]
