"""The layouts, and how one is agreed on."""

from __future__ import annotations

from itertools import combinations

import pytest

from rayk.kv.layout import LAYOUTS, KVCacheLayout, get_layout, resolve_layout
from rayk.types.errors import LayoutVetoed, UserError
from tests.each import each

CONTRACT = {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}
"""Those that users were promised."""


def test_every_name_is_an_order_of_the_axes():
    assert set(LAYOUTS) >= CONTRACT
    assert all(layout.name == name for name, layout in LAYOUTS.items())
    assert all((set(name), name[-1]) == (set("LBHNC"), "C") and len(name) == 5 for name in LAYOUTS)
    assert {n for n in CONTRACT if LAYOUTS[n].block_outermost} == {"BLHNC", "BLNHC", "BHLNC"}
    assert next(iter(LAYOUTS)) == "BHLNC"


def refuses(*names: str):
    def veto(layout: KVCacheLayout) -> str | None:
        return f"not {layout.name}" if layout.name in names else None

    return veto


def test_auto_takes_the_most_preferred():
    agreed = resolve_layout("auto", [])
    assert (agreed.layout.name, agreed.vetoes) == ("BHLNC", ())


@each("vetoed", [c for n in range(len(LAYOUTS)) for c in combinations(LAYOUTS, n)], ids="-".join)
def test_vetoes_leave_the_most_preferred_of_the_rest(vetoed: tuple[str, ...]):
    agreed = resolve_layout("auto", [("specs", refuses()), ("backend", refuses(*vetoed))])
    assert agreed.layout.name == next(name for name in LAYOUTS if name not in vetoed)
    assert agreed.vetoes == tuple((name, "backend", f"not {name}") for name in LAYOUTS if name in vetoed)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_request_vetoes_all_others(name: str):
    agreed = resolve_layout(name, [("specs", refuses())])
    assert agreed.layout.name == name
    assert agreed.vetoes == tuple((other, "user", f"asked for {name}") for other in LAYOUTS if other != name)


def test_the_table_has_every_party_that_refused():
    parties = [("specs", refuses("LHBNC")), ("triton", refuses("LHBNC", "BHLNC")), ("cpu", refuses())]
    agreed = resolve_layout("BLNHC", parties)
    assert agreed.layout.name == "BLNHC"
    assert [row for row in agreed.vetoes if row[0] in ("LHBNC", "BHLNC")] == [
        ("BHLNC", "triton", "not BHLNC"),
        ("BHLNC", "user", "asked for BLNHC"),
        ("LHBNC", "specs", "not LHBNC"),
        ("LHBNC", "triton", "not LHBNC"),
        ("LHBNC", "user", "asked for BLNHC"),
    ]


def test_nothing_left_names_who_and_why():
    with pytest.raises(LayoutVetoed) as caught:
        resolve_layout("LHBNC", [("specs", refuses("LHBNC"))])
    assert {row[0] for row in caught.value.vetoes} == set(LAYOUTS)
    assert ("LHBNC", "specs", "not LHBNC") in caught.value.vetoes
    others = ", ".join(name for name in LAYOUTS if name != "LHBNC")
    assert str(caught.value) == f"not LHBNC; mend: any other layout ({others})"
    with pytest.raises(LayoutVetoed, match="LBNHC: cpu: not LBNHC\\n"):
        resolve_layout("auto", [("cpu", refuses(*LAYOUTS))])
    with pytest.raises(LayoutVetoed) as caught:
        resolve_layout("LHBNC", [("cpu", refuses(*(LAYOUTS.keys() - {"BLHNC", "BLNHC"})))])
    assert str(caught.value) == "layout LHBNC: cpu: not LHBNC; mend: one of BLHNC, BLNHC"


def test_unknown_names_are_the_users_mistake():
    with pytest.raises(UserError, match="unknown KV-cache layout 'NHD'") as caught:
        resolve_layout("NHD", [])
    assert all(name in str(caught.value) for name in LAYOUTS)
    assert get_layout("LBNHC") is LAYOUTS["LBNHC"]
