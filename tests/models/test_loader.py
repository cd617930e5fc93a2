"""Cutting weights while reading them, and what is said of weights that do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.attention import get_backend
from rayk.models.families import load_config
from rayk.models.headers import INDEX_FILE
from rayk.models.load_memory import LoadMemory, held_bytes, measured, tensors_of
from rayk.models.loader import load_decoder
from rayk.models.weights import OpenWeights, WeightReader
from rayk.parallel.local import LocalComm
from rayk.parallel.threads import ThreadComm
from rayk.types.errors import CheckpointError, Unsupported
from tests.house import ROOT
from tests.markers import thorough
from tests.models.tiny import Checkpoint, Paged, assert_right, load, run_ranks, write_checkpoint


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model whose norms are a small part of it."""
    return write_checkpoint(
        tmp_path_factory.mktemp("wide"),
        "qwen2",
        head_dim="absent",
        hidden_size=128,
        intermediate_size=512,
        num_key_value_heads=8,
        vocab_size=1031,
        num_hidden_layers=2,
    )


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_rank_holds_and_reads_its_share_only(
    wide: Checkpoint, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[WeightReader] = []
    original = WeightReader.__exit__

    def remember(self: WeightReader, *args: object) -> None:
        readers.append(self)
        original(self, *args)

    monkeypatch.setattr(WeightReader, "__exit__", remember)
    total = sum(p.numel() * 4 for p in wide.model.parameters())
    largest = max(p.numel() * 4 for p in wide.model.parameters())
    for num_bytes in run_ranks(tp_size, lambda comm: held_bytes(load(wide, comm))):
        assert total / tp_size * 0.99 < num_bytes < total / tp_size * 1.03
    assert len(readers) == tp_size
    for reader in readers:
        # One vocabulary row more than an even share.
        assert reader.max_read_bytes <= largest / tp_size + 128 * 4
        assert reader.total_read_bytes < total / tp_size * 1.03


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of 90 MB, beside which what else a process does is small."""
    return write_checkpoint(
        tmp_path_factory.mktemp("large"),
        "qwen2",
        head_dim="absent",
        hidden_size=1024,
        intermediate_size=4096,
        num_key_value_heads=8,
        vocab_size=2048,
        num_hidden_layers=1,
    )


class Hoarder(WeightReader):
    """Keeps a second copy of whatever is read, until the loading ends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hoard: list[torch.Tensor] = []

    def read(self, *arguments: Any, **options: Any) -> torch.Tensor:
        piece = super().read(*arguments, **options)
        self._hoard.append(piece.clone())
        return piece

    def __exit__(self, *error: Any) -> None:
        self._hoard.clear()
        super().__exit__(*error)


def loading(folder: str, reader: OpenWeights) -> LoadMemory:
    """What loading takes in this process."""
    load_here = partial(
        load_decoder,
        folder,
        load_config(Path(folder)),
        comm=LocalComm(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=get_backend("reference", "cpu"),
    )
    decoder, memory = measured(lambda opened: load_here(open_weights=opened), reader, torch.device("cpu"))
    assert memory.weight_bytes == held_bytes(decoder)
    return memory


def loading_in_a_new_process(checkpoint: Checkpoint, reader: type[WeightReader]) -> LoadMemory:
    """One that has freed nothing yet, and whose malloc gives back what it is given back."""
    call = f"loading({str(checkpoint.path)!r}, {reader.__name__})"
    script = f"import dataclasses, json\nfrom tests.models.test_loader import {reader.__name__}, loading\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}print(json.dumps(dataclasses.asdict({call})))"],
        cwd=ROOT,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return LoadMemory(**json.loads(done.stdout))


@thorough
def test_loading_holds_the_weights_and_one_tensor(large: Checkpoint) -> None:
    """A second copy of what is read is seen."""
    total = sum(p.numel() * 4 for p in large.model.parameters())
    largest = max(p.numel() * 4 for p in large.model.parameters())
    stacked = 2 * largest  # gate_proj and up_proj, which the layer holds as one
    memory = loading_in_a_new_process(large, WeightReader)
    assert 60e6 < total <= memory.weight_bytes < total + 4096  # rope's frequencies, which nobody stores
    assert memory.max_read_bytes == largest
    assert memory.load_device_peak_bytes is None
    assert memory.load_peak_bytes is not None
    others = 32 << 20  # of libraries, at first use
    assert total < memory.load_peak_bytes < total + stacked + others
    hoarded = loading_in_a_new_process(large, Hoarder)
    assert hoarded.weight_bytes == memory.weight_bytes
    assert hoarded.load_peak_bytes is not None
    assert hoarded.load_peak_bytes > memory.load_peak_bytes + 0.8 * total


def test_split_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / INDEX_FILE).is_file()
    ids = [[3, 1, 4, 1, 5, 9, 2, 6]]
    for logits in run_ranks(2, lambda comm: Paged(load(checkpoint, comm), 1).step(ids)):
        assert_right(checkpoint, ids[0], logits[0])


