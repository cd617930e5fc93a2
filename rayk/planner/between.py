"""Fit what passes between engines: gaps, reads, and what a hand-over costs the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayk.costs.fit import nnls
from rayk.costs.table import Gap, GapTable, LinearCost, ReadCosts, TransferTable, read_name
from rayk.planner.recorded import RecordedCell, Row, number

Floats = NDArray[np.float64]
NUM_QUANTILES = 21
TRIMMED_PERCENT = 1.0  # of gaps, the longest
MAX_RATIO = 4.0
"""What took longer than so many times the median of its size was held up by something else. There are few
transfers of a size, and one that waited for a core would count for all."""
MIN_REQUESTS = 40  # that came one by one, and suffice
MIN_STREAMS = 3  # fewer requests at once do not tell what each of them adds


def fit_gaps(cells: Sequence[RecordedCell], *, num_cores: int) -> GapTable:
    """Fit the gaps that requests' stages tell. How long a proof's word travels, and how long a place takes to
    become free after the last token, no table tells: these stay 0."""
    return GapTable(
        dispatch=_gap(cells, "dispatch", num_cores),
        handover=_gap([c for c in cells if c.cell.decode is not None], "handover", num_cores),
    )


def _gap(cells: Sequence[RecordedCell], stage: str, num_cores: int) -> Gap:
    """Fit a stage's time: a constant, and so much per request that streams meanwhile, and for each that takes
    a core; what is left is kept as quantiles around the constant."""
    found = [pair for cell in _one_by_one(cells) for pair in _stage(cell, stage)]
    if not found:
        return Gap()
    streams, ns = (np.array(values, dtype=float) for values in zip(*found, strict=True))
    kept = ns <= np.percentile(ns, 100 - TRIMMED_PERCENT)
    streams, ns = streams[kept], ns[kept]
    taking = np.minimum(streams, num_cores)
    per_stream = per_core = 0.0
    if streams.max() >= MIN_STREAMS:
        _, per_stream, per_core = nnls(np.stack([np.ones(len(ns)), streams, taking], axis=1), ns).tolist()
    rest = np.maximum(0.0, ns - per_stream * streams - per_core * taking)
    quantiles = np.quantile(rest, np.linspace(0, 1, NUM_QUANTILES))
    return Gap(quantiles=tuple(quantiles.tolist()), stream_ns=per_stream, core_ns=per_core)


def _one_by_one(cells: Sequence[RecordedCell]) -> Sequence[RecordedCell]:
    """Keep the cells whose requests come one by one, if there are enough: those of a burst wait for each
    other on their way, which is no gap of theirs."""
    alone = [c for c in cells if len({(r["repeat"], r["due_ms"]) for r in c.requests}) == len(c.requests)]
    return alone if sum(len(cell.requests) for cell in alone) >= MIN_REQUESTS else cells


def _stage(cell: RecordedCell, stage: str) -> list[tuple[int, float]]:
    """Return (requests in flight as it was placed, ns) of each request that had the stage once; of those due
    at one moment each is placed behind the others before it."""
    found = []
    rows = [row for row in cell.requests if number(row, "e2e_ms") is not None and row["num_attempts"] == 1]
    rows.sort(key=lambda row: (row["repeat"], row["due_ms"]))
    begins, ends = (
        np.array(of, dtype=float) for of in ([r["due_ms"] for r in rows], [_end(r) for r in rows])
    )
    repeats = np.array([row["repeat"] for row in rows])
    for index, row in enumerate(rows):
        ns = number(row, f"stage_{stage}_ns")
        if ns is not None:
            at = begins[index] + (number(row, "stage_queue_ns") or 0.0) / 1e6
            is_there = (repeats == repeats[index]) & (begins <= at) & (at < ends)
            is_there[index:] &= begins[index:] != begins[index]
            found.append((int(is_there.sum()), ns))
    return found


def _end(row: Row) -> float:
    """Return when a request ended, in ms like `due_ms`."""
    return float(row["due_ms"] + row["e2e_ms"])


def fit_reads(cells: Sequence[RecordedCell]) -> TransferTable:
    """Fit pulls by kind of engine pair: posting of each row by descriptors and bytes, and how long a rank
    then waits for the last byte of all its rows likewise. A rank looks for it between its engine's steps, so
    waits of a busy engine are longer than these; here engines are as idle as their cells left them."""
    reads: dict[str, list[list[Row]]] = {}
    for cell in cells:
        if cell.cell.decode is not None:
            pulls = [r for r in cell.transfers if r["mode"] == "pull" and r["purpose"] == "handover"]
            whole = [r for r in pulls if r["verdict"] == "OK" and r["bytes"]]
            if whole:
                reads.setdefault(read_name(cell.cell.prefill, cell.cell.decode), []).append(whole)
    return TransferTable(reads={name: _read(of) for name, of in reads.items()})


def _read(cells: Sequence[Sequence[Row]]) -> ReadCosts:
    rows = [row for of in cells for row in of]
    num_bytes = _column(rows, "bytes")
    merged = [number(r, "num_descriptors_merged") or r["num_descriptors"] for r in rows]
    descriptors = np.array(merged, dtype=float)
    post = _column(rows, "post_ms") * 1e6
    # A rank posts all its rows before it looks for the first end: no row alone tells how long it waited.
    names = [(i, r["request_id"], r["retries"], r["consumer_rank"]) for i, of in enumerate(cells) for r in of]
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    read = np.array([index[name] for name in names])
    begin, end = np.full(len(index), np.inf), np.full(len(index), -np.inf)
    np.minimum.at(begin, read, _column(rows, "begin_ms") * 1e6)
    np.maximum.at(end, read, _column(rows, "end_ms") * 1e6)
    posts, sizes, counts = (
        np.bincount(read, values).astype(float) for values in (post, num_bytes, descriptors)
    )
    wait = np.maximum(0.0, end - begin - posts)
    return ReadCosts(post=_linear(post, num_bytes, descriptors), wait=_linear(wait, sizes, counts))


def hand_over_costs(cells: Sequence[RecordedCell]) -> dict[str, LinearCost]:
    """Fit what a hand-over costs the rank that has most of a request: the producer's digests before the
    ticket (MakeTicket), the consumer's of what arrived (verify), and how long it looks whether that is still
    what was lent (fence)."""
    found = {}
    for name, stage, rank in (
        ("MakeTicket", "digest", "producer_rank"),
        ("fence", "fence", "consumer_rank"),
        ("verify", "verify", "consumer_rank"),
    ):
        sizes, ns = [], []
        for cell in cells:
            moved = _bytes_by_request(cell, rank, with_held=name == "MakeTicket")
            for row in cell.requests:
                took, size = number(row, f"stage_{stage}_ns"), moved.get((row["repeat"], row["request_id"]))
                if took is not None and size:
                    sizes.append(float(size))
                    ns.append(took)
        if ns:
            found[name] = _linear(np.array(ns), np.array(sizes), np.zeros(len(ns)))
    # Who is alone waits for no step: from its first token to its ticket a turn passes, for the command.
    pairs = [cell for cell in cells if cell.cell.decode is not None]
    alone = [ns for cell in pairs for streams, ns in _stage(cell, "ticket") if not streams]
    if alone:
        found["each"] = LinearCost(fixed_ns=float(np.median(alone)))
    return found


def _bytes_by_request(cell: RecordedCell, rank: str, *, with_held: bool) -> dict[tuple[int, str], int]:
    """Return the most bytes that one rank had of each request that was handed over once; `with_held`: also of
    those that the consumer had already."""
    sums: dict[tuple[int, str], dict[int, int]] = {}
    for row in cell.transfers:
        if row["purpose"] == "handover" and not row["retries"]:
            of = sums.setdefault((row["repeat"], row["request_id"]), {})
            size = int(row["bytes"]) + (int(row["held_bytes"]) if with_held else 0)
            of[row[rank]] = of.get(row[rank], 0) + size
    return {name: max(of.values()) for name, of in sums.items()}


def _linear(ns: Floats, num_bytes: Floats, num_descriptors: Floats) -> LinearCost:
    """Fit a constant, descriptors and bytes, errors relative to what transfers of a size take: those of the
    smallest would not count else."""
    usual = _usual(ns, num_bytes)
    kept = ns <= MAX_RATIO * usual
    terms = np.stack([np.ones(kept.sum()), num_descriptors[kept], num_bytes[kept]], axis=1)
    usual = usual[kept]
    fixed, descriptor, byte = nnls(terms / usual[:, None], ns[kept] / usual).tolist()
    return LinearCost(fixed_ns=fixed, descriptor_ns=descriptor, byte_ns=byte)


def _usual(ns: Floats, num_bytes: Floats) -> Floats:
    """Return the median time of transfers of about the same size (a power of 2), of each."""
    size = np.rint(np.log2(np.maximum(num_bytes, 1.0)))
    _, of = np.unique(size, return_inverse=True)
    of = of.reshape(-1)
    medians = np.array([np.median(ns[of == place]) for place in range(of.max() + 1)])
    return np.asarray(np.maximum(medians, 1.0)[of])


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([row[name] for row in rows], dtype=float)
