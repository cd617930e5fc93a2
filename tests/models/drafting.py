"""A harness that runs a drafter's rows on caches of scattered blocks, poisoned where unused, and what it
feeds them: a model's hidden states, computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from rayk.attention import CommonAttentionMetadata, get_backend
from rayk.models.decoder import Decoder
from rayk.models.drafters.config import DrafterConfig, drafter_of, drafter_specs
from rayk.models.drafters.drafter import RankDrafter
from rayk.models.drafters.loader import load_drafter
from rayk.models.layers.attention import Attention
from rayk.parallel.comm import Comm
from rayk.types.config import EngineConfig
from rayk.types.speculative import SpeculativeConfig
from tests.models.tiny import Checkpoint, Paged, built, load

BLOCK_SIZE = 8
CUTS = ((0, 7, 8, 31), (0, 30))
"""Unlike ways to cut a text into chunks."""


def engine_of(path: Path, tp: int = 1, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(path), tp=tp, block_size=BLOCK_SIZE, **settings)


def find(checkpoint: Checkpoint, engine_tp: int = 1, **settings: Any) -> DrafterConfig:
    """The drafter that these settings of `speculative` name, in an engine of this TP size."""
    speculative = SpeculativeConfig(**settings)
    return drafter_of(speculative, checkpoint.config, engine_of(checkpoint.path, engine_tp))


def load_both(checkpoint: Checkpoint, config: DrafterConfig, comm: Comm) -> tuple[Decoder, RankDrafter]:
    """One rank's model and drafter on the CPU."""
    decoder = load(checkpoint, comm)
    drafter = load_drafter(
        config,
        decoder,
        comm=comm,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend_for=lambda layer: get_backend("reference", "cpu"),
    )
    return decoder, drafter


def reloaded(path: Path) -> Any:
    """The model as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def chunks(cuts: Sequence[int], end: int) -> list[range]:
    edges = [*(cut for cut in cuts if cut < end), end]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def model_outputs(
    decoder: Decoder, tp: tuple[int, int], ids: Sequence[int], cuts: Sequence[int]
) -> torch.Tensor:
    """What the decoder gives its drafter of a text, fed in chunks: the tapped streams, or else [T, hidden] of
    the final norm."""
    paged, found = Paged(decoder, 1, tp=tp), []
    forward = decoder.forward

    def recorded(*arguments: Any) -> torch.Tensor:
        hidden = forward(*arguments)
        found.append(hidden if not decoder.taps else decoder.tapped)
        return hidden

    decoder.forward = recorded  # type: ignore[method-assign]
    for chunk in chunks(cuts, len(ids)):
        paged.step([ids[chunk.start : chunk.stop]])
    decoder.forward = forward  # type: ignore[method-assign]
    return torch.cat(found)


@dataclass
class Fed:
    """Rows of one request: the tokens that they read, their first position, and their hidden states."""

    token_ids: Sequence[int]
    start: int
    hidden: torch.Tensor | None


class PagedDrafter:
    """Runs rows of several requests through a drafter."""

    def __init__(self, drafter: RankDrafter, num_requests: int, max_tokens: int = 128) -> None:
        self.drafter = drafter
        self.block_table = Paged._table(num_requests, max_tokens, BLOCK_SIZE)
        specs = drafter_specs(drafter.config, engine_of(drafter.config.path))
        assert specs.keys() == drafter.cache_owners.keys() == set(drafter.config.keys)
        for key, owner in drafter.cache_owners.items():
            units = len(owner.kv_head_ids) if isinstance(owner, Attention) else 1
            content = sum(field.row_bytes for field in specs[key].fields()) // 4
            shape = (self.block_table.numel() + 1, units, BLOCK_SIZE, content)
            owner.bind_kv_cache(torch.full(shape, float("nan")))

    def forward(self, fed: Sequence[Fed | None], depth: int = 0) -> list[torch.Tensor]:
        """Feed each request its rows (None: it sits out); the hidden states [rows, hidden] of each."""
        active = [(r, rows) for r, rows in enumerate(fed) if rows is not None]
        positions = [rows.start + i for _, rows in active for i in range(len(rows.token_ids))]
        owners = [r for r, rows in active for _ in rows.token_ids]
        slots = [
            int(self.block_table[r, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for r, p in zip(owners, positions, strict=True)
        ]
        common = CommonAttentionMetadata.from_host(
            query_lens=[len(rows.token_ids) for _, rows in active],
            seq_lens=[rows.start + len(rows.token_ids) for _, rows in active],
            block_table=self.block_table[[r for r, _ in active]],
            slot_mapping=torch.tensor(slots),
            block_size=BLOCK_SIZE,
        )
        hidden = [rows.hidden for _, rows in active if rows.hidden is not None]
        found = self.drafter.forward(
            torch.tensor([token for _, rows in active for token in rows.token_ids]),
            torch.tensor(positions),
            torch.cat(hidden) if hidden else None,
            {key: built(owner, common) for key, owner in self.drafter.cache_owners.items()},
            depth,
        )
        parts = found.split([len(rows.token_ids) for _, rows in active])
        by_request = dict(zip((r for r, _ in active), parts, strict=True))
        return [by_request.get(r, torch.empty(0)) for r in range(len(fed))]

    def propose(
        self, ids: Sequence[int], hidden: torch.Tensor, num_seen: int, num_tokens: int
    ) -> torch.Tensor:
        """Propose after a request's `ids`, of which rows up to `num_seen` are stored, as an engine does with
        one depth; the logits [num_tokens, vocabulary]."""
        rows = Fed(ids[num_seen + 1 :], num_seen, hidden[num_seen : len(ids) - 1])
        logits = []
        for _ in range(num_tokens):
            last = self.forward([rows])[0][-1:]
            logits.append(self.drafter.logits(last)[0])
            rows = Fed([int(logits[-1].argmax())], rows.start + len(rows.token_ids), last)
        return torch.stack(logits)

    def propose_in_turn(
        self, ids: Sequence[int], hidden: torch.Tensor, num_tokens: int, num_again: int
    ) -> torch.Tensor:
        """Propose with a depth for each token; every depth computes the last `num_again` rows again."""
        start = max(0, len(ids) - 1 - num_again)
        tokens, state = list(ids[start + 1 :]), hidden[start : len(ids) - 1]
        logits = []
        for depth in range(num_tokens):
            state = self.forward([Fed(tokens, start, state)], depth)[0]
            logits.append(self.drafter.logits(state[-1:])[0])
            tokens = [*tokens[1:], int(logits[-1].argmax())]
        return torch.stack(logits)