def test_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({k: v.to(torch.float16) for k, v in stored.items()}, tmp_path / "model.safetensors")

    def dtypes(comm, dtype):
        decoder = load(checkpoint, comm, dtype)
        # Angles and head indices are what they are in any dtype.
        return {t.dtype for t in tensors_of(decoder) if t.dim() == 2}

    for dtype in (torch.float32, torch.bfloat16):
        assert run_ranks(2, lambda comm, dtype=dtype: dtypes(comm, dtype)) == [{dtype}] * 2


def test_tied_weights_are_held_once(tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    free = write_checkpoint(tmp_path / "free", "llama", tie_word_embeddings=False)
    (a,), (b,) = (run_ranks(1, lambda comm, c=c: held_bytes(load(c, comm))) for c in (tied, free))
    assert b - a == 263 * 64 * 4


def test_query_heads_that_cannot_be_shared(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(
        tmp_path, "llama", num_attention_heads=6, num_key_value_heads=2, hidden_size=96
    )
    with pytest.raises(Unsupported, match="TP 4 does not divide the model's 6 query heads"):
        load(checkpoint, ThreadComm.make_group(4)[0])


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path, "llama", num_hidden_layers=1)


def change(checkpoint: Checkpoint, **changes: torch.Tensor | None) -> None:
    """Rewrite the checkpoint's file with tensors replaced, added or (None) removed."""
    file = checkpoint.path / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = dict(load_file(file)) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, file)


def refused(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, ThreadComm.make_group(1)[0])
    return str(caught.value)


def test_missing_tensor(saved: Checkpoint) -> None:
    change(saved, **{"model.layers.0.mlp.up_proj.weight": None})
    text = refused(saved)
    assert "tensor model.layers.0.mlp.up_proj.weight is missing" in text
    assert str(saved.path) in text


def test_tensor_of_another_shape(saved: Checkpoint) -> None:
    change(saved, **{"model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 64)})
    text = refused(saved)
    assert "model.layers.0.self_attn.k_proj.weight has shape [16, 64]" in text
    assert "asks for [32, 64]" in text
    assert "model.safetensors" in text


def test_tensor_of_a_strange_dtype(saved: Checkpoint) -> None:
    change(saved, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    assert "model.norm.weight has dtype I8" in refused(saved)


def test_truncated_file(saved: Checkpoint) -> None:
    file = saved.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    text = refused(saved)
    assert "not a readable safetensors file" in text
    assert str(file) in text


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[0]
    gone.unlink()
    assert f"files that are not there: {gone.name}" in refused(checkpoint)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {str(i): f"gone{i}" for i in range(9)}}))
    assert refused(checkpoint).count("gone") == 3
    (tmp_path / INDEX_FILE).write_text(json.dumps({}))
    assert "`weight_map` is missing" in refused(checkpoint)
    (tmp_path / INDEX_FILE).unlink()
    assert f"no {INDEX_FILE}" in refused(checkpoint)
