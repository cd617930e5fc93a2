"""Engines that divide heads, tokens and layers in unlike ways, as pairs and around one host tier: tokens are
those of transformers, and every byte that moves is proven by the digests of both sides.

The cells cover all pairs of values of all axes. In each, what it is for is seen to have been at work.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.kv.groups import max_request_blocks
from rayk.kv.manager import KVCacheManager
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups
from rayk.models.tensor_parallel import why_shape_unsupported
from rayk.parallel.shard import dcp_sizes
from rayk.transfer.handshake import ROWS_PER_GROUP, row_group_blocks
from rayk.types.config import EngineConfig
from rayk.types.request import Request
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.covering import covering
from tests.markers import slow, thorough
from tests.offload.node import Node
from tests.pd import Pair, make_request

ONE_HEAD = {"num_attention_heads": 12, "num_key_value_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-head": ("llama", {"overrides": {**ONE_HEAD, "hidden_size": 96}}),
    "deepseek_v3": ("deepseek_v3", {"overrides": {**ONE_HEAD, "num_key_value_heads": 12}}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3n": ("gemma3n", {}),
    "falcon_h1": ("falcon_h1", {}),
}
HEADS = dict.fromkeys(MODELS, (8, 2)) | {"llama-one-head": (12, 1), "deepseek_v3": (12, 1)}
"""Query heads, and units of which ranks keep replicas."""
STAGES = {
    "deepseek_v3": (((3,), (1, 2), (1, 1, 1)), ((3,), (2, 1), (1, 1, 1))),
    "gemma3n": (((6,), (2, 4), (1, 1, 4)), ((6,), (1, 5), (1, 1, 4))),
}
"""By number of stages, at P and at D, the layers of each; gemma3n's layers 4 and 5 share those of 3 and 2."""
OTHER_STAGES = (((4,), (1, 3), (1, 2, 1)), ((4,), (2, 2), (2, 1, 1)))
HOWS = ("pull", "push", "prefix", "preempted", "tier")
"""What a cell is for."""
BLOCKS = ((16, 16), (8, 16), (16, 8))
CHUNKS = (17, 70)
"""Most tokens of a step."""
MAX_RANKS, MAX_CELLS = 6, 60
MORE = 5
"""Output tokens with which a conversation goes on."""


class Shape(NamedTuple):
    """How one engine is divided."""

    tp: int
    dcp: int
    interleave: str
    """Tokens of a rank's turn: "one", or a "half" or a "whole" of its block."""
    pp: int

    def __str__(self) -> str:
        dealt = f"dcp{self.dcp}{self.interleave}" if self.dcp > 1 else ""
        return f"tp{self.tp}{dealt}" + (f"pp{self.pp}" if self.pp > 1 else "")


