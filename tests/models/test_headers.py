"""config.json held against the headers of the weights, by the loader's own names and without weights."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.models.families import load_config
from rayk.models.fingerprint import fingerprint
from rayk.models.headers import INDEX_FILE, stored_tensors
from rayk.models.unused import note_unused, unused_tensors
from rayk.parallel.local import LocalComm
from rayk.types.errors import CheckpointError, UserError
from tests.models.tiny import CLASSES, Checkpoint, load, write_checkpoint

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("family", CLASSES)
def test_every_family_asks_for_what_transformers_saves(tmp_path: Path, family: str) -> None:
    """None is missing, none is left over; and whatever is taken away or cut is named."""
    checkpoint = write_checkpoint(tmp_path, family)
    assert unused_tensors(tmp_path, checkpoint.config) == {}
    tensors = load_file(tmp_path / WEIGHTS)
    for name in list(tensors)[:: max(1, len(tensors) // 6)]:
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match="is missing"):
            unused_tensors(tmp_path, checkpoint.config)
        save_file(tensors | {name: torch.zeros(3, 5, 7)}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match=r"has shape \[3, 5, 7\], config.json asks for"):
            unused_tensors(tmp_path, checkpoint.config)


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path, "llama", num_hidden_layers=2)


def test_what_is_not_used_is_one_line(saved: Checkpoint) -> None:
    file = saved.path / WEIGHTS
    extra = [f"mtp.layers.{i}.weight" for i in range(20)]
    extra += [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in (0, 1)]
    extra += ["model.layers.0.self_attn.q_proj.bias", "vision_tower", "model.layers.2.norm"]
    save_file(load_file(file) | {name: torch.zeros(1) for name in extra}, file)
    assert note_unused(saved.path, saved.config) == (
        f"{saved.path}: 25 tensors not used: model.layers.*.self_attn.q_proj.bias, "
        "model.layers.*.self_attn.rotary_emb.*, model.layers.2.*, mtp.*, vision_tower"
    )
    load(saved, LocalComm())


def test_an_extra_file_is_no_difference(tmp_path: Path) -> None:
    """Fingerprint and loader go by the index."""
    checkpoint = write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    before = fingerprint(tmp_path, checkpoint.config)
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "zz-adapter.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"?")
    assert fingerprint(tmp_path, load_config(tmp_path)) == before
    assert unused_tensors(tmp_path, checkpoint.config) == {}


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff" * 20, "a header of"),
        (struct.pack("<Q", 1 << 40) + b"{}", "a header of"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "nested deeper"),
        (header(x=GOOD | {"data_offsets": [0, 1 << 50]}), "cannot have"),
        (header(x=GOOD | {"shape": [1 << 60] * 9}), "cannot have"),
        (header(x=GOOD | {"shape": [10**4000] * 9}), "lacks a dtype, shape"),
        (header(x=GOOD | {"data_offsets": [-4, 12]}), "lacks a dtype, shape"),
        (header(x=GOOD | {"data_offsets": [64, 80]}), "bytes are there"),
        (header(x=[]), "lacks a dtype, shape"),
    ],
)
def test_headers_that_lie(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0", "x" * 999]
)
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    (tmp_path.parent / "x.safetensors").write_bytes(header(x=GOOD))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="outside its folder|not there"):
        stored_tensors(tmp_path)


def test_an_index_that_is_wrong_about_a_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    first, *_, last = sorted(index["weight_map"])
    index["weight_map"][first] = index["weight_map"][last]
    shutil.copy(tmp_path / INDEX_FILE, tmp_path / "kept")
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"tensor {first} is in .*, which lacks it"):
        stored_tensors(tmp_path)


def test_a_named_file_is_no_link_out_of_the_folder_but_to_a_caches_blobs(tmp_path: Path) -> None:
    """As Hugging Face's own client lays its cache out."""
    folder = tmp_path / "models--a--b" / "snapshots" / "0f"
    blob, elsewhere = tmp_path / "models--a--b" / "blobs" / "9c", tmp_path / "else" / "9c"
    folder.mkdir(parents=True)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    for target in (elsewhere, blob):
        target.parent.mkdir()
        target.write_bytes(header(x=GOOD))
    (folder / "a.safetensors").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="outside its folder: 'a.safetensors'"):
        stored_tensors(folder)
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(Path("..", "..", "blobs", "9c"))
    assert stored_tensors(folder).keys() == {"x"}


LIES = [
    ("vocab_size", 10**12), ("num_hidden_layers", 10**9), ("num_attention_heads", 1 << 40),
    ("head_dim", 10**9),
    ("max_position_embeddings", 10**400), ("rope_theta", 10**400), ("bos_token_id", 10**400),
    ("model_type", "gpt2"), ("model_type", ["llama"]), ("num_key_value_heads", -1),
    ("architectures", [["x"] * 9999]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), LIES, ids=lambda v: str(v)[:12])
def test_configs_that_lie(saved: Checkpoint, key: str, value: Any) -> None:
    """A number that nothing has been held against allocates nothing; another family's name is refused."""
    file = saved.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=key if key != "architectures" else "not supported") as caught:
        load_config(saved.path)
    assert len(str(caught.value)) < 8000


def test_settings_of_kimi_are_deepseeks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    assert load_config(tmp_path).family == "deepseek_v3"


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 9999 + b"}"])
def test_configs_that_no_parser_should_end_at(saved: Checkpoint, content: bytes) -> None:
    (saved.path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON: "):
        load_config(saved.path)


def read(folder: Path) -> None:
    load_config(folder)
    stored_tensors(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(saved: Checkpoint, name: str) -> None:
    (saved.path / name).unlink()
    os.mkfifo(saved.path / name)
    with pytest.raises(CheckpointError, match="not a plain file"):
        read(saved.path)
    (saved.path / name).unlink()
    (saved.path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a plain file"):
        read(saved.path)
