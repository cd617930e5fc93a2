"""Keep of each simulated request a few numbers, where there are too many to keep their rows."""

from __future__ import annotations

from array import array

import numpy as np

from rayk.types.rows import RequestRow


class Summary:
    """A sink of simulate_cell: 12 bytes a request. Times are as reports count them, from a request's arrival
    on, and of those that answered."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_failed = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_attempts = 0
        self._ttft_ms = array("f")
        self._tpot_ms = array("f")  # of those with two tokens or more
        self._e2e_ms = array("f")

    def __call__(self, row: RequestRow) -> None:
        """Count a request that is over."""
        self.num_requests += 1
        self.num_failed += row.error is not None
        self.num_prompt_tokens += row.num_prompt_tokens
        self.num_cached_tokens += row.num_cached_tokens
        self.num_attempts += row.num_attempts
        if row.error is not None or (ttft_ns := row.ttft_ns) is None or (e2e_ns := row.e2e_ns) is None:
            return
        self.num_output_tokens += len(row.token_times_ns)
        self._ttft_ms.append(ttft_ns / 1e6)
        self._e2e_ms.append(e2e_ns / 1e6)
        if (tpot_ns := row.tpot_ns) is not None:
            self._tpot_ms.append(tpot_ns / 1e6)

    def percentile(self, name: str, percent: float) -> float:
        """Return a percentile of ttft_ms, tpot_ms or e2e_ms; NaN where there is none."""
        values = {"ttft_ms": self._ttft_ms, "tpot_ms": self._tpot_ms, "e2e_ms": self._e2e_ms}[name]
        return float(np.percentile(values, percent)) if values else float("nan")
