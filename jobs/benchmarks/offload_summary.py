"""What jobs/benchmarks/offload.py makes of its requests: medians, ratios, and what is wrong with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayk.reports.page import Column

JUDGED_FROM = 512
"""Tokens of the prompts whose times are judged, or more."""
_SOURCES = ("storing", "device", "host", "disk")
KINDS = ("cold", *(kind for source in _SOURCES for kind in (source, f"{source} per layer")))
LOADED = ("host", "host per layer", "disk", "disk per layer")
COLUMNS = (
    Column(title="model", key="model"),
    Column(title="prompt tokens", key="num_prompt_tokens", spec=",d"),
    Column(title="kind", key="kind"),
    Column(title="times", key="num_samples", spec=",d"),
    Column(title="TTFT, ms", key="ttft_ms", spec=",.1f"),
    Column(title="least", key="ttft_min_ms", spec=",.1f"),
    Column(title="most", key="ttft_max_ms", spec=",.1f"),
    Column(title="of cold", key="of_cold", spec=".3f"),
    Column(title="of per layer", key="of_per_layer", spec=".2f"),
    Column(title="MiB moved", key="mib", spec=",.2f"),
    Column(title="copies", key="num_descriptors", spec=",d"),
    Column(title="after merging", key="num_descriptors_merged", spec=",d"),
    Column(title="load, ms", key="load_ms", spec=",.1f"),
    Column(title="of it the tier's answer", key="look_up_ms", spec=",.1f"),
    Column(title="moving", key="move_ms", spec=",.1f"),
    Column(title="other", key="other_ms", spec=",.1f"),
    Column(title="digests, both sides", key="digest_ms", spec=",.1f"),
    Column(title="GB/s", key="gb_per_s", spec=".2f"),
    Column(title="memcpy GB/s", key="memcpy_gb_per_s", spec=".2f"),
    Column(title="of memcpy", key="of_memcpy", spec=".2f"),
)

Rows = Sequence[Mapping[str, Any]]


def summary(rows: Rows) -> list[dict[str, Any]]:
    """A row per model, prompt and kind: medians over all samples; ratios are medians of the ratios within
    each repeat: to computing the prompt, whose median there counts, and to what was asked for in the same
    turn."""
    found = []
    keys = dict.fromkeys((r["model"], r["num_prompt_tokens"]) for r in rows)
    for model, n in keys:
        by_kind = {
            kind: {
                (r["repeat"], r["turn"]): r
                for r in rows
                if (r["model"], r["num_prompt_tokens"], r["kind"]) == (model, n, kind)
            }
            for kind in KINDS
        }
        found += [_summary_row(model, n, kind, by_kind) for kind in KINDS if by_kind[kind]]
    return found


def _summary_row(
    model: str, n: int, kind: str, by_kind: Mapping[str, Mapping[tuple[int, int], Mapping[str, Any]]]
) -> dict[str, Any]:
    samples = by_kind[kind]
    times = [r["ttft_ms"] for r in samples.values()]
    row: dict[str, Any] = {"model": model, "num_prompt_tokens": n, "kind": kind, "num_samples": len(times)}
    row |= {"ttft_ms": statistics.median(times), "ttft_min_ms": min(times), "ttft_max_ms": max(times)}

    def of_cold() -> float | None:
        cold: dict[int, list[float]] = {}
        for (repeat, _), r in by_kind["cold"].items():
            cold.setdefault(repeat, []).append(r["ttft_ms"])
        ratios = [r["ttft_ms"] / statistics.median(cold[at]) for (at, _), r in samples.items() if at in cold]
        return statistics.median(ratios) if ratios and kind != "cold" else None

    def of_per_layer() -> float | None:
        there = by_kind.get(f"{kind} per layer", {})
        pairs = [(r["ttft_ms"], there[at]["ttft_ms"]) for at, r in samples.items() if at in there]
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def median(pick: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        values = [v for r in samples.values() if (v := pick(r)) is not None]
        return statistics.median(values) if values else None

    row["of_cold"], row["of_per_layer"] = of_cold(), of_per_layer()
    for key in ("bytes", "num_descriptors", "num_descriptors_merged"):
        value = median(lambda r, key=key: r[key] or None)  # type: ignore[misc]
        row[key] = None if value is None else int(value)
    row["mib"] = None if row["bytes"] is None else row["bytes"] / 2**20
    for key in ("load_ms", "look_up_ms", "move_ms", "digest_ms", "gb_per_s"):
        row[key] = median(lambda r, key=key: r[key])  # type: ignore[misc]
    row["other_ms"] = median(_other_ms)
    row["memcpy_gb_per_s"] = median(lambda r: _memcpy_rate(r))
    row["of_memcpy"] = median(lambda r: r["gb_per_s"] / _memcpy_rate(r) if r["gb_per_s"] else None)
    return row


def _other_ms(row: Mapping[str, Any]) -> float | None:
    """Of a load, what is neither the tier's answer nor the move."""
    parts = [row[key] for key in ("load_ms", "look_up_ms", "move_ms")]
    return None if None in parts else parts[0] - parts[1] - parts[2]


