"""Answers at the top of a run's report: did it pass, where does time go, what did unequal TP sizes cost, how
is it run again."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rayk.reports.page import Answer
from rayk.reports.rerun import run_commands, run_needs
from rayk.reports.result import Result
from rayk.reports.stages import LIMITS, PARTS, age_text, evidence, largest, limit_shares, request_parts
from rayk.reports.tp_cost import COST_NOTE, cost_table, is_cost_told, unequal_cost
from rayk.reports.values import plural
from rayk.reports.verdicts import gravest_first

NAMED = 3  # cells that a sentence names


def answers(result: Result) -> list[Answer]:
    cells = result.cells
    passed = bool(len(cells)) and bool(cells["met"].astype(bool).all())
    told = bool(result.num_missing) or bool((cells["verdict"] == "PREDICTED").any())
    tone = "unmet" if not passed else "" if told else "met"
    table = cost_table(result)
    cost = Answer(
        question="What did unequal TP sizes cost?",
        text=unequal_cost(result),
        is_answered=is_cost_told(result),
        table=table,
        note=COST_NOTE if table else "",
    )
    return [
        Answer(question="Did it pass?", text=pass_text(cells, result.num_missing), tone=tone),
        Answer(
            question="Where is time spent?",
            text=time_text(result),
            shares=_share_bar(result),
            is_answered=bool(limit_shares(request_parts(result))),
        ),
        cost,
        Answer(question="How do I run it again?", text=run_needs(result), command=run_commands(result)),
    ]


def pass_text(cells: pd.DataFrame, num_missing: int = 0) -> str:
    """Say yes or no and why; of a failure the gravest cell's reason comes first."""
    if cells.empty:
        return "Unknown: no cell is finished."
    failed = gravest_first(cells[~cells["met"].astype(bool)])
    faulty = bool((cells["expected_verdict"] != "PASS").any())
    if len(failed):
        named = ", ".join(f"{r.cell_id} ({r.verdict})" for r in failed.head(NAMED).itertuples())
        more = f" and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        verb = "did not end as expected" if faulty else "failed"
        why = f"{text}. " if (text := _first_line(failed["reason"].iloc[0])) else ""
        return f"No: {why}{len(failed)} of {plural(len(cells), 'cell')} {verb}: {named}{more}."
    if predicted := int((cells["verdict"] == "PREDICTED").sum()):
        return (
            f"Unknown: {predicted} of {plural(len(cells), 'cell')} predicted; nothing was computed or moved."
        )
    unsupported = int((cells["verdict"] == "UNSUPPORTED").sum())
    how = "ended as expected, faults found" if faulty else "passed"
    planned = len(cells) + num_missing
    word = f"Unfinished: {plural(num_missing, 'cell')} of {planned} have not ended" if num_missing else "Yes"
    texts = [f"{word}: {len(cells) - unsupported} of {plural(len(cells), 'cell')} {how}"]
    ties = int((cells["verdict"] == "NEAR_TIE").sum())
    if ties:
        texts.append(f"{ties} of them with a near tie of two tokens")
    if unsupported:
        texts.append(f"{unsupported} cannot run here (UNSUPPORTED), which is no failure")
    checks = sorted({check for done in cells["checks_done"].dropna() for check in done})
    goes_on = " `rayk run ... --resume` goes on." if num_missing else ""
    checked = ", ".join(checks) if checks else "nothing but that requests ended"
    return f"{', '.join(texts)}. Checked: {checked}.{goes_on}"


def _first_line(reason: object) -> str:
    return reason.strip().splitlines()[0].rstrip(".") if isinstance(reason, str) and reason.strip() else ""


def time_text(result: Result) -> str:
    parts = request_parts(result)
    shares = limit_shares(parts)
    if not shares:
        return "Unknown: no request has stage times."
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered if share >= 0.005)
    limit = largest(shares)
    tpot = {"tpot_ms_p50": float(result.requests["tpot_ms"].median())}
    proof = evidence(limit, parts, tpot)
    age = f" {text}" if (text := age_text(result)) else ""
    return f"Mostly in {limit} ({LIMITS[limit]}): on average {proof}. Of all time: {told}.{age}"


def _share_bar(result: Result) -> list[dict[str, Any]]:
    colours: dict[str, str] = {part.limit: part.colour for part in PARTS}
    shares = limit_shares(request_parts(result))
    return [
        {
            "share": round(share, 4),
            "colour": colours[limit],
            "text": f"{limit} {f'{100 * share:.0f}' if share >= 0.005 else '<1'}%",
            "tip": f"{limit}: {100 * share:.1f}% of all requests' time\n{LIMITS[limit]}",
        }
        for limit, share in ((limit, shares[limit]) for limit in dict.fromkeys(colours) if shares.get(limit))
    ]
