"""Writes a tiny random checkpoint of a real architecture, tokenizer included, through transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rayk.oracle.files import file_digests, is_whole, replaced_folder
from rayk.oracle.quiet import no_progress_bars
from rayk.oracle.release_formats import release_format
from rayk.oracle.tiny import ADDS_BOS, FAMILIES, MTP_KEY, family_values, make_config
from rayk.oracle.tokenizer import SPECIAL_TOKENS, build_tokenizer
from rayk.oracle.trials import TRIALS, trial_key
from rayk.types.errors import UserError
from rayk.types.files import parse_json, read_text

SUPPORTED: tuple[str, ...] = tuple(sorted(FAMILIES))

MARKER = "rayk_checkpoint.json"
"""The file in a finished folder that holds its parameters and promises."""

MARKER_BYTES = 4 << 20
_NOTED = {"family": str, "seed": int, "config": dict, "max_shard_size": str | None, "dtype": str}
"""Parameters in that file that others rely on, with their types."""

DTYPES = ("bfloat16", "float16", "float32")

_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)

Judge = Callable[[dict[str, object], str], object]
"""(contents of a config.json, words for where they come from) -> None; raises UserError to refuse a model
before it is made."""

_FORMAT = 1
"""Raise it when the same parameters give other files."""


def write_checkpoint(
    family: str,
    directory: str | Path,
    *,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    max_shard_size: str | None = None,
    tie: bool | None = None,
    dtype: str = "float32",
    quantise: str | None = None,
    judge: Judge | None = None,
    force: bool = False,
) -> Path:
    """Write the checkpoint, unless `directory` already holds the one these parameters give.

    A checkpoint of the same family with other settings, from another release of transformers, or with missing
    files is written again. One whose files somebody changed is refused, unless `force`.

     overrides:      values of the family's config class, by its names (see tiny.HYBRID). With
                     num_nextn_predict_layers, deepseek_v3 and qwen3_next get random layers of that kind.
     max_shard_size: e.g. "100KB": several weight files and a model.safetensors.index.json.
     tie:            whether lm_head shares the embeddings; None keeps the family's setting.
     dtype:          of the weights on disk; their greedy output is promised in float32.
     quantise:       a format of release_formats.py; the promise is of what it dequantises to.
     judge:          may refuse the config.json before the model is made; not asked about a finished folder.
     force:          write it in any case.

    The folder's rayk_checkpoint.json holds the smallest greedy margin (over 0.03 logits), the smallest
    routing gap (over 0.001, see oracle.routing; null without experts) and, under `probes`, the prompts they
    were measured on and their greedy output. Deterministic for given parameters; the folder appears whole or
    not at all. Returns its path.

    Raises UnsupportedArchitecture (unknown family) and UserError (unknown config key or format, a vocabulary
    without room for all bytes, values no model can have, a folder that cannot be made, is something else,
    holds another family, or files that were changed), and what `judge` raises.
    """
    needed = release_format(quantise, family).values if quantise is not None else {}
    values = family_values(family, {**needed, **(overrides or {})})
    if tie is not None:
        values["tie_word_embeddings"] = tie
    require_form(dtype, max_shard_size)
    if quantise is not None and values.get(MTP_KEY):
        raise UserError(
            f"{MTP_KEY} with quantised weights", where=f"{family}, {quantise}", mend="one or the other"
        )
    parameters = {
        "format": _FORMAT,
        "family": family,
        "seed": seed,
        "config": values,
        "max_shard_size": max_shard_size,
        "dtype": dtype,
        **({} if quantise is None else {"quantise": quantise}),
    }
    target = Path(directory)
    if not force:
        _refuse_changed(target)
        if _is_written(target, parameters):
            return target
    _refuse_other_family(target, family)
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(replaced_folder(target, marker=MARKER))
        except OSError as error:
            problem = f"cannot make a folder here: {error.strerror}"
            raise UserError(problem, where=str(target), mend="choose another folder") from error
        _write(scratch, parameters, judge)
    return target


def require_form(dtype: str, max_shard_size: str | None) -> None:
    """Raise UserError if no weights are written in this dtype or in files of this size."""
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}", mend=f"one of {', '.join(DTYPES)}")
    if max_shard_size is not None and not _SIZE.fullmatch(max_shard_size):
        raise UserError(
            f"max_shard_size {max_shard_size!r}", mend="a number and KB, MB, GB or TB, e.g. 100KB"
        )


def read_marker(directory: str | Path) -> dict[str, Any]:
    """Read the notes of write_checkpoint about a folder; empty if it did not write it, or they are
    damaged."""
    path = Path(directory) / MARKER
    try:
        found = parse_json(read_text(path, MARKER_BYTES))
    except (OSError, ValueError):
        return {}
    parameters = found.get("parameters") if isinstance(found, dict) else None
    if not isinstance(parameters, dict) or not all(
        isinstance(parameters.get(k), kind) for k, kind in _NOTED.items()
    ):
        return {}
    return dict(found)


def changed_files(directory: str | Path) -> list[str]:
    """List names of files in a complete folder that differ from what write_checkpoint wrote; empty if an
    older rayk wrote it, without digests."""
    folder = Path(directory)
    noted = read_marker(folder).get("files")
    if not isinstance(noted, dict) or not is_whole(folder):
        return []
    found = file_digests(folder)
    return [name for name, digest in noted.items() if found.get(name) != digest]


def _refuse_changed(folder: Path) -> None:
    """Raise UserError, so that nobody's changes are lost or mistaken for the original."""
    changed = changed_files(folder)
    if changed:
        raise UserError(
            f"holds a checkpoint that was changed after it was written: {', '.join(changed)}",
            where=str(folder),
            mend="`rayk checkpoint --force` writes it anew; or choose another folder",
        )


