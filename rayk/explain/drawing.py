"""Draw which rank holds which units, and from whom each consumer rank reads them: as a table of dots in text,
with a row per run of units that fare alike, and as SVG in HTML, with a line from producer to consumer."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm

import numpy as np

from rayk.explain.explanation import Explanation, Group
from rayk.explain.places import counted
from rayk.explain.reads import Read, Units

READ, NOT_READ = "●", "○"
LEGEND = (
    f"{READ} read by a consumer, {NOT_READ} held and not read (a replica); "
    "under decode the producer rank that each is read from"
)
# of producer ranks, in turn: told apart in light and dark
COLOURS = ("#3b7dd8", "#d9822b", "#2a9d6f", "#b0489b", "#c2453c", "#6f62c9", "#8a7a1f", "#2f97a8")
# pixels: a row of units, a rank's box, room for lines, between boxes
ROW, BOX, GAP, MARGIN = 22, 150, 260, 10


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The units of one kind in one KV group of the consumer."""

    title: str
    unit_name: str
    units: tuple[int, ...]  # all global ones
    producers: tuple[frozenset[int], ...]  # by rank, the units it holds
    consumers: tuple[frozenset[int], ...]
    sources: Mapping[tuple[int, int], int]  # (consumer rank, unit) -> the producer rank it is read from

    def runs(self) -> list[tuple[int, ...]]:
        """Group neighbouring units that the same ranks hold and read alike."""
        return [tuple(run) for _, run in groupby(self.units, key=self._fate)]

    def is_read(self, producer: int, unit: int) -> bool:
        return any(u == unit and source == producer for (_, u), source in self.sources.items())

    def _fate(self, unit: int) -> tuple[object, ...]:
        holders = tuple(unit in h for h in self.producers), tuple(unit in h for h in self.consumers)
        return (*holders, tuple(self.sources.get((rank, unit)) for rank in range(len(self.consumers))))


def strips(explanation: Explanation) -> list[Strip]:
    """Make a strip per kind of units of a KV group; several where ranks keep unlike layers or tokens of
    it."""
    found = []
    for index, group in enumerate(explanation.sides["decode"].groups):
        reads = [r for r in explanation.reads if r.group == index]
        if group.rides is not None and not reads:
            continue  # left out: the producer may have no such layer
        for kind in group.units[0]:
            fields = f", {', '.join(kind.fields)}" if len(group.units[0]) > 1 else ""
            name = f"KV group {index}: {group.kind}"
            units = sorted(frozenset[int]().union(*_units_by_rank(group, kind)))
            for layers, producer in _layers_alike(explanation, group, kind):
                for positions, period in _tokens_alike(producer, group):
                    sides = [_held(g, kind, layers[0], positions[0]) for g in (producer, group)]
                    dealt = f", {tokens_text(positions, period)}" if period > 1 else ""
                    found.append(
                        Strip(
                            title=f"{name}, {counted('layer', layers)}{fields}{dealt}",
                            unit_name=kind.unit_name,
                            units=tuple(units),
                            producers=sides[0],
                            consumers=sides[1],
                            sources=_read_from(reads, kind, layers[0], *sides),
                        )
                    )
    return found


def tokens_text(positions: Sequence[int], period: int) -> str:
    """Name tokens that are dealt, e.g. `tokens 0-3 of each 8`."""
    return f"{counted('token', positions)} of each {period}"


def _layers_alike(
    explanation: Explanation, group: Group, kind: Units
) -> Iterator[tuple[tuple[int, ...], Group]]:
    """Yield layers of a consumer's group that the same ranks of either side keep, with the producer's group
    of them."""

    def fate(layer: int) -> tuple[object, ...]:
        producer = _producer_group(explanation, layer, kind)
        keeps = (tuple(layer in layers for layers in g.rank_layers) for g in (producer, group))
        return (explanation.sides["prefill"].groups.index(producer), *keeps)

    if len({*group.rank_layers}) == 1 and explanation.sides["prefill"].pp == 1:
        yield group.layers, _producer_group(explanation, group.layers[0], kind)
        return
    for _, alike in groupby(sorted(group.layers, key=lambda n: (str(fate(n)), n)), key=fate):
        layers = tuple(alike)
        yield layers, _producer_group(explanation, layers[0], kind)


