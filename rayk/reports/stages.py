"""Where a request's time goes: the stages of requests.parquet, `read` split into posting and waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rayk.reports.result import Result

NS_PER_MS = 1e6
KEYS = ["cell_id", "repeat", "request_id"]
"""What names a request."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a request's time."""

    name: str
    limit: str
    """Which of LIMITS it counts for."""
    colour: str
    meaning: str


PARTS = (
    Part(name="queue", limit="prefill", colour="#9aa4ad", meaning="due, not yet sent to a prefill engine"),
    Part(
        name="prefill", limit="prefill", colour="#3b7dd8", meaning="until the first token, waiting included"
    ),
    Part(name="digest", limit="checks", colour="#b6a3c9", meaning="the producer's digest and ticket"),
    Part(
        name="handover",
        limit="coordinator",
        colour="#c2a14d",
        meaning="the ticket to the decode engine and notice back",
    ),
    Part(name="reserve", limit="decode KV", colour="#c94f4f", meaning="until decode blocks were free"),
    Part(name="post", limit="link", colour="#e39a4f", meaning="posting the reads"),
    Part(name="wait", limit="link", colour="#d9722b", meaning="until the last byte was there"),
    Part(name="fence", limit="checks", colour="#9b83b5", meaning="until the moved bytes may be read"),
    Part(name="verify", limit="checks", colour="#7f62a3", meaning="comparing digests"),
    Part(name="decode", limit="decode step", colour="#2f9e77", meaning="from proven KV to the last token"),
)
"""In the order in which a pulled request passes them; they add up to its E2E."""
LIMITS = {
    "prefill": "waiting for a prefill engine and computing the prompt",
    "link": "posting reads and waiting for their bytes",
    "decode step": "from proven KV to the last token",
    "decode KV": "waiting for free KV blocks on the decode side",
    "coordinator": "a ticket's way to the decode engine and notice back; an engine looks between its steps",
    "checks": "rayk's own digests, fences and comparisons",
}
"""What can limit a run -> what it is, in words."""


def request_parts(result: Result) -> pd.DataFrame:
    """A row per request that ended well: KEYS, due_ms, e2e_ms and a column of ms per part, 0 where it has
    none. Of a push all of `read` is waiting: posts lie within the prefill."""
    requests = result.requests[result.requests["e2e_ms"].notna()]
    parts = requests[[*KEYS, "due_ms", "e2e_ms"]].reset_index(drop=True)
    read = _stage(requests, "read")
    pulled = parts.merge(_post(result.transfers), on=KEYS, how="left")["post_ms"].fillna(0.0)
    split = {"post": pulled.clip(upper=read), "wait": (read - pulled).clip(lower=0.0)}
    for part in PARTS:
        parts[part.name] = split[part.name] if part.name in split else _stage(requests, part.name)
    parts["due_ms"] = parts["due_ms"].fillna(0.0)
    return parts


def _stage(requests: pd.DataFrame, name: str) -> pd.Series[float]:
    values = requests[f"stage_{name}_ns"].astype("float64").fillna(0.0) / NS_PER_MS
    return values.reset_index(drop=True)


def _post(transfers: pd.DataFrame) -> pd.DataFrame:
    """KEYS and post_ms of requests that were pulled: a rank posts one read after the other, ranks do so at
    the same time, and the slowest counts."""
    pulled = transfers[(transfers["mode"] != "push") & transfers["post_ms"].notna()]
    by_rank = pulled.groupby([*KEYS, "consumer_rank"], sort=False)["post_ms"].sum()
    return by_rank.groupby(level=KEYS, sort=False).max().reset_index()


def limit_shares(parts: pd.DataFrame) -> dict[str, float]:
    """LIMITS' name -> its share of the time of all these requests, 0 to 1; empty without requests.

    Requests that were measured before stages were have their E2E, and no share.
    """
    sums = {part.name: float(parts[part.name].sum()) for part in PARTS}
    total = math.fsum(sums.values())
    if not total > 0:
        return {}
    return {
        limit: math.fsum(sums[part.name] for part in PARTS if part.limit == limit) / total for limit in LIMITS
    }


def largest(shares: Mapping[str, float]) -> str:
    """The name with the largest share; empty where there is none."""
    return max(shares, key=lambda name: shares[name]) if shares else ""


def limit_rows(result: Result) -> list[dict[str, Any]]:
    """A row per cell with requests: cell_id, limit, a share in percent per name of LIMITS, and evidence."""
    parts = request_parts(result)
    cells = {record["cell_id"]: record for record in result.cells.to_dict(orient="records")}
    rows = []
    for cell_id, of_cell in parts.groupby("cell_id", sort=False):
        shares = limit_shares(of_cell)
        if shares:
            limit = largest(shares)
            told = evidence(limit, of_cell, cells[cell_id])
            percents = {name: 100 * share for name, share in shares.items()}
            rows.append({"cell_id": cell_id, "limit": limit, **percents, "evidence": told})
    return rows


def evidence(limit: str, parts: pd.DataFrame, cell: Mapping[Any, Any]) -> str:
    """Numbers that show why a cell is limited so; medians over its requests."""
    middle = {part.name: float(parts[part.name].median()) for part in PARTS}
    if limit == "prefill":
        return f"{middle['queue']:,.1f} ms queued, {middle['prefill']:,.1f} ms until the first token"
    if limit == "link":
        return f"{middle['post']:,.2f} ms posting, {middle['wait']:,.2f} ms waiting for bytes"
    if limit == "decode step":
        tpot = cell["tpot_ms_p50"]
        step = "" if tpot is None or tpot != tpot else f", {tpot:,.1f} ms a token"
        return f"{middle['decode']:,.1f} ms decoding{step}"
    if limit == "decode KV":
        return f"{middle['reserve']:,.1f} ms until blocks were free"
    if limit == "coordinator":
        return f"{middle['handover']:,.1f} ms for the ticket's way, beside reserving, reading and checking"
    checks = ("digest", "fence", "verify")
    return ", ".join(f"{middle[name]:,.1f} ms {name}" for name in checks)


def waterfall_data(result: Result, max_requests: int = 20_000) -> dict[str, Any] | None:
    """What the page's waterfall shows, None without requests: the parts, and by cell a row per request:
    [name, ms when it was due, ms of every part]. Of more than `max_requests`, the first of each cell."""
    parts = request_parts(result)
    if parts.empty:
        return None
    per_cell = max(1, max_requests // parts["cell_id"].nunique())
    pushed = _pushed(result)
    cells = []
    for cell_id, rows in parts.groupby("cell_id", sort=False):
        shown = rows.head(per_cell)
        durations = shown[[part.name for part in PARTS]].round(3).to_numpy().tolist()
        names = [_short_name(str(row.request_id), str(cell_id)) for row in shown.itertuples()]
        due = shown["due_ms"].round(3).tolist()
        requests = [[*of] for of in zip(names, due, durations, strict=True)]
        cells.append({"id": str(cell_id), "push": cell_id in pushed, "of": len(rows), "requests": requests})
    told = [{"name": p.name, "colour": p.colour, "meaning": p.meaning} for p in PARTS]
    return {"parts": told, "cells": cells}


def _pushed(result: Result) -> set[Any]:
    transfers = result.transfers
    return set(transfers.loc[transfers["mode"] == "push", "cell_id"])


def _short_name(request_id: str, cell_id: str) -> str:
    """Requests are named after their cell, which the page shows beside."""
    return request_id.removeprefix(f"{cell_id}/")
