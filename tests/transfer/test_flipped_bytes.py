"""A flipped bit is noticed if and only if its byte is live: what digests cover, byte by byte, in all layouts.

Which bytes are live comes from the layouts' definition alone (tests/kv/brute.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import LAYOUTS
from rayk.transfer import local_agent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.staging import StagingSettings
from rayk.types.errors import KVMismatch, TransferError
from tests.kv.brute import Case, brute_addresses, brute_rows
from tests.markers import one_per
from tests.transfer.cluster import Engine, Pair, Shape, make_engine
from tests.transfer.families import FAMILIES

TOKENS = 10
"""Not whole blocks: of 4 tokens, the third holds two live rows and two dead ones."""
WHOLE_ROWS = ("mamba2", "mamba2-1-group", "deepseek_v3")
"""No rank's rows are cut from each other: a state has one, and a latent is everybody's."""
ONE_SHAPE = (*WHOLE_ROWS, "llama4", "gemma3n")
"""Groups of one shape: LHBNC holds them."""
SWEEP = [
    (family, layout) for family in FAMILIES for layout in LAYOUTS if layout != "LHBNC" or family in ONE_SHAPE
]
QUICK = ("mamba2", "deepseek_v3", "falcon_h1")
"""A state, latents, and both a state and attention in one layer; the others are slow."""
LOCAL = ("llama4", "chunks that share", "everything")
"""Rows of the first blocks are dead at TOKENS: a window or chunk begins behind them."""


def case_of(shape: Shape, side: int) -> Case:
    """The same caches, in the words of the brute-force oracle."""
    layers: dict[int, Any] = {}
    for (layer, _), spec in shape.specs(side).items():
        layers[layer] = (*layers.get(layer, ()), spec)
    return Case(str(shape.family), layers, shape.tp[side], num_blocks=shape.num_blocks[side])


def live_fields(engine: Engine, tp_rank: int, tables: list[list[int]]) -> list[np.ndarray]:
    """Per group and field: addresses [row, layer, unit, byte] of what a request of TOKENS needs on a rank."""
    shape = engine.shape
    found = []
    addresses = brute_addresses(case_of(shape, engine.side), shape.layouts[engine.side], tp_rank)
    for group, places, table in zip(engine.groups(), addresses, tables, strict=True):
        blocks, rows = _live_rows(group, table)
        found += [by_field[:, blocks, :, rows] for by_field in places.values()]
    return found


def live_bytes(engine: Engine, tp_rank: int, tables: list[list[int]]) -> np.ndarray:
    """The same addresses, sorted."""
    return np.unique(np.concatenate([f.reshape(-1) for f in live_fields(engine, tp_rank, tables)]))


def _live_rows(group: KVCacheGroup, table: list[int]) -> tuple[list[int], list[int]]:
    """(block, row in it) of every row that counts: of a state the last token's, of a window those that the
    next token, which is one of the window, sees; likewise of a run of positions."""
    size, window = group.spec.block_size, getattr(group.spec, "window", TOKENS + 1)
    if brute_rows(group.spec) == 1:
        return [table[(TOKENS - 1) // size]], [0]
    tokens = range(TOKENS + 1)[-window:-1]
    chunk = getattr(group.spec, "chunk", TOKENS + 1)
    tokens = [t for t in tokens if t // chunk == TOKENS // chunk]
    return [table[t // size] for t in tokens], [t % size for t in tokens]


def landed(family: str, layouts: tuple[str, str], tp: tuple[int, int] = (2, 1)) -> tuple[Pair, Any]:
    """A pair after one transfer, and the consumer's tables."""
    shape = Shape(family=family, tp=tp, layouts=layouts, state_block_sizes=(16, 64), num_blocks=(24, 24))
    network = LocalNetwork()
    # A flip is planted in what a run brings straight into its page.
    direct = StagingSettings("never")
    pair = Pair(
        *(make_engine(shape, side, lambda n: LocalAgent(n, network), staging=direct) for side in (0, 1))
    )
    pair.connect()
    outcomes, tables = pair.transfer(shape.values(TOKENS))
    assert all(o.ok for o in outcomes.values())
    return pair, tables


