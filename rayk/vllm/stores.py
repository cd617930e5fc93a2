"""vLLM's caches of KV as stores, which `rayk conformance` tries for identity: its prefix cache, its offload
to host memory and files, and its connectors. No engine, model or GPU is needed, only an engine's
configuration. Stores run in vLLM's environment, and are asked as its scheduler asks: with requests, hashed by
vLLM.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayk.conformance.store import BaseStore, StoreCase, StoreKey
from rayk.conformance.vllm_adapter import END, LAYER_NAME, ROW_ELEMENTS, VllmStore

BLOCK_TOKENS = 32
"""The least that vLLM's attention on CPUs takes."""
BLOCK_BYTES = BLOCK_TOKENS * ROW_ELEMENTS * 2
NUM_KEPT = 12
"""Blocks that a store keeps which gives blocks up."""
PENDING_S = 20.0
LAYOUT = "LBHNC"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": ROW_ELEMENTS // 2,
    "vocab_size": 10_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
"""Config of a checkpoint without weights, which nobody reads."""
ONE_REVISION = "an engine has one revision of its model, and its cache ends with it"


def engine_config(
    folder: str, revision: str, connector: str, extra: dict[str, Any], module_path: str | None = None
) -> Any:
    """vLLM's configuration of an engine with a connector, as its command line makes it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    model = Path(folder) / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    arguments = EngineArgs(
        model=str(model),
        revision=revision,
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module_path,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    made = arguments.create_engine_config()
    made.cache_config.kv_cache_layout = LAYOUT  # an engine would choose it at its start
    return made


def cache_config(num_blocks: int) -> Any:
    """Make vLLM's description of one layer's KV cache."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=ROW_ELEMENTS // 2, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(layer_names=[LAYER_NAME.format(0)], kv_cache_spec=spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def form_groups(config: Any, folder: str) -> None:
    """Make the process groups of an engine of one rank, which some workers ask for their rank, once."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )

    if not model_parallel_is_initialized():
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/groups", 0, "gloo")
            initialize_model_parallel()


class Requests:
    """Makes vLLM's requests of keys, with its hasher of blocks."""

    def __init__(self) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._numbers = itertools.count()

    def make(self, key: StoreKey, request_id: str = "") -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        adapter = key.adapter
        return Request(
            request_id=request_id or f"request-{next(self._numbers)}",
            prompt_token_ids=[*key.token_ids, *END],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            # Weights that are loaded again in place keep their adapter's number.
            lora_request=None if adapter is None else LoRARequest(adapter.name, 1, adapter.path),
            cache_salt=key.salt,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=item.hash,
                    mm_hash=item.hash,
                    mm_position=PlaceholderRange(offset=item.offset, length=item.length),
                )
                for item in key.multimodal
            ],
            block_hasher=self._hasher,
        )


class PrefixCache(BaseStore):
    """vLLM's prefix cache: its KVCacheManager over a pool of blocks."""

    block_tokens = BLOCK_TOKENS
    max_blocks = NUM_KEPT

    def __init__(self, folder: str) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self._requests = Requests()
        self._manager = KVCacheManager(
            cache_config(NUM_KEPT + 1), 8192, scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS
        )
        self._memory: dict[int, bytes] = {}

    @classmethod
    def supports(cls, case: StoreCase) -> str | None:
        return ONE_REVISION if "revision" in case.fields else None

    def save(self, key: StoreKey, pages: Sequence[bytes]) -> None:
        request = self._requests.make(key)
        cached, num_cached, _ = self._manager.get_computed_blocks(request)
        new = request.num_tokens - num_cached
        taken = self._manager.allocate_slots(request, new, num_cached, cached)
        assert taken is not None, "more blocks than there are"
        (ids,) = self._manager.get_block_ids(request.request_id)
        first = num_cached // BLOCK_TOKENS
        self._memory |= zip(ids[first:], pages[first:], strict=False)
        self._manager.free(request)

    def look_up(self, key: StoreKey) -> Sequence[bytes]:
        cached, _, _ = self._manager.get_computed_blocks(self._requests.make(key))
        return [self._memory[block] for block in cached.get_block_ids()[0]]


