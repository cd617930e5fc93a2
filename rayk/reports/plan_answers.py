"""Answers at the top of a plan's report: what to start, how good it will be, what limits it, what the next
best costs, and how far to trust that."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from rayk.reports.page import Answer
from rayk.reports.values import format_value, is_null
from rayk.types.model_names import weights_name

Facts = Mapping[str, Any]
"""What plan.json holds."""

NUMBERS = {
    "good_share": ("good requests", ".1%"),
    "ttft_ms_p50": ("TTFT p50, ms", ",.0f"),
    "ttft_ms_p90": ("TTFT p90, ms", ",.0f"),
    "tpot_ms_p50": ("TPOT p50, ms", ",.1f"),
    "tpot_ms_p90": ("TPOT p90, ms", ",.1f"),
    "max_rate": ("highest rate, requests/s", ",.2f"),
}
"""What `facts["range"]` has: how it is called and written."""
RANGE_NOTE = (
    "From the lowest to the highest over {}. Errors of the tables themselves come on top: "
    "rayk plan --validate measures those."
)


def plan_answers(plans: pd.DataFrame, facts: Facts) -> list[Answer]:
    best, next_best = best_plan(plans), facts.get("next_best")
    return [
        Answer(
            question="What should I start?",
            text=_start_text(best, facts),
            command=shell_lines(str(facts.get("command") or "")),
            tone="met" if facts.get("met") else "unmet",
        ),
        Answer(
            question="How good will it be?",
            text=_good_text(best, facts),
            table=_range_table(facts),
            note=RANGE_NOTE.format(varied_text(facts)),
            is_answered=best is not None,
        ),
        Answer(
            question="What limits it?",
            text=" ".join([_limit_text(best), *map(str, facts.get("why", ()))]).strip(),
            table=_busy_table(best),
            is_answered=best is not None,
        ),
        Answer(
            question="What does the next best cost?",
            text=f"{next_best['text']}: {next_best['costs']}" if next_best else "No other plan was found.",
            command=shell_lines(str(next_best.get("command") or "")) if next_best else "",
            is_answered=bool(next_best),
        ),
        Answer(
            question="How far may I trust it?",
            text=trust_text(facts),
            tone=_trust_tone(facts),
            command=_trust_command(facts),
        ),
    ]


def _start_text(best: Mapping[str, Any] | None, facts: Facts) -> str:
    if best is None:
        return "Nothing that was tried fits these GPUs."
    text = f"{facts.get('best_text') or best['plan_id']}."
    if facts.get("met"):
        return text
    missed = f"No plan keeps the objective ({slo_text(facts)}); this one comes closest"
    return f"{missed}, with {best['good_share']:.1%}. {text}"


def _good_text(best: Mapping[str, Any] | None, facts: Facts) -> str:
    if best is None:
        return ""
    share = _range_text(facts, "good_share") or format(best["good_share"], ".1%")
    return f"At {best['rate']:,.4g} requests/s, {share} of requests keep the objective."


def _range_text(facts: Facts, name: str) -> str:
    """Write `97.1% (95.0% to 98.2%)`; empty where nothing tells."""
    found = facts.get("range", {}).get(name)
    if not found or is_null(found[1]):
        return ""
    spec = NUMBERS[name][1]
    low, value, high = (format_value(number, spec) for number in found)
    return f"{value} ({low} to {high})"


def _range_table(facts: Facts) -> list[list[str]]:
    """List the numbers with their ends, and the limit of the objective beside each."""
    slo = facts.get("slo", {})
    rows = []
    for name, (title, spec) in NUMBERS.items():
        found = facts.get("range", {}).get(name)
        if not found or all(is_null(number) for number in found):
            continue
        low, value, high = (format_value(number, spec) for number in found)
        limit = (
            slo.get("good") if name == "good_share" else slo.get(name.replace("_p50", "").replace("_p90", ""))
        )
        rows.append([title, low, value, high, format_value(limit, spec)])
    return [["", "low", "expected", "high", "objective"], *rows] if rows else []


def varied_text(facts: Facts) -> str:
    """Say over what the range of each number is: recorded traffic has no other seeds."""
    has_seeds = any(str(row["change"]).startswith("seed") for row in facts.get("sensitivity", ()))
    return "other seeds and costs +-10 %" if has_seeds else "costs +-10 %"


def _limit_text(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return ""
    return str(best.get("limit_text") or best.get("limit") or "")


def _busy_table(best: Mapping[str, Any] | None) -> list[list[str]]:
    """List how busy each side is, and how full its KV cache at the most."""
    if best is None:
        return []
    apart = not is_null(best.get("busy_decode"))
    sides = {"prefill": "prefill engines", "decode": "decode engines"} if apart else {"prefill": "engines"}
    rows = [
        [title, *(format_value(best.get(f"{name}_{side}"), ".0%") for name in ("busy", "kv_peak_share"))]
        for side, title in sides.items()
    ]
    return [["", "time in steps", "KV blocks taken at most"], *rows]


def shell_lines(command: str) -> str:
    """Put each option of a command on a line of its own, as a shell takes it."""
    first, *options = command.split(" --")
    return " \\\n  --".join([first, *options])


def _trust_command(facts: Facts) -> str:
    """Give the command that makes the answer more trustworthy: tables, or a validation of them."""
    trust = facts.get("trust", {})
    if trust.get("unmeasured"):
        model = weights_name(str(facts.get("model") or "MODEL"))
        return f"rayk costs {shlex.quote(model)} --for spec.yaml --out costs"
    return (
        "" if trust.get("validation") else f"rayk plan --validate RUN --costs {trust.get('costs') or 'DIR'}"
    )


def trust_text(facts: Facts) -> str:
    """Say what the answer rests on, the worst first."""
    trust = facts.get("trust", {})
    texts = []
    if trust.get("unmeasured"):
        texts.append(
            "UNMEASURED: costs are derived from data sheets. Take ratios between plans from it, not times."
        )
    else:
        texts.append(f"Costs were measured ({trust.get('source') or trust.get('costs')}).")
    if outside := trust.get("num_outside_hull"):
        texts.append(f"{int(outside):,} steps ({outside_share(trust):.1%}) lie outside of what was measured.")
    texts += [str(doubt) for doubt in trust.get("doubts", ())]
    if validation := trust.get("validation"):
        texts.append(f"Against measured runs, {validation}.")
    elif trust.get("unmeasured"):
        texts.append("Tables measured on such a machine take their place, and spec.yaml is beside this page:")
    else:
        texts.append(
            "No validation of these tables is known. A run of the plan, or of one like it, makes one:"
        )
    return " ".join(texts)


def _trust_tone(facts: Facts) -> str:
    trust = facts.get("trust", {})
    return "unmet" if trust.get("unmeasured") or trust.get("num_outside_hull") else ""


def slo_text(facts: Facts) -> str:
    """Write e.g. `90 % of requests within TTFT 500 ms and TPOT 50 ms`."""
    slo = facts.get("slo", {})
    limits = [
        f"{name.removesuffix('_ms').upper()} {value:,.4g} ms"
        for name, value in slo.items()
        if name.endswith("_ms")
    ]
    return f"{slo.get('good', 1):.0%} of requests are to keep {' and '.join(limits)}"


def outside_share(trust: Facts) -> float:
    return float(trust["num_outside_hull"]) / max(1, int(trust.get("num_steps") or 1))


def best_plan(plans: pd.DataFrame) -> Mapping[str, Any] | None:
    chosen = plans[plans["is_best"].astype(bool)]
    return None if chosen.empty else {str(k): v for k, v in chosen.iloc[0].to_dict().items()}
