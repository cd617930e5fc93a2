"""Turn the requests of a load into its numbers and a verdict on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayk.bench.client import OK, REFUSED, TIMEOUT, Observed
from rayk.bench.generator import NS_PER_S, Sent
from rayk.bench.load import Load
from rayk.bench.rows import COOLDOWN, MEASURED, WARMUP, request_row
from rayk.bench.statistics import Estimate, mean, quantile, warmup_length
from rayk.bench.verdict import judge
from rayk.types.slo import METRICS

NS_PER_MS = 1e6
PERCENTILES = (50, 90, 99)
MIN_TO_CUT = 40  # fewer requests are all measured: there is no telling what of them is warm-up


def find_phases(load: Load, seen: Sequence[Observed]) -> list[str]:
    """Call each request WARMUP, MEASURED or COOLDOWN, in order of due times. The cuts depend on when requests
    came, not on how they fared. Warm-up is the longer that MSER-5 finds in TTFT or E2E, at least the requests
    that a closed load sends at once. Cool-down begins a median E2E before the last due time. If less than
    half would be left, nothing is cut."""
    count = len(seen)
    first = load.warmup if load.warmup is not None else _auto_warmup(load, seen)
    last = count - load.cooldown if load.cooldown is not None else _auto_end(seen)
    if load.warmup is None and load.cooldown is None and last - first < count / 2:
        first, last = 0, count
    first = min(first, count)
    last = max(first, last)
    return [WARMUP] * first + [MEASURED] * (last - first) + [COOLDOWN] * (count - last)


def _auto_warmup(load: Load, seen: Sequence[Observed]) -> int:
    if len(seen) < MIN_TO_CUT:
        return 0
    found = [load.concurrency or 0]
    answered = [(i, s) for i, s in enumerate(seen) if s.outcome == OK]
    for chunk in (0, -1):  # TTFT, E2E
        cut = warmup_length([s.chunk_ns[chunk] - s.due_ns for _, s in answered])
        found.append(answered[cut][0] if cut else 0)
    return max(found)


def _auto_end(seen: Sequence[Observed]) -> int:
    lives = [s.chunk_ns[-1] - s.due_ns for s in seen if s.outcome == OK]
    if len(seen) < MIN_TO_CUT or not lives:
        return len(seen)
    end_ns = seen[-1].due_ns - float(np.median(lives))
    return sum(s.due_ns <= end_ns for s in seen)


def summarize(load: Load, model: str, sent: Sent) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the row of cells.parquet and those of requests.parquet."""
    phases = find_phases(load, sent.requests)
    rows = [
        request_row(seen, cell_id=load.name, phase=phase, began_ns=sent.began_ns, slo=load.slo)
        for seen, phase in zip(sent.requests, phases, strict=True)
    ]
    measured = [row for row in rows if row["phase"] == MEASURED]
    cell = {
        "cell_id": load.name,
        **_axes(load, model),
        "num_requests": len(rows),
        "num_measured": len(measured),
        "num_warmup": phases.count(WARMUP),
        "num_cooldown": phases.count(COOLDOWN),
        "num_failed": sum(row["outcome"] != OK for row in measured),
        "num_refused": sum(row["outcome"] == REFUSED for row in measured),
        "num_timeouts": sum(row["outcome"] == TIMEOUT for row in measured),
        **_tokens(measured),
        **_rates(sent, phases, rows),
        **_generator(sent, measured),
        "wall_s": (sent.ended_ns - sent.began_ns) / NS_PER_S,
    }
    for name in METRICS:
        cell |= _latency(name, measured)
    verdict, reasons = judge(load, cell, rows)
    return cell | {"verdict": verdict, "reason": "; ".join(reasons), "met": verdict != "INVALID"}, rows


def _axes(load: Load, model: str) -> dict[str, Any]:
    return {
        "url": load.url,
        "model": model,
        "arrival": load.arrival,
        "rate": load.rate,
        "concurrency": load.concurrency,
        "burstiness": load.burstiness if load.arrival == "gamma" else None,
        "seed": load.seed,
        "slo": str(load.slo) or None,
    }


