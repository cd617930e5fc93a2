"""What the reference dequantises, against what the formats' tools wrote; and what it packs, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rayk.oracle.dequantised import UNPACK
from rayk.oracle.packing import PACKERS
from rayk.types.errors import UserError

FIXTURES = Path(__file__).parent.parent / "models" / "packed"
MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.safetensors")), ids=lambda file: str(file.stem))
def test_the_reference_is_that_of_the_tools(file: Path) -> None:
    """Of GPTQ with both versions of its zero points."""
    with safe_open(file, "pt") as opened:
        settings: dict[str, Any] = json.loads(opened.metadata()["config"])
    tensors = load_file(file)
    expected, second = tensors.pop("expected"), tensors.pop("qzeros_v2", None)
    unpack = UNPACK[settings["quant_method"]]
    found = unpack(settings, MODULE, dict(tensors))
    assert set(found) == {"weight"}
    assert found["weight"].dtype == torch.float32
    assert torch.equal(found["weight"].to(expected.dtype), expected)
    if second is not None:
        # Its words differ, so that reading one as the other would show.
        assert not torch.equal(second, tensors["qzeros"])
        newer = unpack(settings | {"checkpoint_format": "gptq_v2"}, MODULE, tensors | {"qzeros": second})
        assert torch.equal(newer["weight"], found["weight"])


# Most steps between two codes, of a group's range (of int4, 15 of them) or of its largest weight.
STEPS = {"awq": 15, "gptq": 15, "int4": 15, "int8": 255, "modelopt-fp8": 14, "modelopt-nvfp4": 6}


@pytest.mark.parametrize("name", STEPS)
def test_packing_moves_a_weight_by_half_a_step(name: str) -> None:
    packer = PACKERS[name]
    settings = packer.settings(["lm_head"])
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(40)
    given = {"weight": weight, "bias": bias}
    stored = packer.pack(settings, MODULE, given)
    assert given.keys() == {"weight", "bias"}
    # What is left of the matrix would be read in its stead.
    assert all(tensor is not weight for tensor in stored.values())
    assert stored["bias"] is bias
    assert sum(tensor.nbytes for tensor in stored.values()) < weight.nbytes / 2
    found = UNPACK[settings["quant_method"]](settings, MODULE, dict(stored))
    assert set(found) == {"weight", "bias"}
    largest = 2 * float(weight.abs().max())
    assert float((found["weight"] - weight).abs().max()) <= 0.6 * largest / STEPS[name]


@pytest.mark.parametrize("name", ["awq", "gptq", "modelopt-nvfp4"])
def test_sizes_that_have_no_packed_form_are_refused(name: str) -> None:
    packer = PACKERS[name]
    with pytest.raises(UserError, match=r"down_proj .*cannot be stored in"):
        packer.pack(packer.settings([]), MODULE, {"weight": torch.zeros(10, 18)})
