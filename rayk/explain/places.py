"""Name bytes of a rank's buffer by coordinates, and find them by coordinates. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rayk.kv.geometry import FieldGeometry, GroupGeometry, RankGeometry
from rayk.types.errors import UserError

# `head` is a `unit` of what has heads; `token` is one of a block
NUMBERS = ("group", "layer", "block", "unit", "token")


def name_byte(rank: RankGeometry, byte: int, sources: Mapping[int, int]) -> list[dict[str, Any]]:
    """Name a byte by a coordinate per KV group that uses it; none in padding. `sources` maps a layer that
    keeps nothing to the one whose pages it uses. Beside the keys of kv.geometry.Coordinate there are `kind`
    and `part` of the layer's cache, `has_token_rows` (else `row` is no token's), `unit_name`, and `used_by`,
    the layers that use the page without keeping any."""
    groups = {g.group.index: g for g in rank.groups}
    found = []
    for c in rank.describe(byte):
        spec, field = groups[c.group].group.spec, groups[c.group].field(c.field).field
        cache = {"kind": spec.kind, "part": spec.part, "has_token_rows": spec.has_token_rows}
        draft = groups[c.group].group.draft_number(c.layer)
        cache |= {} if draft is None else {"draft_layer": draft}
        users = [n for n, source in sources.items() if source == c.layer and spec.has_token_rows]
        found.append(asdict(c) | cache | {"unit_name": field.unit_name, "used_by": users})
    return found


def find_coordinate(
    ranks: Sequence[RankGeometry], rank: int, text: str, sources: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Find first byte and length of each field's row that a coordinate names, with the layer that was `asked`
    for and the `layer` whose page it is. Raises UserError that says what is wrong, and what there is."""
    try:
        coordinate = _parse(text, sources)
        found = _on_rank(ranks, rank, _named(ranks[rank], coordinate, sources), coordinate)
    except UserError as error:
        raise replace(error, where=f"--find {text}") from None
    return [_place(group, field, coordinate) for group, field in found]


