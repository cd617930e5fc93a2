"""The attention groups of models that share keys and values, as a rank forms them, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rayk.attention import AttentionGroups, AttentionParams, PagedAttentionMetadata
from rayk.attention.backends.paged import PagedBackend
from rayk.engine.rank import EngineRank
from rayk.oracle.tiny import HYBRID
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from tests.engine.stepped import Stepped
from tests.spec_models import TWICE_REUSED


@pytest.fixture(scope="module")
def twice_reused(checkpoint: Callable[..., Path]) -> Path:
    """F0 L1 | reuse 0, reuse 1 | F4 L5 | reuse 4, reuse 5."""
    return checkpoint("qwen3", overrides={**HYBRID, **TWICE_REUSED})


def groups_of(path: Path, **settings: object) -> list[tuple[tuple[int, ...], bool, int | None, int]]:
    """(layers, fast prefill, window, KV group) of each attention group."""
    rank = EngineRank(EngineConfig(model=str(path), num_blocks=20, **settings), LocalComm())  # type: ignore[arg-type]
    found = [
        (group.layers, group.view.fast_prefill, group.view.window, group.view.kv_group)
        for group in rank.attention_groups.groups
    ]
    rank.close()
    return found


def test_groups_of_the_fixture_without_the_hybrid_manager(twice_reused: Path) -> None:
    """{F0, F4, reuse 0}, {L1, L5, reuse 1}, fast {reuse 4}, fast {reuse 5}, all in one KV group."""
    assert groups_of(twice_reused, hybrid_kv=False, fast_prefill=True) == [
        ((0, 2, 4), False, None, 0),
        ((1, 3, 5), False, 50, 0),
        ((6,), True, None, 0),
        ((7,), True, 50, 0),
    ]


def test_groups_with_the_hybrid_manager(twice_reused: Path) -> None:
    """A sharing layer is where its target is: in another KV group, and without a page of its own."""
    assert groups_of(twice_reused, hybrid_kv=True, fast_prefill=True) == [
        ((0, 2, 4), False, None, 0),
        ((1, 3, 5), False, 50, 1),
        ((6,), True, None, 0),
        ((7,), True, 50, 1),
    ]


def test_groups_without_fast_prefill(twice_reused: Path) -> None:
    expected = [((0, 2, 4, 6), False, None, 0), ((1, 3, 5, 7), False, 50, 0)]
    assert groups_of(twice_reused, hybrid_kv=False) == expected


def test_the_second_half_of_24_layers_computes_the_last_token_of_each_prompt(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts of 4 tokens: the first half computes packed tokens 0 to 7, the second 3 and 7; then both
    halves one token a request. Metadata is built once where both see the same."""
    sharing = {"num_hidden_layers": 24, "kv_sharing_targets": [None] * 12 + list(range(12))}
    path = checkpoint("qwen2", overrides=sharing)
    computed: list[tuple[int, list[int]]] = []
    builds: list[int] = []
    wanted_by_step: list[list[int] | None] = []
    forward, build, see = PagedBackend.forward, PagedBackend.build, AttentionGroups.see

    def spied_forward(
        self: PagedBackend,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cache: torch.Tensor,
        metadata: PagedAttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert (k is None) == (v is None)
        computed.append((len(q), metadata.common.query_start_loc.tolist()))
        return forward(self, q, k, v, cache, metadata, params)

    def spied_build(self: PagedBackend, common, window, chunk=None):  # noqa: ANN001, ANN202
        builds.append(common.num_tokens)
        return build(self, common, window, chunk)

    def spied_see(self: AttentionGroups, commons, wanted=None):  # noqa: ANN001, ANN202
        wanted_by_step.append(None if wanted is None else np.asarray(wanted).tolist())
        return see(self, commons, wanted)

    monkeypatch.setattr(PagedBackend, "forward", spied_forward)
    monkeypatch.setattr(PagedBackend, "build", spied_build)
    monkeypatch.setattr(AttentionGroups, "see", spied_see)
    engine = Stepped(path, fast_prefill=True, cuda_graphs="never")
    assert engine.rank.fast_prefill_layers == range(12, 24)
    for i in range(2):
        engine.add(str(i), range(5 + i, 9 + i), 2)
    engine.step()
    assert wanted_by_step == [[3, 7]]
    assert computed == [(8, [0, 4, 8])] * 12 + [(2, [0, 1, 2])] * 12
    assert builds == [8, 2]
    engine.finish()
    assert computed[24:] == [(2, [0, 1, 2])] * 24
    assert builds == [8, 2, 2]
