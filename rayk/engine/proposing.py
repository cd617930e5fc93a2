"""A drafter at work on one rank: after each step of the model its own rows, then what it proposes.

It computes when the tokens of the step are known, in the same turn. So each of its rows has its token and, if
it takes one, the hidden state that the model has just computed; nothing waits for a later step, and what the
next turn hands over is complete. The tokens that it proposes go to rank 0's scheduler, and come back with the
next step: every rank of the model then verifies the same ones. Rows of proposed tokens are overwritten by
those of the tokens that come in their place.

R requests that get proposals, T packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rayk.attention import AttentionGroups, AttentionLayer, AttentionView, CommonAttentionMetadata
from rayk.engine.backends import LayerBackends
from rayk.engine.filters import TEMPERATURES
from rayk.engine.inputs import InputBuilder, ModelInputs
from rayk.engine.noise import draw_key, gumbel
from rayk.engine.rejecting import PROPOSES
from rayk.engine.staging import HostBuffers
from rayk.kernels.uploads import sent, uploaded
from rayk.kv.groups import CacheKey, KVCacheGroup
from rayk.models.drafters.drafter import RankDrafter
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.drafting import DraftPlan, DraftShare

NOT_PROPOSED = -1


class Proposing:
    """Calls one rank's drafter. All ranks of an engine call it alike, with equal arguments."""

    def __init__(
        self,
        drafter: RankDrafter,
        inputs: InputBuilder,
        groups: Sequence[KVCacheGroup],
        backends: LayerBackends,
        staging: HostBuffers,
        device: torch.device,
    ) -> None:
        """`inputs`: whose block tables the model's steps keep. `groups`: the engine's. `staging`: for its own
        use."""
        assert drafter.config.depths == 1, "others are refused"
        self._drafter = drafter
        self._inputs = inputs
        self._riders = {g.index: g for g in groups if g.rides is not None}
        self._no_updates = ((0, ()),) * sum(g.rides is None for g in groups)
        self._staging = staging
        self._device = device
        self.drawn_from: dict[int, list[torch.Tensor]] = {}
        """By place among the R requests of the last `run`, of those that draw: for each proposed token the
        float64 logits [V] that it was drawn from, divided by the temperature."""
        self._attention = AttentionGroups()
        self._attention.initialise(self._layers(backends))

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of its layers in the engine."""
        config = self._drafter.config
        return tuple(range(config.first_layer, config.first_layer + config.decoder.num_layers))

    def _layers(self, backends: LayerBackends) -> list[AttentionLayer]:
        config, found = self._drafter.config, []
        groups = {layer: g for g in self._riders.values() for layer in g.layers}
        for index, layer in zip(self.layers, config.decoder.layers, strict=True):
            view = AttentionView(kv_group=groups[index].index, window=layer.window, chunk=layer.chunk)
            found.append(
                AttentionLayer(
                    layer=index,
                    backend=backends[index],
                    spec=groups[index].spec,
                    num_query_heads=config.decoder.num_query_heads // config.tp,
                    view=view,
                )
            )
        return found

    def run(
        self,
        batch: ScheduledBatch,
        plan: DraftPlan,
        hidden: torch.Tensor | None,
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Compute the rows of a step of the model that has just run, and propose. Returns int64 [R, most
        tokens asked for], R being those of `plan` with `num_proposed`, in its order; NOT_PROPOSED behind what
        a request asked for. On a GPU this returns before the kernels have run.

        `hidden`: what the model gives its drafter of the step's packed tokens; None for a smaller model.
        `on_layer`: called with each layer once its rows are queued; what it proposes writes none that count.
        """
        self.drawn_from = {}
        rows, places = self._rows(batch, plan)
        last: torch.Tensor | None = None
        if rows is not None:
            state = None
            if hidden is not None:
                index = sent(torch.from_numpy(places), self._device)
                state = self._drafter.combine(hidden.index_select(0, index))
            inputs, metadata = self._built(rows)
            found = self._drafter.forward(inputs.token_ids, inputs.positions, state, metadata)
            last = found.index_select(0, inputs.logits_index)
        if on_layer is not None:
            for layer in self.layers:
                on_layer(layer)
        if rows is None or last is None or not len(last):
            return torch.empty(0, 0, dtype=torch.int64, device=self._device)
        asking = [share for share in plan if share.num_proposed]
        return self._propose([r for r in rows.requests if r.needs_logits], asking, last)

    def _rows(self, batch: ScheduledBatch, plan: DraftPlan) -> tuple[ScheduledBatch | None, np.ndarray]:
        """Return the drafter's rows as a step, and for each the packed index, int64 [T], of the token in the
        model's step whose hidden state it takes. A smaller model has rows of the tokens themselves, and of
        the one after them where it goes on from that."""
        takes_hidden = self._drafter.config.takes_hidden
        requests, places, at = [], [], 0
        for r, share in zip(batch.requests, plan, strict=True):
            first, at = at, at + len(r.token_ids)
            if not share.num_kept:
                continue
            assert not (takes_hidden and share.token_ids), "no hidden state is left of tokens before the step"
            known = (*(share.token_ids or r.token_ids[: share.num_kept]), share.next_token)
            own = known if share.num_proposed else known[:-1]
            token_ids = known[1:] if takes_hidden else own
            places.append(np.arange(first, first + share.num_kept))
            requests.append(
                ScheduledRequest(
                    request_id=r.request_id,
                    row=r.row,
                    num_computed_tokens=share.first_row if share.token_ids else r.num_computed_tokens,
                    token_ids=token_ids,
                    new_block_ids=share.new_block_ids or self._no_updates,
                    needs_logits=share.num_proposed > 0,
                )
            )
        if not requests:
            return None, np.empty(0, dtype=np.int64)
        rows = ScheduledBatch(step=batch.step, requests=tuple(requests))
        return rows, np.concatenate(places).astype(np.int64)

    def _propose(
        self, requests: Sequence[ScheduledRequest], shares: Sequence[DraftShare], last: torch.Tensor
    ) -> torch.Tensor:
        """Propose tokens of each request, as many as its share says, one after the other. `last` [R, hidden]
        came of the last row of each."""
        wanted = [share.num_proposed for share in shares]
        most = max(wanted)
        found = torch.full((len(wanted), most), NOT_PROPOSED, dtype=torch.int64, device=self._device)
        asking = list(range(len(wanted)))
        tokens = self._choose(last, shares, asking, 0)
        found[:, 0] = tokens
        for depth in range(1, most):
            # Nobody gave blocks for more rows than a request asked for.
            left = [i for i, place in enumerate(asking) if wanted[place] > depth]
            asking = [asking[i] for i in left]
            if len(left) < len(tokens):
                index = uploaded(left, torch.int64, self._device)
                tokens, last = tokens.index_select(0, index), last.index_select(0, index)
            step = self._one_more([requests[place] for place in asking], depth)
            inputs, metadata = self._built(step)
            state = last if self._drafter.config.takes_hidden else None
            last = self._drafter.forward(tokens, inputs.positions, state, metadata)
            tokens = self._choose(last, shares, asking, depth)
            found[:, depth].index_copy_(0, uploaded(asking, torch.int64, self._device), tokens)
        return found

    def _choose(
        self, hidden: torch.Tensor, shares: Sequence[DraftShare], asking: Sequence[int], depth: int
    ) -> torch.Tensor:
        """Choose the next token, int64 [R], of those requests of `shares` that are at the places `asking`."""
        logits = self._drafter.logits(hidden)
        tokens = logits.argmax(-1)
        drawing = [i for i, place in enumerate(asking) if shares[place].temperature]
        if not drawing:
            return tokens
        some = [shares[asking[i]] for i in drawing]
        low, high = TEMPERATURES
        divisors = [min(max(share.temperature, low), high) for share in some]
        keys = [draw_key(share.seed, share.output_index + depth, PROPOSES) for share in some]
        rows = uploaded(drawing, torch.int64, self._device)
        scaled = logits.index_select(0, rows).double()
        # At low temperatures quotients would leave the range; the best token alone counts then.
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / uploaded(
            divisors, torch.float64, self._device
        ).unsqueeze(1)
        ids = torch.arange(logits.shape[1], device=self._device)
        noise = gumbel(uploaded(keys, torch.int64, self._device), ids)
        for i, one in zip(drawing, scaled, strict=True):
            self.drawn_from.setdefault(asking[i], []).append(one)
        return tokens.index_copy(0, rows, (scaled + noise).argmax(-1))

    def _one_more(self, requests: Sequence[ScheduledRequest], depth: int) -> ScheduledBatch:
        """Make a step of the row after those of each request, `depth` - 1 of which are of proposed tokens.
        What its token is, only the device knows."""
        found = tuple(
            ScheduledRequest(
                request_id=r.request_id,
                row=r.row,
                num_computed_tokens=r.num_computed_tokens + len(r.token_ids) + depth - 1,
                token_ids=(0,),
                new_block_ids=self._no_updates,
                needs_logits=True,
            )
            for r in requests
        )
        return ScheduledBatch(step=0, requests=found)

    def _built(self, rows: ScheduledBatch) -> tuple[ModelInputs, Mapping[CacheKey, Any]]:
        """Return a step's inputs on the device, and the metadata of each layer's cache."""
        inputs = self._inputs.build(rows, only=self._riders)
        commons = {
            group: common
            for group, common in zip(self._riders, inputs.metadata, strict=True)
            if isinstance(common, CommonAttentionMetadata)
        }
        seen = self._attention.see(commons)
        moved, *there = self._staging.upload([inputs, *seen.values()])
        built = self._attention.build(dict(zip(seen, there, strict=True)))
        return moved, {(layer, "attention"): metadata for layer, metadata in built.items()}
