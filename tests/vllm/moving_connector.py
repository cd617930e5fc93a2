"""A connector of vLLM's kind for tests: P's blocks are copied to D within one process, between steps."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

CACHES: dict[str, dict[str, Any]] = {}
"""Engine id -> its caches by layer."""


@dataclass
class Moves(KVConnectorMetadata):
    loads: list[tuple[str, str, Any, Any]] = field(default_factory=list)


@dataclass
class MovedStats(KVConnectorStats):
    def aggregate(self, other):
        self.data["moved"] += other.data["moved"]
        return self

    def reduce(self):
        return {"Moved": self.data["moved"]}

    def is_empty(self):
        return not self.data.get("moved")


class MovedMetrics(KVConnectorPromMetrics):
    def __init__(self, *args):
        super().__init__(*args)
        labelnames = args[2]
        self._moved = self._counter_cls(name="vllm:moved", documentation="Moved.", labelnames=labelnames)

    def observe(self, transfer_stats_data, engine_idx=0):
        self._moved.labels(*self.per_engine_labelvalues[engine_idx]).inc(transfer_stats_data["moved"])


class MovingConnector(KVConnectorBase_V1, SupportsHMA):
    """Each request is moved whole when D has room for it."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._moves = Moves()
        self._arrived: set[str] = set()
        self.num_shut_down = 0
        if role == KVConnectorRole.WORKER:  # As NIXL's does on CPUs.
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return bool(extra_config.get("layerwise"))

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return MovedStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args):
        return MovedMetrics(*args)

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        here = self._vllm_config.kv_transfer_config.engine_id
        return True, {
            "do_remote_prefill": True,
            "engine": here,
            "remote_block_ids": [list(b) for b in block_ids],
        }

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        params = request.kv_transfer_params
        if num_external_tokens:
            self._moves.loads.append(
                (request.request_id, params["engine"], params["remote_block_ids"], blocks.get_block_ids())
            )

    def build_connector_meta(self, scheduler_output):
        moves, self._moves = self._moves, Moves()
        return moves

    def register_kv_caches(self, kv_caches):
        CACHES[self._vllm_config.kv_transfer_config.engine_id] = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        mine = CACHES[self._vllm_config.kv_transfer_config.engine_id]
        for request_id, engine, theirs, ours in self._get_connector_metadata().loads:
            for group, spec in enumerate(self._kv_cache_config.kv_cache_groups):
                for name in spec.layer_names:
                    there, here = CACHES[engine][name].kv_cache, mine[name].kv_cache
                    parts = zip(there, here, strict=True) if isinstance(there, tuple) else [(there, here)]
                    for source, destination in parts:
                        destination[ours[group]] = source[theirs[group]]
            self._arrived.add(request_id)

    def wait_for_layer_load(self, layer_name):
        raise NotImplementedError

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        raise NotImplementedError

    def wait_for_save(self):
        pass

    def get_finished(self, finished_req_ids):
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def get_kv_connector_stats(self):
        return MovedStats(data={"moved": 1})

    def shutdown(self):
        self.num_shut_down += 1
