"""Define once, for every table, plot and comparison, what moving a request's KV took."""

from __future__ import annotations

import pandas as pd

KEYS = ["cell_id", "repeat", "request_id"]  # what names a request


# of `moves`, beside KEYS
COLUMNS = (
    "is_push",
    "bytes",
    "descriptors",
    "is_merged",
    "is_span",
    "moving_ms",
    "gb_per_s",
    "ms",
    "rank_ms",
)


def of_handovers(transfers: pd.DataFrame) -> pd.Series[bool]:
    """Mark the rows that are parts of hand-overs, not of what a host tier moved."""
    if "purpose" not in transfers:
        return pd.Series(True, index=transfers.index)
    return transfers["purpose"].fillna("handover") == "handover"


def moves(requests: pd.DataFrame, transfers: pd.DataFrame) -> pd.DataFrame:
    """Make a row per request whose KV was handed over and proven, of its last good attempt. `bytes` and
    `descriptors` (those posted) are of all ranks. `moving_ms` lasts from the first post to the last byte, all
    ranks together; of a push, as long as a pair of ranks had writes in flight. `ms` is what the request
    waited: of a push, whose writes lie within the prefill, the read stage. `rank_ms` is what the slowest
    reading rank took alone. Where an older rayk wrote the tables, is_span or is_merged is False: `moving_ms`
    is then of the slowest pair of ranks, or `descriptors` are counted before neighbours are merged."""
    transfers = transfers[of_handovers(transfers)]
    rows = transfers[transfers["bytes"].fillna(0).gt(0) & transfers["transfer_ms"].fillna(0).gt(0)]
    times = {name: rows[name].astype("float64") for name in ("begin_ms", "end_ms", "num_descriptors_merged")}
    rows = rows.assign(
        **times,
        is_push=rows["mode"] == "push",
        retries=rows["retries"].fillna(0),
        is_good=rows["verdict"].fillna("OK") == "OK",
        is_told=rows["begin_ms"].notna() & rows["end_ms"].notna(),
        is_merged=rows["num_descriptors_merged"].notna(),
    )
    table = (
        rows.groupby([*KEYS, "retries"], sort=False)
        .agg(
            is_push=("is_push", "any"),
            is_good=("is_good", "all"),
            is_told=("is_told", "all"),
            is_merged=("is_merged", "all"),
            bytes=("bytes", "sum"),
            asked=("num_descriptors", "sum"),
            merged=("num_descriptors_merged", "sum"),
            slowest_ms=("transfer_ms", "max"),
            begin_ms=("begin_ms", "min"),
            end_ms=("end_ms", "max"),
        )
        .reset_index()
    )
    table = table.merge(_by_rank(rows), on=[*KEYS, "retries"])
    table = table[table["is_good"].astype(bool)].drop_duplicates(KEYS, keep="last")
    return _with_times(table, requests)


def _by_rank(rows: pd.DataFrame) -> pd.DataFrame:
    attempt = [*KEYS, "retries"]
    of_rank = rows.groupby([*attempt, "consumer_rank"], sort=False)
    spans = of_rank.agg(begin=("begin_ms", "min"), end=("end_ms", "max"), alone=("transfer_ms", "max"))
    took = (spans["end"] - spans["begin"]).fillna(spans["alone"])
    return took.groupby(level=attempt, sort=False).max().rename("rank_ms").reset_index()


def _with_times(table: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    reads = requests[[*KEYS, "stage_read_ns"]].drop_duplicates(KEYS)
    table = table.merge(reads, on=KEYS, how="left")
    is_push, is_told = table["is_push"].astype(bool), table["is_told"].astype(bool)
    moving = (table["end_ms"] - table["begin_ms"]).astype("float64").where(is_told, table["slowest_ms"])
    waited = (table["stage_read_ns"].astype("float64") / 1e6).fillna(moving)
    # Either all of a run's descriptors are those after merging, or none.
    is_merged = bool(table["is_merged"].all())
    return table.assign(
        descriptors=table["merged" if is_merged else "asked"],
        is_merged=is_merged,
        is_span=is_told | is_push,
        moving_ms=moving,
        gb_per_s=table["bytes"] / moving / 1e6,
        ms=moving.where(~is_push, waited),
    )[[*KEYS, *COLUMNS]]
