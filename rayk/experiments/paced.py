"""Judge cells whose engines kept the times of cost tables: whether they kept them, and their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayk.models.config import DecoderConfig
from rayk.specs import Cell
from rayk.types.paced_tokens import PacedTokens
from rayk.types.rows import RequestRow

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome

LATE_SHARE = 0.10
"""Steps that begin or end later than this share of their length, at the 99th percentile, are not the
tables'."""
BUSY_SHARE = 0.70
"""On a machine that is busier than this, of all its cores, what runs waits for one another."""


def is_paced(cell: Cell) -> bool:
    """Tell whether the cell's engines compute nothing: all of them, for `engine.compute` is of both sides."""
    return cell.is_rayks and cell.prefill.compute == "paced"


def expected_tokens(
    cell: Cell, config: DecoderConfig, prompts: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """Say what each prompt is answered with."""
    rule = PacedTokens(config.vocab_size, config.eos_token_ids)
    return {i: rule.outputs(prompt, cell.sampling) for i, prompt in enumerate(prompts)}


def first_difference(row: RequestRow, expected: Sequence[int]) -> tuple[int, str] | None:
    """Find the first token that the rule did not choose, and say so; None where there is none."""
    found = row.output_token_ids
    if found == list(expected):
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        at = min(len(found), len(expected))
        return at, f"request {row.prompt_index}: {len(found)} tokens, and the rule has {len(expected)}"
    return at, f"request {row.prompt_index}, token {at}: {found[at]} instead of {expected[at]} (the rule's)"


def judge_pace(outcomes: Sequence[CellOutcome]) -> tuple[dict[str, float], str]:
    """Return what was measured of all engines, and why the times are none; "" where they are."""
    each = [(n, f["pace"]) for o in outcomes for n, f in o.facts.items() if "pace" in f]
    if not each:
        return {}, "no engine lived to tell whether its steps kept their time"
    worst, pace = max(each, key=lambda pair: pair[1]["late_p99_share"])
    shares = [p["machine_busy_share"] for _, p in each if p["machine_busy_share"] is not None]
    measured = {"late_p99_share": late_p99_share([p for _, p in each])}
    if shares:
        measured["machine_busy_share"] = max(shares)
    outside = sum(p["num_outside_hull"] for _, p in each)
    return measured, "; ".join(_reasons(measured, worst, outside, pace))


def late_p99_share(paces: Sequence[Mapping[str, Any]]) -> float:
    """Find the 99th percentile of how late the steps of all engines came. Of one engine it would be the worst
    of the few steps that a prefill engine takes in a cell."""
    latest = sorted((share for pace in paces for share in pace["worst_shares"]), reverse=True)
    num_later = int(0.01 * (sum(pace["num_steps"] for pace in paces) - 1))
    return float(latest[min(num_later, len(latest) - 1)]) if latest else 0.0


def _reasons(measured: Mapping[str, float], worst: str, outside: int, pace: Mapping[str, Any]) -> list[str]:
    late, busy = measured["late_p99_share"], measured.get("machine_busy_share", 0.0)
    found = []
    if late > LATE_SHARE:
        found.append(f"steps came late (p99 {late:.0%} of a step, most at {worst}; at most {LATE_SHARE:.0%})")
    if busy > BUSY_SHARE:
        found.append(f"the machine was busy {busy:.0%} (at most {BUSY_SHARE:.0%})")
    if found:
        slower = max(late / LATE_SHARE, busy / BUSY_SHARE)
        found[-1] += f": engine.pace: {_rounded_up(pace['factor'] * slower):g} would do"
    if outside:
        found.append(f"{outside:,} steps are unlike those that the cost tables were fitted to")
    return found


def _rounded_up(factor: float) -> float:
    """Round up to two digits."""
    digit = 10.0 ** (math.floor(math.log10(factor)) - 1)
    return math.ceil(factor / digit - 1e-9) * digit
