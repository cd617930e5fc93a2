"""Mamba2's convolution state under heterogeneous TP: how many columns arrive wrong, by executing rayk's plan.

    python jobs/benchmarks/conv_state.py [--layouts BHLNC BLNHC] --record

A column is the kept taps of one channel: x channels are cut by head, B and C by group; with one group every
rank needs all of B and C. The producer's taps are numbered, its other bytes are not; a consumer's column is
wrong unless it holds its own channel's numbers, and came from outside if it holds no channel's.

vLLM 0.33.0's column is what its offset arithmetic does in the same geometry (vLLM issue #55208). Exit
status 1 when any column of rayk's is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from jobs.ranks import bound_fields, make_rank
from rayk.kv.caches import CanonicalKVCaches, FieldView
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import Mamba2Spec
from rayk.parallel.shard import EngineShape
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.rank import TransferRank
from rayk.types.errors import RaykError

HEADS, HEAD_SIZE, STATE_SIZE, CONV_WIDTH = 48, 64, 128, 4
"""x has 48 * 64 = 3072 channels; B and C 128 each per group."""
NUM_LAYERS, NUM_BLOCKS, NUM_TOKENS = 2, 6, 37
TPS = (1, 2, 4)
PROJECTIONS = ("conv_x", "conv_b", "conv_c")
NOTHING = 0xEE
"""Every byte at the consumer before the transfer, and at the producer wherever no tap lies."""

ABOUT = f"""\
x = {HEADS * HEAD_SIZE} channels, state {STATE_SIZE}, width {CONV_WIDTH}, bfloat16. Columns of all
consumer ranks: total/wrong/read outside the convolution state. vLLM 0.33.0: what its offset
arithmetic does with one group of B and C (vLLM issue #55208). rayk: what arrives when its plan is
executed, at {{pairs}} pairs of layouts; the worst.
"""

VLLM_ONE_GROUP = {
    (1, 2): (3584, 128, 256),
    (1, 4): (4096, 128, 768),
    (2, 4): (4096, 256, 512),
    (2, 1): (3328, 192, 0),
    (4, 1): (3328, 224, 0),
    (4, 2): (3584, 384, 0),
}
"""(columns, wrong, read outside the convolution state) of vLLM 0.33.0; equal TP: 0 wrong."""


@dataclass(frozen=True)
class Columns:
    """Of all consumer ranks together, one layer."""

    total: int
    wrong: int
    outside: int

    def __str__(self) -> str:
        return f"{self.total}/{self.wrong}/{self.outside}"


@dataclass(frozen=True)
class Side:
    caches: list[CanonicalKVCaches]
    ranks: list[TransferRank]


def make_side(name: str, spec: Mamba2Spec, layout: str, tp: int, network: LocalNetwork) -> Side:
    """Memory full of NOTHING, and what reads and shows it."""
    side = Side([], [])
    groups = group_layers({(layer, spec.part): spec for layer in range(NUM_LAYERS)})
    for rank in range(tp):
        caches, made = make_rank(
            groups,
            layout,
            LocalAgent(f"{name}{rank}", network),
            shape=EngineShape(tp),
            rank=rank,
            num_blocks=NUM_BLOCKS,
            engine=name,
            fill=NOTHING - 256,
        )
        side.caches.append(caches)
        side.ranks.append(made)
    return side


def states_of(caches: CanonicalKVCaches, layer: int) -> list[FieldView]:
    """A layer's states as its kernels would bind them."""
    return bound_fields(caches, caches.geometry.groups[0].group, layer)


def numbered_taps(spec: Mamba2Spec) -> dict[str, np.ndarray]:
    """Projection -> int16 [units, channels, taps]: a channel's number over all projections, times its taps,
    plus the tap."""
    taps = CONV_WIDTH - 1
    counts = {
        "conv_x": (spec.num_heads, spec.head_size),
        "conv_b": (spec.num_groups, spec.state_size),
        "conv_c": (spec.num_groups, spec.state_size),
    }
    numbers = np.arange(sum(units * channels for units, channels in counts.values()) * taps, dtype=np.int16)
    found, start = {}, 0
    for name, (units, channels) in counts.items():
        stop = start + units * channels * taps
        found[name] = numbers[start:stop].reshape(units, channels, taps)
        start = stop
    return found


def transfer(spec: Mamba2Spec, tp: tuple[int, int], layouts: tuple[str, str]) -> list[dict[str, np.ndarray]]:
    """Execute the plan; layer 1's taps at each consumer rank: projection -> int16 [units, channels, taps]."""
    network = LocalNetwork()
    producer, consumer = (
        make_side(name, spec, layout, ranks, network)
        for name, layout, ranks in zip("pd", layouts, tp, strict=True)
    )
    taps = numbered_taps(spec)
    block, landed_in = 4, 2
    for caches, layer in itertools.product(producer.caches, range(NUM_LAYERS)):
        for view in states_of(caches, layer):
            if view.name in taps:
                right = torch.from_numpy(taps[view.name][list(view.units)].reshape(len(view.units), -1))
                view.view[block, :, 0] = right.view(torch.bfloat16)
    descriptions = [[r.description for r in side.ranks] for side in (producer, consumer)]
    for rank in (*consumer.ranks, *producer.ranks):
        rank.connect(*descriptions)
    ticket = producer.ranks[0].make_ticket(
        request_id="r",
        lease_id="r",
        num_tokens=NUM_TOKENS,
        block_tables=[[block]],
        digests=[r.digests(NUM_TOKENS, [[block]]) for r in producer.ranks],
    )
    for rank in consumer.ranks:
        rank.start(ticket, [[landed_in]], time.monotonic_ns() + 10**10)
        finish(rank)
    return [
        {
            v.name: v.view[landed_in, :, 0]
            .view(torch.int16)
            .numpy()
            .reshape(len(v.units), -1, CONV_WIDTH - 1)
            for v in states_of(caches, 1)
            if v.name in taps
        }
        for caches in consumer.caches
    ]


def finish(rank: TransferRank) -> None:
    """Poll until the read is over. A mismatch is what this job counts; other errors end it."""
    while not (outcomes := rank.poll(time.monotonic_ns())):
        pass
    error: RaykError | None = outcomes[0].error
    if error is not None and type(error).__name__ != "KVMismatch":
        raise error


def wanted_units(spec: Mamba2Spec, name: str, tp_size: int, tp_rank: int) -> list[int]:
    """Heads of the rank, or the groups that they read, head by head."""
    heads = [h for h in range(spec.num_heads) if h * tp_size // spec.num_heads == tp_rank]
    per_unit = 1 if name == "conv_x" else spec.num_heads // spec.num_groups
    return sorted({h // per_unit for h in heads})


def count_columns(spec: Mamba2Spec, tp: tuple[int, int], layouts: tuple[str, str]) -> Columns:
    """What arrived, column by column."""
    taps = numbered_taps(spec)
    known = {
        tuple(column) for name in PROJECTIONS for column in taps[name].reshape(-1, CONV_WIDTH - 1).tolist()
    }
    total = wrong = outside = 0
    for rank, found in enumerate(transfer(spec, tp, layouts)):
        for name in PROJECTIONS:
            right = taps[name][wanted_units(spec, name, tp[1], rank)].reshape(-1, CONV_WIDTH - 1)
            columns = found[name].reshape(-1, CONV_WIDTH - 1)
            assert columns.shape == right.shape, "the rank holds other units than its heads need"
            differs = (columns != right).any(axis=1)
            total += len(columns)
            wrong += int(differs.sum())
            outside += sum(tuple(column) not in known for column in columns[differs].tolist())
    return Columns(total, wrong, outside)


def table(num_groups: int, layout_pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, Columns]]:
    """A row per TP pair: (pair, vLLM's columns, ours, the worst over the layouts)."""
    spec = Mamba2Spec(4096, "bfloat16", CONV_WIDTH, HEADS, HEAD_SIZE, num_groups, STATE_SIZE)
    for tp in sorted(itertools.product(TPS, repeat=2), key=lambda t: (t[0] == t[1], t[0] > t[1], t)):
        counted = [count_columns(spec, tp, layouts) for layouts in layout_pairs]
        assert len({c.total for c in counted}) == 1
        ours = max(counted, key=lambda c: (c.wrong, c.outside))
        theirs = "/".join(map(str, VLLM_ONE_GROUP.get(tp, (ours.total, 0, 0))))
        yield f"{tp[0]} -> {tp[1]}", theirs if num_groups == 1 else "0 wrong", ours


def fill(options: argparse.Namespace, page: Page) -> None:
    """Add a table with one group of B and C, and one with eight."""
    torch.set_num_threads(1)
    pairs = list(itertools.product(options.layouts, repeat=2))
    page.say(ABOUT.format(pairs=len(pairs)))
    for num_groups in (1, 8):
        page.say(f"## n_groups = {num_groups}", "")
        page.head("P -> D", "vLLM 0.33.0", "rayk")
        for pair, theirs, ours in table(num_groups, pairs):
            page.row(pair, theirs, ours)
            if ours.wrong:
                page.wrong.append(f"n_groups {num_groups}, {pair}: {ours.wrong} columns are wrong")
        page.say("")


def main() -> int:
    layouts = {"nargs": "+", "default": list(LAYOUTS), "choices": list(LAYOUTS)}
    title = "Mamba2's convolution state between engines of unlike TP sizes"
    return run(fill, __file__, title=title, layouts=layouts)


if __name__ == "__main__":
    sys.exit(main())
