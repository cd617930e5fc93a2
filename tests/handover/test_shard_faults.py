"""Faults planted in engines that deal tokens and have stages: each is named by layer, head and token.

What P computes wrong both sides hold alike, so the digests agree: the reference's values tell. What is
brought to the wrong layer the digests tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.attention.backends import token_shards
from rayk.attention.metadata import TokenShardMetadata
from rayk.engine.inputs import InputBuilder
from rayk.experiments.compare import compare_values
from rayk.handover import extension
from rayk.kernels.paged_attention.merge import merge_partials
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.kv.maps import match_rows
from rayk.models import decoder
from rayk.models.build import Build
from rayk.models.families import load_config
from rayk.models.layers.layer import BuiltLayer, build_layer
from rayk.oracle.checkpoint import read_marker
from rayk.parallel.shard import Stripe
from rayk.transfer import plan
from rayk.types.errors import HandshakeMismatch, KVMismatch
from tests.markers import thorough
from tests.pd import Pair, make_request

DEALT: dict[str, Any] = {"dcp": 2, "max_batch_tokens": 24}
STAGES: dict[str, Any] = {"pp": 2, "max_batch_tokens": 24}


@pytest.fixture(scope="module")
def llama(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def merged_without_last(outs: Any, lses: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
    return merge_partials(outs[:-1], lses[:-1], sinks)


def plant_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "merge_partials", merged_without_last)


def plant_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is one token shorter to the rank that holds its last."""
    original = InputBuilder._token_shard

    def token_shard(self: InputBuilder, *args: Any) -> TokenShardMetadata:
        made = original(self, *args)
        is_own = torch.from_numpy(made.tokens.holds(made.positions_cpu))
        return replace(made, key_ends=made.key_ends - is_own.int())

    monkeypatch.setattr(InputBuilder, "_token_shard", token_shard)


def plant_interleave(monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...] = (1, 3)) -> None:
    """Ranks compute slots as if tokens were dealt two by two."""
    original = InputBuilder.__init__

    def planted(self: InputBuilder, geometry: RankGeometry, **sizes: Any) -> None:
        original(self, geometry, **sizes)
        if geometry.shape.dcp > 1 and geometry.rank in ranks:
            self.tokens = tuple(replace(t, interleave=2) for t in self.tokens if isinstance(t, Stripe))

    monkeypatch.setattr(InputBuilder, "__init__", planted)


def plant_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage computes layers 1 and 2 in place of 2 and 3."""

    def build(what: Build, index: int) -> BuiltLayer:
        return build_layer(what, index - (what.stage is not None and what.is_last))

    monkeypatch.setattr(decoder, "build_layer", build)


OTHER_KEYS = "a wrong input, from layer {} after its own keys and values"
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], tuple[int, int], str]] = {
    "merge without one rank": (plant_merge, DEALT, (1, 1), OTHER_KEYS.format(0)),
    "last turn one shorter": (plant_last_turn, DEALT, (1, 0), OTHER_KEYS.format(0)),
    "interleave of one rank": (plant_interleave, DEALT, (0, 1), "never written"),
    "layers of a stage": (plant_layers, STAGES, (2, 0), OTHER_KEYS.format(1)),
}
"""Name -> fault, settings of P, (layer, token) of the first wrong value, why."""


@thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_computed_wrong_is_named_by_the_references_values(
    llama: Path, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant_fault, settings, place, why = FAULTS[fault]
    plant_fault(monkeypatch)
    found = values_of(llama, reference, settings)
    assert found is not None
    assert (found.field, found.head, found.layer, found.token) == ("k", 0, *place)
    assert why in found.classification


def values_of(llama: Path, reference: Callable[..., Any], settings: dict[str, Any]) -> KVMismatch | None:
    """What the reference's values say of P's cache of a prompt of 37 tokens."""
    prompt = read_marker(llama)["probes"][1]["prompt"]
    # As a worker's memory is: what nobody wrote is zero.
    with Pair.open(llama, tp=(4 if "dcp" in settings else 1, 1), poison=0, changes=(settings, {})) as pair:
        prefilled = pair.prefill(make_request("r", prompt, 4), capture=True)
        pair.p.handover.settle("r")
        groups = pair.p.engine.ranks[0].plan.groups
        kv, captured, model = reference(llama).caches(prompt), prefilled.info["captured"], load_config(llama)
        return compare_values("r", captured, kv, groups, len(prompt), model=model).mismatch


@pytest.mark.parametrize("settings", [DEALT, STAGES], ids=["dealt", "stages"])
def test_right_values_of_ranks_are_joined(
    llama: Path, reference: Callable[..., Any], settings: dict[str, Any]
) -> None:
    assert values_of(llama, reference, settings) is None


def test_values_that_all_ranks_deal_alike_are_right(
    llama: Path, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P reads what it wrote where it wrote it: what is wrong is only what others take its rows for, and that
    the digests tell (test_token_shards.py)."""
    plant_interleave(monkeypatch, (0, 1, 2, 3))
    assert values_of(llama, reference, DEALT) is None


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_stage_that_is_described_shifted_by_a_layer_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    original = extension.describe_cache

    def describe(agent: Any, caches: Any, **what: Any) -> Any:
        made, geometry = original(agent, caches, **what), caches.geometry
        if not what["engine"].startswith(side) or geometry.share.layers != range(2, 4):
            return made
        groups = tuple(replace(g, layers=(1, 2)) for g in geometry.groups)
        return replace(made, geometry=replace(geometry, groups=groups))

    monkeypatch.setattr(extension, "describe_cache", describe)
    with (
        pytest.raises(HandshakeMismatch, match=r"layers of group 0 .* rank 0: .*\(1, 2\)"),
        Pair.open(llama, changes=(STAGES, STAGES | {"pp": 4}) if side == "p" else ({}, STAGES)),
    ):
        pass


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_map_whose_stage_is_shifted_by_a_layer_is_named_by_the_digests(
    llama: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """Layer 2 is taken for 3, and 3 for 2, on the last stage of P or of D."""

    def shifted(group: GroupGeometry) -> GroupGeometry:
        return replace(group, layers=group.layers[::-1]) if group.layers == (2, 3) else group

    def match(source: GroupGeometry, destination: GroupGeometry, *rest: Any, **rows: Any) -> Any:
        found = (shifted(source), destination) if side == "p" else (source, shifted(destination))
        return match_rows(*found, *rest, **rows)

    monkeypatch.setattr(plan, "match_rows", match)
    changes: Any = (STAGES, {"pp": 4}) if side == "p" else ({}, STAGES)
    prompt = read_marker(llama)["probes"][1]["prompt"]
    with Pair.open(llama, changes=changes) as pair:
        request = make_request("r", prompt, 4)
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), done
        found = pair.diagnose("r", prefilled.payload)  # type: ignore[arg-type]
        assert [(m.layer, m.field, m.head, m.token) for m in found] == [(2, "k", 0, 0), (3, "k", 0, 0)]
