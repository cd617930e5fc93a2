"""A layout is one row: each of the 24 orders with C innermost is right to the byte, or vetoed for what its
axes are, whatever its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest

from rayk.kv.geometry import layout_veto
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS, KVCacheLayout
from tests.each import each
from tests.kv import test_caches, test_geometry, test_maps
from tests.kv.brute import CASES, Case, brute_addresses, brute_clashes, cuts_blocks, full, sliding
from tests.transfer.cluster import Shape, local_pair

ORDERS = ["".join(order) + "C" for order in permutations("LBHN")]
QUICK = (
    "one-group-kernel-2",
    "blocks-of-four-bits",
    "position-padding",
    "two-groups-of-b-and-c",
    "unlike-heads",
)
"""Token rows in kernel blocks, two bundles of them, padding positions, states, and what some cannot hold."""
EXACT: tuple[Callable[[Case, str, int], None], ...] = (
    test_geometry.test_every_address_is_where_the_layout_puts_it,
    test_geometry.test_describe_names_every_byte_and_padding_has_no_name,
    test_geometry.test_a_block_is_the_same_bytes_in_every_group,
    test_caches.test_views_lie_where_the_layout_puts_them,
    test_caches.test_tensors_cover_all_pages_once_and_references_hold_their_blocks,
    test_maps.test_page_map_names_the_canonical_byte_of_every_byte,
)


@pytest.fixture(autouse=True)
def every_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ORDERS:
        monkeypatch.setitem(LAYOUTS, name, KVCacheLayout(name))
    yield
    brute_addresses.cache_clear()


@each("order", ORDERS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.name in QUICK else pytest.mark.slow) for c in CASES],
    ids=lambda case: case.name,
)
def test_an_order_is_right_or_vetoed(case: Case, order: str):
    kernels = kernel_block_sizes(case.groups, case.kernel, case.kernel_by_kind)
    veto = layout_veto(case.groups, LAYOUTS[order], kernels)
    if veto is not None:
        assert cuts_blocks(order)
        assert veto.startswith(f"{order} holds groups of one shape only: ")
        assert not case.fits(order)
        # Stricter than it must be only where rows lie outside blocks: see the next test.
        clashes = any(brute_clashes(case, order, rank) for rank in range(case.tp_size))
        assert clashes or order.index("N") < order.index("B")
        return
    assert not any(brute_clashes(case, order, rank) for rank in range(case.tp_size))
    for check in EXACT:
        check.__wrapped__(case, order, case.tp_size // 2)


def test_the_veto_is_needed():
    """Where these orders would lay unlike groups, a block of one has bytes of another block of the other."""
    case = Case("unlike", {0: full(kv_heads=4), 1: sliding(5, full(kv_heads=4, head_k=2))}, 1)
    for order in ORDERS:
        veto = layout_veto(case.groups, LAYOUTS[order])
        assert (veto is not None) == cuts_blocks(order), order
        if veto is not None:
            assert brute_clashes(case, order, 0), order


def test_the_veto_asks_for_more_than_it_must():
    """Unlike heads, and rows of the same bytes in all: vetoed wherever blocks are cut, yet they clash only
    where a block's bytes in one piece are unlike."""
    case = Case("even-rows", {0: full(4, 4, 4, 4), 1: sliding(5, full(4, 2, 8, 8))}, 1)
    vetoed = {order for order in ORDERS if layout_veto(case.groups, LAYOUTS[order])}
    assert vetoed == {order for order in ORDERS if cuts_blocks(order)}
    harmless = {order for order in vetoed if not brute_clashes(case, order, 0)}
    assert harmless == {"LNBHC", "NLBHC", "NBLHC", "NBHLC"}


def test_rows_of_kernel_blocks_must_be_alike_where_they_lie_around_blocks():
    groups = Case("kernels", {0: full(), 1: sliding(5)}, 1).groups
    for order in ORDERS:
        veto = layout_veto(groups, LAYOUTS[order], (4, 2))
        assert (veto is not None) == (order.index("N") < order.index("B")), order
        assert veto is None or veto.endswith(
            "full has kernel blocks of 4 rows of 5 bytes, sliding has kernel blocks of 2 rows of 5 bytes"
        )


PAIRS = [("HLBNC", "LNBHC"), ("HBLNC", "BNLHC"), ("NHLBC", "LHNBC"), ("LBNHC", "NLBHC")]


@pytest.mark.parametrize(
    "orders", [PAIRS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in PAIRS[1:])], ids="-".join
)
def test_kv_crosses_between_orders_without_a_name(orders: tuple[str, str]):
    shape = Shape(tp=(2, 1), layouts=orders, block_sizes=(4, 6), kernel_block_sizes=(2, None))
    pair = local_pair(shape)
    values = shape.values(29)
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None]
    pair.consumer.check_all(values, tables)
    assert pair.released() == [["lease-r"]] * 2
