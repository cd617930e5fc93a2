"""Converts a GGUF file to a Hugging Face checkpoint, its weights dequantised by transformers.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What transformers would leave out of a
file without a word (tensors, rope scaling, sliding windows) is refused here.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from rayk.oracle.checkpoint import Judge, config_json, require_form
from rayk.oracle.files import replaced_folder
from rayk.oracle.quiet import no_progress_bars
from rayk.types.errors import CheckpointError, UnsupportedArchitecture, UserError

PACKAGES = ("gguf", "accelerate")
"""What transformers needs to read GGUF files, beyond what rayk requires."""

MAGIC = b"GGUF"
ROPE_FREQS = "rope_freqs.weight"

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all releases of Llama 3.1 to 3.3 have in common."""


@dataclass(frozen=True)
class GgufPlan:
    """What a file holds and what its conversion needs."""

    architecture: str
    """The model's, as config.json names it."""
    types: tuple[tuple[str, int], ...]
    """GGUF's names of the tensors' types, with the number of tensors, most first."""
    num_parameters: int
    weight_bytes: int
    """Bytes of all weights in the dtype asked for."""
    file_bytes: int


def convert_gguf(
    file: str | Path,
    directory: str | Path,
    *,
    dtype: str = "bfloat16",
    max_shard_size: str | None = None,
    judge: Judge | None = None,
    tell: Callable[[GgufPlan], None] | None = None,
) -> int:
    """Write `directory` (config, tokenizer, safetensors) and return the process's peak memory in bytes.

     dtype:  of the weights on disk; each is dequantised in float32 and then rounded to it.
     judge:  may refuse the config.json before any weight is dequantised.
     tell:   is called with the plan at that point.

    The folder appears whole or not at all. Raises UserError (a package that is missing, an unknown dtype, a
    folder that is not empty), CheckpointError (no GGUF file, a damaged one, a type of tensors that cannot be
    dequantised, a tokenizer that cannot be read, contents that transformers would leave out),
    UnsupportedArchitecture (transformers or rayk cannot run the model), and what `judge` raises.
    """
    path, target = Path(file), Path(directory)
    require_form(dtype, max_shard_size)
    _require_gguf(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError("is not an empty folder", where=str(target), mend="choose another folder")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"GGUF files need {' and '.join(missing)}, which is not installed",
            mend='pip install "rayk[gguf]"',
        )
    reader = _reader(path)
    types = _tensor_types(reader, path)
    config = _config(reader, path)
    values = config_json(config)
    if judge is not None:
        judge(values, str(path))
    num_parameters = _require_all_read(reader, config, path)
    tokenizer = _tokenizer(path)
    if tell is not None:
        item_bytes = 4 if dtype == "float32" else 2
        (name,) = cast(list[str], values["architectures"])
        tell(GgufPlan(name, types, num_parameters, num_parameters * item_bytes, path.stat().st_size))
    del reader  # it maps the file
    with replaced_folder(target, marker=".") as scratch, no_progress_bars():
        model = _dequantised(path, config, dtype)
        model.save_pretrained(
            scratch, **({} if max_shard_size is None else {"max_shard_size": max_shard_size})
        )
        tokenizer.save_pretrained(scratch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, Linux KiB


def _require_gguf(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError("no such file", where=str(path), mend="pass a GGUF file")
    with path.open("rb") as file:
        found = file.read(len(MAGIC))
    if found != MAGIC:
        raise CheckpointError(
            "is no GGUF file: it does not begin with GGUF", where=str(path), mend="pass a GGUF file"
        )


@contextmanager
def _blamed(path: Path, doing: str) -> Iterator[None]:
    """Turn what the libraries raise about a file into CheckpointError."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        words = " ".join(str(error).split())
        raise CheckpointError(f"{doing}: {words or type(error).__name__}", where=str(path)) from error


def _reader(path: Path) -> Any:
    import gguf

    with _blamed(path, "damaged, or of a kind that the package gguf does not know"):
        return gguf.GGUFReader(path)


def _tensor_types(reader: Any, path: Path) -> tuple[tuple[str, int], ...]:
    """Count the tensors of each type; raise CheckpointError for one that cannot be dequantised."""
    import gguf
    import numpy as np

    counts = Counter(tensor.tensor_type for tensor in reader.tensors)
    if not counts:
        raise CheckpointError("holds no tensors, e.g. a vocabulary alone", where=str(path))
    for kind in counts:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"holds tensors of type {kind.name}, which the package gguf cannot dequantise",
                where=str(path),
                mend="take the model in another quantisation, e.g. Q8_0 or Q4_K_M, or a newer gguf",
            ) from error
    return tuple((kind.name, count) for kind, count in counts.most_common())


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _config(reader: Any, path: Path) -> Any:
    """transformers' config of the file. Raises UnsupportedArchitecture and CheckpointError."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = _value(reader, "general.architecture")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedArchitecture(
            f"transformers does not read GGUF architecture {name}: {' '.join(str(error).split())}",
            where=str(path),
        ) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedArchitecture(f"GGUF architecture {name} is no causal decoder", where=str(path))
    _keep_rope_scaling(reader, config, path, name)
    window = _value(reader, f"{name}.attention.sliding_window")
    if window and getattr(config, "sliding_window", None) != window:
        raise CheckpointError(
            f"has a sliding window of {window} tokens, which transformers does not read for {name}",
            where=str(path),
        )
    return config


def _keep_rope_scaling(reader: Any, config: Any, path: Path, name: str) -> None:
    """Give the config the file's rope scaling, which transformers does not read; raise CheckpointError if it
    is not Llama 3's, which is a tensor of what each rotation's period is multiplied by."""
    kind = _value(reader, f"{name}.rope.scaling.type")
    rope = dict(config.rope_parameters or {})
    if kind not in (None, "none") and rope.get("rope_type", "default") == "default":
        raise CheckpointError(
            f"has rope scaling of type {kind}, which transformers does not read for {name}", where=str(path)
        )
    for tensor in reader.tensors:
        if tensor.name != ROPE_FREQS:
            continue
        found = [float(factor) for factor in tensor.data]
        config.rope_parameters = {
            **rope,
            "rope_type": "llama3",
            "factor": round(max(found), 3),
            **LLAMA3_ROPE,
        }
        with _blamed(path, f"{ROPE_FREQS} is of another size than the heads"):
            right = _period_factors(config, len(found))
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, right, strict=True)):
            raise CheckpointError(f"{ROPE_FREQS} is not of Llama 3.1's kind of rope scaling", where=str(path))


