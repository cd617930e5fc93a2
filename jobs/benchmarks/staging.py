"""Staged against direct reads over NIXL: what each takes, what `auto` chooses, and whether that was right.

A producer process fills its pages; three consumer engines of this process read the same request with
transfer.staging never, always and auto, taking turns, and every byte is compared. Times run from the ticket
to the last byte in its page, repacking included; each is the least of several rounds, summed over ranks.

    python jobs/benchmarks/staging.py --mib 16 --rounds 9 --record
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run, second_process
from jobs.benchmarks.transfer_rate import (
    NUM_LAYERS,
    SPEC,
    Case,
    Side,
    block_table,
    check_bytes,
    large_descriptors,
    make_side,
    produce,
)
from rayk.transfer.staging import StagingSettings
from rayk.transfer.ticket import TransferTicket
from rayk.types.rows import TransferRow

MODES = ("never", "always", "auto")
DENSE = "1 MiB"
"""Bare NIXL, as many bytes 1 MiB at a time."""
LAYOUTS = (
    ("LBNHC", "BHLNC"),
    ("LBNHC", "LBHNC"),
    ("BLNHC", "BHLNC"),
    ("BLNHC", "BLHNC"),
    ("LBHNC", "BLNHC"),
    ("BHLNC", "LBNHC"),
    ("LHBNC", "BLNHC"),
    ("BHLNC", "BLHNC"),
    ("LBHNC", "BHLNC"),
    ("BHLNC", "BHLNC"),
)
TPS = ((1, 1), (1, 2), (2, 1), (4, 2))
TIE = 1.1
"""Choosing the slower way is right as well where it takes this many times as long at most."""


@dataclass
class Seen:
    seconds: list[float] = field(default_factory=list)
    rows: tuple[TransferRow, ...] = ()

    @property
    def least_ms(self) -> float:
        return min(self.seconds[1:]) * 1e3


def read(
    side: Side, ticket: TransferTicket, table: Sequence[int], name: str
) -> tuple[float, list[TransferRow]]:
    """One request on every rank, one after the other: (seconds, rows)."""
    seconds, rows = 0.0, []
    for rank in side.ranks:
        rank.start(replace(ticket, request_id=name, lease_id=name), [table], time.monotonic_ns() + 60 * 10**9)
        while not (outcomes := rank.poll(time.monotonic_ns())):
            pass
        if outcomes[0].error is not None:
            raise outcomes[0].error
        seconds += outcomes[0].stage_ns["read"] / 1e9
        rows += outcomes[0].rows
    return seconds, rows


def run_case(pipe: Connection, case: Case, mib: int, rounds: int, life: int) -> dict[str, Seen]:
    """What each of MODES and DENSE took; all take turns, round by round."""
    num_tokens = case.num_tokens(mib)
    num_blocks = case.num_blocks(1, num_tokens)
    pipe.send((case, num_tokens, life))
    producers, ticket = pipe.recv()
    table = block_table(case, 1, num_tokens, num_blocks)
    sides = {
        mode: make_side(case, 1, num_blocks, 10 * life + i, StagingSettings(mode))
        for i, mode in enumerate(MODES)
    }
    descriptions = [[rank.description for rank in side.ranks] for side in sides.values()]
    pipe.send(descriptions)
    for side, consumers in zip(sides.values(), descriptions, strict=True):
        for rank in side.ranks:
            rank.connect(producers, consumers)
    seen = {mode: Seen() for mode in (*MODES, DENSE)}
    dense, landing = large_descriptors(sides["never"], producers, num_tokens * case.token_bytes)
    for i in range(rounds + 1):
        seen[DENSE].seconds.append(dense.time_s())
        for mode in (*MODES[i % 3 :], *MODES[: i % 3]):
            took, rows = read(sides[mode], ticket, table, f"{mode}{i}")
            seen[mode].seconds.append(took)
            seen[mode].rows = tuple(rows)
    for side in sides.values():
        check_bytes(case, side, table, num_tokens)
        side.close()
    del landing
    return seen


def choice(seen: dict[str, Seen]) -> tuple[str, str]:
    """What auto chose, in words, and the mode that did the same."""
    staged = {row.staged for row in seen["auto"].rows}
    if len(staged) > 1:
        return "both", "auto"
    return ("staged", "always") if True in staged else ("direct", "never")


def expected_ms(rows: Sequence[TransferRow]) -> tuple[float, float]:
    """(direct, staged), by the cost model."""
    costs = ((row.direct_cost_us, row.staged_cost_us) for row in rows)
    direct_us, staged_us = (sum(cost or 0.0 for cost in way) for way in zip(*costs, strict=True))
    return direct_us / 1e3, staged_us / 1e3


TITLES = (
    *("layouts", "TP", "descriptors direct", "staged", "direct ms", "staged ms", "repack ms", "auto ms"),
    *("auto chose", "expected direct ms", "staged ms", "right"),
)


def line(case: Case, seen: dict[str, Seen]) -> tuple[tuple[str, ...], bool]:
    """A row for people; whether auto was right."""
    never, always, auto = (seen[mode] for mode in MODES)
    chose, mode = choice(seen)
    best, taken = min(never.least_ms, always.least_ms), seen[mode].least_ms
    is_right = taken <= TIE * best
    cells = (
        "-".join(case.layouts),
        f"{case.tp[0]} to {case.tp[1]}",
        f"{sum(row.num_descriptors for row in never.rows):,}",
        f"{sum(row.num_descriptors for row in always.rows):,}",
        f"{never.least_ms:.2f}",
        f"{always.least_ms:.2f}",
        f"{sum(row.repack_ns for row in always.rows) / 1e6:.2f}",
        f"{auto.least_ms:.2f}",
        chose,
        *(f"{ms:.2f}" for ms in expected_ms(auto.rows)),
        "yes" if is_right else f"no, {taken / best:.2f} x",
    )
    return cells, is_right


def fill(options: argparse.Namespace, page: Page) -> None:
    """Add a row per case, and how often auto was right."""
    torch.set_num_threads(1)
    page.say(
        f"nixl/UCX (CMA). {NUM_LAYERS} layers, {SPEC.num_kv_heads} KV heads of {SPEC.head_size_k} + "
        f"{SPEC.head_size_v} {SPEC.dtype}, blocks of {SPEC.block_size} tokens, scattered.\n"
    )
    cases = [Case(layouts, tp, scattered=True) for layouts in LAYOUTS for tp in TPS]
    cases = [case for i, case in enumerate(cases) if options.cases is None or i in options.cases]
    page.head(*TITLES)
    num_right = 0
    with second_process(produce) as pipe:
        for i, case in enumerate(cases):
            cells, is_right = line(case, run_case(pipe, case, options.mib, options.rounds, i))
            num_right += is_right
            page.row(*cells)
    right = f"auto was right in {num_right} of {len(cases)} cases"
    page.say("", f"{right} (the faster way, or within {TIE - 1:.0%} of it).")


def main() -> int:
    cases = {"type": int, "nargs": "*", "help": "indices of the cases to run (default all)"}
    return run(fill, __file__, title="Staged against direct reads", mib=16, rounds=9, cases=cases)


if __name__ == "__main__":
    sys.exit(main())
