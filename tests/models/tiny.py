"""Tiny random checkpoints written by transformers, and a paged harness that runs a decoder on them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.qwen3_next import modeling_qwen3_next

from rayk.attention import CommonAttentionMetadata, get_backend
from rayk.attention.transforms import chunked_local, fast_prefill
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kv.caches import TORCH_DTYPES
from rayk.kv.specs import KVCacheSpec
from rayk.models.config import DecoderConfig
from rayk.models.decoder import Decoder
from rayk.models.families import load_config
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.layers.attention import Attention
from rayk.models.loader import load_decoder
from rayk.oracle.sharing import SharingCache, kv_sources
from rayk.oracle.tiny import FAMILIES, model_type
from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.parallel.threads import ThreadComm
from tests.helpers import assert_matches
from tests.models.mamba_dims import MAMBA_DIMS

DIMS: dict[str, Any] = {
    "vocab_size": 263,  # prime: no TP size divides it
    "hidden_size": 64,
    "intermediate_size": 101,  # odd: the MLP splits unevenly
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,  # large, so that a wrong one shows
    "tie_word_embeddings": False,
}

CLASSES = {
    family: (CONFIG_MAPPING[kind].__name__, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    for family, kind in ((family, model_type(family)) for family in FAMILIES)
}
"""Family -> transformers' names of its config's and its model's class."""

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILY_DIMS: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": "absent", "hidden_size": 128, "pad_token_id": 0},
    "gemma2": {
        "sliding_window": 21,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,  # small, so that both cut
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "query_pre_attn_scalar": 24,
    },
    # Layers 3 and 4 share. The last tokens of the vocabulary have no inputs of their own.
    "gemma3n": {
        "num_hidden_layers": 5,
        "intermediate_size": [101, 90, 83, 101, 57],
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "sliding_window": 21,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "final_logit_softcapping": 5.0,
        "vocab_size_per_layer_input": 201,
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 2,
        "laurel_rank": 7,
        "activation_sparsity_pattern": [0.9, 0.3, 0.0, 0.7, 0.0],
    },
    "cohere2": {
        "head_dim": "absent",
        "hidden_size": 128,
        "rms_norm_eps": "absent",
        "layer_norm_eps": 1e-3,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "logit_scale": 0.4,
    },
    "gpt_oss": {
        "sliding_window": 21,
        "rope_parameters": YARN,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,  # small, so that it cuts
    },
    "llama4": {
        "num_hidden_layers": 4,
        "intermediate_size": 29,
        "intermediate_size_mlp": 101,
        "attention_chunk_size": 20,
        "no_rope_layers": [1, 0, 1, 1],
        "moe_layers": [1, 2],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "floor_scale": 9,
        "attn_scale": 0.7,
        "rope_parameters": LLAMA3,
    },
    "qwen3_moe": {
        "mlp_only_layers": [1],
        "moe_intermediate_size": 20,
        "num_experts": 5,
        "num_experts_per_tok": 3,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mlp_only_layers": [2],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 27,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
    "deepseek_v3": {
        "head_dim": "absent",
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
    **MAMBA_DIMS,
}
"""Family -> what it has beyond, or instead of, DIMS."""


def reference_model(family: str, **overrides: Any) -> Any:
    """A transformers model in float32 with every parameter drawn: norms not 1, biases not 0."""
    config_class, model_class = CLASSES[family]
    chosen = copy.deepcopy(DIMS | FAMILY_DIMS.get(family, {}) | overrides)
    values = {key: v for key, v in chosen.items() if v != "absent"}
    config = getattr(transformers, config_class)(
        **values, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, model_class)(config).eval().float()
    draw(model)
    return model


def draw(model: Any) -> None:
    """Every parameter anew, in place."""
    torch.manual_seed(7)
    with torch.no_grad():
        buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *buffers]:
            if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
                parameter.uniform_(-0.5, 0.5)
            elif "norm" in name or name.endswith("correct_output_scale"):
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name or name.endswith("sinks"):
                parameter.normal_(0, 1.0)
            else:
                # x @ W layouts (experts) have their inputs on the axis before the last.
                fan_in = parameter.shape[-2 if parameter.dim() == 3 else -1]
                parameter.normal_(0, 1.5 / fan_in**0.5)


@dataclass
class Checkpoint:
    """A saved model and the transformers module it came from, also in float64."""

    path: Path
    model: Any
    exact: Any
    config: DecoderConfig


