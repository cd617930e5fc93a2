"""Judge whether a load's numbers can be trusted: VALID, NOISY (imprecise) or INVALID (not what they say)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayk.bench.client import OK
from rayk.bench.load import Load
from rayk.bench.rows import MEASURED
from rayk.bench.statistics import drift, intervals_hold
from rayk.types.slo import METRICS

VALID, NOISY, INVALID = "VALID", "NOISY", "INVALID"

MAX_LAG_SHARE = 0.25  # of the median TTFT: a tenth of the generator's stamps may be later
NOISY_LAG_SHARE = 0.1  # as late as this they may be before anybody is told
MIN_LAG_MS = 2.0  # less is never held against it: timers of event loops are no finer than a millisecond
MAX_CPU_SHARE = 0.9  # of a core: an event loop that takes more has a queue of its own
MAX_WIDTH = 0.1  # half an interval's width, of its mean
MAX_DRIFT = 0.2  # growth or decline of a latency through the measured window

Row = dict[str, Any]


def judge(load: Load, cell: Row, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Give the verdict and every reason for it, those that make it INVALID first."""
    measured = [row for row in rows if row["phase"] == MEASURED]
    invalid = [*_generator_faults(cell), *_load_faults(load, cell, measured)]
    noisy = [] if not measured else [*_imprecise(cell, load), *_unsteady(load, cell, measured)]
    verdict = INVALID if invalid else NOISY if noisy else VALID
    return verdict, [*invalid, *noisy]


def _generator_faults(cell: Row) -> list[str]:
    limit_ms = _lag_limit_ms(cell, MAX_LAG_SHARE)
    found = [
        f"the generator does not keep up: {what} is {cell[f'{name}_lag_ms_p90']:.1f} ms at p90, "
        f"{limit_ms:.1f} ms are allowed"
        for name, what in (
            ("send", "requests leave late, which"),
            ("loop", "its event loop wakes late, which"),
        )
        if (cell[f"{name}_lag_ms_p90"] or 0) > limit_ms
    ]
    if cell["generator_cpu_share"] > MAX_CPU_SHARE:
        found.append(f"the generator is busy: it took {cell['generator_cpu_share']:.0%} of a core")
    return found


def _lag_limit_ms(cell: Row, share: float) -> float:
    return float(max(MIN_LAG_MS, share * (cell["ttft_ms_p50"] or cell["ttft_ms_mean"] or 0)))


def _load_faults(load: Load, cell: Row, measured: Sequence[Row]) -> list[str]:
    """Say where the measured load differs from the load asked for."""
    answered = [row for row in measured if row["outcome"] == OK]
    if not answered:
        errors = sorted({row["error"] for row in measured if row["error"]})
        return [f"no request was answered{f': {errors[0]}' if errors else ''}"]
    found = []
    if cell["failed_share"] > load.failed_share:
        first = next(row["error"] for row in measured if row["outcome"] != OK)
        share = f"{cell['num_failed']} of {len(measured)} requests failed ({cell['failed_share']:.1%})"
        found.append(f"{share}, {load.failed_share:.1%} are allowed; the first: {first}")
    unlike = [
        r for r in answered if load.ignore_eos and r["num_output_tokens"] not in (None, r["max_tokens"])
    ]
    if unlike:
        one = unlike[0]
        found.append(
            f"{_count(len(unlike), 'answer is', 'answers are')} not as long as asked, such as request "
            f"{one['prompt_index']}: {one['num_output_tokens']} tokens instead of {one['max_tokens']}"
        )
    cut = [r for r in answered if _prompt_differs(r) and not load.use_chat]
    if cut:
        found.append(
            f"the server counts other prompts than were sent, such as {cut[0]['num_prompt_tokens']} tokens "
            f"of {len(cut[0]['prompt_token_ids'])}"
        )
    return found


def _prompt_differs(row: Row) -> bool:
    sent, counted = row["prompt_token_ids"], row["num_prompt_tokens"]
    return sent is not None and counted is not None and len(sent) != counted


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _imprecise(cell: Row, load: Load) -> list[str]:
    """Find numbers that another run may not find again; what makes the load INVALID is not repeated."""
    found = []
    wide = []
    for name in METRICS:
        value, high = cell[f"{name}_ms_mean"], cell[f"{name}_ms_mean_high"]
        if value and (high - value) / value > MAX_WIDTH:
            wide.append(f"{name.upper()} to {(high - value) / value:.0%}")
    if wide:
        found.append(f"more requests are needed: means are known roughly, {', '.join(wide)}")
    if cell["ttft_ms_mean"] is None:
        found.append("too few requests for intervals")
    kept_up = [
        name
        for name in ("send", "loop")
        if (cell[f"{name}_lag_ms_p90"] or 0) <= _lag_limit_ms(cell, MAX_LAG_SHARE)
    ]
    for percent, share in ((90, NOISY_LAG_SHARE), (99, MAX_LAG_SHARE)):
        late = max((cell[f"{name}_lag_ms_p{percent}"] or 0 for name in kept_up), default=0)
        if late > _lag_limit_ms(cell, share):
            found.append(f"{100 - percent}% of the generator's stamps are {late:.1f} ms late or more")
    if 0 < cell["failed_share"] <= load.failed_share:
        failed = _count(cell["num_failed"], "request", "requests")
        found.append(f"{failed} failed: means are of the answered ones")
    if cell["num_tpot_values"] == 0:
        found.append("the server does not say how many tokens it sent: no TPOT")
    return found


def _unsteady(load: Load, cell: Row, measured: Sequence[Row]) -> list[str]:
    found = []
    for name in ("ttft", "e2e"):
        values = [row[f"{name}_ms"] for row in measured if row["outcome"] == OK]
        share = drift(values)
        if share is not None and abs(share) > MAX_DRIFT:
            trend = "grows" if share > 0 else "falls"
            found.append(
                f"no steady state: {name.upper()} {trend} by {abs(share):.0%} of its mean while measured"
                + (", as when a server gets more than it can do" if share > 0 and load.is_open else "")
            )
        if not intervals_hold(values):
            found.append(f"{name.upper()} depends on that of requests long before: intervals may be narrow")
    if not cell["num_cooldown"] and load.cooldown is None:
        found.append("the load is over before its end can be cut off")
    return found
