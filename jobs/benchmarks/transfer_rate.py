"""How fast rayk reads KV over NIXL, beside two ceilings of the same run.

A producer process fills its pages through the views kernels use; this process reads them as a consumer
engine does and checks every byte. In each round are timed, the first two in turns and the third before each:

  rayk     TransferRank: lower the plan, pick descriptors, read (and then fence and verify, shown apart)
  same     raw NIXL, the very same descriptors prepared beforehand as one list per pair of ranks
  1 MiB    raw NIXL, as many bytes in dense descriptors of 1 MiB

Rates are GB (10^9 bytes) per second of this process's processor time, medians over rounds; ratios are medians
of the rounds' ratios. On the CPU posting a read copies the bytes (UCX reads the peer's memory in a system
call), so that processor time is the copy's time without what other processes take; `--wall` takes the wall's.
--check: 90 % of raw NIXL with the same descriptors, where runs have 64 KiB or more.

    python jobs/benchmarks/transfer_rate.py --mib 64 --rounds 15 --check --record
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run, second_process
from jobs.benchmarks.raw_reads import Clock, RawReads, same_descriptors, take_turns
from jobs.ranks import make_rank
from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.specs import FullAttentionSpec, MlaSpec, page_bytes
from rayk.parallel.shard import EngineShape
from rayk.reports.page import Column
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.nixl_agent import NixlAgent
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.token_classes import common_classes

MIB = 1 << 20
SPEC = FullAttentionSpec(16, 8, 128, 128, "bfloat16", 32)
"""8 KV heads of 128 + 128 bfloat16, blocks of 16 tokens: 64 KiB per layer and block."""
NUM_LAYERS = 32
LEAST, LONG_RUN = 0.9, 64 << 10
"""Of raw NIXL with the same descriptors, where runs have so many bytes or more."""


CLOCK = Clock()


@dataclass(frozen=True)
class Case:
    """One line of the table: (producer, consumer) layouts and TP sizes, and how block ids lie."""

    layouts: tuple[str, str]
    tp: tuple[int, int]
    scattered: bool
    deals: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1))
    """Ranks that deal tokens, and how many in a row."""
    block_sizes: tuple[int, int] = (SPEC.block_size, SPEC.block_size)
    """Rows of a block on one rank."""
    spec: FullAttentionSpec | MlaSpec = SPEC

    def shape(self, side: int) -> EngineShape:
        """How an engine is divided."""
        return EngineShape(self.tp[side], *self.deals[side])

    def groups(self, side: int) -> tuple[KVCacheGroup, ...]:
        """The layers of an engine, which share blocks."""
        spec = replace(self.spec, block_size=self.block_sizes[side])
        specs = {(layer, spec.part): spec for layer in range(NUM_LAYERS)}
        return group_layers(specs, dcp=self.deals[side][0])

    def block_tokens(self, side: int) -> int:
        """Tokens of a block id."""
        return self.block_sizes[side] * self.deals[side][0]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers, before TP."""
        return page_bytes(self.spec) // self.spec.block_size * NUM_LAYERS

    def num_tokens(self, mib: int) -> int:
        """Tokens of so many MiB, in whole blocks of both sides; at least one of each."""
        whole = math.lcm(*map(self.block_tokens, (0, 1)))
        return max(1, mib * MIB // (self.token_bytes * whole)) * whole

    def num_blocks(self, side: int, num_tokens: int) -> int:
        """Blocks of a pool that holds so many tokens, the null block, and another one."""
        return num_tokens // self.block_tokens(side) + 2


CASES = (
    Case(("BHLNC", "BHLNC"), (1, 1), scattered=False),
    Case(("BHLNC", "BHLNC"), (1, 1), scattered=True),
    Case(("BHLNC", "BHLNC"), (1, 2), scattered=True),
    Case(("BHLNC", "BHLNC"), (2, 1), scattered=True),
    Case(("BHLNC", "BHLNC"), (4, 2), scattered=True),
    Case(("BLHNC", "BLHNC"), (1, 1), scattered=True),
    Case(("LBHNC", "LBHNC"), (1, 1), scattered=True),
    Case(("LBHNC", "BLHNC"), (1, 1), scattered=True),
    Case(("LBHNC", "LBHNC"), (1, 2), scattered=True),
    Case(("BHLNC", "LBHNC"), (2, 1), scattered=True),
    Case(("LBNHC", "LBNHC"), (1, 2), scattered=True),
)


@dataclass
class Side:
    agents: list[NixlAgent]
    caches: list[CanonicalKVCaches]
    ranks: list[TransferRank]
    heads: list[tuple[int, ...]]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def make_side(
    case: Case, side: int, num_blocks: int, life: int, staging: StagingSettings | None = None
) -> Side:
    """One engine: caches, agents, ranks."""
    made = Side([], [], [], [])
    groups, shapes = case.groups(side), [case.shape(side) for side in (0, 1)]
    for number in range(case.tp[side]):
        agent = NixlAgent(f"{'pd'[side]}{number}-{life}-{os.getpid()}")
        caches, rank = make_rank(
            groups,
            case.layouts[side],
            agent,
            shape=shapes[side],
            rank=number,
            num_blocks=num_blocks,
            engine=f"{'pd'[side]}{life}",
            token_classes=common_classes(shapes),
            staging=staging,
            clock=CLOCK.now_ns,
        )
        made.agents.append(agent)
        made.caches.append(caches)
        made.heads.append(caches.geometry.groups[0].fields[0].units)
        made.ranks.append(rank)
    return made


def block_table(case: Case, side: int, num_tokens: int, num_blocks: int) -> list[int]:
    count = num_tokens // case.block_tokens(side)
    ids = np.arange(1, num_blocks)
    if case.scattered:
        ids = np.random.default_rng(side).permutation(ids)
    return [int(b) for b in ids[:count]]


def layer_values(case: Case, layer: int, num_tokens: int) -> torch.Tensor:
    """Random bit patterns as bfloat16 [token, head, content]."""
    generator = torch.Generator().manual_seed(layer)
    fields = case.spec.fields()
    shape = (num_tokens, fields[0].units, sum(f.row_bytes for f in fields) // 2)
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    return bits.view(torch.bfloat16)


def places(
    case: Case, side: int, rank: int, table: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, block, slot) of every token of a rank."""
    (num_shards, in_a_row), tokens = case.deals[side], torch.arange(num_tokens)
    tokens = tokens[tokens // in_a_row % num_shards == rank % num_shards]
    before = tokens // (num_shards * in_a_row) * in_a_row + tokens % in_a_row
    return tokens, torch.tensor(table)[tokens // case.block_tokens(side)], before % case.block_sizes[side]


def produce(pipe: Connection) -> None:
    """The producer's process: build, fill, hand over, keep polling."""
    torch.set_num_threads(1)
    side: Side | None = None
    while True:
        for rank in side.ranks if side else ():
            rank.poll(time.monotonic_ns())
        if not pipe.poll(0.001):
            continue
        order = pipe.recv()
        if side is not None:
            side.close()
        if order is None:
            return
        case, num_tokens, life = order
        num_blocks = case.num_blocks(0, num_tokens)
        side = make_side(case, 0, num_blocks, life)
        table = block_table(case, 0, num_tokens, num_blocks)
        for layer in range(NUM_LAYERS):
            values = layer_values(case, layer, num_tokens)
            for number, (caches, heads) in enumerate(zip(side.caches, side.heads, strict=True)):
                tokens, blocks, slots = places(case, 0, number, table, num_tokens)
                caches.view(layer)[blocks, :, slots] = values[tokens][:, list(heads)]
        ticket = side.ranks[0].make_ticket(
            request_id="warm",
            lease_id="warm",
            num_tokens=num_tokens,
            block_tables=[table],
            digests=[rank.digests(num_tokens, [table]) for rank in side.ranks],
        )
        descriptions = [rank.description for rank in side.ranks]
        pipe.send((descriptions, ticket))
        for consumers in pipe.recv():
            for rank in side.ranks:
                rank.connect(descriptions, consumers)


def check_bytes(case: Case, side: Side, table: Sequence[int], num_tokens: int) -> None:
    """Every byte of every rank of a consumer. Raises RuntimeError."""
    for layer in range(NUM_LAYERS):
        values = layer_values(case, layer, num_tokens)
        for number, (caches, heads) in enumerate(zip(side.caches, side.heads, strict=True)):
            tokens, blocks, slots = places(case, 1, number, table, num_tokens)
            found = caches.view(layer)[blocks, :, slots].view(torch.int16)
            if not torch.equal(found, values[tokens][:, list(heads)].view(torch.int16)):
                raise RuntimeError(f"layer {layer}: the bytes read are not the bytes written")


def large_descriptors(
    side: Side, producers: Sequence[CacheDescription], num_bytes: int
) -> tuple[RawReads, torch.Tensor]:
    """As many bytes from producer rank 0 (over and over if it has fewer), 1 MiB at a time; and where to."""
    agent, producer = side.agents[0], producers[0]
    landing = torch.zeros(num_bytes, dtype=torch.int8)
    here = agent.register(landing)
    starts = np.arange(0, num_bytes, MIB)
    sizes = np.minimum(num_bytes - starts, MIB)
    theirs = producer.base_address + starts % (producer.geometry.pages_bytes // MIB * MIB)
    agent.add_peer(producer.agent_name, producer.agent_metadata)
    raw = RawReads()
    raw.add(agent, producer, here + starts, theirs, sizes)
    return raw, landing


def read_with_rayk(side: Side, ticket: TransferTicket, table: Sequence[int], name: str) -> dict[str, float]:
    """One request on every consumer rank, one after the other. Seconds per stage, summed over ranks."""
    stages: dict[str, float] = {"post": 0.0, "all": -CLOCK.now_ns() / 1e9}
    for rank in side.ranks:
        mine = replace(ticket, request_id=name, lease_id=name)
        rank.start(mine, [table], time.monotonic_ns() + 60 * 10**9)
        outcomes = rank.poll(time.monotonic_ns())
        while not outcomes:
            outcomes = rank.poll(time.monotonic_ns())
        if outcomes[0].error is not None:
            raise outcomes[0].error
        for stage, ns in outcomes[0].stage_ns.items():
            stages[stage] = stages.get(stage, 0.0) + ns / 1e9
        stages["post"] += sum(row.post_ns for row in outcomes[0].rows) / 1e9
    stages["all"] += CLOCK.now_ns() / 1e9
    return stages


def run_case(pipe: Connection, case: Case, mib: int, rounds: int, life: int) -> dict[str, Any]:
    num_tokens = case.num_tokens(mib)
    num_blocks = case.num_blocks(1, num_tokens)
    pipe.send((case, num_tokens, life))
    side = make_side(case, 1, num_blocks, life)
    producers, ticket = pipe.recv()
    table = block_table(case, 1, num_tokens, num_blocks)
    consumers = [rank.description for rank in side.ranks]
    pipe.send([consumers])
    for rank in side.ranks:
        rank.connect(producers, consumers)
    read_with_rayk(side, ticket, table, "warm-up")
    check_bytes(case, side, table, num_tokens)
    same = same_descriptors(list(zip(side.agents, side.ranks, strict=True)), producers, ticket, [table])
    large, landing = large_descriptors(side, producers, same.num_bytes)
    seconds: dict[str, list[float]] = {"same": [], "large": [], "rayk": []}
    stages: list[dict[str, float]] = []

    def rayk() -> None:
        stages.append(read_with_rayk(side, ticket, table, f"r{len(stages)}"))
        seconds["rayk"].append(stages[-1]["read"])

    def bare() -> None:
        seconds["same"].append(same.time_s(CLOCK.now_ns))

    def dense() -> None:
        seconds["large"].append(large.time_s(CLOCK.now_ns))

    take_turns(rayk, bare, dense, rounds + 1)
    # It came twice a round.
    twice = seconds["large"]
    seconds["large"] = [(a + b) / 2 for a, b in zip(twice[::2], twice[1::2], strict=True)]
    check_bytes(case, side, table, num_tokens)
    side.close()
    del landing
    return _row(case, same, {n: t[1:] for n, t in seconds.items()}, stages[1:])


def _row(
    case: Case,
    same: RawReads,
    seconds: dict[str, list[float]],
    stages: list[dict[str, float]],
) -> dict[str, Any]:
    def rate(times: Sequence[float]) -> float:
        return same.num_bytes / statistics.median(times) / 1e9

    def ratio(ceiling: str) -> float:
        return statistics.median(c / r for c, r in zip(seconds[ceiling], seconds["rayk"], strict=True))

    median_ms = {
        f"{stage}_ms": statistics.median(s[stage] for s in stages) * 1e3
        for stage in ("post", "read", "fence", "verify", "all")
    }
    return {
        "layouts": "-".join(case.layouts),
        "tp": "{}->{}".format(*case.tp),
        "blocks": "scattered" if case.scattered else "dense",
        "run_bytes": same.run_bytes,
        "run_kib": same.run_bytes / 1024,
        "num_descriptors": same.num_descriptors,
        "num_bytes": same.num_bytes,
        "rayk_gb_per_s": rate(seconds["rayk"]),
        "same_gb_per_s": rate(seconds["same"]),
        "large_gb_per_s": rate(seconds["large"]),
        "of_same": ratio("same"),
        "of_large": ratio("large"),
        "with_verify_gb_per_s": same.num_bytes / (median_ms["all_ms"] / 1e3) / 1e9,
        **median_ms,
    }


COLUMNS = (
    Column("layouts", "layouts"),
    Column("TP", "tp"),
    Column("blocks", "blocks"),
    Column("run KiB", "run_kib", ".1f"),
    Column("descr", "num_descriptors"),
    Column("rayk", "rayk_gb_per_s", ".2f"),
    Column("same", "same_gb_per_s", ".2f"),
    Column("1 MiB", "large_gb_per_s", ".2f"),
    Column("of same", "of_same", ".0%"),
    Column("of 1 MiB", "of_large", ".0%"),
    Column("post ms", "post_ms", ".2f"),
    Column("read ms", "read_ms", ".2f"),
    Column("fence ms", "fence_ms", ".2f"),
    Column("verify ms", "verify_ms", ".2f"),
    Column("verified", "with_verify_gb_per_s", ".2f"),
)


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per case; returns those with long runs that are below LEAST of raw NIXL."""
    CLOCK.is_wall = options.wall
    torch.set_num_threads(1)
    cases = [(i, case) for i, case in enumerate(CASES) if options.cases is None or i in options.cases]
    rows = []
    with second_process(produce) as pipe:
        for i, case in cases:
            rows.append(run_case(pipe, case, options.mib, options.rounds, i))
            print(f"{rows[-1]['layouts']}: {rows[-1]['of_same']:.0%} of the same", file=sys.stderr)
    page.section("Rates", COLUMNS, rows)
    page.tables = {"rates": rows}
    return [
        f"{row['layouts']}, TP {row['tp']}, {row['blocks']}: {row['of_same']:.0%} of raw NIXL, "
        f"the limit is {LEAST:.0%}"
        for row in rows
        if row["run_bytes"] >= LONG_RUN and row["of_same"] < LEAST
    ]


def main() -> int:
    return run(
        fill,
        __file__,
        title="Transfer rate beside raw NIXL",
        mib={"type": int, "default": 64, "help": "KV bytes per request (TP 1)"},
        rounds=15,
        cases={"type": int, "nargs": "*", "help": "indices of the cases to run (default all)"},
        wall={"action": "store_true", "help": "wall clock instead of processor time"},
    )


if __name__ == "__main__":
    sys.exit(main())
