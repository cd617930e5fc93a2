"""Sections of a comparison whose rows have intervals, and what makes its times doubtful."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rayk.reports.intervals import MIN_VALUES
from rayk.reports.load_fields import is_load
from rayk.reports.page import Column, Section
from rayk.reports.paired import CELL, CONFIDENCE, FALSE_RATE, LARGE, MARGIN, SIZES, WHOLE, Change, changes
from rayk.reports.paired_loads import estimate_changes, load_changes
from rayk.reports.result import Result
from rayk.reports.trust import busy, doubt_text, is_predicted, unlike


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A titled table of a comparison, whose cells are texts by now."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]
    chips: list[list[str]] = field(default_factory=list)
    """Each row's colours of the columns after the first ("" for none), as far as they go."""

    def section(self) -> Section:
        width = len(self.chips[0]) + 1 if self.chips else 0
        columns = [
            Column(
                title, "cell_id" if title == "cell_id" else str(i), tone=f"tone {i}" if 0 < i < width else ""
            )
            for i, title in enumerate(self.head)
        ]
        rows = []
        for number, texts in enumerate(self.rows):
            row = {column.key: text for column, text in zip(columns, texts, strict=True)}
            tones = self.chips[number] if self.chips else []
            rows.append(row | {f"tone {i}": tone for i, tone in enumerate(tones, 1)})
        return Section(title=self.title, note=self.note, columns=columns, rows=rows)


# a change of pairs need not be that of the medians
HEAD = ["", "metric", "run", "pairs", "median, base", "median, other", "paired change", "interval", "finding"]
DOUBTS = "Reasons to distrust the times"
NOTE = (
    "Over all cells a pair is a cell, by the median of its requests. The change is the median of the ratios "
    "less one; its interval needs no assumption about their distribution (sign test), and all intervals of "
    f"this table hold together with {CONFIDENCE:.0%}. A regression is a change for the worse of which the "
    f"whole interval is beyond {MARGIN:.0%}; unsure is one beyond {LARGE:.0%} that is not proven so. Counts "
    "(descriptors posted, bytes, tokens computed summed over layers) are no matter of chance: any difference "
    "is told, their sums are compared. Transfer: from the first post to the last byte of a request's KV."
)
DISCOVERY_NOTE = (
    "The change is the geometric mean of the ratios; its interval is Student's of their logarithms, and "
    "takes what most cells scatter by for chance, too. Of what is marked in this table, "
    f"{FALSE_RATE:.0%} at most is expected to be false (Benjamini and Hochberg); it takes {MIN_VALUES} pairs."
)
SIZES_NOTE = (
    "By TP sizes of the prefill (P) and decode (D) engines, over their cells of all layouts; a pair is a "
    f"request of one cell, repeat and prompt. {DISCOVERY_NOTE}"
)
CELLS_NOTE = f"Regressions first; a pair is a request. {DISCOVERY_NOTE}"
NUM_NAMED = 4  # changes that the first sentence names
MAX_UNSURE = 10  # rows of cells, the largest changes, that are shown though unsure
LOADS_NOTE = (
    "Where both benches sent the same requests. A pair is a batch of them in order of arrival, by their "
    "means: requests that follow each other wait in the same queues. Intervals as of runs (sign test), "
    f"{CONFIDENCE:.0%} together; a regression is a change for the worse beyond {MARGIN:.0%}."
)
ESTIMATES_NOTE = (
    "Each bench's own estimate. The interval is what the two 95% intervals leave; each holds with 90% at "
    f"least, by itself: of many, some miss. A finding is an interval that lies beyond {MARGIN:.0%}."
)


def change_row(change: Change, run: str) -> list[str]:
    if change.metric.is_count:
        ends = f"exact: {change.num_unlike} of {change.num_pairs} differ"
    elif change.low is None or change.high is None:
        ends = ""
    else:
        ends = f"{_percent(change.low)} to {_percent(change.high)}"
    values = [format(value, change.metric.spec) for value in (change.base, change.other)]
    pairs = str(change.num_pairs) if change.num_pairs else ""
    found = [_percent(change.ratio), ends, change.verdict]
    return [change.subject, change.metric.title, run, pairs, *values, *found]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


def _tones(change: Change) -> list[str]:
    tone = TONES.get(change.verdict, "")
    return [""] * (len(HEAD) - 2) + [tone]


# finding -> the chip it wears
TONES = {"regression": "unmet", "improvement": "met", "changed": "NEAR_TIE", "unsure": "NEAR_TIE"}
RunChanges = Sequence[tuple[str, Change]]  # run and change