def _period_factors(config: Any, num_pairs: int) -> list[float]:
    """What transformers multiplies the period of each rotated pair by under the config's rope scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    plain = [rope["rope_theta"] ** (-pair / num_pairs) for pair in range(num_pairs)]
    return [a / b for a, b in zip(plain, frequencies.tolist(), strict=True)]


def _require_all_read(reader: Any, config: Any, path: Path) -> int:
    """Return the model's number of parameters; raise CheckpointError if the file has more or fewer.

    transformers passes tensors over that it has no name for.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with _blamed(path, "transformers cannot build the model"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(int(p.numel()) for p in model.parameters())
    found = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != ROPE_FREQS)
    if found == expected:
        return expected
    others = [t.name for t in reader.tensors if t.name.startswith("rope_") and t.name != ROPE_FREQS]
    raise CheckpointError(
        f"holds {found:,} values, but transformers' {type(model).__name__} of it has {expected:,}"
        + (f" and no place for {', '.join(others)}" if others else ""),
        where=str(path),
        mend="take the model's safetensors",
    )


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    with _blamed(path, "transformers cannot read the tokenizer"):
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _dequantised(path: Path, config: Any, dtype: str) -> Any:
    """Load transformers' model with plain weights of `dtype`. Raises CheckpointError."""
    import torch
    import transformers

    # Without it, releases that can keep weights quantised refuse to save the model.
    kept = getattr(transformers, "GgufConfig", None)
    options = {} if kept is None else {"quantization_config": kept(dequantize=True)}
    with _blamed(path, "transformers cannot load it"):
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            **options,
        )
    wrong = sorted({str(key) for keys in told.values() for key in keys})
    if wrong:
        raise CheckpointError(f"lacks, or has wrong, {', '.join(wrong)}", where=str(path))
    return model
