"""An engine's rank, scheduler and block manager in one thread, a step at a time: tests decide what each step
may compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rayk.engine.graphs import Recorder
from rayk.engine.rank import EngineRank
from rayk.kv.manager import KVCacheManager
from rayk.parallel.local import LocalComm
from rayk.sched.batching import Scheduler
from rayk.sched.request_state import RequestState
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from tests.pd import NAN_POISON, make_request


class Stepped:
    """Greedy requests on one rank; its cache is NaN where nobody has written."""

    def __init__(self, model: Path, recorder: Recorder | None = None, **settings: Any) -> None:
        self.config = EngineConfig(model=str(model), **{"num_blocks": 140, "max_seqs": 4, **settings})
        self.rank = EngineRank(self.config, LocalComm(), poison=NAN_POISON, recorder=recorder)
        self.restart(self.config.num_blocks)

    def restart(self, num_blocks: int) -> None:
        """Forget all requests; at most the rank's own number of blocks are handed out from now on."""
        assert num_blocks <= self.config.num_blocks
        self.rank.caches.buffer.fill_(NAN_POISON)
        caching = self.config.prefix_caching
        self.manager = KVCacheManager(self.rank.plan.groups, num_blocks, prefix_caching=caching)
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=self.config.max_batch_tokens,
            max_seqs=self.config.max_seqs,
            max_positions=self.rank.model_config.max_positions,
        )
        self.batches: list[ScheduledBatch] = []
        """Of all steps."""
        self.logits: dict[str, list[torch.Tensor]] = {}
        """By request, of every token sampled: [vocab]."""

    @property
    def num_steps(self) -> int:
        """Steps that computed anything."""
        return len(self.batches)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> RequestState:
        """Queue a request."""
        return self.scheduler.add(make_request(request_id, prompt, max_tokens))

    def fits(self, num_tokens: int) -> bool:
        """Whether the pool holds one request of so many tokens."""
        needed = self.manager.max_request_blocks(num_tokens, self.config.max_batch_tokens)
        return needed < self.manager.pool.num_blocks

    def step(self, max_batch_tokens: int | None = None) -> None:
        """One step, of at most so many tokens."""
        self.scheduler.max_batch_tokens = max_batch_tokens or self.config.max_batch_tokens
        batch = self.scheduler.schedule()
        if batch is None:
            return
        logits = self.rank.step(batch)
        assert bool(logits.isfinite().all()), "what nobody wrote was read"
        wanted = [r.request_id for r in batch.requests if r.needs_logits]
        for name, row in zip(wanted, logits.clone(), strict=True):
            self.logits.setdefault(name, []).append(row)
        self.scheduler.update(batch, dict(zip(wanted, logits.argmax(-1).tolist(), strict=True)))
        self.scheduler.check_integrity()
        self.batches.append(batch)

    def finish(self, max_batch_tokens: int | None = None) -> None:
        """Step until all requests have ended; every block is then free."""
        while self.scheduler.has_work:
            before = self.num_steps
            self.step(max_batch_tokens)
            assert self.num_steps > before, "requests wait for ever"
        assert self.manager.pool.num_free_blocks == self.manager.pool.num_blocks - 1


def run_greedy(rank: EngineRank, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Greedy decoding with the blocks of each group handed out one after the other."""
    groups = rank.plan.groups
    tables: list[list[list[int]]] = []
    next_block = 1
    for prompt, length in zip(prompts, lengths, strict=True):
        row = []
        for group in groups:
            count = -(-(len(prompt) + length) // group.spec.block_size)
            row.append(list(range(next_block, next_block + count)))
            next_block += count
        tables.append(row)
    tokens = [list(p) for p in prompts]
    computed = [0] * len(prompts)
    for step in range(1, max(lengths) + 1):
        live = [i for i, n in enumerate(lengths) if len(tokens[i]) - len(prompts[i]) < n]
        batch = ScheduledBatch(
            step=step,
            requests=tuple(
                ScheduledRequest(
                    request_id=str(i),
                    row=i,
                    num_computed_tokens=computed[i],
                    token_ids=tuple(tokens[i][computed[i] :]),
                    new_block_ids=tuple((0, tuple(ids)) if step == 1 else (0, ()) for ids in tables[i]),
                    needs_logits=True,
                )
                for i in live
            ),
        )
        chosen = rank.step(batch).argmax(-1).tolist()
        for i, token in zip(live, chosen, strict=True):
            computed[i] = len(tokens[i])
            tokens[i].append(token)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
