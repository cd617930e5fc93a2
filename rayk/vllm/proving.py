"""A KV connector for vLLM that proves another one: `ProvingConnector` around any KVConnectorBase_V1.

    vllm serve ... --kv-transfer-config '{"kv_connector": "NixlConnector",
        "kv_connector_module_path": "rayk.vllm.proving", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"secret_file": "/run/secrets/kv", "on_mismatch": "report"}}'

This module has a class for every name that vLLM's factory knows: it is that connector, proven. Since the
config bears the inner connector's own name, all that vLLM derives from a name is derived as without us.
Where vLLM 0.32.0 looks at a name or a class:

- platforms/cpu.py:424-438 sets VLLM_SSM_CONV_STATE_LAYOUT where `has_connector` names one of NIXL's
- config/vllm.py:1188 (routed experts), :1476 (DCP sizes), :1802 and :1836 (HiSparse), :3229 and :3266 (DCP
  interleave), config/kv_transfer.py:21-35 (host pool), v1/utils.py:707 (usage report): by name
- config/vllm.py:1911 asks the class `requires_piecewise_for_cudagraph`; v1/attention/backends/utils.py:335
  by distributed/kv_transfer/kv_connector/utils.py:57 `get_required_kvcache_layout`; .../v1/metrics.py:75
  `build_kv_connector_stats` and :156 `build_prom_metrics`: each asks the inner class
- config/vllm.py:2177, .../factory.py:56 and v1/core/sched/scheduler.py:3045 ask whether it is SupportsHMA:
  the made class is if the inner one is; factory.py:139 looks at MultiConnector's children by its name

`"kv_connector": "ProvingConnector"` with `"inner": "NixlConnector"` (and `"inner_module_path"` for one that
vLLM does not know) is the same class for inner connectors of which nothing goes by name. Where something
would differ it refuses at start and says which name to take. `ProvingConnectorWithoutHMA` is for inner
connectors that are not SupportsHMA. A MultiConnector is proven as a whole, not its children: vLLM reads
children's stats by their names. vLLM logs its arguments: `secret_file` keeps the secret out of its log.
"""

from __future__ import annotations

import abc
import copy
import functools
import importlib
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.version import __version__ as version

from rayk.types.config import TESTED_VLLM
from rayk.types.errors import Unsupported, UserError
from rayk.vllm.halves import Notes, SchedulerHalf, WorkerHalf
from rayk.vllm.proof_verifier import LOGGER
from rayk.vllm.proving_stats import INNER, INNER_CLASS, PROOF, ProvingMetrics, ProvingStats
from rayk.vllm.settings import WHERE, read_settings, without_ours

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
LOADS_AT_ONCE = ("ExampleConnector",)
"""Whose loads within a step are over with `start_load_kv`, unless they say that they work layer by layer."""
_CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


@dataclass
class ProvingMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What a step tells the workers: the inner connector's metadata, and the proof's notes."""

    inner: KVConnectorMetadata
    notes: Notes


@dataclass
class ProvingHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler at start: the inner connector's metadata and its proof server."""

    inner: KVConnectorHandshakeMetadata | None
    served_at: tuple[str, int, str] | None


