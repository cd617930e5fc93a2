"""A decoder cut into pipeline stages: one after the other they compute what the whole one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.attention import get_backend
from rayk.models.decoder import Decoder
from rayk.models.families import load_config
from rayk.models.loader import load_decoder
from rayk.parallel.local import LocalComm
from tests.conftest import CheckpointFactory
from tests.markers import one_per, sweep
from tests.models.tiny import Paged

CASES = {
    "llama": ("llama", {}),
    "tied": ("gemma2", {}),
    "wide": ("mamba2", {}),
    "latent": ("deepseek_v3", {}),
    "windows": ("gpt_oss", {}),
    "states": ("falcon_h1", {}),
    "parallel": ("cohere2", {}),
    "sharing": ("gemma3n", {}),
}
PROMPTS = [[5, 9, 2, 7, 7, 3, 11], [4, 8], [6, 1, 3]]


class Chain:
    """The stages of one model in one process, with the parts of a Decoder that Paged asks for."""

    def __init__(self, stages: Sequence[Decoder]) -> None:
        self.stages = stages
        self.config = stages[0].config
        self.cache_owners = {key: owner for s in stages for key, owner in s.cache_owners.items()}
        self.cache_readers = [reader for s in stages for reader in s.cache_readers]
        self.logits = stages[-1].logits

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[Any, Any],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        received: tuple[torch.Tensor, ...] = ()
        for stage in self.stages:
            shapes = stage.received_shapes(len(token_ids), None if wanted is None else len(wanted))
            assert [tuple(x.shape) for x in received] == list(shapes)
            assert {x.dtype for x in received} <= {stage.residual_dtype}
            if stage.is_last:
                break
            received = stage.pass_on(token_ids, positions, metadata, wanted, received=received)
        return self.stages[-1].forward(token_ids, positions, metadata, wanted, received=received)


def load_stages(path: Path, sizes: Sequence[int]) -> list[Decoder]:
    config, backend = load_config(path), get_backend("reference", "cpu")
    assert sum(sizes) == config.num_layers
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    to = {"comm": LocalComm(), "dtype": torch.float32, "device": torch.device("cpu"), "backend": backend}
    return [
        load_decoder(path, config, stage=range(start, start + size), **to)  # type: ignore[arg-type]
        for start, size in zip(starts, sizes, strict=True)
    ]


def steps(decoder: Any, num_wanted: Sequence[Sequence[int]] | None = None) -> list[torch.Tensor]:
    """Logits of PROMPTS in two chunks, and of a token after them."""
    paged = Paged(decoder, len(PROMPTS))
    chunks = [[p[:2] for p in PROMPTS], [p[2:] for p in PROMPTS], [[9], [8], []]]
    wanted = [None] * 3 if num_wanted is None else num_wanted
    return [x for chunk, count in zip(chunks, wanted, strict=True) for x in paged.step(chunk, count)]


@sweep(2)
@one_per()
@pytest.mark.parametrize("case", ["sharing", *(c for c in CASES if c != "sharing")])
def test_stages_are_the_whole_decoder(checkpoint: CheckpointFactory, case: str) -> None:
    family, overrides = CASES[case]
    path = checkpoint(family, overrides=overrides)
    num_layers = load_config(path).num_layers
    expected = steps(load_stages(path, [num_layers])[0])
    for sizes in [(1, num_layers - 1), (num_layers - 1, 1), (1,) * num_layers]:
        found = steps(Chain(load_stages(path, sizes)))
        for theirs, ours in zip(expected, found, strict=True):
            assert torch.equal(theirs, ours), sizes


@pytest.mark.parametrize("wanted", [[(1, 1, 1), (0, 0, 1), (1, 0, 0)], [(0, 0, 0), (0, 0, 0), (0, 1, 0)]])
def test_stages_behind_fast_prefill_get_wanted_tokens_alone(
    checkpoint: CheckpointFactory, wanted: Sequence[Sequence[int]]
) -> None:
    path = checkpoint("gemma3n")
    config = load_config(path)
    start, num_layers = config.fast_prefill_layers.start, config.num_layers
    assert 1 < start < num_layers - 1, "a stage can end on either side"
    expected = steps(load_stages(path, [num_layers])[0], wanted)
    for first in (start - 1, start, start + 1):
        found = steps(Chain(load_stages(path, (first, num_layers - first))), wanted)
        for theirs, ours in zip(expected, found, strict=True):
            assert torch.equal(theirs, ours), first


def test_only_the_first_stage_embeds_and_only_the_last_has_the_head(checkpoint: CheckpointFactory) -> None:
    first, middle, last = load_stages(checkpoint("llama"), (1, 2, 1))
    assert [s.is_first for s in (first, middle, last)] == [True, False, False]
    assert [s.num_head_weights > 0 for s in (first, middle, last)] == [False, False, True]
    assert first.received_shapes(5) == ()
    assert middle.received_shapes(5) == ((5, middle.config.hidden_size),)
    with pytest.raises(AssertionError, match="last stage"):
        middle.forward(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), {})
