"""Reads of dealt tokens over NIXL: descriptors, bytes, and the rate of both ways beside bare NIXL.

    python jobs/benchmarks/stripes.py [--mib 16] [--rounds 9] [--cases 0 1 ...] [--check] [--record]

Where two engines deal tokens unlike (decode context parallel), neighbours in one page are not neighbours in
the other: with turns of one token there is a run per token and layer (and head, unless the layout keeps heads
together). As in staging.py a producer process fills its pages, three consumer engines of this process read
the same request run by run, through the staging buffer, and as the cost model says; they take turns, and
every byte is compared. Bare NIXL reads as many bytes in one block, 1 MiB at a time. Times are the wall's,
from the ticket to the last byte in its page, summed over ranks, medians of the rounds; ratios are medians of
the rounds' ratios. With --check the model must have chosen the faster way, or one within 10 % of it,
everywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run, second_process
from jobs.benchmarks.staging import DENSE, TIE, Seen, choice, expected_ms, run_case
from jobs.benchmarks.transfer_rate import NUM_LAYERS, Case, produce
from rayk.kv.specs import FullAttentionSpec, MlaSpec

LATENTS = MlaSpec(16, 512, 64, "bfloat16", 128)
"""As DeepSeek-V3's: 1,152 bytes per token and layer."""
HEADS = FullAttentionSpec(16, 2, 128, 128, "bfloat16", 32)
"""Grouped queries, 512 bytes per token, layer and head."""
MODELS = {"MLA": LATENTS, "GQA": HEADS}
ONE = (1, 1)
DIVISIONS = {
    # TP sizes, deals (ranks and tokens in a row), rows of a block.
    "MLA": (
        ((2, 1), ((2, 1), ONE), (16, 16)),
        ((2, 1), ((2, 16), ONE), (16, 16)),
        ((1, 4), (ONE, (4, 1)), (16, 16)),
        ((1, 4), (ONE, (4, 4)), (16, 16)),
        ((2, 4), ((2, 1), (4, 16)), (16, 32)),
        ((2, 2), ((2, 1), (2, 1)), (16, 16)),
    ),
    "GQA": (
        ((4, 2), ((2, 1), ONE), (16, 16)),
        ((2, 4), (ONE, (2, 1)), (16, 16)),
        ((4, 4), ((2, 1), (2, 16)), (16, 32)),
    ),
}
LAYOUTS = {
    # With one head the order of heads and tokens says nothing.
    "MLA": (("BHLNC", "BHLNC"), ("LBNHC", "LBNHC")),
    # Blocks of all layers together; each layer apart, tokens in front of heads (NHD) and behind (HND).
    "GQA": (("BHLNC", "BHLNC"), ("LBNHC", "LBNHC"), ("LBHNC", "LBHNC"), ("LBNHC", "LBHNC")),
}
TITLES = (
    *(
        "caches",
        "ranks",
        "layouts",
        "blocks",
        "MiB",
        "descriptors direct",
        "bytes each",
        "staged",
        "bytes each",
    ),
    *("bare NIXL, GiB/s", "direct", "staged", "auto", "auto chose", "expected direct ms", "staged ms"),
    *("staged over direct", "of bare NIXL", "right"),
)


def make_cases() -> Iterator[tuple[str, Case]]:
    """Yield every division in every layout, with its model's name."""
    for name, spec in MODELS.items():
        for tp, deals, sizes in DIVISIONS[name]:
            for layouts in LAYOUTS[name]:
                yield name, Case(layouts, tp, scattered=True, deals=deals, block_sizes=sizes, spec=spec)


def ranks_text(case: Case) -> str:
    """Say how both sides are divided, e.g. `2 x 1 to 1`: ranks that deal turns of one token."""
    sides = zip(case.tp, case.deals, strict=True)
    return " to ".join(f"TP {tp}" + (f" DCP {n} I {turn}" if n > 1 else "") for tp, (n, turn) in sides)


def ratio(seen: dict[str, Seen], one: str, other: str) -> float:
    """The median over rounds of what one mode took, by what another took in the same round."""
    pairs = zip(seen[one].seconds[1:], seen[other].seconds[1:], strict=True)
    return statistics.median(a / b for a, b in pairs)


def line(name: str, case: Case, mib: int, seen: dict[str, Seen]) -> tuple[tuple[str, ...], float]:
    """A row for people, and what the chosen way takes by the faster one."""
    num_bytes = case.num_tokens(mib) * case.token_bytes
    descriptors = {mode: sum(row.num_descriptors for row in seen[mode].rows) for mode in ("never", "always")}
    chose, mode = choice(seen)
    faster = "always" if ratio(seen, "always", "never") < 1 else "never"
    loss = ratio(seen, mode, faster)
    rates = (
        num_bytes / statistics.median(seen[way].seconds[1:]) / 2**30
        for way in (DENSE, "never", "always", "auto")
    )
    cells = (
        name,
        ranks_text(case),
        "-".join(case.layouts),
        "-".join(map(str, case.block_sizes)),
        f"{sum(row.bytes for row in seen['never'].rows) / 2**20:.1f}",
        *(f"{n:,}" for count in descriptors.values() for n in (count, num_bytes // count)),
        *(f"{rate:.2f}" for rate in rates),
        chose,
        *(f"{ms:.1f}" for ms in expected_ms(seen["auto"].rows)),
        f"{ratio(seen, 'always', 'never'):.2f}",
        f"{ratio(seen, DENSE, 'auto'):.0%}",
        "yes" if loss <= TIE else f"no, {loss:.2f} x",
    )
    return cells, loss


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per case; returns those in which the model chose the slower way."""
    torch.set_num_threads(1)
    page.say(
        f"One request over nixl/UCX (CMA), {NUM_LAYERS} layers, scattered blocks of rows of one rank. MLA: "
        f"{LATENTS.latent_size} + {LATENTS.rope_size} bfloat16 a token; GQA: {HEADS.num_kv_heads} KV heads "
        f"of {HEADS.head_size_k} + {HEADS.head_size_v}. DCP N I T: N ranks deal turns of T tokens. "
        "Staged reads take whole stretches, with what lies between their runs, and copy the runs out.",
        "",
    )
    cases = list(enumerate(make_cases()))
    cases = [(i, case) for i, case in cases if options.cases is None or i in options.cases]
    page.head(*TITLES)
    wrong = []
    with second_process(produce) as pipe:
        for i, (name, case) in cases:
            cells, loss = line(name, case, options.mib, run_case(pipe, case, options.mib, options.rounds, i))
            page.row(*cells)
            if loss > TIE:
                wrong.append(
                    f"{' '.join(cells[:4])}: the chosen way takes {loss:.2f} of the faster, limit {TIE}"
                )
    right = len(cases) - len(wrong)
    page.say(
        "", f"The model chose the faster way, or one within {TIE - 1:.0%} of it, in {right} of {len(cases)}."
    )
    return wrong


def main() -> int:
    return run(
        fill,
        __file__,
        title="Reads of dealt tokens",
        mib={"type": int, "default": 16, "help": "KV bytes per request, before TP"},
        rounds=9,
        cases={"type": int, "nargs": "*", "help": "indices of the cases to run (default all)"},
    )


if __name__ == "__main__":
    sys.exit(main())
