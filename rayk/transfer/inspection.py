"""Looking into a transfer that failed: the first wrong byte of each cache, and what arrived all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayk.transfer.diagnose import first_difference, merge_rows
from rayk.transfer.layer_view import LayerView
from rayk.transfer.peer_data import check_ticket
from rayk.transfer.valid_prefix import LayerProof, proven_rows
from rayk.transfer.verify import CanonicalViews, Rows, compare_digests, compute_digests, fetch_rows

if TYPE_CHECKING:
    from rayk.transfer.consumer import Consumption
    from rayk.transfer.handshake import CacheDescription
    from rayk.transfer.link import ProducerLink
    from rayk.transfer.ticket import TransferTicket
    from rayk.types.errors import KVMismatch


def first_wrong(
    consumption: Consumption, layer: int, group: int, fetched: Mapping[int, Rows]
) -> KVMismatch | None:
    """Find the first wrong byte of one of a layer's caches; None when all is equal. `group` is that of the
    views it arrived in.

    `fetched`: every producer rank's rows of the layer, by rank (more fields do no harm).
    """
    view = next(v for v in consumption.views if (v.layer, v.group.index) == (layer, group))
    return _compare(consumption, view, fetched)


def all_wrong(consumption: Consumption, fetched: Sequence[Mapping[int, Rows]]) -> list[KVMismatch]:
    """Return the first wrong byte of each cache that has one. `fetched`: by producer rank, rows by layer."""
    request_id, num_tokens = consumption.ticket.request_id, consumption.ticket.num_tokens
    if consumption.converting is not None and consumption.converting.is_wrong:
        return consumption.converting.diagnose(request_id, num_tokens, consumption.first_row)
    found = (
        _compare(consumption, view, {rank: rows[view.layer] for rank, rows in enumerate(fetched)})
        for view in consumption.views
    )
    return [mismatch for mismatch in found if mismatch is not None]


def layer_proofs(
    views: CanonicalViews,
    ticket: TransferTicket,
    block_tables: Sequence[Sequence[int]],
    link: ProducerLink,
    me: CacheDescription,
    first_row: int = 0,
) -> list[LayerProof]:
    """Prove by the digests what of a failed transfer arrived all the same; rows before `first_row` were here.
    Raises TransferError where the ticket is one that no read begins by: it proves nothing."""
    check_ticket(ticket, link.producers, me, views, block_tables, first_row)
    sources, rows_per_group = link.plan.sources, me.rows_per_group
    what = ticket.num_tokens, rows_per_group, first_row
    found = compute_digests(views, block_tables, *what)
    wrong: dict[tuple[int, int], list[int]] = {}
    for word in compare_digests(views, ticket.digests, found, sources, *what):
        wrong.setdefault((word.group, word.layer), []).append(word.row_group)
    proofs = []
    for view in views:
        key = view.group.index, view.layer
        live = view.live_rows(ticket.num_tokens)
        proofs.append(LayerProof(*key, proven_rows(live, rows_per_group, wrong.get(key, ()))))
    return proofs


def _compare(consumption: Consumption, view: LayerView, fetched: Mapping[int, Rows]) -> KVMismatch | None:
    group, num_tokens = view.group.index, consumption.ticket.num_tokens
    sources = {
        (field, unit): rank
        for (of, field, unit), rank in consumption.link.plan.sources.items()
        if of == group
    }
    first_row = consumption.first_row
    found = fetch_rows(view, consumption.block_tables[group], num_tokens, first_row)
    num_cached_rows = max(0, first_row - view.live_rows(num_tokens).start)
    expected = {key: rows[num_cached_rows:] for key, rows in merge_rows(fetched, sources).items()}
    return first_difference(consumption.ticket.request_id, view, num_tokens, expected, found, first_row)
