"""What two engines must agree on so that one can read the other's KV. Free of torch.

It is compared field by field, so that a refused handshake says what differs. Nothing depends on tensor
parallelism, on how a checkpoint is split into files, or on its folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rayk.models.config import DecoderConfig, LayerConfig
from rayk.models.headers import StoredTensor, stored_tensors
from rayk.types.noted_hashes import noted_hash

WHOLE_BYTES = 8 << 20
"""Tensors up to this size are hashed whole; of larger ones, `NUM_SAMPLES` pieces."""
NUM_SAMPLES = 16
SAMPLE_BYTES = 64 << 10
NUM_THREADS = 4
"""Threads that hash weights as a whole."""


ATTENTION = (
    "qkv_bias", "o_bias", "qk_norm", "turned_norm_eps", "v_norm", "sinks", "attention_soft_cap",
    "attention_scale", "attention_gate", "key_multiplier",
    "attention_in_multiplier", "attention_out_multiplier",
)  # fmt: skip
"""Settings that a model's attention layers share."""
PER_LAYER = {
    "mixer": "mixers",
    "window": "windows",
    "chunk": "chunks",
    "temperature": "temperatures",
    "kv_source": "kv_sources",
    "mlp": "mlps",
}
"""A layer's setting -> its field in the fingerprint, if the name differs."""
ELSEWHERE = frozenset((
    "architecture", "num_layers", "num_query_heads", "num_kv_heads", "head_size", "norm", "vocab_size",
    "layers", "quantisation", *ATTENTION,
    "score_multiplier", "query_scalar",  # in attention_scale
))  # fmt: skip
"""Settings with fields of their own."""
HARMLESS = frozenset((
    "family", "dtype", "max_positions", "stated_positions",
    "mtp_layers",  # they read what the model computes, and add nothing to it
    # Used after the last layer, where nothing is cached.
    "tie_embeddings", "logit_scale", "final_soft_cap",
    "bos_token_id", "eos_token_ids", "pad_token_id",
))  # fmt: skip
"""Settings that do not affect the cache. All others show in the fingerprint."""


def fingerprint(path: str | Path | None, config: DecoderConfig) -> dict[str, str]:
    """Field -> value, in the order in which a handshake reports differences. `path`: of the weights; None:
    the engine computes nothing, and reads none. Raises CheckpointError if a weights file cannot be read."""
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in HARMLESS | ELSEWHERE}
    mixers = {name: value for name, value in settings.items() if is_dataclass(value)}
    has_attention = any("attention" in layer.mixers for layer in config.layers)
    # A layer's keys, values and states depend on everything that lower layers compute.
    block = {name: value for name, value in settings.items() if name not in mixers and value is not None}
    return {
        "architecture": config.architecture,
        "num_layers": str(config.num_layers),
        "num_query_heads": str(config.num_query_heads),
        "num_kv_heads": str(config.num_kv_heads),
        "head_sizes": f"k {config.head_size_k}, v {config.head_size_v}",
        **{
            PER_LAYER.get(f.name, f.name): _per_layer([getattr(layer, f.name) for layer in config.layers])
            for f in fields(LayerConfig)
        },
        "norm": _text(config.norm),
        "attention_settings": (
            _text({name: getattr(config, name) for name in ATTENTION}) if has_attention else "none"
        ),
        "mixer_settings": _text(mixers),
        "block": _text(block),
        "vocab_size": str(config.vocab_size),
        # Before the weights' hash, so that a release and its plain copy are told apart by name.
        "quantisation": "none" if config.quantisation is None else config.quantisation.text,
        "weights": "none" if path is None else weights_digest(Path(path)),
    }


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=asdict)


def _per_layer(values: list[Any]) -> str:
    """Return one text if all layers are alike, else a list of runs."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return _text(runs[0][1] if len(runs) == 1 else runs)


def weights_digest(folder: Path) -> str:
    """Hash of every tensor's name, dtype, shape and bytes (sampled above `WHOLE_BYTES`)."""
    tensors = stored_tensors(folder)
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        with tensor.file.open("rb") as handle:
            for piece in _samples(handle, tensor.start, tensor.num_bytes):
                digest.update(piece)
    return digest.hexdigest()


def whole_weights_digest(folder: Path) -> str:
    """Hash of every tensor's name, dtype, shape and all of its bytes, for what outlives engines. Several GB
    take seconds, once until a file changes."""
    tensors = sorted(stored_tensors(folder).items())

    def digest_of(named: tuple[str, StoredTensor]) -> bytes:
        name, tensor = named
        digest = hashlib.blake2b(json.dumps([name, tensor.dtype, tensor.shape]).encode(), digest_size=32)
        with tensor.file.open("rb") as handle:
            handle.seek(tensor.start)
            for start in range(0, tensor.num_bytes, WHOLE_BYTES):
                digest.update(handle.read(min(WHOLE_BYTES, tensor.num_bytes - start)))
        return digest.digest()

    def compute() -> str:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            parts = pool.map(digest_of, tensors)
            return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()

    return noted_hash("tensors", sorted({tensor.file for _, tensor in tensors}), compute)


def _samples(handle: BinaryIO, start: int, num_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a tensor to hash."""
    if num_bytes <= WHOLE_BYTES:
        handle.seek(start)
        yield handle.read(num_bytes)
        return
    # Evenly spaced, including the first and the last bytes.
    for i in range(NUM_SAMPLES):
        handle.seek(start + (num_bytes - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
        yield handle.read(SAMPLE_BYTES)