@dataclass
class ProvingWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell the scheduler after a step: the inner connector's metadata, and verified requests."""

    inner: KVConnectorWorkerMetadata | None
    verified: list[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ProvingWorkerMetadata:
        """Add another worker's metadata."""
        if self.inner is None or other.inner is None:
            inner = other.inner if self.inner is None else self.inner
        else:
            inner = self.inner.aggregate(other.inner)
        return ProvingWorkerMetadata(inner, [*self.verified, *other.verified])


def inner_config(kv_transfer_config: Any) -> Any:
    """Return the inner connector's KVTransferConfig, without our keys, under its own name."""
    extra = kv_transfer_config.kv_connector_extra_config
    name = extra.get("inner")
    if name is None and kv_transfer_config.kv_connector not in _OWN_NAMES:
        name = kv_transfer_config.kv_connector
    if not isinstance(name, str) or name in _OWN_NAMES:
        raise UserError(f"inner {name!r}", WHERE, 'name the connector to prove: "inner": "NixlConnector"')
    inner = copy.copy(kv_transfer_config)
    inner.kv_connector = name
    inner.kv_connector_module_path = extra.get("inner_module_path")
    inner.kv_connector_extra_config = without_ours(extra)
    return inner


def _inner_view(vllm_config: Any) -> tuple[type[KVConnectorBase_V1], Any]:
    """Return the inner connector's class, and vLLM's config as it would be with it."""
    inner = copy.copy(vllm_config)
    inner.kv_transfer_config = inner_config(vllm_config.kv_transfer_config)
    return KVConnectorFactory.get_connector_class(inner.kv_transfer_config), inner


def _refuse_unlike_conv_layout(vllm_config: Any, inner: Any) -> None:
    """Refuse a name of ours that hides NIXL's, or a MultiConnector with such a child, from the CPU platform,
    unless the layout of convolution states is the one that the platform would set."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.platforms import current_platform

    outer = vllm_config.kv_transfer_config
    is_hidden = any(inner.has_connector(name) and not outer.has_connector(name) for name in NIXL)
    is_hybrid = vllm_config.model_config is not None and vllm_config.model_config.has_inner_state
    if not is_hidden or not current_platform.is_cpu() or not is_hybrid:
        return
    if get_conv_state_layout() != "DS":
        raise Unsupported(
            f'"kv_connector": "{outer.kv_connector}" around {inner.kv_connector} leaves convolution states '
            f"in the layout {get_conv_state_layout()}, vLLM would choose DS: write "
            f'"kv_connector": "{inner.kv_connector}" with the same "kv_connector_module_path", or set '
            f"{_CONV_LAYOUT}=DS"
        )


class _Proving(KVConnectorBase_V1):  # type: ignore[misc]
    """Delegates what vLLM asks of a connector to the inner one (`_delegate_all`), with a proof beside it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        inner_class, self._inner_vllm_config = _inner_view(vllm_config)
        self._refuse_unlike_hma(vllm_config, inner_class)
        _refuse_unlike_conv_layout(vllm_config, self._inner_vllm_config.kv_transfer_config)
        self._cores = _cores()
        self.inner: Any = inner_class(self._inner_vllm_config, role, kv_cache_config)
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(self._settings, vllm_config.parallel_config.world_size)
            if version.partition("+")[0] != TESTED_VLLM:
                LOGGER.warning("KV proof: this is vLLM %s, rayk is tested with %s", version, TESTED_VLLM)
        self._served_at: dict[int, tuple[str, int, str]] = {}
        self._bad_blocks: set[int] = set()

    def _refuse_unlike_hma(self, vllm_config: Any, inner_class: type[KVConnectorBase_V1]) -> None:
        is_on = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        has = KVConnectorFactory.supports_hma_config(self._inner_vllm_config.kv_transfer_config)
        if is_on and isinstance(self, SupportsHMA) and not has:
            raise Unsupported(
                f"{inner_class.__name__} does not support the hybrid KV cache manager: write "
                f'"kv_connector": "{_WITHOUT_HMA}", or set --disable-hybrid-kv-cache-manager'
            )
        if has and not isinstance(self, SupportsHMA):
            raise Unsupported(
                f"{inner_class.__name__} supports the hybrid KV cache manager, which vLLM turns off around "
                f'{type(self).__name__}: write "kv_connector": "{ProvingConnector.__name__}"'
            )

    def __getattr__(self, name: str) -> Any:
        # What only the inner class has.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    # What vLLM asks the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        inner_class, inner = _inner_view(vllm_config)
        layout: str | None = inner_class.get_required_kvcache_layout(inner)
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        config = KVTransferConfig(
            kv_connector=cls.__name__, kv_role="kv_both", kv_connector_extra_config=extra_config
        )
        inner = inner_config(config)
        inner_class = KVConnectorFactory.get_connector_class(inner)
        return bool(inner_class.requires_piecewise_for_cudagraph(inner.kv_connector_extra_config))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ProvingStats:
        told = dict(data or {})
        if isinstance(told.get(INNER), Mapping):
            module, _, name = told[INNER_CLASS].partition(":")
            inner_class = getattr(importlib.import_module(module), name)
            told[INNER] = inner_class.build_kv_connector_stats(told[INNER])
        return ProvingStats(told)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ProvingMetrics:
        inner_class, inner = _inner_view(vllm_config)
        common = metric_types, labelnames, per_engine_labelvalues
        return ProvingMetrics(inner_class.build_prom_metrics(inner, *common), vllm_config, *common)

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, is_async = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        self._scheduler.matched(request.request_id, num_computed_tokens, is_async)
        return found, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.before_alloc(request.kv_transfer_params)
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
        self._scheduler.allocated(
            request.request_id,
            request.kv_transfer_params,
            blocks.get_block_ids(),
            num_external_tokens,
            self._loader(request.request_id),
            self._sources(request, num_external_tokens),
        )

    def _sources(self, request: Any, num_external_tokens: int) -> set[str] | None:
        """Return what vLLM calls the places that a request is loaded from; None where its version does not
        tell."""
        ask_inner = getattr(self.inner, "get_external_cache_hit_sources", None)
        if ask_inner is None or num_external_tokens <= 0:
            return None
        return {source.value for source in ask_inner(request, num_external_tokens)}

    def _loader(self, request_id: str) -> str:
        """Name the class that loads a request: of a MultiConnector, the child that it chose."""
        child = getattr(self.inner, "_requests_to_connector", {}).get(request_id)
        return type(self.inner if child is None else self.inner._connectors[child]).__name__

    def build_connector_meta(self, scheduler_output: Any) -> ProvingMetadata:
        inner = self.inner.build_connector_meta(scheduler_output)
        return ProvingMetadata(inner, self._scheduler.take_notes())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        is_kept, params = self.inner.request_finished(request, block_ids)
        return is_kept, self._scheduler.finished(request, (block_ids,), params)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self.inner, SupportsHMA):
            is_kept, params = self.inner.request_finished_all_groups(request, block_ids)
        else:  # The hybrid manager is off: there is one group.
            is_kept, params = self.inner.request_finished(request, block_ids[0])
        return is_kept, self._scheduler.finished(request, block_ids, params)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, ProvingWorkerMetadata):
            self._scheduler.verified(told.verified)
            connector_output.kv_connector_worker_meta = told.inner
        try:
            self.inner.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = told

    def has_pending_push_work(self) -> bool:
        if self.inner.has_pending_push_work():
            return True
        return self.scheduler is not None and self.scheduler.has_pending()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        inner = self._take_served(metadata)
        if inner:
            self.inner.set_xfer_handshake_metadata(inner)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        inner = self._take_served(metadata)
        if inner:
            self.inner.set_xfer_handshake_metadata_pp_aware(inner)

    def _take_served(self, metadata: Mapping[Any, Any]) -> dict[Any, Any]:
        """Tell the scheduler half where workers serve; return the rest, which is for the inner connector."""
        for rank, told in metadata.items():
            if told.served_at is not None:
                self._served_at[rank[1] if isinstance(rank, tuple) else rank] = told.served_at
        self._scheduler.set_servers(self._served_at)
        return {rank: told.inner for rank, told in metadata.items() if told.inner is not None}

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler is not None, "asked in a worker"
        return self.scheduler

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        from rayk.vllm.caches import ProvenCaches
        from rayk.vllm.planted import plant_at_worker
        from rayk.vllm.transfer_log import TransferLog

        if self.worker is not None:  # Registered anew: its port is needed again.
            self.worker.close()
            self.worker = None
        self.inner.register_kv_caches(kv_caches)
        config, kept = self._vllm_config, self._kv_cache_config
        rank, size = get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size
        caches = ProvenCaches(config, kept, kv_caches, rank, size)
        with _on_cores(self._cores):
            self.worker = WorkerHalf(
                self._settings,
                caches,
                rank,
                [group.kv_cache_spec.block_size for group in kept.kv_cache_groups],
                serves=self._kv_transfer_config.is_kv_producer,
                loads_at_once=self._loads_at_once(),
                planted=plant_at_worker(self._settings.planted, config, kept, caches),
            )
        nixl_worker = getattr(self.inner, "connector_worker", None)
        if hasattr(nixl_worker, "nixl_wrapper") and hasattr(nixl_worker, "_recving_transfers"):
            self.worker.transfer_log = TransferLog(nixl_worker)

    def _loads_at_once(self) -> bool:
        inner_class = type(self.inner)
        extra = self._inner_vllm_config.kv_transfer_config.kv_connector_extra_config
        is_known = inner_class.__name__ in LOADS_AT_ONCE
        return is_known and not inner_class.requires_piecewise_for_cudagraph(extra)

    def get_handshake_metadata(self) -> ProvingHandshake:
        served_at = self.worker.served_at if self.worker is not None else None
        return ProvingHandshake(self.inner.get_handshake_metadata(), served_at)

    def handle_preemptions(self, kv_connector_metadata: ProvingMetadata) -> None:
        self._begin_step(kv_connector_metadata)
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: ProvingMetadata) -> None:
        self._begin_step(connector_metadata)
        self.inner.bind_connector_metadata(connector_metadata.inner)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.inner.clear_connector_metadata()
        super().clear_connector_metadata()

    def _begin_step(self, metadata: ProvingMetadata) -> None:
        """Begin a step once, in whichever call comes first, before anything is written."""
        notes, metadata.notes = metadata.notes, Notes()
        if self.worker is not None:
            self.worker.begin_step(notes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.inner.start_load_kv(forward_context, **kwargs)
        if self.worker is not None:
            self._bad_blocks |= self.worker.loaded()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.inner.get_transfer_results(finished_req_ids)
        if self.worker is None:
            return results
        told = self.worker.received(results.finished_recving, results.failed_recving)
        return KVConnectorTransferResults(results.finished_sending, told.arrived, told.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad | set(self.inner.get_block_ids_with_load_errors())

    def get_kv_connector_stats(self) -> ProvingStats | None:
        inner = self.inner.get_kv_connector_stats()
        proof = self.worker.counts.take() if self.worker is not None else None
        if proof is None and inner is None:
            return None
        inner_class = type(self.inner)
        name = f"{inner_class.__module__}:{inner_class.__qualname__}"
        stats = ProvingStats({PROOF: proof, INNER: inner, INNER_CLASS: name})
        return None if stats.is_empty() else stats

    def build_connector_worker_meta(self) -> ProvingWorkerMetadata | None:
        inner = self.inner.build_connector_worker_meta()
        verified = self.worker.take_verified() if self.worker is not None else []
        return ProvingWorkerMetadata(inner, verified) if inner is not None or verified else None

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.inner.shutdown()

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker is not None, "asked before register_kv_caches, or in the scheduler"
        return self.worker

    # For rayk's own engines, by collective_rpc

    def proof_results(self, request_id: str) -> dict[str, Any]:
        """Return what was found of a request at D, as WorkerHalf.proof_results does."""
        return self._worker.proof_results(request_id)

    def kept_rows(self, request_id: str) -> dict[tuple[int, str, int], Any]:
        """Return the rows that P kept of a request, as WorkerHalf.kept_rows does."""
        return self._worker.kept_rows(request_id)

    def forget(self) -> None:
        """Forget all records and results."""
        self._worker.forget()


def _cores() -> set[int]:
    """Return the cores that this thread may run on; none where the platform does not tell."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    """Let threads that start within the block run on these cores. NIXL's CPU worker has pinned its own thread
    to one core, the same in all engines of a machine (nixl/base_worker.py:702-718), which our threads would
    inherit."""
    before = _cores()
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def _delegate_all(cls: type[KVConnectorBase_V1]) -> None:
    """Delegate every public method and property of vLLM's base class that `cls` does not define to the inner
    connector, including those of later versions."""
    for name, member in vars(KVConnectorBase_V1).items():
        if name.startswith("_") or name in vars(cls):
            continue
        if isinstance(member, property):
            setattr(cls, name, property(operator.attrgetter(f"inner.{name}")))
        elif not isinstance(member, classmethod | staticmethod):
            setattr(cls, name, _delegate(name, member))
    abc.update_abstractmethods(cls)


def _delegate(name: str, member: Any) -> Any:
    @functools.wraps(member)
    def ask_inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    ask_inner.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return ask_inner


_delegate_all(_Proving)


class ProvingConnector(_Proving, SupportsHMA):  # type: ignore[misc]
    """Proves the connector that `inner` names."""


class ProvingConnectorWithoutHMA(_Proving):
    """Proves a connector that does not support the hybrid KV cache manager."""


_WITHOUT_HMA = ProvingConnectorWithoutHMA.__name__
_OWN_NAMES = (ProvingConnector.__name__, _WITHOUT_HMA)


@functools.cache
def proven(name: str) -> type[_Proving]:
    """Return the class of this name: the connector that vLLM knows by it, proven. Raises ValueError for a
    name that vLLM does not know."""
    inner = KVConnectorFactory.get_connector_class_by_name(name)
    base = ProvingConnector if issubclass(inner, SupportsHMA) else ProvingConnectorWithoutHMA
    return type(name, (base,), {"__module__": __name__, "__doc__": f"vLLM's {name}, proven."})


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return proven(name)
    except ValueError as error:
        raise AttributeError(f"neither rayk nor vLLM has a connector {name}") from error
