"""Tables of jobs/serve_stress.py: a row per family, kill and request, and what in them must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.stress_chaos import BACK_S, BACK_SHARE, WINDOW_S, Kill, Throughput
from jobs.stress_load import VERDICTS, Met, percentile
from rayk.reports.page import Column

Tables = dict[str, list[dict[str, Any]]]
ANSWERED_SHARE = 0.8
"""Of the requests whose clients stayed, under kills."""

FAMILIES = (
    Column(title="family", key="family"),
    Column(title="requests", key="num_requests", spec=",d"),
    Column(title="right", key="num_right", spec=",d"),
    Column(title="near ties", key="num_near_tie", spec=",d"),
    Column(title="client left", key="num_left", spec=",d"),
    Column(title="error", key="num_failed", spec=",d"),
    Column(title="wrong", key="num_wrong", spec=",d"),
    Column(title="hung", key="num_hung", spec=",d"),
    Column(title="answered of those whose client stayed", key="answered_share", spec=".1%"),
    Column(title="tokens/s", key="tokens_per_s", spec=",.0f"),
    Column(title="TTFT p50, s", key="ttft_s_p50", spec=".2f"),
    Column(title="E2E p50, s", key="e2e_s_p50", spec=".2f"),
    Column(title="E2E p99, s", key="e2e_s_p99", spec=".2f"),
    Column(title="blocks held at the end", key="num_blocks_held", spec=",d"),
    Column(title="exit status", key="exit_status"),
)
FIRE = (
    Column(title="family", key="family"),
    Column(title="minutes", key="minutes", spec=".1f"),
    Column(title="restart and new spare, s", key="restart_s", spec=".1f"),
    Column(title="kills", key="num_kills", spec=",d"),
    Column(title="tokens/s before, median", key="median_tokens_per_s", spec=",.0f"),
    Column(title="restart under fire p50, s", key="restart_s_p50", spec=".1f"),
    Column(title="most, s", key="restart_s_max", spec=".1f"),
    Column(title="throughput back p50, s", key="back_s_p50", spec=".1f"),
    Column(title="most, s ", key="back_s_max", spec=".1f"),
    Column(title="kills it was not back after in time", key="num_late", spec=",d"),
)
KILLS = (
    Column(title="family", key="family"),
    Column(title="at, s", key="at_s", spec=".1f"),
    Column(title="engine", key="engine"),
    Column(title="rank", key="rank", spec="d"),
    Column(title="load", key="load", spec=".0f"),
    Column(title="tries", key="tries", spec="d"),
    Column(title="workers replaced", key="num_replaced", spec="d"),
    Column(title="they are there, s", key="workers_s", spec=".1f"),
    Column(title="formed, s", key="form_s", spec=".1f"),
    Column(title="connected, s", key="connect_s", spec=".1f"),
    Column(title="CPU to start a worker, s", key="start_cpu_s", spec=".1f"),
    Column(title="CPU to form, s", key="form_cpu_s", spec=".1f"),
    Column(title="takes requests again after, s", key="restart_s", spec=".1f"),
    Column(title="throughput back after, s", key="back_s", spec=".1f"),
)
NOTE = (
    f"Throughput is back when the first window of {WINDOW_S:g} s that lies wholly behind the kill has at "
    f"least {BACK_SHARE:.0%} of the median tokens per second before the first kill: after {WINDOW_S:g} s at "
    f"the earliest, {BACK_S:g} s at the latest. Windows may hold later kills. A kill comes every three times "
    "that an engine's restart takes, its new spare included. The parts of a restart are "
    "those of the try that succeeded, one after the other; processor time to start is a rank's, imports "
    "included, whenever it was spent; to form that of all ranks."
)


@dataclass(kw_only=True)
class Run:
    """What one server went through. Times are time.monotonic_ns."""

    family: str
    met: list[Met] = field(default_factory=list)
    began_ns: int = 0
    ended_ns: int = 0
    kills: list[Kill] = field(default_factory=list)
    restart_s: float | None = None
    """Mean, until a spare waits again, as measured before the killing began."""
    measured_kills: int = 0
    """How many of the kills measured it."""
    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Engine -> free and all blocks, at the end."""
    requests_left: tuple[int, int] = (0, 0)
    """Running and waiting, as the server says at the end."""
    exit_status: int | None = None
    trouble: str = ""
    """Why it could not go on, if so."""


def throughput(run: Run) -> Throughput:
    pairs = [p for m in run.met for p in zip(m.observed.chunk_ns, m.observed.chunk_tokens, strict=True)]
    return Throughput([at for at, _ in pairs], [count for _, count in pairs])


def enough_tokens(run: Run) -> float | None:
    """Tokens per second at which throughput is back; None without kills."""
    median = median_before(run)
    return None if median is None else BACK_SHARE * median


def median_before(run: Run) -> float | None:
    """Tokens per second before the first kill, the load's own start aside; None without kills."""
    if not run.kills:
        return None
    return throughput(run).median(run.began_ns / 1e9 + WINDOW_S, run.kills[0].at_ns / 1e9)