def _refuse_other_family(folder: Path, family: str) -> None:
    """Raise UserError: more likely another folder was meant than to lose this model."""
    found = read_marker(folder).get("parameters", {}).get("family", family)
    if found != family:
        raise UserError(
            f"holds a checkpoint of another family ({found}, not {family})",
            where=str(folder),
            mend="choose another folder, or delete this one",
        )


def _is_written(folder: Path, parameters: Mapping[str, Any]) -> bool:
    """Tell whether the folder holds, complete, what these parameters give with the installed libraries."""
    marker = read_marker(folder)
    return (
        marker.get("parameters") == json.loads(json.dumps(parameters))
        and marker.get("transformers") == version("transformers")
        and is_whole(folder)
    )


def _write(folder: Path, parameters: Mapping[str, Any], judge: Judge | None) -> None:
    """Write all files of the checkpoint, the marker last."""
    import torch
    import transformers

    from rayk.oracle.draw import probe_prompts, search
    from rayk.oracle.mtp import add_mtp
    from rayk.oracle.packing import PACKERS, Packed
    from rayk.oracle.text import FedText

    family, values = parameters["family"], parameters["config"]
    if not isinstance(values["vocab_size"], int):
        raise UserError(f"vocab_size {values['vocab_size']!r}", where=family, mend="a whole number")
    tokenizer = build_tokenizer(values["vocab_size"], adds_bos=family in ADDS_BOS)
    bos, eos, pad = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS)
    special = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    config = _config(family, special, values, judge)
    with _values_blamed(family, values):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        text = FedText(model)  # some values show only when the model runs
        text.feed((0, 1, 2))
        text.feed((3,))
    positions = getattr(config, "max_position_embeddings", None)
    prompts = probe_prompts(values["vocab_size"], tokenizer.all_special_ids, positions)
    dtype = getattr(torch, parameters["dtype"])
    known = TRIALS.get(trial_key(parameters))
    packed = Packed(PACKERS[parameters["quantise"]]) if "quantise" in parameters else None
    draw = search(
        model,
        seed=parameters["seed"],
        dtype=dtype,
        prompts=prompts,
        eos_id=eos,
        known=known,
        **({} if packed is None else {"rounded": packed.round}),
    )

    size = parameters["max_shard_size"]
    with no_progress_bars():
        model.to(dtype).save_pretrained(folder, **({} if size is None else {"max_shard_size": size}))
    if packed is not None:
        packed.replace(folder)
    if values.get(MTP_KEY):
        add_mtp(folder, model, values[MTP_KEY], seed=parameters["seed"], dtype=dtype)
    tokenizer.save_pretrained(folder)
    notes = {
        "parameters": parameters,
        "transformers": transformers.__version__,
        "trial": draw.trial,
        "margin": draw.margin,
        "routing_gap": draw.routing_gap,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "probes": [asdict(probe) for probe in draw.probes],
        "files": file_digests(folder),
    }
    (folder / MARKER).write_text(json.dumps(notes, indent=1), encoding="utf-8")


def _config(family: str, special: Mapping[str, Any], values: Mapping[str, Any], judge: Judge | None) -> Any:
    """transformers' config object, unless `judge` refuses it.

    A value that transformers itself refuses is shown to `judge` first, whose words name the key and its
    limits.
    """
    where = _where(family, values)
    try:
        with _values_blamed(family, values):
            config = make_config(family, {**special, **values})
    except UserError as error:
        if judge is not None:
            sound = config_json(make_config(family, {**special, **FAMILIES[family]}))
            for key in changed_keys(family, values):
                if f"'{key}'" in error.problem:
                    with _values_blamed(family, values):
                        judge(sound | {key: values[key]}, where)
        raise
    if judge is not None:
        with _values_blamed(family, values):
            judge(config_json(config), where)
    return config


def config_json(config: Any) -> dict[str, object]:
    """Make the future contents of config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, object] = json.loads(config.to_json_string())
    return found | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def changed_keys(family: str, values: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ from the family's own."""
    own = FAMILIES[family]
    return [key for key, value in values.items() if key not in own or own[key] != value]


def _where(family: str, values: Mapping[str, Any]) -> str:
    """Name it in messages, e.g. `llama with num_kv_shared_layers=5`."""
    changed = [f"{key}={values[key]}" for key in changed_keys(family, values)]
    return family + (f" with {', '.join(changed)}" if changed else "")


@contextmanager
def _values_blamed(family: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Turn transformers' errors into UserError if values differ from the family's own."""
    from huggingface_hub.errors import StrictDataclassError

    kinds = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except (*kinds, StrictDataclassError) as error:
        if not changed_keys(family, values):
            raise
        raise UserError(
            f"transformers cannot build or run it: {' '.join(str(error).split())}",
            where=_where(family, values),
            mend="choose other values, or leave them out",
        ) from error
