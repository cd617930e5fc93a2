"""Colours of curves: told apart by the colour-blind, in either mode, or else by their dashes."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.html import TEMPLATES
from rayk.reports.plots import PALETTE, spread_plots
from tests.reports.synthetic import SPEC, cell_row, request_rows

BLINDNESS = {
    "none": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Machado, Oliveira, Fernandes 2009, severity 1: linear RGB as the colour-blind see it."""
DISTANCE = 15.0
"""CIE 1976: some 2.3 can just be noticed side by side."""

Colour = tuple[float, float, float]


def linear(text: str) -> Colour:
    red, green, blue = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (_linear(red), _linear(green), _linear(blue))


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def seen(colour: Colour, blindness: str) -> Colour:
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, colour, strict=True))))
        for row in BLINDNESS[blindness]
    )
    return (red, green, blue)


def lab(colour: Colour) -> Colour:
    """CIE L*a*b* under D65."""
    red, green, blue = colour
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return (116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz))


def palettes() -> list[list[str]]:
    """Of the light page and of the dark one."""
    css = (TEMPLATES / "report.css").read_text()
    found = [re.findall(rf"--{name}: (#[0-9a-f]{{6}});", css) for name in PALETTE]
    return [list(colours) for colours in zip(*found, strict=True)]


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_series_are_told_apart(mode: int, blindness: str) -> None:
    colours = palettes()[mode]
    assert len(colours) == len(PALETTE) == 6
    near = min(
        (math.dist(lab(seen(linear(a), blindness)), lab(seen(linear(b), blindness))), a, b)
        for a, b in combinations(colours, 2)
    )
    assert near[0] > DISTANCE, near


def test_twelve_curves_have_twelve_looks(tmp_path: Path) -> None:
    """The colour says the prefill TP, the dash the decode TP."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    sizes = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4, None)]
    for prefill, decode in sizes:
        cell = cell_row(prefill, decode, ("BHLNC", "BHLNC"))
        writer.write_cell(cell, request_rows(cell, Random(0)), [])
    writer.finish()
    lines = {trace["name"]: trace["line"] for trace in spread_plots(load(tmp_path))[0].data}
    assert len(lines) == 12
    assert len({(line["color"], line["dash"]) for line in lines.values()}) == 12
    for prefill in (1, 2, 4):
        assert len({lines[f"P {prefill}, D {d}"]["color"] for d in (1, 2, 4)}) == 1
        assert len({lines[f"P {p}, D {prefill}"]["dash"] for p in (1, 2, 4)}) == 1
    assert {lines[f"TP {size}"]["color"] for size in (1, 2, 4)} == {"soft"}