def _tokens_alike(producer: Group, group: Group) -> list[tuple[tuple[int, ...], int]]:
    """List positions that the same ranks of either side keep, of as many as all deals repeat after."""
    shards = (*producer.tokens, *group.tokens)
    period = lcm(*(shard.period for shard in shards))
    holders = np.stack([shard.holds(np.arange(period)) for shard in shards])
    alike: dict[bytes, list[int]] = {}
    for position in range(period):
        alike.setdefault(holders[:, position].tobytes(), []).append(position)
    return [(tuple(positions), period) for positions in alike.values()]


def _held(group: Group, kind: Units, layer: int, position: int) -> tuple[frozenset[int], ...]:
    """List by rank the units that it keeps of a layer and a token."""
    where = np.array([position])
    return tuple(
        units if layer in layers and tokens.holds(where).all() else frozenset()
        for units, layers, tokens in zip(
            _units_by_rank(group, kind), group.rank_layers, group.tokens, strict=True
        )
    )


def _read_from(
    reads: Sequence[Read],
    kind: Units,
    layer: int,
    producers: Sequence[frozenset[int]],
    consumers: Sequence[frozenset[int]],
) -> dict[tuple[int, int], int]:
    """Map (consumer rank, unit) of what both sides keep to the producer rank it is read from."""
    return {
        (read.consumer_rank, unit): read.producer_rank
        for read in reads
        if layer in read.layers
        for units in read.units
        if set(units.fields) & set(kind.fields)
        for unit in units.ids
        if unit in producers[read.producer_rank] and unit in consumers[read.consumer_rank]
    }


def text_drawing(explanation: Explanation) -> Iterator[str]:
    drawn = strips(explanation)
    if not drawn:
        return
    yield f"who reads what ({LEGEND})"
    for strip in drawn:
        yield from _strip_lines(strip)
    if idle_ranks(explanation):
        yield f"  {idle_text(explanation)}"


def idle_ranks(explanation: Explanation) -> tuple[int, ...]:
    read = {r.producer_rank for r in explanation.reads}
    return tuple(rank for rank in range(explanation.sides["prefill"].num_ranks) if rank not in read)


def idle_text(explanation: Explanation) -> str:
    """Say that idle ranks, too, must learn when they may free."""
    ranks = idle_ranks(explanation)
    holds = "holds" if len(ranks) == 1 else "hold"
    return (
        f"nobody reads from prefill {counted('rank', ranks)}, which {holds} replicas only; "
        f"{'it is' if len(ranks) == 1 else 'they are'} told when to free all the same"
    )


def _strip_lines(strip: Strip) -> Iterator[str]:
    names = [counted(strip.unit_name, run) for run in strip.runs()]
    width = max(len("rank"), *map(len, names))
    column = max(len(str(len(side) - 1)) for side in (strip.producers, strip.consumers)) + 2
    left_width = max(len(strip.producers) * column, len("prefill") + 1)

    def line(name: str, here: list[str], there: list[str]) -> str:
        left, right = ("".join(f"{cell:>{column}}" for cell in cells) for cells in (here, there))
        return f"    {name:<{width}} {left:<{left_width}}  │{right}".rstrip()

    yield f"  {strip.title}"
    yield f"    {'':<{width}} {' prefill':<{left_width}}  │  decode"
    ranks = [[str(rank) for rank in range(len(side))] for side in (strip.producers, strip.consumers)]
    yield line("rank", *ranks)
    for name, run in zip(names, strip.runs(), strict=True):
        unit = run[0]
        marks = [
            " " if unit not in units else READ if strip.is_read(rank, unit) else NOT_READ
            for rank, units in enumerate(strip.producers)
        ]
        yield line(name, marks, [str(strip.sources.get((r, unit), " ")) for r in range(len(strip.consumers))])


