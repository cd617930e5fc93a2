"""A connector as vLLM's workers know them, small: KV of whole blocks in files, by content of the prompt."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from pathlib import Path

import torch

from rayk.conformance.vllm_adapter import VllmConnector, VllmStore

FOLDER = Path(tempfile.gettempdir()) / "rayk-test-vllm-shaped"


class Half:
    """Scheduler and worker in one class, as in vLLM."""

    def __init__(self, block_size: int, folder: Path = FOLDER) -> None:
        self.block_size = block_size
        self.folder = folder
        self.to_load = set()

    def path(self, token_ids, layer: str) -> Path:
        whole = len(token_ids) // self.block_size * self.block_size
        return self.folder / f"{hashlib.sha256(str(token_ids[:whole]).encode()).hexdigest()[:32]}-{layer}"

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        whole = (len(request.prompt_token_ids) - 1) // self.block_size * self.block_size
        there = self.path(request.prompt_token_ids[:-1], "model.layers.0.self_attn.attn").exists()
        return (whole if there else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.to_load.add(request.request_id)

    def build_connector_meta(self, scheduler_output):
        (request,) = scheduler_output.scheduled_new_reqs
        is_load = request.req_id in self.to_load
        self.to_load.discard(request.req_id)
        # The last token has no KV yet.
        return request.prompt_token_ids[:-1], request.block_ids[0], is_load

    def bind_connector_metadata(self, metadata):
        self.metadata = metadata

    def clear_connector_metadata(self):
        self.metadata = None

    def start_load_kv(self, forward_context):
        token_ids, block_ids, is_load = self.metadata
        for name, layer in forward_context.no_compile_layers.items() if is_load else ():
            layer.kv_cache[block_ids] = torch.load(self.path(token_ids, name))

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata):
        token_ids, block_ids, is_load = self.metadata
        if not is_load:
            self.folder.mkdir(exist_ok=True)
            torch.save(kv_layer[block_ids].clone(), self.path(token_ids, layer_name))

    def wait_for_save(self):
        pass


class OnFiles(VllmConnector):
    def make(self, role, block_size):
        return Half(block_size)


class StoreOnFiles(VllmStore):
    """The same connector as a store: it knows a prompt by its tokens alone."""

    finds_prefixes = False

    def make(self, role, revision):
        return Half(self.block_tokens, Path(self.folder))


class BlockHalf(Half):
    """Block by block, each by all tokens up to its end: prompts that begin alike share them."""

    def ends(self, token_ids):
        return range(self.block_size, len(token_ids) + 1, self.block_size)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        ids, layer = request.prompt_token_ids[:-1], "model.layers.0.self_attn.attn"
        there = itertools.takewhile(lambda end: self.path(ids[:end], layer).exists(), self.ends(ids))
        return max(there, default=0), False

    def start_load_kv(self, forward_context):
        token_ids, block_ids, is_load = self.metadata
        for name, layer in forward_context.no_compile_layers.items() if is_load else ():
            for block, end in zip(block_ids, self.ends(token_ids), strict=True):
                if self.path(token_ids[:end], name).exists():
                    layer.kv_cache[block] = torch.load(self.path(token_ids[:end], name))

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata):
        token_ids, block_ids, is_load = self.metadata
        for block, end in zip(block_ids, self.ends(token_ids), strict=True):
            if not self.path(token_ids[:end], layer_name).exists() and kv_layer[block].any():
                torch.save(kv_layer[block].clone(), self.path(token_ids[:end], layer_name))


class BlocksOnFiles(VllmStore):
    def make(self, role, revision):
        return BlockHalf(self.block_tokens, Path(self.folder))


class HeadsReversed(OnFiles):
    """Saves heads in the wrong order."""

    def make(self, role, block_size):
        half = super().make(role, block_size)
        save = half.save_kv_layer
        half.save_kv_layer = lambda name, layer, told: save(name, layer.flip(1), told)
        return half