class Cell(NamedTuple):
    """One pair of engines."""

    model: str
    p: Shape
    d: Shape
    how: str
    blocks: tuple[int, int]
    chunk: int

    def __str__(self) -> str:
        blocks = "-".join(map(str, self.blocks))
        return f"{self.model}-{self.p}-to-{self.d}-{self.how}-blocks{blocks}-chunk{self.chunk}"

    def settings(self, side: int) -> dict[str, Any]:
        """Return those of P (0) or D (1)."""
        shape, block_size = (self.p, self.d)[side], self.blocks[side]
        turns = {"one": 1, "half": block_size // 2, "whole": block_size}
        found = {
            "tp": shape.tp,
            "dcp": shape.dcp,
            "dcp_interleave": turns[shape.interleave],
            "block_size": block_size,
            "max_batch_tokens": self.chunk,
        }
        if shape.pp > 1:
            stages = STAGES.get(self.model, OTHER_STAGES)[side][shape.pp - 1]
            found |= {"pp": shape.pp, "pp_layers": stages}
        if self.model == "falcon_h1" and self.how == "prefix":
            # States are found again at the ends of blocks.
            found |= {"state_block_size": block_size, "prefix_caching": True}
        return found


def shapes(model: str) -> list[Shape]:
    return [
        Shape(tp, dcp, interleave, pp)
        for tp, pp in itertools.product(range(1, MAX_RANKS), (1, 2, 3))
        if tp * pp < MAX_RANKS and HEADS[model][0] % tp == 0
        for dcp in dcp_sizes(*HEADS[model], tp)
        for interleave in (("one", "half", "whole") if dcp > 1 else ("one",))
    ]


def all_cells() -> Iterator[Cell]:
    for model in MODELS:
        for p, d in itertools.product(shapes(model), shapes(model)):
            if p.tp * p.pp + d.tp * d.pp <= MAX_RANKS:
                for how, blocks, chunk in itertools.product(HOWS, BLOCKS, CHUNKS):
                    yield Cell(model, p, d, how, blocks, chunk)


def flat(cell: Cell) -> tuple[object, ...]:
    return (cell.model, *cell.p, *cell.d, cell.how, cell.blocks, cell.chunk)


def chosen_cells() -> list[Cell]:
    """Of all cells, 20,000, some are looked at, and few of these chosen."""
    cells = {flat(cell): cell for cell in random.Random(0).sample(list(all_cells()), 3000)}
    return [cells[case] for case in covering(list(cells))]


CELLS = chosen_cells()
WHOLE = Shape(1, 1, "one", 1)
LARGER = (
    Cell("llama", Shape(8, 4, "half", 1), WHOLE, "tier", (16, 16), 70),
    Cell("llama", Shape(8, 4, "one", 1), Shape(4, 2, "whole", 2), "prefix", (8, 16), 70),
    Cell("deepseek_v3", Shape(6, 3, "one", 1), Shape(4, 4, "half", 2), "push", (16, 16), 17),
)
"""Of more ranks. In the first, four ranks for each of two heads store a quarter of the tokens each, and one
rank loads them."""


def cells_with_markers() -> list[Any]:
    """`make test` has the first cell; `make test-all` the first of each model and of each thing to show."""
    met: set[str] = set()
    found = []
    for cell in CELLS:
        is_first = not met >= {cell.model, cell.how}
        marks = () if not met else (thorough,) if is_first else (slow,)
        met |= {cell.model, cell.how}
        found.append(pytest.param(cell, id=str(cell), marks=marks))
    return found + [pytest.param(cell, id=str(cell), marks=slow) for cell in LARGER]


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@pytest.mark.parametrize("cell", cells_with_markers())
def test_tokens_are_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    model = answers(cell.model)
    if cell.how == "tier":
        by_way_of_a_tier(cell, model)
        return
    changes = cell.settings(0), cell.settings(1)
    tp, common = (cell.p.tp, cell.d.tp), {"num_blocks": 600, "prefix_caching": cell.how == "prefix"}
    changes = tuple({k: v for k, v in side.items() if k != "tp"} for side in changes)
    if cell.how == "preempted":
        changes[1]["num_blocks"] = small_pool(cell, 1, model)
    with Pair.open(model.path, tp=tp, push=cell.how == "push", changes=changes, **common) as pair:
        if cell.how == "prefix":
            converse(cell, model, pair)
        else:
            requests, expected = crowd(model) if cell.how == "preempted" else each_prompt(model)
            done = pair.complete(requests)
            assert [d.token_ids for d in done] == expected
            assert all(d.info["num_kv_bytes_checked"] > 0 for d in done)
            num_preemptions = sum(d.info["num_preemptions"] for d in done)
            assert bool(num_preemptions) == (cell.how == "preempted")
        pair.check_all_free()


def each_prompt(model: Answers) -> tuple[list[Request], list[list[int]]]:
    """Return a request for each of the prompts, and what is to come of them."""
    return [make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)], model.expected


def crowd(model: Answers) -> tuple[list[Request], list[list[int]]]:
    """Return three times two requests, of which one outgrows its last block, whatever its size is here."""
    order = (2, 1) * 3
    requests = [make_request(f"c{n}", model.prompts[i], NUM_TOKENS) for n, i in enumerate(order)]
    return requests, [model.expected[i] for i in order]


