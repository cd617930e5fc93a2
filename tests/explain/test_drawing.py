"""The drawing of who reads what, read back: its marks and lines say what the reads say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayk.explain.drawing import svg_drawing, text_drawing
from rayk.explain.explanation import Explanation, explain_pair
from tests.conftest import CheckpointFactory

Lines = set[tuple[str, int, int, int]]
"""(unit's name, unit, producer rank, consumer rank)."""


def explain(model: Path, prefill: int, decode: int) -> Explanation:
    return explain_pair(str(model), {"prefill": {"tp": prefill}, "decode": {"tp": decode}})


def told(explanation: Explanation) -> Lines:
    return {
        (units.unit_name, unit, read.producer_rank, read.consumer_rank)
        for read in explanation.reads
        for units in read.units
        for unit in units.ids
    }


def units_of(text: str) -> list[int]:
    """`heads 0-1, 4` -> 0, 1, 4."""
    ends = [part.split("-") for part in re.findall(r"[\d-]+", text)]
    return [unit for first, *last in ends for unit in range(int(first), int(last[0] if last else first) + 1)]


def drawn_lines(svg: str) -> Lines:
    titles = re.findall(r"<title>(\D+?)s? ([\d, -]+): prefill rank (\d+) to decode rank (\d+)</title>", svg)
    return {(name, unit, int(p), int(d)) for name, units, p, d in titles for unit in units_of(units)}


def drawn_marks(lines: list[str]) -> Lines:
    """From the table: under each consumer rank's number stands the producer rank it reads from."""
    found: Lines = set()
    places: list[int] = []
    for line in lines:
        bar = line.find("│")
        if re.match(r"\s+rank\s", line):
            places = [m.end() - 1 for m in re.finditer(r"\d+", line) if m.start() > bar]
        elif bar > 0 and places and "prefill" not in line:
            name, units = re.match(r"\s+(\D+?)s? ([\d, -]+)", line).groups()  # type: ignore[union-attr]
            cells = [line[at : at + 1].strip() for at in places]
            found |= {(name, u, int(c), d) for d, c in enumerate(cells) if c for u in units_of(units)}
    return found


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("family", ["qwen3", "bamba", "qwen3_next", "deepseek_v3"])
def test_lines_and_marks_are_the_reads(
    family: str, prefill: int, decode: int, checkpoint: CheckpointFactory
) -> None:
    explanation = explain(checkpoint(family), prefill, decode)
    expected = told(explanation)
    assert expected
    assert drawn_lines(svg_drawing(explanation)) == expected
    assert drawn_marks(list(text_drawing(explanation))) == expected


def test_a_known_picture(checkpoint: CheckpointFactory) -> None:
    """Two KV heads: TP 4 holds each twice, TP 2 reads one copy each."""
    lines = list(text_drawing(explain(checkpoint("qwen3"), 4, 2)))[1:]
    assert lines == [
        "  KV group 0: full, layers 0-3",
        "            prefill      │  decode",
        "    rank     0  1  2  3  │  0  1",
        "    head 0   ●  ○        │  0",
        "    head 1         ●  ○  │     2",
        "  nobody reads from prefill ranks 1, 3, which hold replicas only; they are told when to free all "
        "the same",
    ]
