"""Tries connectors written for vLLM's workers (KVConnectorBase_V1), without vLLM.

A subclass of `VllmConnector` makes the connector's two halves, which vLLM calls scheduler and worker, with
any stand-in for vLLM's configuration. This file calls their methods, which it knows by name alone, in the
order of vLLM's model runner and scheduler around one step of each engine:

 producer   build_connector_meta, bind_connector_metadata, start_load_kv, per layer wait_for_layer_load and
            save_kv_layer, wait_for_save, clear_connector_metadata, request_finished, get_finished
 consumer   get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta, then as above

For vLLM, a request is a prompt of one token more than its KV: the consumer computes the last token. (So does
the producer, in a step of its own that is left out here.) Every request has new token ids, so that a cache
that is found by content has only what was saved. A method that a half lacks does what the interface does by
default.

`VllmStore` calls the same methods around single steps, to see whose pages a connector finds for a prompt.
"""

from __future__ import annotations

import itertools
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayk.conformance.store import BaseStore, StoreKey
from rayk.transfer.connector import BaseConnector, ConnectorCase, KVRequest

if TYPE_CHECKING:
    from rayk.kv.caches import CanonicalKVCaches

VOCABULARY = 30_000
LAYER_NAME = "model.layers.{}.self_attn.attn"
END = (7, 7)
"""Follow a store's prompt: the last token is always computed, and some connectors leave a second one out."""
ROW_ELEMENTS = 64
PAGE_BYTES = 32
"""Bytes of a page that the kit makes."""


