"""Looking into a transfer that failed: the first wrong byte of each cache, and what arrived all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rayk.parallel.shard import Ints, TokenShard
from rayk.transfer.diagnose import first_difference, join_rows
from rayk.transfer.layer_view import LayerView
from rayk.transfer.peer_data import check_ticket
from rayk.transfer.token_classes import ONE_CLASS
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
        _compare(consumption, view, {rank: rows.get(view.layer, {}) for rank, rows in enumerate(fetched)})
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
    sources, rows_per_group = link.plan.sources(views.classes), me.rows_per_group
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
    num_tokens, first_row = consumption.ticket.num_tokens, consumption.first_row
    found = fetch_rows(view, consumption.block_tables[view.group.index], num_tokens, first_row)
    live = view.live_rows(num_tokens)
    expected = _join(consumption, view, fetched, np.arange(live.start, live.stop, dtype=np.int64))
    num_cached_rows = max(0, first_row - live.start)
    expected = {key: rows[num_cached_rows:] for key, rows in expected.items()}
    return first_difference(consumption.ticket.request_id, view, num_tokens, expected, found, first_row)


def _join(consumption: Consumption, view: LayerView, fetched: Mapping[int, Rows], live: Ints) -> Rows:
    """Return the rows of a layer of a whole producer engine at all `live` positions: of each token class
    those of the ranks that are read from, and of what nobody here reads those of any rank that has it."""
    classes = consumption.views.classes if view.group.spec.has_token_rows else ONE_CLASS
    elected: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for (layer, field, unit, of), rank in consumption.link.plan.sources(consumption.views.classes).items():
        if layer == view.layer:
            elected.setdefault((rank, of), set()).add((field, unit))
    held = {rank: live[_tokens(consumption.link, rank, view).holds(live)] for rank in fetched}
    rows_of = {rank: _of_view(view, rows) for rank, rows in fetched.items()}
    parts = [(held[rank], rows) for rank, rows in rows_of.items()]
    for (rank, token_class), keys in elected.items():
        if rank not in rows_of:
            continue
        chosen = classes.of(held[rank]) == token_class
        rows = {key: values[chosen] for key, values in rows_of[rank].items() if key in keys}
        parts.append((held[rank][chosen], rows))
    return join_rows(live, parts)


def _of_view(view: LayerView, rows: Rows) -> Rows:
    """Leave out the rows of the layer's other caches."""
    return {key: values for key, values in rows.items() if key[0] in view.names}


def _tokens(link: ProducerLink, rank: int, view: LayerView) -> TokenShard:
    """Return the tokens that a producer rank takes its rows of a cache for."""
    producer, spec = link.producers[rank], view.group.spec
    groups = producer.geometry.groups
    index = next(i for i, g in enumerate(groups) if (view.layer, spec.part) in g.group.keys)
    return producer.slot_tokens[index] if producer.slot_tokens else groups[index].tokens