class HostOffload(BaseStore):
    """vLLM's offload to host memory: the manager of OffloadingConnector, and the keys that it is asked by."""

    block_tokens = BLOCK_TOKENS
    max_blocks: int | None = NUM_KEPT
    extra: dict[str, Any] = {"cpu_bytes_to_use": NUM_KEPT * BLOCK_BYTES}

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._requests = Requests()
        self._managers: dict[str, tuple[Any, Any]] = {}
        """Revision -> manager of offloaded blocks, their memory."""

    @classmethod
    def supports(cls, case: StoreCase) -> str | None:
        return ONE_REVISION if "revision" in case.fields else None

    def extra_config(self) -> dict[str, Any]:
        """List the connector's own settings."""
        return dict(self.extra)

    def save(self, key: StoreKey, pages: Sequence[bytes]) -> None:
        manager, memory = self._manager(key.revision)
        context, keys = self._asked(key)
        manager.on_new_request(context)
        made = manager.prepare_store(keys, context)
        assert made is not None, "no room"
        by_key = dict(zip(keys, pages, strict=True))
        for name, chunk in zip(made.keys_to_store, made.store_spec.block_ids.tolist(), strict=True):
            memory[chunk] = by_key[name]
        if made.keys_to_store:
            manager.complete_store(made.keys_to_store, context)
        manager.on_request_finished(context)
        self._settle(manager)

    def look_up(self, key: StoreKey) -> Sequence[bytes]:
        from vllm.v1.kv_offload.base import LookupResult

        manager, memory = self._manager(key.revision)
        context, keys = self._asked(key)
        manager.on_new_request(context)
        found = []
        for name in keys:
            until = time.monotonic() + PENDING_S
            while (answer := manager.lookup(name, context)) not in (LookupResult.HIT, LookupResult.MISS):
                if time.monotonic() > until:
                    raise TimeoutError(f"{answer} after {PENDING_S:g} s")
                self._turn(manager)
            if answer is LookupResult.MISS:
                break
            found.append(name)
        pages: list[bytes] = []
        if found:
            chunks = manager.prepare_load(found, context).block_ids.tolist()
            pages = [bytes(memory[chunk]) for chunk in chunks]
            manager.complete_load(found, context)
        manager.on_request_finished(context)
        self._settle(manager)
        return pages

    def close(self) -> None:
        for manager, _ in self._managers.values():
            manager.shutdown()
        self._managers.clear()

    def memory_of(self, manager: Any) -> Any:
        """Return the memory of the manager's chunks, by chunk."""
        return {}

    def _manager(self, revision: str) -> tuple[Any, Any]:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        if revision not in self._managers:
            config = engine_config(self._folder, revision, "OffloadingConnector", self.extra_config())
            spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache_config(64)))
            manager = spec.get_manager()
            self._managers[revision] = manager, self.memory_of(manager)
        return self._managers[revision]

    def _asked(self, key: StoreKey) -> tuple[Any, list[Any]]:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key

        request = self._requests.make(key)
        keys = [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]
        return ReqContext(req_id=request.request_id), keys[: len(key.token_ids) // BLOCK_TOKENS]

    def _settle(self, manager: Any) -> None:
        """Wait until nothing is on its way between tiers."""
        until = time.monotonic() + PENDING_S
        while manager.has_pending_work():
            if time.monotonic() > until:
                raise TimeoutError(f"work is pending after {PENDING_S:g} s")
            self._turn(manager)

    def _turn(self, manager: Any) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        time.sleep(0.001)


class FileOffload(HostOffload):
    """vLLM's offload to files (TieringOffloadingSpec, fs), which engines of all revisions share."""

    is_persistent = True
    max_blocks = None

    @classmethod
    def supports(cls, case: StoreCase) -> str | None:
        return None

    def extra_config(self) -> dict[str, Any]:
        files = {"type": "fs", "root_dir": f"{self._folder}/pages"}
        return {**self.extra, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [files]}

    def memory_of(self, manager: Any) -> Any:
        return _TierMemory(manager.primary_tier.get_kv_memoryview())


class _TierMemory:
    """A tier's memory: the first bytes of a chunk are its page."""

    def __init__(self, view: memoryview) -> None:
        self._stride, self._bytes = view.strides[0] if view.strides else 0, view.cast("B")

    def __setitem__(self, chunk: int, page: bytes) -> None:
        start = chunk * self._stride
        self._bytes[start : start + len(page)] = page

    def __getitem__(self, chunk: int) -> bytes:
        start = chunk * self._stride
        return bytes(self._bytes[start : start + 32])


class ConnectorStore(VllmStore):
    """A connector that vLLM's factory makes, by its name; `extra_config` are its own settings."""

    block_tokens = BLOCK_TOKENS
    connector = ""
    module_path: str | None = None
    """Module of a connector that is not vLLM's own."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._requests = Requests()
        self._configs: dict[str, Any] = {}

    def extra_config(self) -> dict[str, Any]:
        """List the connector's own settings."""
        return {}

    def make(self, role: str, revision: str) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        if revision not in self._configs:
            extra = self.extra_config()
            self._configs[revision] = engine_config(
                self.folder, revision, self.connector, extra, self.module_path
            )
        form_groups(self._configs[revision], self.folder)
        as_role = KVConnectorRole.SCHEDULER if role == "scheduler" else KVConnectorRole.WORKER
        config = self._configs[revision]
        return KVConnectorFactory.create_connector(config, as_role, cache_config(self.num_blocks))

    def as_vllm(self, request_id: str, key: StoreKey) -> Any:
        return self._requests.make(key, request_id)

    def as_new(self, as_vllm: Any, block_ids: list[int]) -> Any:
        from vllm.v1.core.sched.output import NewRequestData

        return NewRequestData.from_request(as_vllm, (block_ids,))


class ExampleConnector(ConnectorStore):
    """vLLM's ExampleConnector: prompts in files, found if they are equal."""

    connector = "ExampleConnector"
    is_persistent = True
    finds_prefixes = False

    def extra_config(self) -> dict[str, Any]:
        return {"shared_storage_path": f"{self.folder}/prompts"}
