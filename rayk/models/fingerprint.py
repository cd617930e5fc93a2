"""What two engines must agree on so that one may read the other's KV. Free of torch.

Field by field, so that a refused handshake can say what differs. Nothing here depends on tensor
parallelism, on the files a checkpoint is split into, or on where its folder lies.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rayk.models.headers import tensor_entries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rayk.models.config import DecoderConfig

WHOLE_BYTES = 8 << 20
"""A tensor up to this size is hashed whole; of a larger one, `NUM_SAMPLES` pieces are."""
NUM_SAMPLES = 16
SAMPLE_BYTES = 64 << 10


def fingerprint(path: str | Path, config: DecoderConfig) -> dict[str, str]:
    """Field -> value, in the order in which a handshake should report differences.

    Raises CheckpointError when a weights file cannot be read.
    """
    ropes = [None if layer.rope is None else asdict(layer.rope) for layer in config.layers]
    return {
        "architecture": config.architecture,
        "num_layers": str(config.num_layers),
        "mixers": _per_layer([layer.mixer for layer in config.layers]),
        "num_query_heads": str(config.num_query_heads),
        "num_kv_heads": str(config.num_kv_heads),
        "head_sizes": f"k {config.head_size_k}, v {config.head_size_v}",
        "windows": _per_layer([layer.window for layer in config.layers]),
        "rope": _per_layer(ropes),
        "norm": json.dumps(asdict(config.norm)),
        "attention_settings": _attention(config),
        "mixer_settings": _mixers(config),
        # Keys, values and states of a layer are made of all that the layers below it computed.
        "block": (
            f"{config.block}, embedding scale {config.embedding_scale!r}, "
            f"residual multiplier {config.residual_multiplier!r}, float32 residual {config.residual_wide}"
        ),
        "mlps": _per_layer([None if layer.mlp is None else asdict(layer.mlp) for layer in config.layers]),
        "vocab_size": str(config.vocab_size),
        "weights": weights_digest(Path(path)),
    }


def _attention(config: DecoderConfig) -> str:
    """What the model's attention layers share; none without such layers."""
    if not any("attention" in layer.mixer.split("+") for layer in config.layers):
        return "none"
    return (
        f"qkv_bias {config.qkv_bias}, o_bias {config.o_bias}, qk_norm {config.qk_norm}, "
        f"scale {config.attention_scale!r}, sinks {config.sinks}, "
        f"soft_cap {config.attention_soft_cap!r}, gate {config.attention_gate}, multipliers key "
        f"{config.key_multiplier!r}, in {config.attention_in_multiplier!r}, "
        f"out {config.attention_out_multiplier!r}"
    )


def _mixers(config: DecoderConfig) -> str:
    """What the model's latent and recurrent layers share."""
    settings = {name: getattr(config, name) for name in ("mla", "mamba1", "mamba2", "gdn")}
    return json.dumps({name: asdict(value) for name, value in settings.items() if value is not None})


def _per_layer(values: list[Any]) -> str:
    """One text for all layers where they are alike, else a list of runs."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return json.dumps(runs[0][1] if len(runs) == 1 else runs, sort_keys=True)


def weights_digest(folder: Path) -> str:
    """Hash of every tensor's name, dtype, shape and bytes (sampled above `WHOLE_BYTES`)."""
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, start, entry in tensor_entries(file):
            tensors[name] = (file, start, entry)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        file, data_start, entry = tensors[name]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        first, last = entry["data_offsets"]
        with file.open("rb") as handle:
            for piece in _samples(handle, data_start + first, last - first):
                digest.update(piece)
    return digest.hexdigest()


def _samples(handle: BinaryIO, start: int, num_bytes: int) -> Iterator[bytes]:
    """The bytes to hash of a tensor's `num_bytes` from `start`."""
    if num_bytes <= WHOLE_BYTES:
        handle.seek(start)
        yield handle.read(num_bytes)
        return
    # Evenly spaced, the first and the last bytes included.
    for i in range(NUM_SAMPLES):
        handle.seek(start + (num_bytes - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
        yield handle.read(SAMPLE_BYTES)
