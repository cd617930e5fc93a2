"""Random heads and further layers for tiny checkpoints: what is written, and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rayk.models.drafters.config import drafter_of
from rayk.models.families import load_config
from rayk.oracle.checkpoint import read_marker, write_checkpoint
from rayk.oracle.eagle3 import write_eagle3
from rayk.oracle.files import file_digests
from rayk.oracle.reference import Reference
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, UserError
from rayk.types.speculative import SpeculativeConfig
from tests.conftest import CheckpointFactory
from tests.markers import one_per

MTP = {"num_nextn_predict_layers": 1}


@one_per()
@pytest.mark.parametrize(("family", "max_shard_size"), [("qwen3_next", None), ("deepseek_v3", "100KB")])
def test_layers_that_predict_further_are_written(
    tmp_path: Path, family: str, max_shard_size: str | None
) -> None:
    """As a release has them: config.json states them, the weights hold them, and the model's answers stay."""
    path = write_checkpoint(family, tmp_path / "m", overrides=MTP, max_shard_size=max_shard_size)
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    engine = EngineConfig(model=str(path))
    found = drafter_of(SpeculativeConfig(method="mtp"), load_config(path), engine)
    assert found.keys == ((load_config(path).num_layers, "attention"),)
    probe = read_marker(path)["probes"][0]
    (output,) = Reference(path).generate([probe["prompt"]], 24)
    assert list(output.token_ids) == probe["output"]
    before = file_digests(path)
    write_checkpoint(family, path, overrides=MTP, max_shard_size=max_shard_size)
    assert file_digests(path) == before


def test_they_are_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with quantised weights"):
        write_checkpoint("deepseek_v3", tmp_path / "m", overrides=MTP, quantise="fp8-block")


def test_a_head_is_written_once(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    target, folder = checkpoint("llama"), tmp_path / "head"
    assert write_eagle3(folder, target, seed=1) == folder
    first, written = load_file(folder / "model.safetensors"), (folder / "config.json").stat().st_mtime_ns
    write_eagle3(folder, target, seed=1)
    assert (folder / "config.json").stat().st_mtime_ns == written
    ids = torch.arange(128) + first["d2t"]
    assert ids.unique().tolist() == ids.tolist()
    assert first["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    write_eagle3(folder, target, seed=2, dtype="bfloat16", overrides={"draft_vocab_size": 5})
    second = load_file(folder / "model.safetensors")
    assert second["d2t"].shape == (5,)
    assert second["fc.weight"].dtype == torch.bfloat16
    assert not torch.equal(second["fc.weight"].float(), first["fc.weight"])
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"changed after it was written: config\.json"):
        write_eagle3(folder, target, seed=2)
    write_eagle3(folder, target, seed=2, force=True)
    assert load_file(folder / "model.safetensors")["d2t"].shape == (128,)


def test_what_no_head_can_have_is_refused(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    target = checkpoint("llama")
    for overrides, words in (
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"draft_vocab_size": 516}, "draft_vocab_size 516"),
        ({"draft_vocab_sizes": 5}, "unknown config key 'draft_vocab_sizes'"),
        ({"hidden_act": "nonsense"}, "transformers cannot build it"),
    ):
        with pytest.raises(UserError, match=words):
            write_eagle3(tmp_path / "head", target, overrides=overrides)
        assert not (tmp_path / "head").exists()
    with pytest.raises(CheckpointError, match="no model to write a head for"):
        write_eagle3(tmp_path / "head", tmp_path)
    with pytest.raises(UserError, match="a checkpoint of llama"):
        write_eagle3(target, target)
