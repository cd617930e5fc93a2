"""Ask a Prometheus what every panel would: `python -m dashboards.check [URL]`.

Exit 1 where a query is an error or has no data in the last minutes. Queries about events (faults, mismatches,
preemptions) that did not happen show 0; they are listed as quiet, and so are metrics nobody has reported.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from dashboards.queries import VARIABLES, Query, exported
from dashboards.table import ABSENT_ON_CPU, ABSENT_UNDRAFTED, ABSENT_UNPACED, ABSENT_WITHOUT_TIER, DASHBOARDS
from rayk.metrics import METRICS, MetricKind

RATE_S = 20
"""What `$__rate_interval` stands for: four times the interval of scrapes, and some."""
WINDOW_S = 300
ASK_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one query."""

    where: str
    """Dashboard and panel."""
    query: Query
    num_series: int
    is_quiet: bool
    """Only zeros, of what need not happen."""
    error: str = ""


class Prometheus:
    """One server's HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/)."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def ask(self, path: str, **parameters: str | float) -> object:
        """`data` of an answer. Raises ValueError with what Prometheus says of a bad query, OSError."""
        full = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(full, timeout=ASK_S) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from error
        return body["data"]

    def series(self, expr: str, window_s: float = WINDOW_S) -> list[dict[str, object]]:
        """The series that an expression has in the last `window_s`, NaN aside (0 of 0: nothing happened)."""
        now = time.time()
        data = self.ask("query_range", query=expr, start=now - window_s, end=now, step=2)
        assert isinstance(data, dict)
        found: list[dict[str, object]] = data["result"]
        return [one for one in found if any(value != "NaN" for _, value in one["values"])]  # type: ignore[attr-defined]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        data = self.ask("alerts")
        assert isinstance(data, dict)
        return {alert["labels"]["alertname"] for alert in data["alerts"] if alert["state"] == "firing"}


def filled_in(expr: str) -> str:
    """An expression as Grafana sends it, with all models and engines chosen."""
    for variable in VARIABLES:
        expr = expr.replace(f"${variable}", ".*")
    return expr.replace("$__rate_interval", f"{RATE_S}s")


def ask_all(prometheus: Prometheus, window_s: float = WINDOW_S) -> list[Answer]:
    """Every query of every panel."""
    answers = []
    for board in DASHBOARDS:
        for panel in board.panels:
            for query in panel.queries:
                where = f"{board.uid}: {panel.title} ({query.legend})"
                answers.append(_answer(prometheus, where, query, window_s))
    return answers


def _answer(prometheus: Prometheus, where: str, query: Query, window_s: float) -> Answer:
    try:
        shown = prometheus.series(filled_in(query.shown), window_s)
    except ValueError as error:
        return Answer(where=where, query=query, num_series=0, is_quiet=False, error=str(error))
    has_happened = any(float(value) for one in shown for _, value in one["values"])  # type: ignore[attr-defined]
    is_quiet = query.zero is not None and bool(shown) and not has_happened
    return Answer(where=where, query=query, num_series=len(shown), is_quiet=is_quiet)


def unreported(prometheus: Prometheus, window_s: float = WINDOW_S) -> set[str]:
    """Metrics of the table that no target has had."""
    absent = set()
    for name, metric in METRICS.items():
        suffix = f"_count{metric.series_ending}" if metric.kind is MetricKind.HISTOGRAM else ""
        if not prometheus.series(f"count({exported(name)}{suffix})", window_s):
            absent.add(name)
    return absent


def main(arguments: list[str]) -> int:
    """0: every query has data, or lacks only what no CPU has."""
    prometheus = Prometheus(arguments[0] if arguments else "http://127.0.0.1:9090")
    try:
        answers, absent = ask_all(prometheus), unreported(prometheus)
    except OSError as error:
        print(f"no Prometheus answers at {prometheus.url}: {error}", file=sys.stderr)
        return 2
    may_lack = ABSENT_ON_CPU | ABSENT_UNPACED | ABSENT_UNDRAFTED | ABSENT_WITHOUT_TIER
    bad = [a for a in answers if a.error or (not a.num_series and not a.query.metrics <= may_lack)]
    for answer in answers:
        if answer.is_quiet:
            print(f"quiet  {answer.where}")
    for answer in bad:
        print(f"FAIL   {answer.where}: {answer.error or 'no series'}")
    if absent:
        print(f"not reported: {', '.join(sorted(absent))}")
    print(f"{len(answers)} queries, {len(bad)} without data or with an error")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