def svg_drawing(explanation: Explanation) -> str:
    """Draw a figure per strip; "" if there is nothing to draw."""
    figures = [
        f"<figure><figcaption>{html.escape(strip.title)}</figcaption>{_strip_svg(strip)}</figure>"
        for strip in strips(explanation)
    ]
    if not figures:
        return ""
    idle = f"<p>{html.escape(idle_text(explanation))}</p>" if idle_ranks(explanation) else ""
    return f"<h2>Who reads what</h2>{''.join(figures)}{idle}"


def _strip_svg(strip: Strip) -> str:
    """Draw producer ranks on the left, consumer ranks on the right, a box each with a row per run of its
    units."""
    sides = [_boxes(strip, holdings) for holdings in (strip.producers, strip.consumers)]
    parts: list[str] = []
    for side, (name, boxes) in enumerate(zip(("prefill", "decode"), sides, strict=True)):
        for rank, (top, rows) in enumerate(boxes):
            colour = COLOURS[rank % len(COLOURS)] if side == 0 else "currentColor"
            parts += _box_svg(side * (BOX + GAP) + 1, top, f"{name} rank {rank}", rows, strip, colour)
    parts += _lines_svg(strip, *sides)
    height = max(top + (1 + len(rows)) * ROW for boxes in sides for top, rows in boxes) + 2
    width = 2 * BOX + GAP + 2
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{html.escape(strip.title)}" font-size="13" fill="currentColor">{"".join(parts)}</svg>'
    )


Boxes = list[tuple[int, list[tuple[int, ...]]]]


def _boxes(strip: Strip, units_by_rank: tuple[frozenset[int], ...]) -> Boxes:
    boxes: Boxes = []
    top = 1
    for units in units_by_rank:
        rows = [run for run in strip.runs() if run[0] in units]
        boxes.append((top, rows))
        top += (1 + len(rows)) * ROW + MARGIN
    return boxes


def _box_svg(
    left: int, top: int, name: str, rows: list[tuple[int, ...]], strip: Strip, colour: str
) -> Iterator[str]:
    height = (1 + len(rows)) * ROW
    yield (
        f'<rect x="{left}" y="{top}" width="{BOX}" height="{height}" rx="5" fill="{colour}" '
        f'fill-opacity="0.08" stroke="{colour}"/>'
    )
    yield f'<text x="{left + 8}" y="{top + 15}" font-weight="600">{html.escape(name)}</text>'
    for i, run in enumerate(rows):
        text = html.escape(counted(strip.unit_name, run))
        yield f'<text x="{left + 8}" y="{top + (i + 1) * ROW + 15}">{text}</text>'


def _lines_svg(strip: Strip, producers: Boxes, consumers: Boxes) -> Iterator[str]:
    """Draw a curve from every run to each rank that reads it, in the producer rank's colour."""
    for rank, (top, rows) in enumerate(consumers):
        for i, run in enumerate(rows):
            source = strip.sources.get((rank, run[0]))
            if source is None:
                continue
            source_top, source_rows = producers[source]
            y0 = source_top + (source_rows.index(run) + 1.5) * ROW
            y1 = top + (i + 1.5) * ROW
            x0, x1, middle = BOX + 1, BOX + GAP + 1, BOX + GAP / 2 + 1
            colour = COLOURS[source % len(COLOURS)]
            title = f"{counted(strip.unit_name, run)}: prefill rank {source} to decode rank {rank}"
            yield (
                f'<path d="M{x0} {y0} C{middle} {y0} {middle} {y1} {x1} {y1}" fill="none" stroke="{colour}" '
                f'stroke-width="2"><title>{html.escape(title)}</title></path>'
                f'<circle cx="{x1}" cy="{y1}" r="3.5" fill="{colour}"/>'
            )


def _producer_group(explanation: Explanation, layer: int, kind: Units) -> Group:
    return next(
        g
        for g in explanation.sides["prefill"].groups
        if layer in g.layers and any(set(u.fields) & set(kind.fields) for u in g.units[0])
    )


def _units_by_rank(group: Group, kind: Units) -> tuple[frozenset[int], ...]:
    return tuple(
        frozenset(unit for u in units if set(u.fields) & set(kind.fields) for unit in u.ids)
        for units in group.units
    )
