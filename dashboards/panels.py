"""What a dashboard is made of, and panels that occur more than once."""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.queries import Query, quantile, rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel. `unit` is Grafana's name of it; `help` is what it is and what to make of it."""

    title: str
    help: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    is_stacked: bool = False
    width: int = 8
    """Of a row's 24."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """One dashboard: a file `<uid>.json`."""

    uid: str
    title: str
    help: str
    panels: tuple[Panel, ...]


TURNS = rate("rayk_turns_total", "engine", rank="0")
"""What every engine has that lives."""
RANK_TURNS = rate("rayk_turns_total", "engine", "rank")
"""What every rank has."""


def stat(title: str, help_text: str, *queries: Query, unit: str = "short", width: int = 4) -> Panel:
    return Panel(title=title, help=help_text, queries=queries, unit=unit, kind="stat", width=width)


def latencies(title: str, name: str, help_text: str) -> Panel:
    shares = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    queries = tuple(quantile(share, name, "model").named(f"{p} {{{{model}}}}") for share, p in shares)
    return Panel(title=title, help=help_text, queries=queries, unit="s")


def sizes(title: str, name: str, unit: str, help_text: str) -> Panel:
    queries = tuple(
        quantile(share, name, "engine").named(f"{p} {{{{model}}}}/{{{{engine}}}}")
        for share, p in ((0.5, "p50"), (0.95, "p95"))
    )
    return Panel(title=title, help=help_text, queries=queries, unit=unit)


def per_engine(title: str, name: str, help_text: str, *, unit: str = "short") -> Panel:
    return Panel(
        title=title, help=help_text, queries=(rate(name, "engine").named("{{model}}/{{engine}}"),), unit=unit
    )


def per_rank(title: str, help_text: str, query: Query, unit: str = "short") -> Panel:
    return Panel(
        title=title,
        help=help_text,
        queries=(query.named("{{model}}/{{engine}}/{{rank}}"),),
        unit=unit,
        width=12,
    )
