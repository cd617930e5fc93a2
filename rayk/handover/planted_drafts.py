"""wrong_drafts: a decode engine whose drafter goes on from wrong KV, though all that came was right.

Digests were compared before, so they agree; the tokens are the model's own. What the drafter proposes tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from rayk.handover.commands import BlockTables, StartRead
from rayk.handover.planted import PlantedFault
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.layer_view import LayerView
from rayk.types.fault_table import DRAFT_POINTS

Places = tuple[torch.Tensor, torch.Tensor]
KIND = "wrong_drafts"


class SpoiledDrafts:
    """The faults of this kind of one rank. Each strikes every request that it means."""

    def __init__(self, views: Sequence[LayerView], faults: Sequence[PlantedFault]) -> None:
        self._views = views
        self._faults = tuple(fault for fault in faults if fault.kind == KIND)
        self._coming: dict[str, tuple[BlockTables, int]] = {}
        self.num_faults_hit: Counter[tuple[str, str]] = Counter()
        """(kind, point) -> how many have struck."""

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._faults)

    def note(self, command: StartRead) -> None:
        """Learn where a request's KV goes."""
        if self._faults:
            ticket = command.ticket
            self._coming[ticket.request_id] = command.block_tables, ticket.num_tokens

    def arrived(self, outcomes: Sequence[TransferOutcome]) -> None:
        """Strike what came right, once no kernel uses it."""
        for outcome in outcomes:
            coming = self._coming.pop(outcome.request_id, None)
            if coming is None or outcome.error is not None:
                continue
            for fault in self._faults:
                if fault.hits(outcome.request_id):
                    assert fault.point is not None
                    spoil_drafts(self._views, *coming, fault.point)
                    self.num_faults_hit[KIND, fault.point] += 1


def spoil_drafts(views: Sequence[LayerView], block_tables: BlockTables, num_tokens: int, point: str) -> None:
    """Change a request's rows of draft layers on a rank, those of its first `num_tokens` tokens.

    not_moved: they hold zeros, as memory does that nobody wrote. shifted: token t has the row of token t - 1,
    the first one zeros, and the last row is lost. Were it only moved to the front, all would be as before:
    attention does not care where a row lies whose key was turned by its position. wrong_layer: each layer has
    the rows of the next one that keeps the same, the last those of the first.
    """
    assert point in DRAFT_POINTS, point
    alike: dict[tuple[int, str], list[tuple[torch.Tensor, Places]]] = defaultdict(list)
    for view in views:
        if view.group.rides is None:
            continue
        blocks, slots, _ = view.places(block_tables[view.group.index], num_tokens)
        for field in view.fields:
            alike[view.group.index, field.name].append((field.view, (blocks, slots)))
    for caches in alike.values():
        # [tokens, units, elements] of each layer
        rows = [cache[blocks, :, slots].clone() for cache, (blocks, slots) in caches]
        wrong = _wrong(rows, point)
        for (cache, (blocks, slots)), of_layer in zip(caches, wrong, strict=True):
            cache[blocks, :, slots] = of_layer


def _wrong(rows: Sequence[torch.Tensor], point: str) -> list[torch.Tensor]:
    if point == "not_moved":
        return [torch.zeros_like(of_layer) for of_layer in rows]
    if point == "shifted":
        return [torch.cat([torch.zeros_like(of_layer[:1]), of_layer[:-1]]) for of_layer in rows]
    return [*rows[1:], rows[0]]
