"""Segments are moved as far as their rows are live, where that costs less than it saves."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import BLOCK_COST_BYTES, group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from rayk.transfer.plan import BlockReads, consecutive_tables, plan_transfer
from tests.markers import thorough

JOB = Path(__file__).resolve().parents[2] / "jobs" / "benchmarks" / "descriptors.py"
LENGTHS = (5, 1024, 4096)


@pytest.fixture(scope="module")
def job() -> Any:
    spec = importlib.util.spec_from_file_location("descriptors", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["descriptors"] = module
    spec.loader.exec_module(module)
    return module


def rank_of(spec: KVCacheSpec, layout: str = "BHLNC") -> RankGeometry:
    """Two layers on one rank."""
    groups = group_layers({(layer, spec.part): spec for layer in range(2)})
    return plan_rank(groups, LAYOUTS[layout], num_blocks=20)


def lower(source: KVCacheSpec, destination: KVCacheSpec, num_tokens: int) -> list[BlockReads]:
    """Between two engines of one rank."""
    producer, consumer = rank_of(source), rank_of(destination)
    tables = [consecutive_tables(side, num_tokens) for side in (producer, consumer)]
    return plan_transfer([producer], consumer).lower(num_tokens, *tables)


def pieces(reads: list[BlockReads]) -> list[tuple[int, int, int, int]]:
    """(source block, first row in it, in the destination's block, number of rows), in order."""
    return sorted(
        (block, r.pattern.source_row, r.pattern.destination_row, r.pattern.num_rows)
        for r in reads
        for block in r.source_blocks.tolist()
    )


def full(block_size: int, head_size: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, head_size, head_size, "bfloat16", 1)


def sliding(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 64, 64, "bfloat16", 1, window)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, [(1, 0, 0, 64)]),
        (64, [(1, 0, 0, 64)]),
        (65, [(1, 0, 0, 128)]),
        (960, [(1, 0, 0, 960)]),
        (961, [(1, 0, 0, 1024)]),
        (1024, [(1, 0, 0, 1024)]),
        (2100, [(1, 0, 0, 1024), (2, 0, 0, 1024), (3, 0, 0, 64)]),
    ],
)
def test_a_tail_is_cut_at_a_sixteenth(num_tokens: int, expected: list[tuple[int, ...]]) -> None:
    """Of 1024 rows: 64."""
    assert pieces(lower(full(1024), full(1024), num_tokens)) == expected


@pytest.mark.parametrize(
    ("window", "num_tokens", "expected"),
    [
        # Live: 901 to 999, in the second block at rows 389 to 487 of 512; the quantum is 32.
        (100, 1000, [(1, 384, 384, 128)]),
        # 401 to 499 and 501 to 599.
        (100, 500, [(1, 384, 384, 128)]),
        (100, 600, [(1, 480, 480, 32), (2, 0, 0, 96)]),
        (2000, 600, [(1, 0, 0, 512), (2, 0, 0, 96)]),
    ],
)
def test_a_window_is_cut_at_both_ends(window: int, num_tokens: int, expected: list[tuple[int, ...]]) -> None:
    assert pieces(lower(sliding(512, window), sliding(512, window), num_tokens)) == expected


def test_segments_between_unlike_blocks_are_cut_from_their_own_start() -> None:
    """Blocks of 384 against 256: segments of 256, 128, 128, 256 rows; 16 rows at least."""
    assert pieces(lower(full(384), full(256), 290)) == [(1, 0, 0, 256), (1, 256, 0, 48)]
    assert pieces(lower(full(384), full(256), 400)) == [(1, 0, 0, 256), (1, 256, 0, 128), (2, 0, 128, 16)]


def test_a_block_that_did_not_grow_moves_whole() -> None:
    assert pieces(lower(full(16, 4096), full(16, 4096), 1)) == [(1, 0, 0, 16)]


def test_a_cut_that_saves_less_than_its_descriptors_cost_is_not_made() -> None:
    """One run for a block; cut, one for each of two layers, and a read of its own."""
    for block_size in (32, 64, 80, 96, 128, 256):
        row_bytes = 2 * 2 * 64
        (reads,) = lower(full(block_size), full(block_size), 3)
        saved = 2 * (block_size - 16) * row_bytes
        assert reads.num_bytes == (
            2 * 16 * row_bytes if saved > BLOCK_COST_BYTES else 2 * block_size * row_bytes
        )
        assert reads.num_descriptors == (2 if saved > BLOCK_COST_BYTES else 1)
    # The tail that stays whole is one of the blocks before it: one read.
    (reads,) = lower(full(32), full(32), 100)
    assert reads.source_blocks.tolist() == [1, 2, 3, 4]


@thorough
def test_released_models_move_what_they_need(job: Any) -> None:
    """A tenth more at most, or a block that did not grow: of any length, layout and TP pair."""
    seen = set()
    for first, (family, (name, values)) in enumerate(job.RELEASED.items()):
        model = job.model_of(family, values)
        cases = itertools.product(job.LAYOUTS, LENGTHS)
        for (layout, num_tokens), tp in zip(
            cases, itertools.cycle(job.TPS[first % 3 :] + job.TPS[: first % 3])
        ):
            moved = job.moved(model, layout, tp, num_tokens)
            assert moved.num_bytes >= moved.needed_bytes
            # 16 tokens of each layer, on every consumer rank.
            extra = 16 * moved.token_bytes
            where = f"{name} {layout} {tp} {num_tokens} tokens"
            assert moved.num_bytes <= max(1.1 * moved.needed_bytes, moved.needed_bytes + extra), where
            seen.add(name)
    assert len(seen) == len(job.RELEASED) == 9
