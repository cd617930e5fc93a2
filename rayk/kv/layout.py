"""The order of a KV cache's logical axes in memory, and how one order is agreed on.

Logical axes: L layer (position in its group), B block, H head slot, N token slot, C content bytes.
C is always innermost: a (head, token)'s bytes stay together. Adding a layout is adding a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayk.types.errors import LayoutVetoed, UserError


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """One axis order, outermost first, e.g. BLHNC."""

    name: str

    @property
    def block_outermost(self) -> bool:
        return self.name.startswith("B")

    @property
    def around_blocks(self) -> str:
        """The axes outside B, outermost first. With H or N among them a block is in pieces within a layer,
        which match those of other groups only if all groups have one shape."""
        return self.name.split("B")[0]


LAYOUTS: dict[str, KVCacheLayout] = {
    name: KVCacheLayout(name) for name in ("BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC")
}
"""Every layout, most preferred first: BHLNC keeps a head slice one run under heterogeneous TP."""

Veto = Callable[[KVCacheLayout], str | None]
"""Why a party cannot work with a layout, or None."""


@dataclass(frozen=True, slots=True)
class LayoutResolution:
    """The agreed layout and who vetoed which other one, as (layout, who, reason) rows."""

    layout: KVCacheLayout
    vetoes: tuple[tuple[str, str, str], ...]


def get_layout(name: str) -> KVCacheLayout:
    """Return the layout of this name; UserError names all of them otherwise."""
    if name not in LAYOUTS:
        raise UserError(f"unknown KV-cache layout {name!r}", mend=f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def resolve_layout(requested: str, parties: Sequence[tuple[str, Veto]]) -> LayoutResolution:
    """Return the most preferred layout that no party vetoes.

    `requested` is a layout name (the user then vetoes all others) or "auto". Raises LayoutVetoed with the
    whole table if nothing is left.
    """
    only = None if requested == "auto" else get_layout(requested)
    vetoes: list[tuple[str, str, str]] = []
    accepted: list[KVCacheLayout] = []
    for layout in LAYOUTS.values():
        rows = [(layout.name, who, why) for who, veto in parties if (why := veto(layout)) is not None]
        if only is not None and layout != only:
            rows.append((layout.name, "user", f"asked for {only.name}"))
        vetoes += rows
        if not rows:
            accepted.append(layout)
    if not accepted:
        raise LayoutVetoed(tuple(vetoes), "" if only is None else only.name)
    return LayoutResolution(accepted[0], tuple(vetoes))
