"""Write a run's requests as a Chrome trace, which Perfetto and chrome://tracing open. Processes are the
coordinator and the engines, rows are requests, spans are stages. The tables tell times within a cell's repeat
only, so repeats are laid one behind the other. Format: "Trace Event Format" (Google), JSON object form; times
in microseconds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rayk.reports.columns import NS_PER_MS, STAGES
from rayk.reports.files import write_text
from rayk.reports.moves import of_handovers
from rayk.reports.result import Result

GAP_NS = 1_000_000  # between the end of a repeat and the begin of the next
COORDINATOR = "coordinator"
# at the engine that computes the prompt; stages of neither side are the coordinator's
AT_PREFILL = ("lookup", "load", "prefill_queue", "prefill", "ticket", "digest")
AT_DECODE = ("reserve", "read", "fence", "verify", "notice", "decode_queue", "swap", "decode")
# all other stages are the transfer's
CATEGORIES = {
    **dict.fromkeys(("queue", "dispatch"), "queue"),
    **dict.fromkeys(AT_PREFILL, "prefill"),
    **dict.fromkeys(("lookup", "load"), "transfer"),
    **dict.fromkeys(("decode_queue", "decode"), "decode"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of a request. Times in ns, from when the request was due."""

    stage: str
    start_ns: int
    length_ns: int


def spans_of(request: dict[str, Any], *, is_push: bool = False) -> list[Span]:
    """Lay a request's stages one after another. `decode` ends with the last token: what lies before it of a
    request that was tried again is of no stage. A push reserves before the prompt is computed."""
    order = [s for s in STAGES if not (is_push and s == "reserve")]
    if is_push:
        order.insert(order.index("lookup"), "reserve")
    spans: list[Span] = []
    end_ns = 0
    for stage in order:
        length = _ns(request.get(f"stage_{stage}_ns"))
        if length is None:
            continue
        e2e = _ns(request.get("e2e_ms"), NS_PER_MS)
        if stage == "decode" and e2e is not None and request["num_attempts"] > 1:
            end_ns = max(end_ns, e2e - length)
        spans.append(Span(stage, end_ns, length))
        end_ns += length
    return spans


def write_timeline(result: Result, path: Path) -> Path:
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"run": str(result.directory or ""), "writer": "rayk"},
        "traceEvents": list(timeline_events(result)),
    }
    write_text(path, json.dumps(document, allow_nan=False, separators=(",", ":")))
    return path


def timeline_events(result: Result) -> Iterator[dict[str, Any]]:
    """Yield names of processes and rows, then each repeat's spans in the order of the tables."""
    requests = result.requests
    engines = sorted({e for c in ("prefill_engine", "decode_engine") for e in requests[c].dropna()}, key=_key)
    indices = sorted(int(i) for i in requests["prompt_index"].unique())
    tracks = _TrackNumbers([COORDINATOR, *engines], indices)
    yield from tracks.names()
    moved = _transfers(result.transfers)
    verdicts = dict(zip(result.cells["cell_id"], result.cells["verdict"], strict=True))
    pushes = _pushes(result.cells)
    flow_ids = itertools.count(1)
    begin_ns = 0
    groups: Any = requests.groupby(["cell_id", "repeat"], sort=False)
    for (cell_id, repeat), rows in groups:
        is_push = cell_id in pushes
        records = rows.to_dict("records")
        lines = [_RequestLine(row, begin_ns, spans_of(row, is_push=is_push), tracks) for row in records]
        end_ns = max(line.end_ns for line in lines)
        about = {"verdict": verdicts[cell_id], "repeat": int(repeat), "requests": len(lines)}
        yield _event(str(cell_id), "cell", begin_ns, end_ns - begin_ns, tracks.of_cells, about)
        for line in lines:
            yield from line.events(moved.get((cell_id, repeat, line.request_id), {}), next(flow_ids))
        begin_ns = end_ns + GAP_NS


Track = tuple[int, int]  # the numbers of a process and of one of its rows


class _TrackNumbers:
    """Numbers processes and their rows. No two rows of a trace share a number. Perfetto takes the row with
    its process's number for row 0: the coordinator's is for cells."""

    def __init__(self, processes: Sequence[str], indices: Sequence[int]) -> None:
        """Take process names, the coordinator first, and indices of prompts."""
        self._pids = {name: 1 + i for i, name in enumerate(processes)}
        self._indices = indices
        self._stride = 10 ** len(str(max(indices, default=0) + 1))
        self.of_cells: Track = (1, 1)

    def of(self, process: str, index: int) -> Track:
        pid = self._pids[process]
        return pid, pid * self._stride + 1 + index

    def names(self) -> Iterator[dict[str, Any]]:
        for name, pid in self._pids.items():
            yield from _named("process", (pid, pid), name, pid)
        yield from _named("thread", self.of_cells, "cells", 0)
        for name in self._pids:
            for i in self._indices:
                yield from _named("thread", self.of(name, i), f"request {i}", 1 + i)


