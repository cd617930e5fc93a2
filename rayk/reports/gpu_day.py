"""The page of a GPU day (jobs/gpu_day.py): a card per stage, measured over ceiling, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayk.reports.page import Column, Page, Plot, Section
from rayk.reports.values import plural
from rayk.types.errors import UserError
from rayk.types.files import JSON_BYTES, parse_json, read_text

FILE = "gpu-day.json"
TONES = {"failed": "unmet", "passed": "met", "measured": "", "skipped": ""}
SHARES = {"of_copy": "of copy", "of_matmul": "of matmul"}  # bandwidth, FLOP/s
NOTE = (
    "Shares are of what a copy on the device and a large matrix product reached in the same process. Rates "
    "count each byte and each FLOP that the work needs once."
)
_COLUMNS = (
    Column("kernel", "kernel"),
    Column("shape", "shape"),
    Column("variant", "variant"),
    Column("status", "status", tone="tone"),
    Column("ms", "ms", ".4g"),
    Column("GB/s", "gbps", ".4g"),
    Column("of copy", "of_copy", ".0%"),
    Column("TFLOP/s", "tflops", ".4g"),
    Column("of matmul", "of_matmul", ".0%"),
    Column("value", "value", ".4g"),
    Column("unit", "unit"),
    Column("SM MHz", "sm_mhz", ".0f"),
    Column("note", "note"),
)


def is_gpu_day(folder: Path) -> bool:
    return (folder / FILE).is_file()


def gpu_day_page(folder: Path) -> Page:
    """Make the page of a folder's rows. Raises UserError for a file that the job did not write."""
    where = folder / FILE
    try:
        found = parse_json(read_text(where, JSON_BYTES))
        rows = [{column.key: None for column in _COLUMNS[:-1]} | row for row in found["rows"]]
        environment = dict(found["environment"])
        for row in rows:
            row["tone"] = TONES[row["status"]]
        return _page(rows, environment)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            problem=f"is not what jobs/gpu_day.py writes: {error!r}", where=str(where), mend="run it again"
        ) from error


def _page(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> Page:
    counts = {status: sum(row["status"] == status for row in rows) for status in TONES}
    commits = sorted({row["commit"] for row in rows})
    return Page(
        eyebrow="GPU day",
        title=str(environment.get("device", "unknown device")),
        lead=f"Rows of {plural(len(commits), 'commit')}: {', '.join(commits)}" if len(commits) > 1 else "",
        chips=[(TONES[status] or "PASS", f"{count} {status}") for status, count in counts.items() if count],
        sections=[_section(stage, rows) for stage in dict.fromkeys(row["stage"] for row in rows)],
        environment=environment,
    )


def _section(stage: str, rows: Sequence[Mapping[str, Any]]) -> Section:
    own = [row for row in rows if row["stage"] == stage]
    used = [c for c in _COLUMNS if any(row.get(c.key) not in (None, "") for row in own)]
    return Section(
        title=stage,
        note=NOTE if any(row.get(share) is not None for row in own for share in SHARES) else "",
        columns=used,
        rows=own,
        plots=_plots(stage, own),
    )


def _plots(stage: str, rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Bars of each share that rows have."""
    data = [
        {
            "type": "bar",
            "name": title,
            "x": [" ".join(filter(None, (r["kernel"], r["shape"], r["variant"]))) for r in own],
            "y": [row[share] for row in own],
            "marker": {"color": f"series{number}"},
        }
        for number, (share, title) in enumerate(SHARES.items(), start=1)
        if (own := [row for row in rows if row.get(share) is not None])
    ]
    if not data:
        return []
    layout = {
        "height": 420,
        "barmode": "group",
        "showlegend": True,
        "xaxis": {"showticklabels": False},
        "yaxis": {"title": {"text": "of the ceiling"}, "tickformat": ".0%"},
    }
    return [Plot(id=f"shares-{stage}", data=data, layout=layout, is_wide=True)]
