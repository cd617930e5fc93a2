"""D's comparison of what arrived with what P's ranks held, and the name of what is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rayk.transfer.diagnose import first_difference, merge_rows
from rayk.transfer.digest_words import Source, Sources, Words
from rayk.transfer.verify import (
    CanonicalViews,
    Digests,
    Rows,
    WrongWord,
    compare_digests,
    digest_mismatch,
    num_bytes_checked,
)
from rayk.types.errors import KVMismatch
from rayk.vllm.proof import PartRows, Ticket, canonical_shape

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ArrivedKV:
    """What one D rank received, digested before anything else could write there."""

    request_id: str
    """The request's id at D."""
    ticket: Ticket | None
    num_tokens: int
    first_row: int
    """The first row that was transferred: D's own cache had those before it."""
    digests: Digests
    rows: PartRows | None = None
    digest_s: float = 0.0
    made_at: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    """When the step that waits for the verdict must go on."""
    is_stored: bool = False
    """Whether it came from a store, which may have had it of another engine than this P."""


@dataclass(frozen=True, eq=False)
class PeerProof:
    """One P rank's description, and its digests of the request."""

    description: Mapping[str, Any]
    num_tokens: int
    digests: Digests


@dataclass
class Comparison:
    """The outcome of one rank's comparison of a request."""

    status: str
    """One of equal, mismatch, unverified; local: nothing of P's was loaded; skipped: not sampled."""
    why: str = ""
    """Why some words were not verified, or nothing was compared."""
    num_equal: int = 0
    num_unverified: int = 0
    num_wrong: int = 0
    wrong: list[WrongWord] = field(default_factory=list)
    """The wrong words, dropped once they are counted: those of thousands of requests would fill the memory.
    """
    sources: Sources = field(default_factory=dict)
    """(group, field, unit) -> the P rank that it was compared with."""
    mismatch: KVMismatch | None = None
    num_bytes: int = 0
    """Bytes that the words cover."""
    digest_s: float = 0.0
    fetch_s: float = 0.0