def family_row(run: Run, verdicts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    counts = Counter(verdict for verdict, _ in verdicts)
    stayed = [m.observed for m, (v, _) in zip(run.met, verdicts, strict=True) if v != "left"]
    answered = [m.observed for m, (v, _) in zip(run.met, verdicts, strict=True) if v in ("right", "near_tie")]
    seconds = (run.ended_ns - run.began_ns) / 1e9
    kills = kill_rows(run)
    restarts = [k["restart_s"] for k in kills if k["restart_s"] is not None]
    backs = [k["back_s"] for k in kills if k["back_s"] is not None]
    lasted = [(o.ended_ns - o.sent_ns) / 1e9 for o in answered]
    return {
        "family": run.family,
        "num_requests": len(verdicts),
        **{f"num_{verdict}": counts[verdict] for verdict in VERDICTS},
        "answered_share": len(answered) / len(stayed) if stayed else 0.0,
        "seconds": seconds,
        "tokens_per_s": sum(len(m.observed.output_token_ids) for m in run.met) / seconds,
        "ttft_s_p50": percentile([(o.chunk_ns[0] - o.sent_ns) / 1e9 for o in answered], 50),
        "e2e_s_p50": percentile(lasted, 50),
        "e2e_s_p99": percentile(lasted, 99),
        "num_blocks_held": sum(total - 1 - free for free, total in run.blocks.values()),
        "num_engines": len(run.blocks),
        "num_requests_left": sum(run.requests_left),
        "exit_status": run.exit_status,
        "minutes": seconds / 60,
        "restart_s": run.restart_s,
        "num_kills": len(kills),
        "median_tokens_per_s": median_before(run),
        "restart_s_p50": percentile(restarts, 50),
        "restart_s_max": max(restarts, default=None),
        "back_s_p50": percentile(backs, 50),
        "back_s_max": max(backs, default=None),
        "num_late": sum(k["back_s"] is None or k["back_s"] > BACK_S for k in kills),
        "trouble": run.trouble,
        "notes": [f"{v}: {text}" for v, text in verdicts if v not in ("right", "left")],
    }


def kill_rows(run: Run) -> list[dict[str, Any]]:
    """One per kill, those that measured restarts included."""
    tokens, enough = throughput(run), enough_tokens(run)
    rows = []
    for number, kill in enumerate(run.kills):
        at_s = kill.at_ns / 1e9
        back_s = None if enough is None else tokens.back_s(at_s, run.ended_ns / 1e9, enough)
        rows.append(
            {
                "family": run.family,
                "at_s": at_s - run.began_ns / 1e9,
                "engine": kill.engine,
                "rank": kill.rank,
                "measures": number < run.measured_kills,
                "load": kill.load,
                "restart_s": kill.restart_s,
                **_parts(kill.parts),
                "back_s": back_s,
            }
        )
    return rows


def _parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """How a restart went. Nothing of one that did not end."""
    workers_s, formed_s, joined_s = (parts.get(f"{name}_s") for name in ("workers", "formed", "joined"))
    ranks = parts.get("cpu_s", ())
    is_whole = joined_s is not None
    return {
        "tries": parts.get("try"),
        "num_replaced": parts.get("num_replaced"),
        "workers_s": workers_s,
        "form_s": formed_s - workers_s if is_whole else None,
        "connect_s": joined_s - formed_s if is_whole else None,
        "start_cpu_s": max((r["start"] for r in ranks), default=None),
        "form_cpu_s": sum(r["load"] + r["transport"] for r in ranks) if ranks else None,
    }


def request_rows(run: Run, verdicts: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {
            "family": run.family,
            "prompt_index": met.case.prompt_index,
            "num_prompt_tokens": len(met.observed.planned.prompt),
            "max_tokens": met.case.max_tokens,
            "leave_after": met.case.leave_after,
            "verdict": verdict,
            "note": note,
            "status": met.observed.status,
            "sent_s": (met.observed.sent_ns - run.began_ns) / 1e9,
            "ended_s": (met.observed.ended_ns - run.began_ns) / 1e9,
            "chunk_s": [(at - run.began_ns) / 1e9 for at in met.observed.chunk_ns],
            "chunk_tokens": list(met.observed.chunk_tokens),
        }
        for met, (verdict, note) in zip(run.met, verdicts, strict=True)
    ]


def failures(tables: Tables, num_requests: int | None) -> list[str]:
    """What must not be, in words. num_requests: of each family; None: ranks were killed, and there were as
    many as there was time for."""
    found = []
    for row in tables["families"]:
        found += [f"{row['family']}: {text}" for text in _wrong(row, num_requests)]
    return found


def _wrong(row: Mapping[str, Any], num_requests: int | None) -> list[str]:
    is_under_fire = num_requests is None
    checks = (
        (row["num_wrong"], f"{row['num_wrong']} answers have other tokens than the reference"),
        (row["num_hung"], f"{row['num_hung']} requests hung"),
        (
            not is_under_fire and row["num_requests"] != num_requests,
            f"{row['num_requests']} of {num_requests} requests ended",
        ),
        (not is_under_fire and row["num_failed"], f"{row['num_failed']} requests ended with an error"),
        (
            is_under_fire and row["answered_share"] < ANSWERED_SHARE,
            f"only {row['answered_share']:.1%} were answered",
        ),
        (is_under_fire and not row["num_kills"], "no rank was killed"),
        (row["num_late"], f"throughput was not back within {BACK_S:g} s of {row['num_late']} kills"),
        (row["num_blocks_held"], f"{row['num_blocks_held']} blocks are held at the end"),
        (not row["num_engines"], "no engine told of its blocks"),
        (row["num_requests_left"], f"the server counts {row['num_requests_left']} requests at the end"),
        (row["exit_status"], f"the server ended with status {row['exit_status']}"),
        (row["trouble"], row["trouble"]),
    )
    return [text for is_so, text in checks if is_so]
