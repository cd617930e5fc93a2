"""Say in words how good fitted tables are, and what they were fitted to."""

from __future__ import annotations

from collections.abc import Iterator

from rayk.costs.fit import Fitted
from rayk.costs.hull import AXES
from rayk.costs.table import StepTable
from rayk.planner.fitting import MAX_ERROR, FittedBook, FittedClass

WORST = 5  # places that are listed


def told(fitted: FittedBook) -> Iterator[str]:
    """Yield lines: each table's constants, residuals, coverage and worst places; then the shared tables."""
    for found in fitted.classes:
        costs = fitted.book.engines[found.key]
        yield from _class(found, costs.decode if found.kind == "decode" else costs.prefill)
    for key, costs in fitted.book.engines.items():
        yield (
            f"{key.text}: a turn takes {_us(costs.host_ns)} beside its step, and "
            f"{_us(costs.request_host_ns)} a request"
        )
    gaps, host = fitted.book.gaps, fitted.book.host
    yield (
        f"gaps: dispatch {_us(gaps.dispatch.ns())} and {_us(gaps.dispatch.stream_ns)} a stream, "
        f"hand-over {_us(gaps.handover.ns())}"
    )
    yield f"neighbours: a step takes {1 + host.slow:.2f} times as long while all other cores are busy"
    for note in fitted.notes:
        yield f"note: {note}"


def _class(found: FittedClass, table: StepTable) -> Iterator[str]:
    fit = found.fitted
    yield f"{found.key.text}, {found.kind} steps: {_errors(fit)}{'' if found.is_good else _too_far()}"
    terms = zip(table.terms, table.constants, strict=True)
    yield "  ns = " + " + ".join(f"{constant:,.4g} {term}" for term, constant in terms)
    yield from ("  " + line for line in coverage(fit))
    for place in sorted(fit.judged, key=lambda p: -abs(p.error))[:WORST]:
        sizes = zip(fit.axes, place.sizes, strict=True)
        where = ", ".join(f"{size:,.0f} {axis.removeprefix('num_')}" for axis, size in sizes)
        yield f"  {place.error:+7.1%} at {where}: {place.num_samples} steps of {_us(place.mean_ns)}"


def _errors(fit: Fitted) -> str:
    return (
        f"{fit.num_samples:,} at {len(fit.places)} places ({len(fit.judged)} of them judged), "
        f"{fit.num_trimmed} trimmed; off by "
        f"{fit.error(50):.1%} at half of the places, {fit.error(90):.1%} at nine tenths, "
        f"{fit.worst.error:+.1%} at worst"
    )


def _too_far() -> str:
    return f"  (OVER {MAX_ERROR:.0%}: measure on a quiet machine, or --accept)"


def coverage(fit: Fitted) -> list[str]:
    """Count steps by tokens computed (rows) and tokens seen per request (columns), both by powers of 4."""
    requests, tokens, _, seen = (AXES.index(name) for name in AXES)
    counts: dict[tuple[int, int], int] = {}
    for place in fit.places:
        context = place.sizes[seen] / max(1.0, place.sizes[requests])
        cell = _power(place.sizes[tokens]), _power(context)
        counts[cell] = counts.get(cell, 0) + place.num_samples
    rows, columns = (sorted({cell[i] for cell in counts}) for i in (0, 1))
    head = "tokens \\ seen each" + "".join(f"{_about(c):>9}" for c in columns)
    lines = [
        f"{_about(r):>18}" + "".join(f"{counts.get((r, c), 0) or '.':>9}" for c in columns) for r in rows
    ]
    return [head, *lines]


def _power(size: float) -> int:
    """Return the power of 4 at or below a size."""
    return (int(max(1.0, size)).bit_length() - 1) // 2


def _about(power: int) -> str:
    return f"{4**power:,}+"


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.0f} us" if ns >= 1e4 else f"{ns / 1e3:,.2f} us"