def write_checkpoint(path: Path, family: str, *, max_shard_size: str = "1GB", **overrides: Any) -> Checkpoint:
    """Save a tiny model of `family` into `path`."""
    model = reference_model(family, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return Checkpoint(path, model, copy.deepcopy(model).double(), load_config(path))


def write_vision_checkpoint(path: Path) -> Checkpoint:
    """A tiny gemma3 with a vision tower, of which the text model counts."""
    text = {k: v for k, v in (DIMS | FAMILY_DIMS["gemma3"]).items() if k != "tie_word_embeddings"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=copy.deepcopy(text),
        vision_config=vision | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        attn_implementation="eager",
    )
    model: Any = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    draw(model)
    model.save_pretrained(path)
    return Checkpoint(path, model, copy.deepcopy(model).double(), load_config(path))


def run_ranks(num_ranks: int, body: Callable[[Comm], Any]) -> list[Any]:
    """body(comm) on `num_ranks` threads; their results in rank order, or the first exception."""
    if num_ranks == 1:
        return [body(LocalComm())]
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def target(comm: Comm) -> None:
        try:
            with torch.inference_mode():
                results[comm.rank] = body(comm)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)
        finally:
            comm.close()

    comms = ThreadComm.make_group(num_ranks, timeout_s=20)
    threads = [threading.Thread(target=target, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


def load(
    checkpoint: Checkpoint,
    comm: Comm,
    dtype: torch.dtype = torch.float32,
    backend: str = "reference",
) -> Decoder:
    """One rank's decoder on the CPU."""
    return load_decoder(
        checkpoint.path,
        checkpoint.config,
        comm=comm,
        dtype=dtype,
        device=torch.device("cpu"),
        backend=get_backend(backend, "cpu"),
    )


class Paged:
    """Runs requests through a decoder with caches of scattered blocks and slots, poisoned where unused."""

    def __init__(
        self,
        decoder: Decoder,
        num_requests: int,
        max_tokens: int = 128,
        *,
        tp: tuple[int, int] = (1, 0),
        state_block_size: int | None = None,
        dtype: str = "float32",
    ) -> None:
        """`tp`: size and rank, for models with states. `state_block_size` None: one slot per request.
        `dtype`: of the caches."""
        self.decoder = decoder
        # Runs of a chunked layer begin where blocks do.
        self.block_size = math.gcd(8, *(layer.chunk or 8 for layer in decoder.config.layers))
        self.seen = [0] * num_requests
        self.state_block_size = state_block_size or max_tokens
        self.block_table = self._table(num_requests, max_tokens, self.block_size)
        self.slots = self._table(num_requests, max_tokens, self.state_block_size)
        specs = kv_cache_specs(decoder.config, block_size=self.block_size, dtype=dtype)
        for key, owner in decoder.cache_owners.items():
            if key[1] == "state":
                owner.bind_kv_cache(poisoned_state(specs[key], self.slots.numel() + 1, *tp))
                continue
            units = len(owner.kv_head_ids) if isinstance(owner, Attention) else 1
            content = sum(f.row_bytes for f in specs[key].fields()) // TORCH_DTYPES[dtype].itemsize
            shape = (self.block_table.numel() + 1, units, self.block_size, content)
            owner.bind_kv_cache(torch.full(shape, float("nan"), dtype=TORCH_DTYPES[dtype]))
        for key, reader in decoder.cache_readers:
            reader.bind_kv_cache(decoder.cache_owners[key].kv_cache)

    @staticmethod
    def _table(num_requests: int, max_tokens: int, block_size: int) -> torch.Tensor:
        """[request, block] int32: scattered blocks; block 0 is nobody's."""
        per_request = -(-max_tokens // block_size)
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(num_requests * per_request, generator=generator) + 1
        return order.view(num_requests, per_request).int()

    def cached_rows(self) -> dict[tuple[int, int], torch.Tensor]:
        """(layer, global KV head) -> rows of the first request's blocks, one after the other."""
        return {
            (layer, head): attention.kv_cache[self.block_table[0].long(), slot].flatten(0, 1)
            for layer, attention in self.decoder.attention_layers.items()
            for slot, head in enumerate(attention.kv_head_ids)
        }

    def step(
        self, tokens: Sequence[Sequence[int]], num_wanted: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Feed each request its next tokens (none: it sits out); logits [tokens, vocab] of each.

        `num_wanted`: of how many of its tokens, the last ones, logits are wanted (None: of all)."""
        active = [r for r, new in enumerate(tokens) if new]
        segments = self._segments(active, tokens)
        positions, slots, flat = [], [], []
        for r in active:
            for position, token in enumerate(tokens[r], start=self.seen[r]):
                block = int(self.block_table[r, position // self.block_size])
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
                flat.append(token)
            self.seen[r] += len(tokens[r])
        common = CommonAttentionMetadata.from_host(
            query_lens=[len(tokens[r]) for r in active],
            seq_lens=[self.seen[r] for r in active],
            block_table=self.block_table[active],
            slot_mapping=torch.tensor(slots),
            block_size=self.block_size,
        )
        counts = [len(tokens[r]) if num_wanted is None else num_wanted[r] for r in active]
        wanted = None
        if num_wanted is not None:
            ends = itertools.accumulate(len(tokens[r]) for r in active)
            wanted = torch.tensor(
                [end - n + i for end, n in zip(ends, counts, strict=True) for i in range(n)],
                dtype=torch.int64,
            )
        metadata = self._metadata(common, segments, wanted)
        hidden = self.decoder.forward(torch.tensor(flat), torch.tensor(positions), metadata, wanted)
        logits = self.decoder.logits(hidden).split(counts)
        by_request = dict(zip(active, logits, strict=True))
        return [by_request.get(r, torch.empty(0)) for r in range(len(tokens))]

    def _metadata(
        self, common: CommonAttentionMetadata, segments: Segments, wanted: torch.Tensor | None
    ) -> dict[tuple[int, str], Any]:
        """By (layer, part); of layers that compute only `wanted` tokens, the metadata is of these."""
        found: dict[tuple[int, str], Any] = {}
        for key, owner in self.decoder.cache_owners.items():
            found[key] = segments if key[1] == "state" else built(owner, common)
        fast = self.decoder.config.fast_prefill_layers
        for (_, part), reader in self.decoder.cache_readers:
            seen = common
            if wanted is not None and reader.layer in fast:
                seen = fast_prefill(common, wanted.numpy())
            if seen is not None:
                found[reader.layer, part] = built(reader, seen)
        return found

    def _segments(self, active: Sequence[int], tokens: Sequence[Sequence[int]]) -> Segments:
        """A segment ends at every border of a state block inside the step, and with the last token."""
        size, read_slots, ends, write_slots = self.state_block_size, [], [], []
        for r in active:
            first, last = self.seen[r], self.seen[r] + len(tokens[r]) - 1
            read_slots.append(NO_SLOT if first == 0 else int(self.slots[r, (first - 1) // size]))
            blocks = range(first // size, last // size + 1)
            ends.append([min((b + 1) * size - 1, last) - first + 1 for b in blocks])
            write_slots.append([int(self.slots[r, b]) for b in blocks])
        return Segments.from_host(
            query_lens=[len(tokens[r]) for r in active],
            read_slots=read_slots,
            ends=ends,
            write_slots=write_slots,
        )


def built(owner: Any, common: CommonAttentionMetadata) -> Any:
    """An attention layer's metadata for one step."""
    chunk = owner.params.chunk if isinstance(owner, Attention) else None
    seen = common if chunk is None else chunked_local(common, chunk)
    return owner.backend.build(seen, owner.window, chunk)


def poisoned_state(spec: KVCacheSpec, num_slots: int, tp_size: int, tp_rank: int) -> dict[str, torch.Tensor]:
    """A rank's bundles [B, U, 1, C] of a state, side by side in one page per slot, all NaN."""
    sizes = [len(f.shard(tp_size, tp_rank)) * f.row_bytes for f in spec.fields()]
    starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
    pages = torch.full((num_slots, starts[-1]), -1, dtype=torch.int8)
    bundles = {}
    for f, size, start in zip(spec.fields(), sizes, starts, strict=False):
        typed = pages[:, start : start + size].view(TORCH_DTYPES[f.dtype])
        bundles[f.bundle] = typed.view(num_slots, len(f.shard(tp_size, tp_rank)), 1, -1)
    return bundles


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits [T, vocab] of one prompt, in the model's dtype."""
    sources = kv_sources(model.config)
    caches = {} if sources is None else {"past_key_values": SharingCache(sources)}
    with torch.no_grad(), wide_scans(model):
        logits: torch.Tensor = model(torch.tensor([list(token_ids)]), **caches).logits[0]
    return logits


class _WideTorch:
    """torch, but float32 means float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def wide_scans(model: Any) -> Iterator[None]:
    """A model in float64 that would scan its recurrent states in float32 does not."""
    kind = model.config.model_type
    if model.dtype != torch.float64 or kind not in (*MAMBA_DIMS, "qwen3_next"):
        yield
        return
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        if kind == "qwen3_next":
            patches.enter_context(mock.patch.object(modeling_qwen3_next, "torch", _WideTorch()))
        yield


def assert_all_right(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor]
) -> None:
    """The same of several prompts together, where one prompt's largest error is a matter of luck: over 174
    such comparisons C++ and torch kernels err alike (0.87 and 0.93 of eager's maximum in the mean), and
    single ones of either by more than twice as much."""
    found = torch.cat(list(logits))
    exact, eager = (
        torch.cat([reference_logits(model, token_ids) for token_ids in prompts])
        for model in (checkpoint.exact, checkpoint.model)
    )
    assert_matches(found, exact, eager, what=f"logits of {len(prompts)} prompts")


def assert_right(checkpoint: Checkpoint, token_ids: Sequence[int], logits: torch.Tensor) -> None:
    """Float32 logits of every position of a prompt against transformers."""
    exact = reference_logits(checkpoint.exact, token_ids)
    eager = reference_logits(checkpoint.model, token_ids)
    assert_matches(logits, exact, eager, what=f"logits of {len(token_ids)} tokens")