def _memcpy_rate(row: Mapping[str, Any]) -> float | None:
    return row["bytes"] / row["memcpy_ms"] / 1e6 if row["memcpy_ms"] else None


def failures(tables: Mapping[str, Rows], *, judged_from: int | None) -> tuple[list[str], list[str]]:
    """(what is wrong, what does not pay), in words. `judged_from`: prompts of so many tokens or more are to
    be faster from the host tier; None: no time is judged."""
    wrong = []
    cold = {_key(r): r["token_ids"] for r in tables["requests"] if r["kind"] == "cold"}
    for row in tables["requests"]:
        where = f"{row['model']}, {row['num_prompt_tokens']} tokens, {row['kind']}, repeat {row['repeat']}"
        wanted = cold.get(_key(row))
        if wanted is not None and list(row["token_ids"]) != list(wanted):
            wrong.append(f"{where}: tokens {list(row['token_ids'])}, not {list(wanted)}")
        if row["offload_failure"]:
            wrong.append(f"{where}: {row['offload_failure']}")
        wrong += [f"{where}: {what}" for what in _from_elsewhere(row)]
    if judged_from is None:
        return wrong, []
    missed = [text for row in tables["summary"] for text in _does_not_pay(row, judged_from)]
    if not any(r["kind"] == "host" and r["num_prompt_tokens"] >= judged_from for r in tables["summary"]):
        missed.append(f"no prompt of {judged_from} tokens or more: nothing is judged")
    return wrong, missed


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["num_prompt_tokens"], row["repeat"]


def _from_elsewhere(row: Mapping[str, Any]) -> list[str]:
    """Where a prompt's KV came from something else than its kind says."""
    n, kind = row["num_prompt_tokens"], row["kind"]
    wanted = {
        "num_host_tokens": n if kind in LOADED else 0,
        "num_disk_tokens": n if kind.startswith("disk") else 0,
    }
    found = [
        f"{row[key]} {key.removeprefix('num_').replace('_', ' ')}, not {number}"
        for key, number in wanted.items()
        if row[key] != number
    ]
    if kind.startswith("device") and row["num_cached_tokens"] != n:
        found.append(f"{row['num_cached_tokens']} tokens in its own cache, not {n}")
    return found


def _does_not_pay(row: Mapping[str, Any], judged_from: int) -> list[str]:
    """Where a host hit is not faster than it should be."""
    if row["kind"] != "host" or row["num_prompt_tokens"] < judged_from:
        return []
    where = f"{row['model']}, {row['num_prompt_tokens']} tokens: a host hit takes"
    than = {"of_cold": "computing the prompt", "of_per_layer": "one with per-layer pages"}
    return [
        f"{where} {row[key]:.2f} of {what}"
        for key, what in than.items()
        if row[key] is None or not row[key] < 1
    ]
