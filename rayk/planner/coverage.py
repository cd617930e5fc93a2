"""Say in words how good fitted tables are, and what they were fitted to, in lines of at most 80 columns."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rayk.costs.fit import Fitted
from rayk.costs.hull import AXES
from rayk.costs.losses import NO_LOSSES, StepLosses
from rayk.costs.table import Gap, StepTable
from rayk.planner.fitting import MAX_ERROR, FittedBook, FittedClass
from rayk.types.files import write_atomically

WORST = 5  # places that are listed
WIDTH = 80
RESIDUALS = "residuals.csv"
_TERMS = {
    "one": "a step",
    "requests": "request",
    "prefills": "prompt",
    "logits": "token that is sampled",
    "tokens": "token",
    "pairs": "pair of tokens",
    "seen": "token whose KV is read",
    "drafts": "drafted token",
}
_BENDS = {"<": "the first {}", ">": "those beyond {}", "@": "in window {}"}


def told(fitted: FittedBook) -> Iterator[str]:
    """Yield lines: where the times are from; each table's constants, residuals, coverage and worst places;
    then the shared tables, and what to be wary of."""
    about = fitted.book.provenance
    where = f"{about.cpu or 'unknown CPU'}, {about.num_cores} cores; rayk {about.commit[:8] or '?'}"
    yield from _wrapped(f"measured on {where}; {len(about.cells)} cells, begun {about.date[:16]}")
    for found in fitted.classes:
        costs = fitted.book.engines[found.key]
        yield ""
        table: StepTable | None = getattr(costs, found.kind)
        assert table is not None, "it was fitted"
        yield from _class(found, table)
    yield ""
    yield "Beside steps"
    for key, costs in fitted.book.engines.items():
        each = f"{_time(costs.request_host_ns)} a request, {_time(costs.prefill_host_ns)} a prompt"
        turn = f"{_time(costs.host_ns)} a turn, {each}"
        yield from _wrapped(f"  host      {turn} ({key.text})")
        for name, turns in costs.drafting.items():
            yield from _wrapped(f"  {name:9} {_turns(turns)} where it drafts ({key.text})")
    gaps, host = fitted.book.gaps, fitted.book.host
    yield f"  dispatch  {_gap(gaps.dispatch)}"
    if fitted.book.transfers.reads:
        yield f"  hand-over {_gap(gaps.handover)}, on its way"
        for name, read in fitted.book.transfers.reads.items():
            per_mb = [cost.ns(2**20, 1) for cost in (read.post, read.wait)]
            yield f"  a read    {_time(per_mb[0])} to post, {_time(per_mb[1])} to wait, of 1 MiB ({name})"
    for key, costs in fitted.book.engines.items():
        if costs.losses != NO_LOSSES:
            yield from _wrapped(f"  beside    {_losses(costs.losses)} ({key.text})")
    yield f"  an engine serves again {host.form_s:.1f} s after it died"
    for note in fitted.notes:
        yield from _wrapped(f"note: {note}")


def _turns(table: StepTable) -> str:
    """Say what turns take beside steps, term by term."""
    parts = [
        f"{_time(constant)} {_TERMS[term] if term == 'one' else 'a ' + _TERMS[term]}"
        for term, constant in zip(table.terms, table.constants, strict=True)
    ]
    return ", ".join(parts).replace("a step", "a turn") or "nothing beside steps"


def _gap(gap: Gap) -> str:
    streams = f" and {_time(gap.stream_ns)} a stream" if gap.stream_ns else ""
    cores = f" and {_time(gap.core_ns)} a core that is taken" if gap.core_ns else ""
    return _time(gap.ns()) + streams + cores


def _losses(of: StepLosses) -> str:
    """Say how many times as long steps take beside neighbours on all other cores."""
    return (
        f"prefill steps take {1 + of.prefill_beside_prefill:.2f} and {1 + of.prefill_beside_decode:.2f} "
        "times as long beside prefill and decode steps of others, decode steps "
        f"{1 + of.decode_beside_prefill:.2f} and {1 + of.decode_beside_decode:.2f}"
    )


def write_residuals(fitted: FittedBook, folder: Path) -> None:
    """Write the error at each place of each table: a row per place, sizes being those of its mean step."""
    text = io.StringIO(newline="")
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["engine", "kind", *AXES, "num_steps", "is_judged", "mean_ns", "error"])
    for found in fitted.classes:
        judged = set(found.fitted.judged)
        for place in found.fitted.places:
            sizes = [f"{size:g}" for size in place.sizes]
            counts = [place.num_samples, int(place in judged)]
            errors = [f"{place.mean_ns:.0f}", f"{place.error:.4f}"]
            out.writerow([found.key.text, found.kind, *sizes, *counts, *errors])
    write_atomically(folder / RESIDUALS, text.getvalue())


def _class(found: FittedClass, table: StepTable) -> Iterator[str]:
    fit = found.fitted
    yield f"{found.key.text}: {found.kind} steps"
    num_judged = len(fit.judged)
    yield f"  {fit.num_samples:,} at {len(fit.places)} places, {num_judged} of these with enough to judge by"
    errors = (
        f"off by {fit.error(50):.1%} at half of these, {fit.error(90):.1%} at nine tenths, "
        f"{fit.worst.error:+.1%} at worst"
    )
    yield f"  {errors}"
    if not found.is_good:
        yield f"  OVER {MAX_ERROR:.0%} at nine tenths: measure on a quiet machine, or --accept"
    yield "  a step takes"
    for term, constant in zip(table.terms, table.constants, strict=True):
        yield f"    {_time(constant):>9} {_per(term)}"
    yield "  steps by tokens computed (rows) and seen by each request (columns)"
    yield from (f"  {line}" for line in coverage(fit))
    yield "  the places that are worst"
    for place in sorted(fit.judged, key=lambda p: -abs(p.error))[:WORST]:
        requests, tokens, _, seen = (f"{size:,.0f}" for size in place.sizes)
        where = f"{requests} requests, {tokens} tokens, {seen} seen"
        yield f"   {place.error:+7.1%}  {where}: {place.num_samples} of {_time(place.mean_ns)}"


def _per(term: str) -> str:
    """Say what a term counts: `tokens>64` is each token beyond 64."""
    for sign, words in _BENDS.items():
        name, found, number = term.partition(sign)
        if found:
            return f"per {_TERMS[name]}, {words.format(number)}"
    return "once" if term == "one" else f"per {_TERMS[term]}"


def coverage(fit: Fitted) -> list[str]:
    """Count steps by tokens computed (rows) and tokens seen per request (columns), both by powers of 4."""
    requests, tokens, _, seen = (AXES.index(name) for name in AXES)
    counts: dict[tuple[int, int], int] = {}
    for place in fit.places:
        context = place.sizes[seen] / max(1.0, place.sizes[requests])
        cell = _power(place.sizes[tokens]), _power(context)
        counts[cell] = counts.get(cell, 0) + place.num_samples
    rows, columns = (sorted({cell[i] for cell in counts}) for i in (0, 1))
    head = " " * 9 + "".join(f"{_about(c):>9}" for c in columns)
    lines = [f"{_about(r):>9}" + "".join(f"{counts.get((r, c), 0) or '.':>9}" for c in columns) for r in rows]
    return [head, *lines]


def _power(size: float) -> int:
    """Return the power of 4 at or below a size."""
    return (int(max(1.0, size)).bit_length() - 1) // 2


def _about(power: int) -> str:
    return f"{4**power:,}+"


def _time(ns: float) -> str:
    """Name a time in three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, drop_whitespace=True)
