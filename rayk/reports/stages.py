"""Say where requests' time goes: the stages of requests.parquet, with `read` split into posting and
waiting."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rayk.reports.derived import once_per_result
from rayk.reports.fields import STAGES
from rayk.reports.moves import KEYS, of_handovers
from rayk.reports.result import Result
from rayk.reports.schema import MEASURED_STAGES

NS_PER_MS = 1e6
SLACK = 0.001  # share of a request's time that may be of no stage without being told


@dataclass(frozen=True, kw_only=True)
class TimePart:
    name: str
    limit: str  # which of LIMITS it counts for
    colour: str
    meaning: str


OTHER = "other"
TIER = "host tier"  # a limit that only runs with a host tier have


def _part(name: str, limit: str, colour: str, meaning: str = "") -> TimePart:
    return TimePart(name=name, limit=limit, colour=colour, meaning=meaning or STAGES[name])


# in a pulled request's order; they add up to its E2E
PARTS = (
    _part("queue", "queue", "#9aa4ad"),
    _part("dispatch", "coordinator", "#d9c07a"),
    _part("lookup", TIER, "#d98fb8"),
    _part("load", TIER, "#c2578f"),
    _part("prefill_queue", "prefill", "#8fb5e8"),
    _part("prefill", "prefill", "#3b7dd8"),
    _part("ticket", "ticket", "#a9a15c"),
    _part("digest", "checks", "#b6a3c9"),
    _part("relay", TIER, "#a8467e"),
    _part("handover", "coordinator", "#c2a14d"),
    _part("reserve", "decode KV", "#c94f4f"),
    _part("post", "link", "#e39a4f", "posting the reads"),
    _part("wait", "link", "#d9722b", "until every rank has seen its last byte; it looks between its steps"),
    _part("fence", "checks", "#9b83b5"),
    _part("verify", "checks", "#7f62a3"),
    _part("notice", "decode step", "#b5dccb"),
    _part("retry", "retries", "#6b4a4a"),
    _part("decode_queue", "decode step", "#8ccdb2"),
    _part("swap", TIER, "#8f3a68"),
    _part("decode", "decode step", "#2f9e77"),
    _part(OTHER, OTHER, "#c9cdd1", "of no stage"),
)
# what can limit a run, in words
LIMITS = {
    "queue": "due, and not yet sent to an engine: the coordinator's places are taken, or it is late",
    TIER: "asking the host tier, reading from it, being swapped out to it, and the way into it of KV that is "
    "handed on",
    "prefill": "waiting for room at a prefill engine, and computing the prompt",
    "ticket": "the prompt is computed, and its ticket not yet out: the prefill engine ends its turn and "
    "writes it in the next, on all ranks, beside that turn's step",
    "link": "posting reads and waiting until their bytes are seen to be there",
    "decode KV": "waiting for free KV blocks on the decode side",
    "decode step": "waiting for a decode engine to look, and for room in its batch, and until the last token",
    "coordinator": "the ways of a request and its ticket between the coordinator and engines",
    "checks": "rayk's own digests, fences and comparisons",
    "retries": "attempts that failed, until the next one was sent",
    OTHER: "of no stage",
}
# limit -> its parts, and their words as evidence
TOLD = {
    "queue": (("queue", "until sent to an engine"),),
    TIER: (
        ("lookup", "asking the host tier"),
        ("load", "reading from it"),
        ("relay", "handing on through it"),
        ("swap", "swapped out to it"),
    ),
    "prefill": (("prefill_queue", "waiting for room at the engine"), ("prefill", "computing the prompt")),
    "ticket": (("ticket", "until the engine's turns ended and the ticket was written"),),
    "link": (("post", "posting"), ("wait", "waiting for bytes")),
    "decode KV": (("reserve", "until blocks were free and reads began"),),
    "decode step": (
        ("notice", "until the decode engine looked"),
        ("decode_queue", "until a step took it"),
        ("decode", "decoding"),
    ),
    "coordinator": (("dispatch", "to the first engine"), ("handover", "for the ticket's way")),
    "checks": (("digest", "digest"), ("fence", "fence"), ("verify", "verify")),
    "retries": (("retry", "in attempts that failed"),),
    OTHER: ((OTHER, "of no stage"),),
}


@once_per_result
def request_parts(result: Result) -> pd.DataFrame:
    """Make a row per request that ended well: KEYS, due_ms, e2e_ms and a column of ms per part. All of a
    push's `read` is waiting: its posts lie within the prefill. `other` is what no stage holds."""
    requests = result.requests
    requests = requests[requests["e2e_ms"].notna() & requests["error"].isna()]
    parts = requests[[*KEYS, "due_ms", "e2e_ms"]].reset_index(drop=True)
    stages = pd.DataFrame({name: _stage(requests, name) for name in STAGES})
    read, covered = stages["read"], stages.sum(axis=1)
    pulled = parts.merge(_post(result.transfers), on=KEYS, how="left")["post_ms"].fillna(0.0)
    split = {
        "post": pulled.clip(upper=read),
        "wait": (read - pulled).clip(lower=0.0),
        OTHER: (parts["e2e_ms"] - covered).clip(lower=0.0).where(covered > 0, 0.0),
    }
    for part in PARTS:
        parts[part.name] = split[part.name] if part.name in split else stages[part.name]
    parts["due_ms"] = parts["due_ms"].fillna(0.0)
    return parts


