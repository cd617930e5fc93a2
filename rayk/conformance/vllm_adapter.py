"""Tries connectors written for vLLM's workers (KVConnectorBase_V1), without vLLM.

The interface is duck-typed: a subclass of `VllmConnector` makes the connector's two halves, which vLLM calls
scheduler and worker, with any stand-in for vLLM's configuration. This file calls their methods in the order
of vLLM's model runner and scheduler around one step of each engine:

 producer   build_connector_meta, bind_connector_metadata, start_load_kv, per layer wait_for_layer_load and
            save_kv_layer, wait_for_save, clear_connector_metadata, request_finished, get_finished
 consumer   get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta, then as above

For vLLM, a request is a prompt of one token more than its KV: the last token is computed by the consumer (and
by the producer in a step of its own, which is left out). Token ids are fresh for every request, so that a
content-addressed cache finds only what was saved. Methods that a half lacks take the interface's defaults.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rayk.transfer.connector import BaseConnector, ConnectorCase, KVRequest

if TYPE_CHECKING:
    from rayk.kv.caches import CanonicalKVCaches

VOCABULARY = 30_000
LAYER_NAME = "model.layers.{}.self_attn.attn"


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
        """The connector's half for a role, "scheduler" or "worker"."""
        raise NotImplementedError

    @classmethod
    def supports(cls, case: ConnectorCase) -> str | None:
        """One identical rank of attention on each side; override it if the connector does more."""
        if case.kinds != ("full",):
            return "the adapter describes one group of full attention"
        if case.kv_format != "bfloat16":
            return "the adapter describes keys and values of plain elements"
        if case.tp != (1, 1):
            return "a rank's place in its TP group comes from vLLM's own process groups"
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
        """(tokens that can be loaded, whether after the step), waiting while the connector looks."""
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


def _call(half: Any, method: str, *arguments: Any) -> Any:
    """The method's answer; None if the interface makes it optional."""
    found = getattr(half, method, None)
    return None if found is None else found(*arguments)


def _request(request: KVRequest, token_ids: list[int], params: Any) -> Any:
    """A request as vLLM's scheduler represents it."""
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
    """A step that schedules one new request and no other."""
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