def numbers(values: Iterable[int]) -> str:
    """Shorten runs of ascending numbers: 0-3, 7."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ", ".join("-".join(map(str, part)) for part in parts)


def counted(name: str, ids: Sequence[int]) -> str:
    """Name them, e.g. `layer 0`, `layers 0-3`."""
    return f"{name}{'s'[: len(ids) != 1]} {numbers(ids)}"


@dataclass(frozen=True, slots=True)
class _GivenCoordinate:
    """A coordinate as it was given; None for what was left out."""

    asked: int  # the layer that was given
    layer: int  # the layer whose pages it uses: mostly its own
    block: int
    unit: int | None
    is_head: bool  # whether the unit was called one
    token: int | None
    group: int | None
    field: str | None


_Found = list[tuple[GroupGeometry, FieldGeometry]]


def _parse(text: str, sources: Mapping[int, int]) -> _GivenCoordinate:
    """Parse a coordinate. Raises UserError for what no model has."""
    parts = [part.partition("=") for part in text.split(",")]
    given = {key.strip(): value.strip() for key, _, value in parts}
    wrong = [f"no {n!r} is known" for n in given if n not in (*NUMBERS, "head", "field")]
    wrong += [
        f"{n}={v} is no number" for n, v in given.items() if n in (*NUMBERS, "head") and not v.isdecimal()
    ]
    wrong += [f"{n} is left out" for n in ("layer", "block") if n not in given]
    if len(given) < len(parts) or {"unit", "head"} <= set(given):
        wrong.append("something is given twice")
    if wrong:
        raise UserError(
            problem=f"not a coordinate: {', '.join(wrong)}",
            mend="layer=0,block=1,head=0,token=0 (and field=k or v, group=0); of a state no token, and "
            "unit= for what is no head",
        )
    values = {n: int(value) for n, value in given.items() if n != "field"}
    return _GivenCoordinate(
        asked=values["layer"],
        layer=sources.get(values["layer"], values["layer"]),
        block=values["block"],
        unit=values.get("unit", values.get("head")),
        is_head="head" in values,
        token=values.get("token"),
        group=values.get("group"),
        field=given.get("field"),
    )


def _named(rank: RankGeometry, coordinate: _GivenCoordinate, sources: Mapping[int, int]) -> _Found:
    """Find the fields that a coordinate may mean, whoever holds its unit. Raises UserError when there is
    none."""
    layer, token = coordinate.layer, coordinate.token
    layers = sorted({n for g in rank.groups for n in g.group.layers})
    if layer not in layers:
        others = f", and {numbers(sorted(sources))} use their pages" if sources else ""
        raise UserError(f"layer {layer}: the layers that keep something are {numbers(layers)}{others}")
    if coordinate.block >= rank.num_pool_blocks:
        raise UserError(f"block {coordinate.block}: the pool has blocks 0-{rank.num_pool_blocks - 1}")
    found = [(g, f) for g in rank.groups if layer in g.group.layers for f in g.fields]
    if coordinate.group is not None:
        groups = numbers(sorted({g.group.index for g, _ in found}))
        found = [(g, f) for g, f in found if g.group.index == coordinate.group]
        whose = f", whose pages layer {coordinate.asked} uses," if coordinate.asked != layer else ""
        _check(found, f"KV group {coordinate.group}: layer {layer}{whose} is in {groups}")
    if coordinate.field is not None:
        names = ", ".join(f.field.name for _, f in found)
        found = [(g, f) for g, f in found if f.field.name == coordinate.field]
        _check(found, f"field {coordinate.field}: layer {layer} has {names}")
    if coordinate.is_head:
        units = _units_text(found)
        found = [(g, f) for g, f in found if f.field.unit_name.split()[-1] == "head"]
        _check(found, f"head={coordinate.unit}: no heads here but {units}", mend=f"unit={coordinate.unit}")
    if token is not None:
        names = ", ".join(f.field.name for _, f in found)
        found = [(g, f) for g, f in found if g.group.spec.has_token_rows]
        _check(found, f"token={token}: a state has no tokens ({names})", mend="leave token out")
        size = max(g.block_size for g, _ in found)
        found = [(g, f) for g, f in found if token < g.block_size]
        _check(found, f"token {token}: a block has tokens 0-{size - 1}")
    units = _units_text(found)
    if coordinate.unit is None:
        if any(f.field.units > 1 for _, f in found):
            raise UserError(f"which of {units}?", mend="add unit=N, or head=N")
        return found
    found = [(g, f) for g, f in found if coordinate.unit < f.field.units]
    _check(found, f"unit {coordinate.unit}: there are {units}")
    return found


def _check(found: Sequence[object], problem: str, mend: str = "") -> None:
    if not found:
        raise UserError(problem, mend=mend)


def _on_rank(ranks: Sequence[RankGeometry], rank: int, named: _Found, coordinate: _GivenCoordinate) -> _Found:
    """Keep the fields of which this rank holds the unit, layer and token. Raises UserError with the ranks
    that do."""
    keys = [(g.group.index, f.field.name) for g, f in named]

    def held_by(geometry: RankGeometry) -> _Found:
        return [
            (g, f)
            for g in geometry.groups
            for f in g.fields
            if (g.group.index, f.field.name) in keys and _holds(g, f, coordinate)
        ]

    found = held_by(ranks[rank])
    if not found:
        others = [r.rank for r in ranks if held_by(r)]
        who = f"rank {others[0]} holds" if len(others) == 1 else f"ranks {numbers(others)} hold"
        names = " or ".join(dict.fromkeys(f.field.unit_name for _, f in named))
        what = f"{names} {coordinate.unit or 0}"
        shape = ranks[rank].shape
        what += f" of layer {coordinate.layer}" if shape.pp > 1 else ""
        what += f" for token {coordinate.token or 0}" if shape.dcp > 1 else ""
        raise UserError(f"rank {rank} does not hold {what}; {who} it", mend=f"--rank {others[0]}")
    return found


def _holds(group: GroupGeometry, f: FieldGeometry, coordinate: _GivenCoordinate) -> bool:
    return (
        (coordinate.unit or 0) in f.units
        and coordinate.layer in group.layers
        and _local_row(group, coordinate) >= 0
    )


def _local_row(group: GroupGeometry, coordinate: _GivenCoordinate) -> int:
    """Find the token's row in the rank's block; -1: another rank has it."""
    return int(group.local_rows[(coordinate.token or 0) // group.tokens_per_row])


def _units_text(found: _Found) -> str:
    """List the units found, e.g. `heads 0-7 (conv_x, ssm), groups 0-1 (conv_b, conv_c)`."""
    alike: dict[tuple[str, int], list[str]] = {}
    for _, f in found:
        alike.setdefault((f.field.unit_name, f.field.units), []).append(f.field.name)
    return ", ".join(
        f"{counted(name, range(count))} ({', '.join(fields)})" for (name, count), fields in alike.items()
    )


def _place(group: GroupGeometry, f: FieldGeometry, coordinate: _GivenCoordinate) -> dict[str, Any]:
    kernel_block, row = divmod(_local_row(group, coordinate), group.kernel_block_size)
    kernel_block += coordinate.block * group.kernel_blocks_per_block
    position, slot = group.layers.index(coordinate.layer), f.units.index(coordinate.unit or 0)
    return {
        "asked": coordinate.asked,
        "layer": coordinate.layer,
        "group": group.group.index,
        "kind": group.group.spec.kind,
        "field": f.field.name,
        "byte": f.address(position, kernel_block, slot, row),
        "num_bytes": f.field.row_bytes,
    }