def paired_sections(results: list[Result], names: list[str]) -> list[TextTable]:
    """Compare every run with the first: over all cells, by TP sizes, and the cells that changed. Benches are
    compared by pairs of the same requests, and by their estimates."""
    base = results[0]
    others = [(name, other) for name, other in zip(names, results, strict=True) if other is not base]
    if is_load(base.cells):
        loads = [(name, other) for name, other in others if is_load(other.cells)]
        paired = [(name, c) for name, other in loads for c in load_changes(base, other)]
        alone = [(name, c) for name, other in loads for c in estimate_changes(base, other)]
        return [
            *_section("Paired differences", LOADS_NOTE, paired),
            *_section("Estimates", ESTIMATES_NOTE, alone),
        ]
    told = [(name, c) for name, other in others if not is_load(other.cells) for c in changes(base, other)]
    levels = {level: [pair for pair in told if pair[1].level == level] for level in (WHOLE, SIZES, CELL)}
    return [
        *_section("Paired differences", NOTE, levels[WHOLE]),
        *_section("Transfers by TP sizes", SIZES_NOTE, levels[SIZES]),
        *([_cells_section(levels[CELL])] if others else []),
    ]


AS_ERRORS = {"regression": "predicted worse", "improvement": "predicted better", "changed": "unlike"}
"""What findings are called where one of the runs is a prediction."""
ERRORS_NOTE = (
    " One of the runs is predicted: these are errors of the prediction. It has no tokens and no digests."
)


def as_errors(found: Sequence[TextTable]) -> list[TextTable]:
    """Call findings what they are where a run is predicted."""
    return [
        replace(
            table,
            note=table.note + ERRORS_NOTE,
            rows=[[*row[:-1], AS_ERRORS.get(row[-1], row[-1])] for row in table.rows],
        )
        for table in found
    ]


MARKED = ("regression", "improvement", "changed", "unsure")  # findings of cells that are shown, in this order


def _cells_section(told: RunChanges) -> TextTable:
    found = Counter(change.verdict for _, change in told)
    rows = [pair for pair in told if pair[1].verdict in MARKED]
    rows.sort(key=lambda pair: (MARKED.index(pair[1].verdict), -_distance(pair[1].ratio)))
    rows = rows[: len(rows) - max(0, found["unsure"] - MAX_UNSURE)]
    if not told:
        rest = "Nothing could be told: no request is in both runs."
    else:
        sure = sum(found[verdict] for verdict in MARKED[:3])
        head = f"{sure} changed" if sure else "Nothing is known to have changed"
        shown = f" (the {MAX_UNSURE} largest are shown)" if found["unsure"] > MAX_UNSURE else ""
        rest = (
            f"{head}. Of {len(told)} times and counts of cells, {found['unsure']} are unsure{shown}, of "
            f"{found['no change seen']} no change is seen, {found['the same']} counts are the same, "
            f"{found['too few pairs']} have too few pairs to say."
        )
    note = f"{rest} {CELLS_NOTE}"
    texts = [change_row(change, name) for name, change in rows]
    chips = [_tones(change) for _, change in rows]
    return TextTable(title="Cells that changed", note=note, head=HEAD, rows=texts, chips=chips)


FINDINGS = {
    "regression": "Worse",
    "improvement": "Better",
    "predicted worse": "Predicted worse than measured",
    "predicted better": "Predicted better than measured",
}


def summary(found: Sequence[TextTable]) -> str:
    """Say whether any run is slower or faster than the first."""
    rows = [row for section in found if section.head == HEAD for row in section.rows]
    parts = []
    for verdict, word in FINDINGS.items():
        told = [
            f"{row[0]} {row[1].partition(',')[0]} {row[6]} ({row[2]})" for row in rows if row[-1] == verdict
        ]
        if told:
            more = f" and {len(told) - NUM_NAMED} more" if len(told) > NUM_NAMED else ""
            parts.append(f"{word}: {'; '.join(told[:NUM_NAMED])}{more}.")
    num_unsure = sum(row[-1] == "unsure" for row in rows)
    if not parts:
        parts = ["Nothing is known to be faster or slower."]
    if num_unsure:
        parts.append(f"Unsure, of those that are shown: {num_unsure}.")
    if any(section.title == DOUBTS for section in found):
        parts.append("The times are doubtful, see below.")
    return " ".join(parts)


def _distance(ratio: float) -> float:
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def _section(title: str, note: str, told: RunChanges) -> list[TextTable]:
    rows = [change_row(change, name) for name, change in told]
    chips = [_tones(change) for _, change in told]
    return [TextTable(title=title, note=note, head=HEAD, rows=rows, chips=chips)] if rows else []


def doubt_section(results: list[Result], names: list[str]) -> list[TextTable]:
    """Say why some run's times may not be compared."""
    rows = []
    for name, result in zip(names, results, strict=True):
        if is_predicted(result.environment):
            rows.append([name, doubt_text(result.environment)])
            continue
        rows += [[name, reason] for reason in busy(result.environment)]
        if result is not results[0]:
            rows += [[name, reason] for reason in unlike(results[0].environment, result.environment)]
    note = "What else ran on the machine, and how fast it was: times differ for that alone."
    return [TextTable(title=DOUBTS, note=note, head=["run", "reason"], rows=rows)][: len(rows)]