def _stage(requests: pd.DataFrame, name: str) -> pd.Series[float]:
    values = requests[f"stage_{name}_ns"].astype("float64").fillna(0.0) / NS_PER_MS
    return values.reset_index(drop=True)


def _post(transfers: pd.DataFrame) -> pd.DataFrame:
    """Sum post_ms of pulled requests over the reads of a rank, of the slowest rank."""
    transfers = transfers[of_handovers(transfers)]
    is_good = transfers["verdict"].fillna("OK") == "OK"
    pulled = transfers[(transfers["mode"] != "push") & transfers["post_ms"].notna() & is_good]
    by_rank = pulled.groupby([*KEYS, "consumer_rank"], sort=False)["post_ms"].sum()
    return by_rank.groupby(level=KEYS, sort=False).max().reset_index()


def limit_shares(parts: pd.DataFrame) -> dict[str, float]:
    """Compute each limit's share of all requests' time, 0 to 1. `other` is told above SLACK only, the host
    tier only where it has any. Requests without measured stages have no share."""
    sums = {part.name: float(parts[part.name].sum()) for part in PARTS}
    total = math.fsum(sums.values())
    if not total > 0:
        return {}
    shares = {
        limit: math.fsum(sums[part.name] for part in PARTS if part.limit == limit) / total for limit in LIMITS
    }
    least = {OTHER: SLACK, TIER: 0.0}
    return {limit: share for limit, share in shares.items() if share > least.get(limit, -1.0)}


def largest(shares: Mapping[str, float]) -> str:
    return max(shares, key=lambda name: shares[name]) if shares else ""


def limit_rows(result: Result) -> list[dict[str, Any]]:
    """Make a row per cell with requests: cell_id, limit, percent per name of LIMITS, and evidence."""
    parts = request_parts(result)
    cells = {record["cell_id"]: record for record in result.cells.to_dict(orient="records")}
    rows = []
    for cell_id, of_cell in parts.groupby("cell_id", sort=False):
        shares = limit_shares(of_cell)
        if shares:
            limit = largest(shares)
            told = evidence(limit, of_cell, cells[cell_id])
            percents = {name: 100 * shares.get(name, 0.0) for name in LIMITS}
            rows.append({"cell_id": cell_id, "limit": limit, **percents, "evidence": told})
    return rows


def shown_limits(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Leave out the host tier's limit where no row has any of it."""
    has_tier = any(row[TIER] for row in rows)
    return {name: meaning for name, meaning in LIMITS.items() if name != TIER or has_tier}


def evidence(limit: str, parts: pd.DataFrame, cell: Mapping[Any, Any]) -> str:
    """Show why a cell is limited so by means over its requests."""
    told = [f"{float(parts[name].mean()):,.1f} ms {words}" for name, words in TOLD[limit]]
    tpot = cell["tpot_ms_p50"]
    if limit == "decode step" and tpot is not None and tpot == tpot:
        told.append(f"median TPOT {tpot:,.1f} ms, a hand-over included")
    return ", ".join(told)


def age_text(result: Result) -> str:
    """Say how an older rayk measured its stages; empty for newer runs."""
    if result.schema_version >= MEASURED_STAGES:
        return ""
    return (
        "An older rayk measured these stages: prefill holds the queue at the engine, coordinator is what no "
        "other stage holds."
    )


def waterfall_data(result: Result, max_requests: int = 20_000) -> dict[str, Any] | None:
    """Show the first requests of each cell, about `max_requests` in all."""
    parts = request_parts(result)
    if parts.empty:
        return None
    shown = [part for part in PARTS if part.limit != TIER or parts[part.name].any()]
    ids = zip(parts["cell_id"], parts["request_id"], strict=True)
    labels = [str(request_id).removeprefix(f"{cell_id}/") for cell_id, request_id in ids]
    pushed = set(result.transfers.loc[result.transfers["mode"] == "push", "cell_id"])
    per_cell = max(1, max_requests // parts["cell_id"].nunique())
    return waterfall(shown, parts.assign(label=labels), per_cell, pushed)


def waterfall(
    parts: Sequence[TimePart], requests: pd.DataFrame, per_cell: int, pushed: Collection[Any] = ()
) -> dict[str, Any]:
    """Give the page's waterfall its parts, and by cell a row [label, due ms, ms of every part] of the first
    requests. `requests` has cell_id, label, due_ms and a column of ms per part."""
    cells = []
    for cell_id, rows in requests.groupby("cell_id", sort=False):
        shown = rows.head(per_cell)
        durations = shown[[part.name for part in parts]].round(3).to_numpy().tolist()
        due = shown["due_ms"].round(3).tolist()
        bars = [[*of] for of in zip(shown["label"], due, durations, strict=True)]
        cells.append({"id": str(cell_id), "push": cell_id in pushed, "of": len(rows), "requests": bars})
    told = [{"name": part.name, "colour": part.colour, "meaning": part.meaning} for part in parts]
    return {"parts": told, "cells": cells}
