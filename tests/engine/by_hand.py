"""The ranks of an engine without a scheduler: a test says what each step computes, drafts included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from rayk.engine.rank import EngineRank
from rayk.parallel.local import LocalComm
from rayk.parallel.threads import ThreadComm
from rayk.types.batch import Rollback, ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from rayk.types.speculative import SpeculativeConfig
from tests.pd import NAN_POISON

T = TypeVar("T")


class Share(NamedTuple):
    """A row's part of a step."""

    row: int
    tokens: Sequence[int]
    num_drafts: int = 0
    """The last so many of `tokens`."""
    needs_logits: bool = True


class ByHand:
    """Requests by the rows they have. Blocks are handed out as tokens need them, each once; caches are NaN
    where nobody has written."""

    def __init__(
        self,
        model: Path,
        *,
        tp: int = 1,
        num_drafts: int = 0,
        make_recorder: Callable[[], Any] = lambda: None,
        **settings: Any,
    ) -> None:
        """`num_drafts`: the most of a request in a step; 0: the engine knows of none."""
        speculative = SpeculativeConfig(method="ngram", num_tokens=num_drafts) if num_drafts else None
        settings = {"num_blocks": 600, "max_seqs": 3, "attention_backend": "reference", **settings}
        config = EngineConfig(model=str(model), tp=tp, speculative=speculative, **settings)
        comms = ThreadComm.make_group(tp) if tp > 1 else [LocalComm()]
        self._pool = ThreadPoolExecutor(tp)
        self.ranks = self._together(
            lambda comm: EngineRank(config, comm, poison=NAN_POISON, recorder=make_recorder()), comms
        )
        self.restart()

    def restart(self) -> None:
        """Forget all requests."""
        for rank in self.ranks:
            rank.caches.buffer[: rank.caches.geometry.pages_bytes].fill_(NAN_POISON)
        max_seqs = self.ranks[0].config.max_seqs
        self.num_steps = 0
        self.computed = [0] * max_seqs
        """By row, tokens that count."""
        self.tables: list[list[list[int]]] = [
            [[] for _ in self.ranks[0].plan.groups] for _ in range(max_seqs)
        ]
        """By row and KV group."""
        self._next_block = 1
        self._last: dict[int, Share] = {}
        self._known: set[int] = set()
        """Rows whose blocks the ranks have been told of."""

    def _together(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        return list(self._pool.map(work, items))

    def step(self, *shares: Share) -> dict[int, torch.Tensor]:
        """Compute one step. Returns each row's logits [1 + drafts, vocab], rank 0's. All of its tokens count
        unless `keep` says otherwise."""
        self.num_steps += 1
        batch = ScheduledBatch(step=self.num_steps, requests=tuple(map(self._request, shares)))
        self._last = {share.row: share for share in shares}
        logits = self._together(lambda rank: rank.step(batch), self.ranks)[0].clone()
        for share in shares:
            self.computed[share.row] += len(share.tokens)
        wanted = [share for share in shares if share.needs_logits]
        parts = logits.split([1 + share.num_drafts for share in wanted])
        assert all(bool(part.isfinite().all()) for part in parts), "what nobody wrote was read"
        return {share.row: part for share, part in zip(wanted, parts, strict=True)}

    def keep(self, **num_kept: int) -> None:
        """Let only the first so many tokens of rows' last step count: `r0=2` of row 0."""
        rollbacks = []
        for name, kept in num_kept.items():
            row = int(name[1:])
            self.computed[row] += kept - len(self._last[row].tokens)
            rollbacks.append(Rollback(row, kept))
        self._together(lambda rank: rank.roll_back(rollbacks), self.ranks)

    def fork(self, row: int, other: int, num_tokens: int) -> None:
        """Let `other` begin with the blocks that hold the first tokens of `row`, which computes no more."""
        self.computed[other] = num_tokens
        for group, table, own in zip(
            self.ranks[0].plan.groups, self.tables[row], self.tables[other], strict=True
        ):
            assert not own, f"row {other} has blocks"
            size = group.spec.block_size
            assert group.spec.has_token_rows or num_tokens % size == 0, "there is no state in the middle"
            own += table[: -(-num_tokens // size)]
        self._known.discard(other)

    def _request(self, share: Share) -> ScheduledRequest:
        before = self.computed[share.row]
        updates = []
        for group, table in zip(self.ranks[0].plan.groups, self.tables[share.row], strict=True):
            start = len(table) if share.row in self._known else 0
            missing = -(-(before + len(share.tokens)) // group.spec.block_size) - len(table)
            new = range(self._next_block, self._next_block + max(0, missing))
            self._next_block += len(new)
            table += new
            updates.append((start, tuple(table[start:])))
        self._known.add(share.row)
        return ScheduledRequest(
            request_id=str(share.row),
            row=share.row,
            num_computed_tokens=before,
            token_ids=tuple(share.tokens),
            new_block_ids=tuple(updates),
            needs_logits=share.needs_logits,
            num_drafts=share.num_drafts,
        )
