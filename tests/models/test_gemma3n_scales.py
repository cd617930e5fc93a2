"""Constants that gemma3n multiplies by are rounded to the model's dtype first: bit by bit as transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rayk.models.decoder import Decoder
from rayk.models.layers.altup import AltUpLayer, AltUpStreams
from rayk.parallel.comm import Comm
from tests.models.test_decoder import prompts
from tests.models.tiny import Checkpoint, load, run_ranks, write_checkpoint

HIDDEN, DTYPE = 88, torch.bfloat16
"""Of all scales (88^0.5, 1/88, 88^-0.5, 12^0.5 and 2^-0.5), bfloat16 has none."""
SELECTED = ("altup.modality_router.weight", "per_layer_model_projection.weight")


class Rounded:
    """A checkpoint and transformers' text model of it, loaded as bfloat16."""

    def __init__(self, path: Path) -> None:
        self.checkpoint: Checkpoint = write_checkpoint(path, "gemma3n", hidden_size=HIDDEN)
        tensors = load_file(path / "model.safetensors")
        # Each row picks an element out, so that no order of sums decides about a bit.
        picked = {n: rows_that_pick(t) for n, t in tensors.items() if n.endswith(SELECTED)}
        assert len(picked) == self.checkpoint.config.num_layers + 1
        save_file(tensors | picked, path / "model.safetensors", metadata={"format": "pt"})
        whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE)
        self.theirs: Any = whole.model
        self.ids = torch.tensor(prompts()[2])

    def of_each_rank(self, tp_size: int, part: str) -> list[torch.Tensor]:
        return run_ranks(tp_size, lambda comm: self._compute(comm, part))

    @torch.inference_mode()
    def _compute(self, comm: Comm, part: str) -> torch.Tensor:
        decoder = load(self.checkpoint, comm, DTYPE)
        x = decoder._embedding.forward(self.ids)
        if part == "embedding":
            return x
        assert isinstance(decoder._streams, AltUpStreams)
        begins = decoder._streams.begins
        assert begins is not None
        if part == "table":
            return begins.table.forward(self.ids.clamp(max=200))
        if part == "per-layer inputs":
            return decoder._streams.begin(self.ids, x).inputs
        return modalities(decoder, x)

    @torch.inference_mode()
    def of_transformers(self, part: str) -> torch.Tensor:
        x = self.theirs.embed_tokens(self.ids)
        if part == "embedding":
            return x
        if part == "table":
            return self.theirs.embed_tokens_per_layer(self.ids.clamp(max=200))
        if part == "per-layer inputs":
            rows = self.theirs.get_per_layer_inputs(self.ids)
            return self.theirs.project_per_layer_inputs(x, rows).transpose(0, 1)
        return torch.stack([layer.altup.compute_router_modalities(x) for layer in self.theirs.layers])


def rows_that_pick(weight: torch.Tensor) -> torch.Tensor:
    num_rows, num_inputs = weight.shape
    return torch.eye(num_inputs)[torch.arange(num_rows) * 7 % num_inputs].to(weight.dtype)


def modalities(decoder: Decoder, x: torch.Tensor) -> torch.Tensor:
    found = []
    for layer in decoder.layers:
        assert isinstance(layer, AltUpLayer)
        found.append(layer.altup.router.forward(x))
    return torch.stack(found)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Rounded:
    return Rounded(tmp_path_factory.mktemp("gemma3n-scales"))


def test_scales_are_none_that_the_dtype_has() -> None:
    for scale in (HIDDEN**0.5, 1 / HIDDEN, HIDDEN**-0.5, 12**0.5, 2**-0.5):
        assert float(torch.tensor(scale).to(DTYPE)) != scale


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("part", ["embedding", "table", "per-layer inputs", "modalities"])
def test_bits_are_those_of_transformers(rounded: Rounded, part: str, tp_size: int) -> None:
    theirs = rounded.of_transformers(part)
    assert theirs.dtype == DTYPE
    assert int(theirs.count_nonzero()) > theirs.numel() / 2
    for mine in rounded.of_each_rank(tp_size, part):
        assert mine.dtype == DTYPE
        assert torch.equal(mine, theirs), f"{int((mine != theirs).sum())} of {mine.numel()} differ"