def digest_of(pair: Pair, tables: list[list[int]]) -> np.ndarray:
    return pair.consumer.ranks[0].digests(TOKENS, tables)


SOME = [
    pytest.param(
        *c, marks=[] if c[0] in QUICK or c == ("llama4", "LBNHC") else [pytest.mark.slow], id="-".join(c)
    )
    for c in SWEEP
]


@one_per()
@pytest.mark.parametrize(("family", "layout"), SOME)
def test_digests_cover_every_live_byte_and_no_other(family: str, layout: str) -> None:
    """Dead bytes change nothing, all at once; each byte of a live row the word of its layer and unit."""
    pair, tables = landed(family, ("BHLNC", layout))
    memory = pair.consumer.caches[0].buffer.numpy()
    live = live_bytes(pair.consumer, 0, tables)
    right = digest_of(pair, tables)
    dead = np.setdiff1d(np.arange(len(memory)), live)
    assert len(live) > 500
    assert len(dead) > len(live)
    memory[dead] ^= 1
    assert np.array_equal(digest_of(pair, tables), right), "bytes outside live rows count"
    for field in live_fields(pair.consumer, 0, tables):
        for row, byte in np.ndindex(field.shape[0], field.shape[3]):
            addresses = field[row, :, :, byte].reshape(-1)
            memory[addresses] ^= 1
            assert int((digest_of(pair, tables) != right).sum()) == len(addresses), (row, byte)
            memory[addresses] ^= 1


class FlippedByte:
    """LocalAgent._copy that changes the first byte of one of the runs it copied, counted over all reads."""

    def __init__(self, run: int | None) -> None:
        self.run = run
        self.num_runs = 0
        self.address = -1

    def __call__(self, agent: LocalAgent, read: Any) -> Any:
        state = COPY(agent, read)
        local = read.prepared.local
        for index in read.local_indices:
            if self.num_runs == self.run:
                run, block = divmod(int(index), local.num_blocks)
                local_agent._run_view(agent._regions, local, run)[block, 0] ^= 1
                self.address = int(local.addresses[run]) + block * int(local.strides[run])
            self.num_runs += 1
        return state


COPY = LocalAgent._copy


@one_per()
@pytest.mark.parametrize(("family", "layout"), SOME)
def test_a_flipped_bit_in_any_run_is_noticed_where_the_byte_is_live(
    monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    """Whole blocks move: where tokens lie outside heads, runs of a last block may hold dead rows only.

    A flip in those is the only one that goes unnoticed. Block generations, which lie outside pages, are
    found out by themselves.
    """
    pair, tables = landed(family, (layout, layout))
    caches = pair.consumer.caches[0]
    start = caches.buffer.data_ptr()
    live = set(live_bytes(pair.consumer, 0, tables).tolist())
    values = pair.producer.shape.values(TOKENS)

    def outcome_of(flipped: FlippedByte) -> BaseException | None:
        monkeypatch.setattr(LocalAgent, "_copy", lambda agent, read: flipped(agent, read))
        outcomes, _ = pair.transfer(values, f"r{flipped.run}")
        return outcomes[0].error

    clean = FlippedByte(None)
    assert outcome_of(clean) is None
    seen = {"noticed": 0, "dead": 0, "generations": 0}
    for number in range(clean.num_runs):
        flipped = FlippedByte(number)
        error = outcome_of(flipped)
        place = flipped.address - start
        if not 0 <= place < caches.geometry.pages_bytes:
            seen["generations"] += 1
            assert isinstance(error, TransferError)
            assert "was reused while being read" in str(error)
        elif place in live:
            seen["noticed"] += 1
            assert isinstance(error, KVMismatch), f"a flip of live byte {place} went unnoticed"
        else:
            seen["dead"] += 1
            assert error is None, f"byte {place} is not live"
    assert seen["noticed"] > 0
    assert seen["generations"] > 0
    # A run starts with a dead row only where rows are cut from each other, or before a window or chunk.
    cuts_rows = layout in ("BLNHC", "LBNHC") and family not in WHOLE_ROWS
    assert (seen["dead"] > 0) == (cuts_rows or family in LOCAL)
