"""P and D of vLLM on stand-ins of its workers: halves of the proving connector, and requests between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rayk.vllm.halves import SchedulerHalf, WorkerHalf
from rayk.vllm.planted import plant_at_worker
from rayk.vllm.settings import read_settings
from tests.pd import HANG_S
from tests.vllm.standins import Model, Worker, keys_transposed

SECRET = {"secret": "a secret of twenty letters"}
MODEL = Model(size_v=8)
TOKENS = 70
FULL, STATES, WINDOW, CHUNKS = ALL_GROUPS = range(4)
"""vLLM's KV cache groups of a stand-in."""
WIDE = Model(query_heads=8, kv_heads=4, size_v=8)
"""With two heads to each of two ranks."""


@dataclass
class Engine:
    """One side: a scheduler half and its workers."""

    workers: list[Worker]
    scheduler: SchedulerHalf
    halves: list[WorkerHalf]
    clock: list[float]


def make_engine(
    tp_size: int,
    *,
    is_producer: bool,
    block_size: int = 16,
    model: Model = MODEL,
    groups: Sequence[int] = ALL_GROUPS,
    loads_at_once: bool = True,
    planted_ranks: Sequence[int] | None = None,
    **extra,
) -> Engine:
    settings = read_settings({**SECRET, "timeout_s": HANG_S, **extra})
    clock = [0.0]
    workers = [
        Worker(model, (rank, tp_size), block_size, keys_transposed, num_blocks=48) for rank in range(tp_size)
    ]
    made = []
    for rank, worker in enumerate(workers):
        config = worker.kv_cache_config
        config.kv_cache_groups = [config.kv_cache_groups[group] for group in groups]
        caches = worker.prove()
        name = settings.planted if planted_ranks is None or rank in planted_ranks else None
        planted = plant_at_worker(name, worker.vllm_config, worker.kv_cache_config, caches)
        made.append(
            WorkerHalf(
                settings,
                caches,
                rank,
                [group.kv_cache_spec.block_size for group in config.kv_cache_groups],
                serves=is_producer,
                loads_at_once=loads_at_once,
                planted=planted,
            )
        )

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    scheduler = SchedulerHalf(settings, tp_size, lambda: clock[0], sleep)
    scheduler.set_servers({rank: half.served_at for rank, half in enumerate(made) if half.served_at})
    return Engine(workers, scheduler, made, clock)


@contextmanager
def pair(p_tp: int = 2, d_tp: int = 1, p: dict[str, Any] | None = None, **d: Any) -> Iterator[Pair]:
    made = Pair(
        make_engine(p_tp, is_producer=True, **(p or {"keep_rows": True})),
        make_engine(d_tp, is_producer=False, block_size=32, **{"keep_rows": True, **d}),
        d.get("model", MODEL),
    )
    try:
        yield made
    finally:
        for half in (*made.producer.halves, *made.consumer.halves):
            half.close()


@dataclass
class Pair:
    producer: Engine
    consumer: Engine
    model: Model = MODEL

    def prefill(self, name: str = "r", seed: int = 0) -> dict[str, Any]:
        """P computes a request; returns what its proxy passes on."""
        values = self.model.values(TOKENS, seed)
        ids = self.producer.workers[0].block_ids(TOKENS, seed)
        for worker in self.producer.workers:
            worker.write(values, ids)
        request = SimpleNamespace(
            request_id=f"p-{name}",
            kv_transfer_params={"do_remote_decode": True},
            num_computed_tokens=TOKENS,
            num_prompt_tokens=TOKENS,
        )
        inner = {"do_remote_prefill": True, "remote_block_ids": ids}
        params = self.producer.scheduler.finished(request, ids, inner)
        notes = self.producer.scheduler.take_notes()
        for half in self.producer.halves:
            half.begin_step(notes)
        assert params is not None
        return params

    def expect(
        self,
        params: dict[str, Any],
        name: str = "r",
        seed: int = 0,
        *,
        is_async: bool = True,
        sources: Sequence[str] | None = None,
        num_local: int = 0,
    ) -> list:
        """D makes room for it, and has its first `num_local` tokens already."""
        scheduler = self.consumer.scheduler
        ids = self.consumer.workers[0].block_ids(TOKENS, seed)
        scheduler.matched(f"d-{name}", num_local, is_async)
        scheduler.before_alloc(params)
        scheduler.allocated(f"d-{name}", params, ids, TOKENS - num_local, "SomeConnector", sources)
        notes = scheduler.take_notes()
        for half in self.consumer.halves:
            half.begin_step(notes)
        return ids

    def move(self, ids: list, seed: int = 0) -> None:
        """The inner connector brings it."""
        for worker in self.consumer.workers:
            worker.write(self.model.values(TOKENS, seed), ids)

    def results(self, name: str = "r") -> list[dict[str, Any]]:
        """Every D worker's verdict."""
        found = []
        for half in self.consumer.halves:
            result = half.proof_results(f"d-{name}")
            until = time.monotonic() + HANG_S
            while result["status"] == "pending":
                assert time.monotonic() < until
                time.sleep(0.001)
                result = half.proof_results(f"d-{name}")
            found.append(result)
        return found

    def run(self, name: str = "r", seed: int = 0, move_seed: int | None = None) -> list[dict[str, Any]]:
        ids = self.expect(self.prefill(name, seed), name, seed)
        self.move(ids, seed if move_seed is None else move_seed)
        for half in self.consumer.halves:
            told = half.received({f"d-{name}"}, set())
            assert (told.arrived, told.failed) == ({f"d-{name}"}, set())
        return self.results(name)
