"""Make a row of requests.parquet per request of a load; columns mean the same as a run's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rayk.bench.client import OK, Observed
from rayk.types.slo import Slo

NS_PER_MS = 1e6
WARMUP, MEASURED, COOLDOWN = "warmup", "measured", "cooldown"


def request_row(seen: Observed, *, cell_id: str, phase: str, began_ns: int, slo: Slo) -> dict[str, Any]:
    """Latencies count from the time the request was due. Of a request that failed they are of what came
    before, and `is_good` is false.

    `itl_ms` has the gaps between chunks that carry tokens, as vLLM's own benchmark counts them: tokens of one
    chunk came at once, and a gap of 0 between them was nobody's wait. `tpot_ms` spreads time over tokens.
    """
    prompt = seen.planned.prompt
    times = seen.chunk_ns
    count = seen.num_output_tokens
    row: dict[str, Any] = {
        "cell_id": cell_id,
        "repeat": 0,
        "request_id": f"{cell_id}/{seen.planned.index}",
        "prompt_index": seen.planned.index,
        "prompt_token_ids": prompt if isinstance(prompt, list) else None,
        "output_token_ids": seen.output_token_ids or None,
        "error": seen.error,
        "num_prompt_tokens": seen.usage.get("prompt_tokens"),
        "num_cached_tokens": seen.usage.get("cached_tokens"),
        **_drafted(seen.usage),
        "ttft_ms": (times[0] - seen.due_ns) / NS_PER_MS if times else None,
        "tpot_ms": (times[-1] - times[0]) / NS_PER_MS / (count - 1)
        if times and count and count > 1
        else None,
        "itl_ms": [(b - a) / NS_PER_MS for a, b in pairwise(times)] if times else None,
        "e2e_ms": (times[-1] - seen.due_ns) / NS_PER_MS if times else None,
        "finish_reason": seen.finish_reason if seen.outcome == OK else "error",
        "seed": seen.planned.seed,
        "outcome": seen.outcome,
        "http_status": seen.status,
        "phase": phase,
        "num_output_tokens": count,
        "max_tokens": seen.planned.max_tokens,
        "num_chunks": len(times),
        "due_ms": (seen.due_ns - began_ns) / NS_PER_MS,
        "send_lag_ms": (seen.sent_ns - seen.due_ns) / NS_PER_MS if seen.sent_ns else None,
        "ended_ms": (seen.ended_ns - began_ns) / NS_PER_MS if seen.ended_ns else None,
    }
    return row | {"is_good": row["outcome"] == OK and slo.is_kept(row)}


def _drafted(usage: dict[str, Any]) -> dict[str, Any]:
    """Count what the server proposed to itself; null where it does not say, or proposed nothing."""
    accepted, rejected = usage.get("accepted_tokens"), usage.get("rejected_tokens")
    num_drafted = (accepted or 0) + (rejected or 0)
    if accepted is None or rejected is None or not num_drafted:
        return {"num_drafted": None, "num_accepted": None, "acceptance_rate": None}
    return {
        "num_drafted": num_drafted,
        "num_accepted": accepted,
        "acceptance_rate": accepted / num_drafted,
    }