def compare(
    arrival: ArrivedKV, views: CanonicalViews, mine: Mapping[str, Any], theirs: Mapping[int, PeerProof]
) -> Comparison:
    """Compare what arrived with what P's ranks held. `theirs` by P rank; a rank that is missing leaves the
    units that it alone holds unverified, and those that it shares where its replicas' differ from D's.

    `views`: the structure of this rank's caches; `mine`: its description.
    """
    rows_per_group = int(mine["rows_per_group"])
    first_row = arrival.first_row + -arrival.first_row % rows_per_group
    checked = Comparison("unverified", num_bytes=num_bytes_checked(views, arrival.num_tokens, first_row))
    words = views.words(arrival.num_tokens, rows_per_group)[1]
    counted = words.row_group >= first_row // rows_per_group
    # A row group that begins in D's own cache and ends behind it has no word of what was transferred.
    num_cut = int((words.row_group >= arrival.first_row // rows_per_group).sum() - counted.sum())
    checked.num_unverified = int(counted.sum()) + num_cut
    if len(arrival.digests) != words.num_in_all:
        checked.why = f"D made {len(arrival.digests)} words of {words.num_in_all}"
        return checked
    ranks = {}
    for rank, proof in theirs.items():
        unlike = _unlike(mine, proof, views, rows_per_group)
        if unlike:
            checked.why = unlike
        else:
            ranks[rank] = _align(arrival, views, proof, rows_per_group)
    expected, known, checked.sources = _expect(arrival, words, views, theirs, ranks)
    checked.wrong = compare_digests(
        views, expected, arrival.digests, checked.sources, arrival.num_tokens, rows_per_group, first_row
    )
    num_unlike = 0
    if checked.wrong and arrival.is_stored:  # Two right engines may differ in the last bit.
        num_unlike, checked.wrong = len(checked.wrong), []
        checked.why = f"a store may have had it of another engine: {num_unlike} words differ"
    checked.num_wrong = len(checked.wrong)
    num_unknown = int((~known[words.index] & counted).sum())
    checked.num_equal = int(counted.sum()) - num_unknown - num_unlike - checked.num_wrong
    checked.num_unverified = num_unknown + num_unlike + num_cut
    if not checked.why:
        checked.why = _why_unverified(num_unknown, num_cut, range(arrival.first_row, first_row))
    if checked.wrong:
        checked.status = "mismatch"
        checked.mismatch = digest_mismatch(
            arrival.request_id, views, checked.wrong, arrival.num_tokens, rows_per_group, first_row
        )
    elif not checked.num_equal:
        checked.why = checked.why or "no row was transferred that has a word of its own"
    elif not checked.num_unverified:
        checked.status = "equal"
    return checked


def _expect(
    arrival: ArrivedKV,
    words: Words,
    views: CanonicalViews,
    theirs: Mapping[int, PeerProof],
    ranks: Mapping[int, tuple[Digests, Bools]],
) -> tuple[Digests, Bools, dict[Source, int]]:
    """Choose the P rank that each unit is compared with. Returns its words by P rank, which of them are
    known, and the chosen ranks. `ranks`: by P rank, what `_align` made of it."""
    known = np.zeros(words.num_in_all, dtype=bool)
    expected = np.tile(arrival.digests, (max(ranks, default=0) + 1, 1))
    sources: dict[Source, int] = {}
    for key, lanes in _lanes_by_unit(views).items():
        at = words.index[np.isin(words.lane, lanes)]
        holders = [r for r in ranks if key[2] in _units(theirs[r].description, views, key)]
        # Ranks compute replicas apart, so these may differ in the last bit: one equal replica will do.
        scores = {r: int((ranks[r][0][at] == arrival.digests[at])[ranks[r][1][at]].sum()) for r in holders}
        best = max(holders, key=lambda r: (scores[r], -r), default=0)
        sources.update((views.lanes.keys[lane], best) for lane in lanes)
        if holders:
            aligned, is_known = ranks[best]
            told = is_known[at]
            if len(holders) < _num_holders(theirs[best].description, views, key):
                told &= aligned[at] == arrival.digests[at]  # D may have read from the one that is missing.
            expected[best, at] = np.where(told, aligned[at], arrival.digests[at])
            known[at] = told
    return expected, known, sources


def _lanes_by_unit(views: CanonicalViews) -> dict[tuple[int, str, int], list[int]]:
    """Return (group, field, unit) -> its lanes: D reads these of one P rank."""
    found: dict[tuple[int, str, int], list[int]] = {}
    for lane, (_, name, unit, _) in enumerate(views.lanes.keys):
        group = views[views.lanes.view[lane]].group.index
        found.setdefault((group, name, unit), []).append(lane)
    return found


def _why_unverified(num_unknown: int, num_cut: int, cut: range) -> str:
    """Explain why words are unverified; empty: none is. `cut`: rows of a row group that begins in D's own
    cache."""
    if num_unknown:
        return "P has no word of some rows"
    is_cut = f"tokens from {cut.start} to {cut.stop - 1} share a word with rows that D had already"
    return is_cut if num_cut else ""


def _unlike(mine: Mapping[str, Any], proof: PeerProof, views: CanonicalViews, rows_per_group: int) -> str:
    """Explain why a P rank's words cannot be compared with D's; empty: they can."""
    if int(proof.description["rows_per_group"]) != rows_per_group:
        return f"P digests {proof.description['rows_per_group']} rows a word, D {rows_per_group}"
    if canonical_shape(proof.description) != canonical_shape(mine):
        return "P and D keep unlike caches"
    wanted = views.words(proof.num_tokens, rows_per_group)[1].num_in_all
    return "" if len(proof.digests) == wanted else f"P made {len(proof.digests)} words of {wanted}"


def _align(
    arrival: ArrivedKV, views: CanonicalViews, proof: PeerProof, rows_per_group: int
) -> tuple[Digests, Bools]:
    """Return P's words at D's places, and which of them are of the very rows that D has: all words where both
    counted as many tokens, else those of row groups that both have whole."""
    aligned = np.zeros(len(arrival.digests), dtype=np.int64)
    is_known = np.zeros(len(arrival.digests), dtype=bool)
    if proof.num_tokens == arrival.num_tokens:
        return proof.digests, ~is_known
    mine, theirs = (views.words(n, rows_per_group)[1] for n in (arrival.num_tokens, proof.num_tokens))
    keys = [words.lane * (1 << 32) + words.row_group for words in (mine, theirs)]
    _, at, of = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    whole = (mine.row_group[at] + 1) * rows_per_group <= min(arrival.num_tokens, proof.num_tokens)
    first = _first_whole_rows(views, arrival.num_tokens, proof.num_tokens)
    whole &= mine.row_group[at] * rows_per_group >= first[views.lanes.view[mine.lane[at]]]
    at, of = mine.index[at[whole]], theirs.index[of[whole]]
    aligned[at], is_known[at] = proof.digests[of], True
    return aligned, is_known


def _first_whole_rows(views: CanonicalViews, *num_tokens: int) -> npt.NDArray[np.int64]:
    """Return [views]: the first row that is live for each of these numbers of tokens. Windows and chunks
    begin where the number says."""
    return np.array([max(v.live_rows(n).start for n in num_tokens) for v in views], dtype=np.int64)


def _units(description: Mapping[str, Any], views: CanonicalViews, key: tuple[int, str, int]) -> list[int]:
    """List the units of a field that a P rank holds of the caches of one of D's groups."""
    units: list[int] = _field(description, views, key)["units"]
    return units


def _num_holders(description: Mapping[str, Any], views: CanonicalViews, key: tuple[int, str, int]) -> int:
    """Count P's ranks that hold a unit; each holds as many units as this one."""
    field = _field(description, views, key)
    return int(description["tp_size"]) * len(field["units"]) // int(field["of"])


def _field(
    description: Mapping[str, Any], views: CanonicalViews, key: tuple[int, str, int]
) -> Mapping[str, Any]:
    group, name, _ = key
    view = next(v for v in views if v.group.index == group)
    where = view.layer, view.group.spec.part
    cache = next(c for c in description["layers"] if (c["layer"], c["part"]) == where)
    found: Mapping[str, Any] = next(f for f in cache["fields"] if f["name"] == name)
    return found


def classify(
    arrival: ArrivedKV, views: CanonicalViews, comparison: Comparison, fetched: Mapping[int, tuple[int, Rows]]
) -> KVMismatch | None:
    """Name the first wrong byte and what went wrong. `fetched`: P rank -> (its tokens, its rows of the
    cache that the first wrong word is of)."""
    first = comparison.wrong[0]
    view = next(v for v in views if (v.group.index, v.layer) == (first.group, first.layer))
    found = (arrival.rows or {}).get((view.layer, view.group.spec.part))
    if found is None:
        return None
    live = view.live_rows(arrival.num_tokens)
    start = max(live.start, arrival.first_row)
    parts = {}
    for rank, (num_tokens, rows) in fetched.items():
        begin = start - view.live_rows(num_tokens).start
        parts[rank] = {key: values[begin : begin + live.stop - start] for key, values in rows.items()}
    sources = {
        (name, unit): rank
        for (layer, name, unit, _), rank in comparison.sources.items()
        if layer == first.layer
    }
    expected = merge_rows(parts, sources)
    if any(key not in expected or expected[key].shape != values.shape for key, values in found.items()):
        return None
    return first_difference(arrival.request_id, view, arrival.num_tokens, expected, found, arrival.first_row)
