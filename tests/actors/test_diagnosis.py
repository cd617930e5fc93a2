"""Whose KV it was: wrong content that only the producer can name, planted in reads between real engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayk.oracle.checkpoint import read_marker
from rayk.transfer.plan import BlockReads
from rayk.types.errors import KVMismatch
from tests.pd import NAN_POISON, Pair, make_request

MODELS = ("qwen3", "mistral", "bamba")
"""Full attention; a sliding window; states beside attention."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param)


def prompts_of(path: Path) -> list[list[int]]:
    """Three of unlike tokens, the last one's blocks filled in part."""
    probe = read_marker(path)["probes"][2]["prompt"]
    return [probe[:90], probe[100:190], probe[200:285]]


class Misread:
    """Descriptors of reads name other blocks of the producer, or leave some out; fences are right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swaps: dict[int, int] = {}
        self.dropped: set[int] = set()
        real = BlockReads.indices

        def indices(read: BlockReads, *num_blocks: int) -> Any:
            return real(self._change(read), *num_blocks)

        monkeypatch.setattr(BlockReads, "indices", indices)

    def _change(self, read: BlockReads) -> BlockReads:
        blocks = np.array([self.swaps.get(b, b) for b in read.source_blocks.tolist()], dtype=np.int64)
        kept = ~np.isin(read.source_blocks, list(self.dropped))
        return replace(read, source_blocks=blocks[kept], destination_blocks=read.destination_blocks[kept])


def prefill(pair: Pair, name: str, prompt: list[int]) -> tuple[Any, Any]:
    request = make_request(name, prompt, 4)
    return request, pair.prefill(request)


def middle_block(ticket: Any) -> tuple[int, int]:
    """(group, index) of a live block that is not the last of its sequence, if any group has one."""
    for group, table in enumerate(ticket.block_tables):
        live = [i for i, b in enumerate(table) if b]
        if len(live) > 1:
            return group, live[-2]
    raise AssertionError("every group has one block")


def wrong(pair: Pair, request: Any, prefilled: Any) -> KVMismatch:
    """Decode must fail; the explained mismatch."""
    done = pair.decode(request, prefilled)
    assert isinstance(done.error, KVMismatch), done.error
    assert done.token_ids == []
    found = pair.explain(request.request_id, prefilled.payload)
    pair.d.handover.settle(request.request_id)
    assert found.found_rows == ()
    return found


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_another_requests_block_is_named_with_its_holder(
    model: Path, monkeypatch: pytest.MonkeyPatch, tp: tuple[int, int]
) -> None:
    misread = Misread(monkeypatch)
    with Pair.open(model, tp=tp) as pair:
        first, second = (prefill(pair, name, p) for name, p in zip("ab", prompts_of(model), strict=False))
        theirs, ours = first[1].payload, second[1].payload
        group, index = middle_block(ours)
        misread.swaps = {ours.block_tables[group][index]: theirs.block_tables[group][index]}
        found = wrong(pair, *second)
        assert found.group == group
        assert found.classification.startswith("another request's block: ")
        block = theirs.block_tables[group][index]
        assert f"block {block} of producer rank " in found.classification
        assert found.classification.endswith("which a holds")
        misread.swaps = {}
        assert pair.decode(*first).error is None
        pair.check_all_free()


def test_another_requests_state_is_named(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, of many units and several fields."""
    path = checkpoint("bamba")
    misread = Misread(monkeypatch)
    with Pair.open(path, tp=(1, 2)) as pair:
        first, second = (prefill(pair, name, p) for name, p in zip("ab", prompts_of(path), strict=False))
        groups = [g.spec.part for g in pair.p.engine.ranks[0].plan.groups]
        state = groups.index("state")
        theirs, ours = (done.payload.block_tables[state][-1] for _, done in (first, second))
        misread.swaps = {ours: theirs}
        found = wrong(pair, *second)
        assert (found.field, found.token) == ("conv_x", 89)
        assert found.classification.startswith("another request's block: ")
        assert found.classification.endswith("which a holds")
        pair.p.handover.settle("a")
        pair.check_all_free()


def test_a_block_of_an_earlier_generation_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misread = Misread(monkeypatch)
    with Pair.open(model, tp=(2, 1)) as pair:
        first, second = (prefill(pair, name, p) for name, p in zip("ab", prompts_of(model), strict=False))
        assert pair.decode(*first).error is None
        theirs, ours = first[1].payload, second[1].payload
        group, index = middle_block(ours)
        block = theirs.block_tables[group][index]
        misread.swaps = {ours.block_tables[group][index]: block}
        found = wrong(pair, *second)
        assert found.classification.startswith("stale generation: ")
        assert f"block {block} of producer rank " in found.classification
        assert f"generation {theirs.generations[group][index]})" in found.classification
        pair.check_all_free()


def test_the_sequences_own_other_block_is_named(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Farther off than a shift of rows is looked for."""
    path = checkpoint("qwen3")
    misread = Misread(monkeypatch)
    with Pair.open(path, tp=(1, 1)) as pair:
        second = prefill(pair, "b", prompts_of(path)[1])
        table = second[1].payload.block_tables[0]
        misread.swaps = {table[4]: table[0]}
        found = wrong(pair, *second)
        assert found.token == 64
        assert "rows shifted" in found.classification or "block 0 of the sequence" in found.classification
        pair.check_all_free()


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
def test_a_tail_that_was_not_written_is_named(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, is_fresh: bool
) -> None:
    """Over pages that hold poison, and over those of a request that is gone from both sides."""
    path = checkpoint("qwen3")
    misread = Misread(monkeypatch)
    with Pair.open(path, tp=(1, 2), poison=NAN_POISON, num_blocks=8) as pair:
        if not is_fresh:
            # It fills the pool of both sides.
            assert pair.decode(*prefill(pair, "a", prompts_of(path)[0])).error is None
        second = prefill(pair, "b", prompts_of(path)[2])
        misread.dropped = {second[1].payload.block_tables[0][-1]}
        found = wrong(pair, *second)
        assert found.token == 80
        assert found.classification.startswith("tail not written: tokens ")
        pair.check_all_free()
