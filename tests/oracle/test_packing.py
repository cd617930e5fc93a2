"""Checkpoints in the formats of quantised releases, against transformers' own loading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rayk.oracle import packing
from rayk.oracle.checkpoint import write_checkpoint
from rayk.oracle.dequantised import plain_checkpoint
from rayk.oracle.draw import draw_weights
from rayk.oracle.packing import PACKERS, Packed, mxfp4
from rayk.oracle.release_formats import RELEASE_FORMATS, release_format
from rayk.oracle.tiny import family_values, make_config
from rayk.types.errors import CheckpointError, UserError
from tests.conftest import CheckpointFactory
from tests.markers import one_per

SMALL = {"num_hidden_layers": 2}
Weights = dict[str, torch.Tensor]


def test_every_format_of_the_table_is_packed() -> None:
    assert PACKERS.keys() == RELEASE_FORMATS.keys()


def write_packed(folder: Path, family: str, form: str, *, files: str = "1GB", **values: Any) -> Weights:
    """Write a checkpoint without a search for a good draw, and return the weights that it stands for."""
    needed = release_format(form, family).values
    config = make_config(family, family_values(family, {**needed, **SMALL, **values}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_weights(model, seed=0, trial=0, dtype=torch.float32)
    packed = Packed(PACKERS[form])
    packed.round(model)
    model.save_pretrained(folder, max_shard_size=files)
    packed.replace(folder)
    return dict(model.state_dict())


def weights_of(folder: Path, **options: Any) -> Weights:
    """Return what transformers loads in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return dict(model.state_dict())


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@one_per("form")
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("form", "family", "config"),
    [
        ("fp8-block", "qwen3_moe", transformers.FineGrainedFP8Config),
        ("fp8-block", "deepseek_v3", transformers.FineGrainedFP8Config),
        ("fp8-tensor", "llama", transformers.CompressedTensorsConfig),
        ("fp8-channel", "qwen2", transformers.CompressedTensorsConfig),
        ("fp8-channel", "qwen3_moe", transformers.CompressedTensorsConfig),
        ("mxfp4", "gpt_oss", transformers.Mxfp4Config),
        ("int4", "llama", transformers.CompressedTensorsConfig),
        ("int8", "qwen2", transformers.CompressedTensorsConfig),
    ],
)
def test_what_is_written_means_what_transformers_loads(
    form: str, family: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cut-off blocks are beyond transformers; these divide all sizes.
    monkeypatch.setattr(packing, "FP8_BLOCK", [2, 2])
    meant = write_packed(tmp_path, family, form, files="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = weights_of(tmp_path, quantization_config=config(dequantize=True))
    assert_same(meant, expected)
    with plain_checkpoint(tmp_path) as plain:
        assert_same(weights_of(plain), expected)


@pytest.mark.parametrize(("form", "family"), [("fp8-block", "qwen3"), ("fp8-tensor", "phi3")])
def test_what_is_written_means_what_was_judged(form: str, family: str, tmp_path: Path) -> None:
    """With blocks that are cut off, and with several matrices in one."""
    meant = write_packed(tmp_path, family, form, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    with plain_checkpoint(tmp_path) as plain:
        assert_same(weights_of(plain), meant)


def test_plain_checkpoints_are_used_as_they_are(checkpoint: CheckpointFactory) -> None:
    path = checkpoint("qwen3")
    with plain_checkpoint(path) as plain:
        assert plain == path


def test_unknown_methods_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(CheckpointError, match="`quant_method` 'hqq'"), plain_checkpoint(tmp_path):
        pass


@pytest.mark.parametrize(
    ("form", "family", "match"),
    [
        ("fp9", "qwen3", r"no format 'fp9'\n.*fp8-block, fp8-tensor"),
        ("mxfp4", "qwen3", r"no release of qwen3 is in the format mxfp4\n.*for qwen3: fp8-block"),
        ("mxfp4", "mamba2", r"no release of mamba2 is in the format mxfp4\n.*mxfp4 is for gpt_oss"),
    ],
)
def test_formats_that_do_not_exist_are_named(form: str, family: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        write_checkpoint(family, tmp_path / "c", quantise=form)
    assert not (tmp_path / "c").exists()


def test_sizes_that_are_no_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="72 inputs cannot be stored in groups of 32"):
        write_packed(tmp_path, "gpt_oss", "mxfp4", intermediate_size=72)


def test_mxfp4_takes_the_nearest_number() -> None:
    """Against a search among all sixteen, with the exponent that the specification wants."""
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    values[0, :32] = 0
    values[1, 0] = 0.25 * values[1, 1:32].abs().amax()  # a tie is possible
    blocks, scales = mxfp4(values)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3).long()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers]).double()
    units = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    groups = values.double().unflatten(-1, (2, 32)).abs().amax(-1)
    assert torch.equal(scales[groups > 0].double() - 127, groups[groups > 0].log2().floor() - 2)
    errors = (values.double()[..., None] - units[..., None] * numbers).abs()
    assert torch.equal(errors.gather(-1, codes[..., None])[..., 0], errors.amin(-1))
