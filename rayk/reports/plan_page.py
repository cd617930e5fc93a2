"""The report of a plan: what to start, how good it will be, what limits it, and how far to trust that."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from rayk.reports.page import Column, Page, Plot, Section
from rayk.reports.plan_answers import Facts, best_plan, outside_share, plan_answers, slo_text
from rayk.reports.plots import LEGEND, PALETTE, plain
from rayk.reports.values import is_null, plural

PLANS = (
    Column("plan", "plan_id", tone="tone"),
    Column("GPUs", "num_gpus", "d"),
    Column("good %", "good_percent", ".1f"),
    Column("goodput/s per GPU", "goodput_per_gpu", ".3g"),
    Column("tokens/s per user", "interactivity", ",.1f"),
    Column("TTFT p50", "ttft_ms_p50", ",.0f"),
    Column("TTFT p90", "ttft_ms_p90", ",.0f"),
    Column("TPOT p50", "tpot_ms_p50", ",.1f"),
    Column("TPOT p90", "tpot_ms_p90", ",.1f"),
    Column("highest rate", "max_rate", ",.2f"),
    Column("drafts", "num_drafts", ".0f"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("pays from", "break_even", ".2f"),
    Column("prefill busy %", "busy_prefill_percent", ".0f"),
    Column("decode busy %", "busy_decode_percent", ".0f"),
    Column("KV peak %", "kv_percent", ".0f"),
    Column("limit", "limit"),
    Column("", "why_not", is_under_first=True),
)
PLANS_NOTE = (
    "Best first, all at the rate that is asked for, or each at its highest where none is; green plans keep "
    "the objective. Times in ms. Goodput counts requests that keep it. Highest rate: at which the objective "
    "is still kept, of the best few. Busy: the share of time in steps. Drafts pay "
    "where a step gives a request more tokens than `pays from` says."
)
SENSITIVITY = (
    Column("what if", "change"),
    Column("objective", "kept", tone="tone"),
    Column("rate", "rate", ",.3g"),
    Column("good %", "good_percent", ".1f"),
    Column("TTFT p50", "ttft_ms_p50", ",.0f"),
    Column("TTFT p90", "ttft_ms_p90", ",.0f"),
    Column("TPOT p50", "tpot_ms_p50", ",.1f"),
    Column("TPOT p90", "tpot_ms_p90", ",.1f"),
    Column("goodput/s per GPU", "goodput_per_gpu", ".3g"),
)
FRONT = (
    "A mark per plan: good requests per second and GPU, against tokens per second that one user sees (one "
    "over the median TPOT). Up and to the right is better; the line joins the plans that no other beats in "
    "both. Hollow marks miss the objective; the star is the plan to start. Point at one for its name."
)
MODES = {"disaggregated": "prefill and decode apart", "aggregated": "aggregated"}


def plan_page(plans: pd.DataFrame, facts: Facts, spec_yaml: str = "") -> Page:
    """Make the page of plans.parquet and plan.json."""
    trust = facts.get("trust", {})
    chips = [("met" if facts.get("met") else "unmet", _met_text(facts)), ("PREDICTED", "PREDICTED")]
    if trust.get("unmeasured"):
        chips.append(("unmet", "UNMEASURED costs"))
    if trust.get("num_outside_hull"):
        chips.append(("unmet", f"{outside_share(trust):.1%} of steps outside of the tables"))
    return Page(
        eyebrow=" · ".join(
            filter(None, ("rayk plan", str(facts.get("name", "")), str(facts.get("model", ""))))
        ),
        name=str(facts.get("name", "plan")),
        title=str(facts.get("best_text") or "Nothing fits"),
        lead=f"{facts.get('traffic', '')} on {facts.get('machine', '')}; {slo_text(facts)}.",
        chips=chips,
        stats=_stats(plans, facts),
        answers=plan_answers(plans, facts),
        sections=[s for s in _sections(plans, facts, spec_yaml) if s.plots or s.rows or s.items or s.text],
        environment=_environment(facts),
        footer="Tables: plans.parquet and plan.json, beside this file.",
    )


def _met_text(facts: Facts) -> str:
    return "objective kept" if facts.get("met") else "objective missed"


def _environment(facts: Facts) -> dict[str, Any]:
    """Begin with what the times were made of: it is told at the top of the page."""
    trust = facts.get("trust", {})
    predicted = {
        "costs": trust.get("costs", ""),
        "unmeasured": bool(trust.get("unmeasured")),
        "outside_hull": int(trust.get("num_outside_hull") or 0),
    }
    return {
        "predicted": predicted,
        "costs": dict(trust.get("provenance") or {}),
        **facts.get("environment", {}),
    }


def _stats(plans: pd.DataFrame, facts: Facts) -> list[tuple[str, str]]:
    best = best_plan(plans)
    stats = []
    if best is not None:
        stats = [
            (f"{int(best['num_gpus'])} of {facts.get('num_gpus', '?')}", "GPUs"),
            (f"{best['rate']:,.4g}/s", "requests"),
            (f"{best['good_share']:.1%}", "of them good"),
            (f"{best['goodput_per_gpu']:.3g}/s", "goodput per GPU"),
        ]
    return [*stats, (f"{len(plans):,}", "plans simulated")]


def _sections(plans: pd.DataFrame, facts: Facts, spec_yaml: str) -> list[Section]:
    return [
        Section(title="Goodput against speed", note=FRONT, plots=front_plot(plans)),
        Section(title="Plans", note=PLANS_NOTE, columns=_shown(plans), rows=_plan_rows(plans)),
        Section(
            title="What if",
            note="The best plan under other traffic, other costs, and other draws of the same traffic.",
            columns=SENSITIVITY,
            rows=[_sensitivity_row(row) for row in facts.get("sensitivity", ())],
        ),
        Section(title="The search", items=_search_items(facts)),
        Section(title="Spec", is_folded=True, text=spec_yaml),
    ]


def _sensitivity_row(row: Mapping[str, Any]) -> dict[str, Any]:
    met = bool(row.get("met"))
    return {
        **dict.fromkeys(column.key for column in SENSITIVITY),
        **row,
        "tone": "met" if met else "unmet",
        "kept": "kept" if met else "missed",
        "good_percent": _percent(row.get("good_share")),
    }


def _plan_rows(plans: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for plan in plans.to_dict("records"):
        row = {str(name): None if is_null(value) else value for name, value in plan.items()}
        peaks = [row.get(f"kv_peak_share_{side}") for side in ("prefill", "decode")]
        known = [float(peak) for peak in peaks if peak is not None]
        rows.append(
            row
            | {
                "tone": "met" if row["met"] else "",
                "good_percent": _percent(row["good_share"]),
                "busy_prefill_percent": _percent(row.get("busy_prefill")),
                "busy_decode_percent": _percent(row.get("busy_decode")),
                "kv_percent": _percent(max(known, default=None)),
                "why_not": row.get("why_not") or "",
            }
        )
    return rows


def _shown(plans: pd.DataFrame) -> list[Column]:
    """Leave out columns that hold nothing in any row."""
    rows = _plan_rows(plans)
    return [c for c in PLANS if c.is_under_first or any(not is_null(row.get(c.key)) for row in rows)]


def _percent(share: Any) -> float | None:
    return None if is_null(share) else 100 * float(share)


def _search_items(facts: Facts) -> list[tuple[str, Sequence[str]]]:
    search = facts.get("search", {})
    if not search:
        return []
    tried = (
        f"{plural(int(search.get('num_candidates', 0)), 'candidate')}: {search.get('num_pruned', 0):,} could "
        f"not reach the others by arithmetic, {search.get('num_simulated', 0):,} were simulated, of "
        f"{search.get('num_bisected', 0):,} the highest rate was sought, and "
        f"{search.get('num_left_out', 0):,} were left out for time."
    )
    took = f"{search.get('wall_s', 0):,.0f} s of {search.get('budget_s', 0):,.0f} s"
    return [("tried", [tried, *map(str, search.get("notes", ()))]), ("took", [took])]


def front_plot(plans: pd.DataFrame) -> list[Plot]:
    """Draw goodput per GPU against interactivity, a mark per plan, and the front; none without plans that
    have both."""
    known = plans[plans["interactivity"].notna() & plans["goodput_per_gpu"].notna()]
    if known.empty:
        return []
    front = known[known["on_front"].astype(bool)].sort_values("interactivity")
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "front",
            "x": front["interactivity"].tolist(),
            "y": front["goodput_per_gpu"].tolist(),
            "line": {"color": "soft", "width": 1.2, "dash": "dot"},
            "hoverinfo": "skip",
        }
    ]
    data.append(_names(front))
    for index, (mode, rows) in enumerate(known.groupby("mode", sort=True)):
        data.append(_mode_marks(str(mode), rows, PALETTE[index % len(PALETTE)]))
    layout = {
        "height": 420,
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "tokens/s per user"}, "rangemode": "tozero"},
        "yaxis": {
            "title": {"text": "goodput/s per GPU"},
            "range": [0, 1.12 * known["goodput_per_gpu"].max()],
        },
    }
    return [Plot(id="front", data=data, layout=layout, is_wide=True)]


def _names(front: pd.DataFrame) -> dict[str, Any]:
    """Write the engines of each plan of the front beside its mark."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": front["interactivity"].tolist(),
        "y": front["goodput_per_gpu"].tolist(),
        "text": [f"{plain(_engines(plan))}<br> " for plan in front.to_dict("records")],  # above a star
        "textposition": "top center",
        "textfont": {"size": 11},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _engines(plan: Mapping[Hashable, Any]) -> str:
    """Write e.g. `1P 3D`, `1P 2D TP 4:2`, `4 TP 2`."""
    prefill, decode = int(plan["prefill_tp"]), plan["decode_tp"]
    if is_null(decode):
        return f"{plan['prefill_engines']:.0f} TP {prefill}"
    sizes = "" if prefill == decode == 1 else f" TP {prefill}:{decode:.0f}"
    return f"{plan['prefill_engines']:.0f}P {plan['decode_engines']:.0f}D{sizes}"


def _mode_marks(mode: str, rows: pd.DataFrame, colour: str) -> dict[str, Any]:
    is_best = rows["is_best"].astype(bool).tolist()
    shape = "circle" if mode == "disaggregated" else "square"
    symbols = [
        "star" if best else shape if met else f"{shape}-open"
        for best, met in zip(is_best, rows["met"].astype(bool), strict=True)
    ]
    told = [
        f"{plain(row['plan_id'])}<br>{int(row['num_gpus'])} GPUs, {row['good_share']:.1%} good, limit: "
        f"{plain(row['limit'])}"
        for row in rows.to_dict("records")
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": MODES.get(mode, mode),
        "x": rows["interactivity"].tolist(),
        "y": rows["goodput_per_gpu"].tolist(),
        "text": told,
        "hovertemplate": "%{text}<br>%{x:.1f} tokens/s per user, %{y:.3g} good/s per GPU<extra></extra>",
        "marker": {
            "size": [18 if best else 9 for best in is_best],
            "opacity": 0.85,
            "color": colour,
            "symbol": symbols,
        },
    }
