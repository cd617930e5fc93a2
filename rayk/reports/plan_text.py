"""Tell a plan on a terminal: the answer, how sure it is, and the command, before anything else."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import pandas as pd
from rich.table import Table

from rayk.reports.page import Column
from rayk.reports.plan_answers import NUMBERS, Facts, best_plan, outside_share, slo_text, varied_text
from rayk.reports.terminal import terminal_table
from rayk.reports.values import format_value, is_null

MOST_PLANS = 10
NEAR = 1.06  # a highest rate is found where one so much higher is known to be too high
RANGE = (
    Column("at the asked rate", "name"),
    Column("low", "low"),
    Column("expected", "expected"),
    Column("high", "high"),
    Column("limit", "limit"),
)
SENSITIVITY = (
    Column("what if", "change"),
    Column("SLO", "kept", tone="tone"),
    Column("req/s", "rate", ",.3g"),
    Column("good", "good_share", ".1%"),
    Column("TTFT p90, ms", "ttft_ms_p90", ",.0f"),
    Column("TPOT p90, ms", "tpot_ms_p90", ",.1f"),
)
PLANS = (
    Column("engines", "name", tone="tone"),
    Column("GPUs", "num_gpus", "d"),
    Column("good", "good_share", ".0%"),
    Column("TTFT p90", "ttft_ms_p90", ",.0f"),
    Column("tok/s/user", "interactivity", ",.0f"),
    Column("req/s/GPU", "goodput_per_gpu", ",.2f"),
    Column("most req/s", "max_rate", ",.3g"),
    Column("why not", "why_not", is_under_first=True),
)
DROPPED_FIRST = ("req/s/GPU", "TTFT p90", "most req/s")  # titles, where a terminal is narrow
SETTINGS = {"max_batch_tokens": "b{}", "max_seqs": "s{}", "block_size": "k{}", "policy": "{}"}
"""Settings, and how they are written behind a plan's engines where they are not those of the first plan."""


def plan_texts(plans: pd.DataFrame, facts: Facts, *, width: int = 78) -> Iterator[tuple[str, str]]:
    """Yield (rich style, lines): what to start, how good it is, what limits it, and what to doubt."""
    best, trust = best_plan(plans), facts.get("trust", {})
    mark = "PREDICTED, not measured"
    if trust.get("unmeasured"):
        mark += "; UNMEASURED: costs are from data sheets, no step was ever timed"
    if trust.get("num_outside_hull"):
        mark += f"; EXTRAPOLATED: {outside_share(trust):.0%} of steps are unlike those measured"
    yield "cyan", _wrapped(mark, width)
    yield "", _wrapped(f"{facts['traffic']}; {slo_text(facts)}", width)
    if best is None:
        return
    is_met = bool(facts.get("met"))
    answer = "Start this" if is_met else "No plan keeps the SLO; this one comes closest"
    yield ("bold green" if is_met else "bold red"), _wrapped(f"\n{answer}: {facts['best_text']}", width)
    yield "", "\n" + in_lines(str(facts["command"]), width) + "\n"
    yield "", _wrapped(f"How good: {_good(best, facts)}", width)
    yield "", _wrapped(f"What limits it: {best['limit_text']}", width)
    if validation := trust.get("validation"):
        yield "", _wrapped(f"How far off: against measured runs, {validation}.", width)
    if (following := facts.get("next_best")) is not None:
        yield "", _wrapped(f"Next best: {following['text']}: {following['costs']}.", width)
    for line in (*trust.get("doubts", ()), *facts.get("search", {}).get("notes", ())):
        yield "yellow", _wrapped(f"note: {line}", width)


def _good(best: Mapping[str, Any], facts: Facts) -> str:
    text = f"{best['good_share']:.1%} of requests are good at {best['rate']:,.4g} requests/s"
    found = facts.get("range", {}).get("good_share")
    if found and not is_null(found[0]) and found[0] != found[2]:
        text += f" ({found[0]:.1%} to {found[2]:.1%} with {varied_text(facts)})"
    if not is_null(best["max_rate"]) and facts.get("rate"):
        text += f"; the SLO holds up to {best['max_rate']:,.4g} requests/s"
        text += f", {best['max_rate'] / facts['rate']:.2f} times what is asked"
        below = facts.get("max_rate_below")
        if below is None or below > NEAR * best["max_rate"]:
            text += " (at least" + ("" if below is None else f", and not to {below:,.4g}") + ")"
    return text + "."


def _wrapped(text: str, width: int) -> str:
    lines = [textwrap.fill(line, width, subsequent_indent="  ") for line in text.split("\n")]
    return "\n".join(lines)


def in_lines(command: str, width: int) -> str:
    """Break a command over lines that a shell reads as one."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if word.startswith("--") or not parts or parts[-1] == "rayk serve":
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines = ["  "]
    for part in parts:
        if len(lines[-1]) + len(part) + 3 > width:
            lines.append("    ")
        lines[-1] += part + " "
    return " \\\n".join(line.rstrip() for line in lines)


def plan_tables(plans: pd.DataFrame, facts: Facts, *, width: int | None = None) -> Iterator[Table]:
    """Yield tables: the range of each number, what if, and the plans that come first."""
    ranges = list(_ranges(facts))
    if ranges:
        yield terminal_table(f"How sure: {varied_text(facts)}", RANGE, ranges, width=width)
    changes = [_change(row) for row in facts.get("sensitivity", ())]
    if changes:
        yield terminal_table("What if", SENSITIVITY, changes, width=width)
    found = plans.head(MOST_PLANS).to_dict("records")
    rows = [_plan(row, found[0]) for row in found]
    more = f", the first {MOST_PLANS} of {len(plans)}" if len(plans) > MOST_PLANS else ""
    title = f"Plans tried{more}; * of the Pareto front"
    yield terminal_table(title, PLANS, rows, width=width, dropped_first=DROPPED_FIRST, max_lines=3)


def _ranges(facts: Facts) -> Iterator[dict[str, Any]]:
    slo = facts.get("slo", {})
    for name, (title, spec) in NUMBERS.items():
        found = facts.get("range", {}).get(name)
        if not found or is_null(found[1]):
            continue
        limit = slo.get("good") if name == "good_share" else slo.get(name.rsplit("_p", 1)[0])
        low, value, high = (format_value(number, spec) for number in found)
        yield {
            "name": title,
            "low": low,
            "expected": value,
            "high": high,
            "limit": format_value(limit, spec),
        }


def _change(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = "outside" if row.get("outside") else "kept" if row["met"] else "missed"
    return {**row, "kept": kept, "tone": "met" if kept == "kept" else "unmet"}


def _plan(row: Mapping[Hashable, Any], first: Mapping[Hashable, Any]) -> dict[str, Any]:
    engines = f"{row['prefill_engines']}xTP{row['prefill_tp']}"
    if row["decode_engines"]:
        engines = f"P {engines} D {row['decode_engines']}xTP{row['decode_tp']:.0f}"
    settings = [text.format(row[name]) for name, text in SETTINGS.items() if row[name] != first[name]]
    return {
        **{str(name): value for name, value in row.items()},
        "name": " ".join([engines, *settings, *("*" if row["on_front"] else "")]),
        "tone": "met" if row["met"] else "unmet",
        "why_not": "the best" if row["is_best"] else row["why_not"],
    }