class VllmConnector(BaseConnector):
    """Adapts a vLLM connector to the protocol of `rayk.transfer.Connector`; a subclass makes both halves.

    Tensors have vLLM's standard shape: per layer [blocks, heads, tokens, K then V], strided as in the rank's
    layout.
    """

    moves_whole_blocks_only: bool = True
    """True for prefix caches; False if the connector also moves partly filled blocks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._worker: Any = None
        self._scheduler: Any = None
        self._sending: dict[str, float] = {}
        """Request id -> deadline, of requests saved after the step."""
        self._receiving: dict[str, tuple[float, frozenset[int]]] = {}
        """Request id -> deadline and blocks, of requests loaded after the step."""

    def make(self, role: str, block_size: int) -> Any:
        """Make the connector's half for a role, "scheduler" or "worker"."""
        raise NotImplementedError

    @classmethod
    def supports(cls, case: ConnectorCase) -> str | None:
        """Support one identical rank of attention on each side; override it if the connector does more."""
        if case.kinds != ("full",):
            return "the adapter describes one group of full attention"
        if case.kv_format != "bfloat16":
            return "the adapter describes keys and values of plain elements"
        for sizes, group in ((case.dcp, "DCP"), (case.pp, "PP"), (case.tp, "TP")):
            if sizes != (1, 1):
                return f"a rank's place in its {group} group comes from vLLM's own process groups"
        if not case.is_alike:
            return "vLLM's metadata tells nothing of the other engine's blocks or layout"
        return None

    def register(self, caches: CanonicalKVCaches) -> None:
        super().register(caches)
        (group,) = caches.geometry.groups
        self._layers = {LAYER_NAME.format(layer): caches.view(layer) for layer in group.group.layers}
        self._block_size = group.block_size
        self._scheduler = self.make("scheduler", self._block_size)
        self._worker = self.make("worker", self._block_size)
        _call(self._worker, "register_kv_caches", self._layers)

    def describe(self) -> bytes:
        return pickle.dumps(_call(self._worker, "get_handshake_metadata"))

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Pass the workers' handshake metadata to the scheduler."""
        told = {rank: pickle.loads(blob) for rank, blob in enumerate(producers)}  # noqa: S301 - our own
        if any(metadata is not None for metadata in told.values()):
            _call(self._scheduler, "set_xfer_handshake_metadata", told)

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """Run one step of the producer's engine, after which the request is over there."""
        if request.request_id in self._sending or self.is_unreported(request.request_id):
            raise ValueError(f"{request.request_id} is being sent")
        token_ids = [secrets.randbelow(VOCABULARY) for _ in range(request.num_tokens + 1)]
        as_vllm = _request(request, token_ids, None)
        _call(self._scheduler, "get_num_new_matched_tokens", as_vllm, 0)
        self._step(request, as_vllm, request.num_tokens)
        is_later, params = _call(
            self._scheduler, "request_finished", as_vllm, list(request.block_ids[0])
        ) or (
            False,
            None,
        )
        if is_later:
            self._sending[request.request_id] = time.monotonic() + request.deadline_s
        else:
            self.finish(request.request_id)
        return pickle.dumps((token_ids, params))

    def receive(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        if request.request_id in self._receiving or self.is_unreported(request.request_id):
            raise ValueError(f"{request.request_id} is being received")
        token_ids, params = pickle.loads(peers[0])  # noqa: S301 - our own
        as_vllm = _request(request, token_ids, params)
        found, is_later = self._matched(as_vllm, request)
        if found < request.num_tokens:
            self.finish(request.request_id, f"only {found or 0} of {request.num_tokens} tokens were found")
            return b""
        blocks = SimpleNamespace(
            get_block_ids=lambda **_: tuple(map(list, request.block_ids)), blocks=request.block_ids
        )
        _call(self._scheduler, "update_state_after_alloc", as_vllm, blocks, found)
        as_vllm.num_computed_tokens = found
        self._step(request, as_vllm, 1)
        if is_later:
            ids = frozenset(b for table in request.block_ids for b in table)
            self._receiving[request.request_id] = (time.monotonic() + request.deadline_s, ids)
        else:
            wrong = self._load_errors() & set(request.block_ids[0])
            self.finish(request.request_id, f"blocks {sorted(wrong)} were not loaded" if wrong else "")
        return b""

    def poll(self) -> Any:
        if self._worker is not None and (self._sending or self._receiving):
            sent, received = _call(self._worker, "get_finished", set(self._sending)) or (None, None)
            failed = self._load_errors()
            for request_id in [r for r in sent or () if r in self._sending]:
                del self._sending[request_id]
                self.finish(request_id)
            for request_id in [r for r in received or () if r in self._receiving]:
                _, blocks = self._receiving.pop(request_id)
                wrong = sorted(blocks & failed)
                self.finish(request_id, f"blocks {wrong} were not loaded" if wrong else "")
        # A late worker may still write; only its own report says that it has stopped.
        return super().poll()

    def held(self) -> dict[str, int]:
        requests = len(self._sending) + len(self._receiving)
        return {"registrations": int(self._caches is not None), "requests": requests}

    def close(self) -> None:
        for half in (self._worker, self._scheduler):
            _call(half, "shutdown")
        self._worker = self._scheduler = None
        self._sending.clear()
        self._receiving.clear()
        super().close()

    def _matched(self, as_vllm: Any, request: KVRequest) -> tuple[int, bool]:
        """Return (tokens that can be loaded, whether after the step), waiting while the connector looks."""
        until = time.monotonic() + request.deadline_s
        while (answer := _call(self._scheduler, "get_num_new_matched_tokens", as_vllm, 0) or (0, False))[
            0
        ] is None:
            if time.monotonic() > until:
                return 0, False
            time.sleep(0.001)
        return int(answer[0]), bool(answer[1])

    def _step(self, request: KVRequest, as_vllm: Any, num_new_tokens: int) -> None:
        """Call the connector as the model runner does around one forward pass."""
        worker = self._worker
        output = _scheduler_output(request.request_id, as_vllm, num_new_tokens)
        metadata = self._scheduler.build_connector_meta(output)
        worker.bind_connector_metadata(metadata)
        told = SimpleNamespace(block_size=self._block_size, num_actual_tokens=request.num_tokens)
        context = SimpleNamespace(
            no_compile_layers={n: SimpleNamespace(kv_cache=view) for n, view in self._layers.items()},
            attn_metadata=dict.fromkeys(self._layers, told),
            virtual_engine=0,
        )
        try:
            worker.start_load_kv(context)
            for layer, view in self._layers.items():
                worker.wait_for_layer_load(layer)
                worker.save_kv_layer(layer, view, told)
            worker.wait_for_save()
        finally:
            worker.clear_connector_metadata()

    def _load_errors(self) -> set[int]:
        return set(_call(self._worker, "get_block_ids_with_load_errors") or ())


class VllmStore(BaseStore):
    """Adapts a vLLM connector to the protocol of `store.Store`; a subclass makes both halves.

    It has one engine per revision of the model, and all share a folder. An engine has one layer, and one
    group of full attention. Saving a prompt is a step that loads what the connector finds and computes the
    rest, as in vLLM; looking one up is a step that only loads.
    """

    num_blocks: int = 64
    """Blocks of an engine's KV cache."""
    wait_s: float = 20.0
    """How long to wait for loads and saves that go on after their step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._engines: dict[str, tuple[Any, Any, torch.Tensor]] = {}
        """Revision -> scheduler half, worker half, KV cache."""
        self._numbers = itertools.count()

    def make(self, role: str, revision: str) -> Any:
        """Make the connector's half for a role, "scheduler" or "worker", in an engine of this revision."""
        raise NotImplementedError

    def as_vllm(self, request_id: str, key: StoreKey) -> Any:
        """Represent the request of a key as vLLM's scheduler does."""
        made = _request(_Blocks(request_id), [*key.token_ids, *END], None)
        made.cache_salt = key.salt
        if key.adapter is not None:
            made.lora_request = SimpleNamespace(
                lora_name=key.adapter.name, lora_path=key.adapter.path, lora_int_id=1
            )
        made.mm_features = [
            SimpleNamespace(
                identifier=item.hash,
                mm_hash=item.hash,
                modality="image",
                mm_position=SimpleNamespace(offset=item.offset, length=item.length),
            )
            for item in key.multimodal
        ]
        made.mm_hashes = [item.hash for item in key.multimodal]
        return made

    def as_new(self, as_vllm: Any, block_ids: list[int]) -> Any:
        """Return what the scheduler tells workers of a new request."""
        as_vllm.block_ids = (block_ids,)
        return as_vllm

    def save(self, key: StoreKey, pages: Sequence[bytes]) -> None:
        self._step(key, pages)

    def look_up(self, key: StoreKey) -> Sequence[bytes]:
        return self._step(key, None)

    def close(self) -> None:
        for scheduler, worker, _ in self._engines.values():
            _call(worker, "shutdown")
            _call(scheduler, "shutdown")
        self._engines.clear()

    def _engine(self, revision: str) -> tuple[Any, Any, torch.Tensor]:
        if revision not in self._engines:
            cache = torch.zeros((self.num_blocks, 1, self.block_tokens, ROW_ELEMENTS), dtype=torch.bfloat16)
            scheduler, worker = self.make("scheduler", revision), self.make("worker", revision)
            _call(worker, "register_kv_caches", {LAYER_NAME.format(0): cache})
            self._engines[revision] = scheduler, worker, cache
        return self._engines[revision]

    def _step(self, key: StoreKey, pages: Sequence[bytes] | None) -> list[bytes]:
        """Run a prompt; return the pages that the connector found."""
        scheduler, worker, cache = self._engine(key.revision)
        number, count = next(self._numbers), len(key.token_ids) // self.block_tokens
        ids = [1 + (number * count + i) % (self.num_blocks - 1) for i in range(count)]
        as_vllm = self.as_vllm(f"request-{number}", key)
        _call(scheduler, "on_new_request", as_vllm)
        found, is_later = self._until(
            lambda: _call(scheduler, "get_num_new_matched_tokens", as_vllm, 0) or (0, False),
            lambda answer: answer[0] is not None,
            "get_num_new_matched_tokens() has no answer",
        )
        num_found = found // self.block_tokens
        cache[ids] = 0
        result: list[bytes] = []
        if found or pages is not None:
            blocks = SimpleNamespace(get_block_ids=lambda **_: (ids,), blocks=(ids,))
            _call(scheduler, "update_state_after_alloc", as_vllm, blocks, found)
            as_vllm.num_computed_tokens = found
            new = as_vllm.num_prompt_tokens - found if pages is not None else 1
            output = _scheduler_output(as_vllm.request_id, self.as_new(as_vllm, ids), new)
            worker.bind_connector_metadata(scheduler.build_connector_meta(output))
            computed = ids[num_found:], pages[num_found:] if pages is not None else ()
            self._forward(worker, cache, computed)
            if is_later and found:
                self._await_finished(worker, as_vllm.request_id, 1)
            result = [_read(cache, block) for block in ids[:num_found]]
        told = _call(scheduler, "request_finished", as_vllm, ids) or (False, None)
        if told[0]:
            self._await_finished(worker, as_vllm.request_id, 0)
        return result

    def _forward(
        self, worker: Any, cache: torch.Tensor, computed: tuple[Sequence[int], Sequence[bytes]]
    ) -> None:
        """Call the connector as the model runner does around one forward pass. The pass computes these
        blocks' pages; a look-up computes none."""
        name = LAYER_NAME.format(0)
        told = SimpleNamespace(block_size=self.block_tokens)
        context = SimpleNamespace(
            no_compile_layers={name: SimpleNamespace(kv_cache=cache)},
            attn_metadata={name: told},
            virtual_engine=0,
        )
        try:
            worker.start_load_kv(context)
            worker.wait_for_layer_load(name)
            _write(cache, *computed)
            worker.save_kv_layer(name, cache, told)
            worker.wait_for_save()
        finally:
            worker.clear_connector_metadata()

    def _await_finished(self, worker: Any, request_id: str, which: int) -> None:
        """Wait until `get_finished` tells the request among those sent (0) or received (1)."""
        self._until(
            lambda: (_call(worker, "get_finished", {request_id}) or (None, None))[which] or (),
            lambda told: request_id in told,
            f"get_finished() never tells {request_id}",
        )

    def _until(self, ask: Callable[[], Any], is_enough: Callable[[Any], bool], otherwise: str) -> Any:
        until = time.monotonic() + self.wait_s
        while not is_enough(answer := ask()):
            if time.monotonic() > until:
                raise TimeoutError(f"{otherwise} after {self.wait_s:g} s")
            time.sleep(0.001)
        return answer


class _Blocks:
    """Stands for a KVRequest without blocks."""

    block_ids: tuple[tuple[int, ...], ...] = ((),)

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def _write(cache: torch.Tensor, ids: Sequence[int], pages: Sequence[bytes]) -> None:
    """Fill each block that has a page with it, over and over."""
    for block, page in zip(ids, pages, strict=False):
        rows = cache[block].view(torch.uint8)
        rows[:] = torch.from_numpy(np.resize(np.frombuffer(page, np.uint8), tuple(rows.shape)))


def _read(cache: torch.Tensor, block: int) -> bytes:
    """Read the page of a block; all of its bytes where it does not repeat one."""
    found = cache[block].contiguous().view(torch.uint8).numpy().tobytes()
    page = found[:PAGE_BYTES]
    return page if found == page * (len(found) // PAGE_BYTES) else found


def _call(half: Any, method: str, *arguments: Any) -> Any:
    """Ask the method; None if the interface makes it optional."""
    found = getattr(half, method, None)
    return None if found is None else found(*arguments)


def _request(request: KVRequest | _Blocks, token_ids: list[int], params: Any) -> Any:
    """Represent a request as vLLM's scheduler does."""
    return SimpleNamespace(
        request_id=request.request_id,
        req_id=request.request_id,
        prompt_token_ids=token_ids,
        all_token_ids=token_ids,
        num_tokens=len(token_ids),
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=tuple(map(list, request.block_ids)),
        mm_features=[],
        mm_hashes=[],
        lora_request=None,
        cache_salt=None,
        sampling_params=SimpleNamespace(extra_args=None),
        kv_transfer_params=params,
        block_hashes=[],
    )


def _scheduler_output(request_id: str, as_vllm: Any, num_new_tokens: int) -> Any:
    """Describe a step that schedules one new request and no other."""
    return SimpleNamespace(
        scheduled_new_reqs=[as_vllm],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[], new_token_ids=[]
        ),
        num_scheduled_tokens={request_id: num_new_tokens},
        total_num_scheduled_tokens=num_new_tokens,
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