def small_pool(cell: Cell, side: int, model: Answers) -> int:
    """Blocks of one side in which two of the crowd's prompts fit, and not what they come to."""
    config = EngineConfig(model=str(model.path), **cell.settings(side))
    groups = engine_groups(config, load_config(model.path))
    sizes = []
    for more in (0, NUM_TOKENS - 1):
        manager = KVCacheManager(groups, 1000)
        for i in (1, 2):
            num_tokens = len(model.prompts[i]) + more
            assert manager.extend(f"c{i}", num_tokens) is not None
            manager.trim(f"c{i}", num_tokens)
        sizes.append(1000 - manager.pool.num_free_blocks)
    # One request alone fits with what a chunk of its prompt needs.
    found = max(sizes[0], 1 + max_request_blocks(groups, num_tokens, cell.chunk))
    assert found < sizes[1]
    return found


def converse(cell: Cell, model: Answers, pair: Pair) -> None:
    """The longest prompt, and then again with a part of what was answered: P has computed the prompt, and D
    holds it, in blocks that cover other numbers of tokens."""
    prompt, expected = model.prompts[2], model.expected[2]
    (first,) = pair.complete([make_request("first", prompt, NUM_TOKENS)])
    (again,) = pair.complete([make_request("again", prompt + expected[:MORE], NUM_TOKENS - MORE)])
    assert [first.token_ids, again.token_ids] == [expected, expected[MORE:]]
    assert first.info["num_cached_tokens"] == 0
    assert again.info["num_cached_tokens"] > 0
    held = [sum(row.held_bytes for row in done.info["transfers"]) for done in (first, again)]
    groups = pair.d.engine.ranks[0].plan.groups
    assert held[0] == 0
    # What D holds counts by row groups, which lie in whole blocks or are not held.
    assert bool(held[1]) == (row_group_blocks(groups) == ROWS_PER_GROUP)


def by_way_of_a_tier(cell: Cell, model: Answers) -> None:
    """P swaps, as its pool is small, and stores what it computes; D loads that."""
    own = cell.settings(0) | {"num_blocks": small_pool(cell, 0, model)}
    with Node.open(model.path, [own, cell.settings(1) | {"num_blocks": 600}]) as node:
        first, second = node.engines
        for engine, (requests, expected) in ((first, crowd(model)), (second, each_prompt(model))):
            assert [d.token_ids for d in engine.complete(requests)] == expected
            node.settle()
        assert first.offloading.counts["swaps"] > 0
        assert not first.offloading.counts["swaps_failed"]
        # What states were at the end of a block is gone when its store would begin.
        assert bool(second.offloading.counts["loads"]) == (cell.model != "falcon_h1")
        assert not second.offloading.counts["loads_failed"]


def test_few_cells_hold_every_pair_of_values() -> None:
    def pairs(cells: Iterable[Cell]) -> set[Any]:
        rows = map(flat, cells)
        return {(i, j, row[i], row[j]) for row in rows for i in range(len(row)) for j in range(i)}

    assert len(CELLS) <= MAX_CELLS
    assert all(c.p.tp * c.p.pp + c.d.tp * c.d.pp <= MAX_RANKS for c in CELLS)
    assert pairs(CELLS) == pairs(all_cells())
    assert len(pairs(CELLS)) > 700


@thorough
def test_cells_are_all_that_engines_can_be(answers: Callable[[str], Answers]) -> None:
    """Shapes of at most five ranks that are not among them are refused."""
    for name in MODELS:
        config = load_config(answers(name).path)
        right = set()
        for tp, dcp, pp in itertools.product(range(1, MAX_RANKS), range(1, MAX_RANKS), (1, 2, 3)):
            if tp * pp < MAX_RANKS and dcp <= tp:
                layers = STAGES.get(name, OTHER_STAGES)[0][pp - 1] if pp > 1 else None
                engine = EngineConfig(model="", tp=tp, dcp=dcp, pp=pp, pp_layers=layers)
                if why_shape_unsupported(config, engine) is None:
                    right.add((tp, dcp, pp))
        assert {(s.tp, s.dcp, s.pp) for s in shapes(name)} == right
