"""Bytes of a rank's buffer and the coordinates they stand for, both ways. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.types.errors import UserError

NUMBERS = ("group", "layer", "block", "unit", "token")
"""Keys of a coordinate that are numbers. `head` is another word for `unit`; `token` counts in the block."""


def name_byte(rank: RankGeometry, byte: int) -> list[dict[str, Any]]:
    """What a byte of the buffer is: one coordinate per KV group that uses it; none in padding.

    Keys: those of kv.geometry.Coordinate, `kind` and `part` of the layer's cache, `has_token_rows` (else
    `row` is no token's) and `unit_name`.
    """
    groups = {g.group.index: g for g in rank.groups}
    found = []
    for c in rank.describe(byte):
        spec, field = groups[c.group].group.spec, groups[c.group].field(c.field).field
        cache = {"kind": spec.kind, "part": spec.part, "has_token_rows": spec.has_token_rows}
        found.append(asdict(c) | cache | {"unit_name": field.unit_name})
    return found


def find_coordinate(rank: RankGeometry, text: str) -> list[dict[str, Any]]:
    """First byte and length of the row of each field that a coordinate names. Raises UserError."""
    wanted = _parse(text)
    found = [place for group in rank.groups for place in _places(rank, group, wanted)]
    if not found:
        raise UserError(problem=f"rank {rank.tp_rank} holds no such coordinate", where=f"--find {text}")
    return found


def _places(rank: RankGeometry, group: GroupGeometry, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    layers = group.group.layers
    layer, block, unit, token = (wanted[k] for k in ("layer", "block", "unit", "token"))
    if wanted.get("group", group.group.index) != group.group.index:
        return []
    if layer not in layers or token >= group.block_size or block >= rank.num_blocks:
        return []
    kernel_block, row = divmod(token // group.tokens_per_row, group.kernel_block_size)
    kernel_block += block * group.kernel_blocks_per_block
    return [
        {
            "group": group.group.index,
            "kind": group.group.spec.kind,
            "field": f.field.name,
            "byte": f.address(layers.index(layer), kernel_block, f.units.index(unit), row),
            "num_bytes": f.field.row_bytes,
        }
        for f in group.fields
        if unit in f.units and wanted.get("field", f.field.name) == f.field.name
    ]


def _parse(text: str) -> dict[str, Any]:
    """Numbers by key, and the field. A state's only row needs no token."""
    wanted: dict[str, Any] = {"token": "0"}
    for part in text.split(","):
        key, _, value = part.partition("=")
        wanted["unit" if key.strip() == "head" else key.strip()] = value.strip()
    numbers = [wanted[k] for k in NUMBERS if k in wanted]
    missing = {"layer", "block", "unit"} - set(wanted)
    extra = set(wanted) - {*NUMBERS, "field"}
    if missing or extra or not all(n.isdigit() for n in numbers):
        raise UserError(
            problem="not a coordinate",
            where=f"--find {text}",
            mend="layer=0,block=1,head=0,token=0 (and field=k or v, group=0); of a state no token, and "
            "unit= for what is no head",
        )
    return wanted | {k: int(wanted[k]) for k in NUMBERS if k in wanted}