def _tokens(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count prompt and cached tokens of answers that tell both, and tokens per chunk; None where no answer
    tells."""
    answered = [row for row in measured if row["outcome"] == OK]
    complete = [row for row in answered if None not in (row["num_prompt_tokens"], row["num_cached_tokens"])]
    sums: dict[str, Any] = {
        f"num_{what}_tokens": sum(row[f"num_{what}_tokens"] for row in complete) if complete else None
        for what in ("prompt", "cached")
    }
    counted = [row for row in answered if row["num_output_tokens"] is not None]
    num_chunks = sum(row["num_chunks"] for row in counted)
    per_chunk = sum(row["num_output_tokens"] for row in counted) / num_chunks if num_chunks else None
    return sums | {"tokens_per_chunk": per_chunk} | _drafted(answered)


def _drafted(answered: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count what the server proposed to itself for these answers; None where no answer tells."""
    told = [row for row in answered if row["num_drafted"] is not None]
    if not told:
        return dict.fromkeys(("num_drafted", "num_accepted", "acceptance_rate"))
    num_drafted, num_accepted = (sum(row[name] for row in told) for name in ("num_drafted", "num_accepted"))
    return {
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "acceptance_rate": num_accepted / num_drafted,
    }


def _rates(sent: Sent, phases: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measure the rates of the window from the first measured due time to the first of the cool-down (without
    one, to the last answer). Answers, good ones and tokens count where they were read; what is offered, and
    shares, are of requests due in it."""
    measured = [row for row in rows if row["phase"] == MEASURED]
    if not measured:
        return {"window_s": 0.0}
    first, after = phases.index(MEASURED), len(phases) - phases.count(COOLDOWN)
    begin_ns = sent.requests[first].due_ns
    end_ns = (
        sent.requests[after].due_ns
        if after < len(phases)
        else max(s.ended_ns for s in sent.requests[first:after])
    )
    window_s = (end_ns - begin_ns) / NS_PER_S
    if window_s <= 0:
        return {"window_s": 0.0}
    ended = [
        row["is_good"]
        for s, row in zip(sent.requests, rows, strict=True)
        if s.outcome == OK and begin_ns < s.chunk_ns[-1] <= end_ns
    ]
    tokens = sum(_tokens_within(s, begin_ns, end_ns) for s in sent.requests)
    in_flight_ns = sum(max(0, min(s.ended_ns, end_ns) - max(s.sent_ns, begin_ns)) for s in sent.requests)
    return {
        "window_s": window_s,
        "offered_per_s": len(measured) / window_s,
        "answered_per_s": len(ended) / window_s,
        "output_tokens_per_s": tokens / window_s,
        "goodput_per_s": sum(ended) / window_s,
        "good_share": sum(row["is_good"] for row in measured) / len(measured),
        "failed_share": sum(row["outcome"] != OK for row in measured) / len(measured),
        "mean_in_flight": in_flight_ns / NS_PER_S / window_s,
    }


def _tokens_within(seen: Observed, begin_ns: int, end_ns: int) -> float:
    """Count tokens read in the window; chunks that do not say what they carry have equal parts."""
    counts: Sequence[float] = seen.chunk_tokens
    if len(counts) != len(seen.chunk_ns):
        counts = [(seen.num_output_tokens or 0) / len(seen.chunk_ns)] * len(seen.chunk_ns)
    return sum(n for at, n in zip(seen.chunk_ns, counts, strict=True) if begin_ns < at <= end_ns)


def _generator(sent: Sent, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tell how punctual the generator was with measured requests, and how much of a core it took."""
    late_ms = [row["send_lag_ms"] for row in measured if row["send_lag_ms"] is not None]
    loop_ms = [lag / NS_PER_MS for lag in sent.loop_lags_ns]
    found: dict[str, Any] = {"generator_cpu_share": sent.cpu_ns / max(1, sent.ended_ns - sent.began_ns)}
    for name, lags in (("send", late_ms), ("loop", loop_ms)):
        for percent in (50, 90, 99):
            value = float(np.percentile(lags, percent, method="inverted_cdf")) if lags else None
            found[f"{name}_lag_ms_p{percent}"] = value
    return found


def _latency(name: str, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Estimate mean and percentiles; None where the sample supports none. Percentiles are of all measured
    requests, failed ones infinitely late; means are of what was answered."""
    values: list[float] = []
    for row in measured:
        value = row[f"{name}_ms"]
        if row["outcome"] != OK:
            values.append(math.inf)
        elif isinstance(value, list):
            values += value
        elif value is not None:
            values.append(value)
    found: dict[str, Any] = {f"num_{name}_values": len(values)}
    found |= _columns(f"{name}_ms_mean", mean([v for v in values if v < math.inf]))
    for percent in PERCENTILES:
        found |= _columns(f"{name}_ms_p{percent}", quantile(values, percent / 100))
    return found


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    parts = (("", "value"), ("_low", "low"), ("_high", "high"))
    found = {f"{name}{end}": getattr(estimate, part) if estimate else None for end, part in parts}
    return {key: value if value is None or math.isfinite(value) else None for key, value in found.items()}