def _named(kind: str, place: Track, name: str, sort_index: int) -> Iterator[dict[str, Any]]:
    base = {"ph": "M", "pid": place[0], "tid": place[1]}
    yield {"name": f"{kind}_name", "args": {"name": name}} | base
    yield {"name": f"{kind}_sort_index", "args": {"sort_index": sort_index}} | base


class _RequestLine:
    def __init__(self, row: dict[str, Any], begin_ns: int, spans: list[Span], tracks: _TrackNumbers) -> None:
        self.request_id: str = row["request_id"]
        self._row, self._spans, self._tracks = row, spans, tracks
        self._due_ns = begin_ns + (_ns(row["due_ms"], NS_PER_MS) or 0)
        last = spans[-1] if spans else Span("", 0, 0)
        e2e = _ns(row["e2e_ms"], NS_PER_MS) or 0
        self._length_ns = max(last.start_ns + last.length_ns, e2e)
        self.end_ns = self._due_ns + self._length_ns

    def events(self, moved: dict[str, Any], flow_id: int) -> Iterator[dict[str, Any]]:
        """Yield the request, its stages, first token and the way of its KV. `moved` is what its transfers
        say; `flow_id` is a number, since Perfetto takes only hexadecimal texts."""
        due, place = self._due_ns, self._place("")
        yield _event(self.request_id, "request", due, self._length_ns, place, self._about())
        ttft = _ns(self._row["ttft_ms"], NS_PER_MS)
        if ttft is not None:
            yield _base("first token", "request", due + ttft, place) | {"ph": "i", "s": "t"}
        ends: dict[str, tuple[int, Track]] = {}
        for span in self._spans:
            place = self._place(span.stage)
            about = {"request": self.request_id} | (moved if span.stage == "read" else {})
            category = CATEGORIES.get(span.stage, "transfer")
            start = due + span.start_ns
            yield _event(span.stage, category, start, span.length_ns, place, about)
            ends[span.stage] = (start, place)
        if "prefill" in ends and "read" in ends:
            for stage, phase in (("prefill", {"ph": "s"}), ("read", {"ph": "f", "bp": "e"})):
                start, place = ends[stage]
                yield _base("kv", "transfer", start, place) | {"id": flow_id} | phase

    def _place(self, stage: str) -> Track:
        """Place a stage at the coordinator where the row does not know the engine."""
        role = "prefill" if stage in AT_PREFILL else "decode" if stage in AT_DECODE else None
        # A prompt that the decode engine computed itself has no prefill engine.
        names = (self._row[f"{role}_engine"], self._row["decode_engine"]) if role is not None else ()
        engine = next((n for n in names if isinstance(n, str)), COORDINATOR)
        return self._tracks.of(engine, int(self._row["prompt_index"]))

    def _about(self) -> dict[str, Any]:
        names = (
            "num_prompt_tokens",
            "num_cached_tokens",
            "kv_path",
            "finish_reason",
            "num_attempts",
            "error",
        )
        found = {name: _plain(self._row[name]) for name in names}
        found["num_output_tokens"] = len(self._row["output_token_ids"])
        return {name: value for name, value in found.items() if value is not None}


def _transfers(table: pd.DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Sum the transfers of each (cell, repeat, request)'s hand-over."""
    table = table[of_handovers(table)]
    if table.empty:
        return {}
    found = table.groupby(["cell_id", "repeat", "request_id"]).agg(
        bytes=("bytes", "sum"),
        num_descriptors=("num_descriptors", "sum"),
        num_transfers=("bytes", "size"),
        max_transfer_ms=("transfer_ms", "max"),
        max_post_ms=("post_ms", "max"),
    )
    sums: dict[Any, dict[Any, Any]] = found.to_dict("index")
    return {key: {str(k): _plain(v) for k, v in row.items()} for key, row in sums.items()}


def _pushes(cells: pd.DataFrame) -> set[str]:
    if "transfer.mode" not in cells:
        return set()
    return set(cells.loc[cells["transfer.mode"] == "push", "cell_id"])


def _event(
    name: str, category: str, start_ns: int, length_ns: int, place: Track, about: dict[str, Any]
) -> dict[str, Any]:
    times = {"ph": "X", "dur": length_ns / 1e3}
    return _base(name, category, start_ns, place) | times | {"args": about}


def _base(name: str, category: str, start_ns: int, place: Track) -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": start_ns / 1e3, "pid": place[0], "tid": place[1]}


def _key(engine: str) -> tuple[bool, str]:
    return (not engine.startswith("prefill"), engine)


def _ns(value: Any, factor: float = 1.0) -> int | None:
    """Convert to whole ns; None where the table holds nothing."""
    return None if value is None or pd.isna(value) else round(value * factor)


def _plain(value: Any) -> Any:
    if value is None or pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
