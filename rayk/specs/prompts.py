"""Prompts of an experiment as token ids: random ones, or a file of texts or ids."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rayk.models.config import DecoderConfig
from rayk.models.families.raw import RawConfig, read_json
from rayk.models.hub import model_folder
from rayk.specs.experiment import ExperimentSpec, RandomPrompts
from rayk.types.errors import SpecError
from rayk.types.files import PROMPTS_BYTES, parse_json, read_text

Encode = Callable[[str], list[int]]
TokenizerLoader = Callable[[str], Encode]
"""Model -> text encoder with the tokenizer's own defaults; called for text prompts only."""


def resolve_prompts(
    spec: ExperimentSpec, config: DecoderConfig, tokenizer_loader: TokenizerLoader | None = None
) -> list[list[int]]:
    """Look up the token ids of every prompt, in order. Raises SpecError (bad file, id out of vocabulary)."""
    if spec.prompts.random is not None:
        special = special_token_ids(spec.model) | set(config.eos_token_ids)
        return random_prompts(spec.prompts.random, config.vocab_size, special)
    assert spec.prompts.file is not None
    return _file_prompts(Path(spec.prompts.file), spec.model, config, tokenizer_loader)


def random_prompts(spec: RandomPrompts, vocab_size: int, special: Iterable[int]) -> list[list[int]]:
    """`count` prompts of cycling lengths, ids uniform over the vocabulary without `special`. Prompts in turn
    begin with one of the shared prefixes, or with as much of it as they have room for."""
    excluded = sorted({i for i in special if 0 <= i < vocab_size})
    # How many ids that may be drawn lie below each that may not: the vocabulary itself is never listed.
    below = [i - nth for nth, i in enumerate(excluded)]
    allowed = range(vocab_size - len(excluded))
    if not allowed:
        raise SpecError(problem="every token of the vocabulary is special", where="prompts.random")
    draw = random.Random(spec.seed)
    # Prefixes are drawn on their own: prompts without any are those of the seed, as ever.
    shared = random.Random(f"prefixes of {spec.seed}")

    def ids(draw: random.Random, count: int) -> list[int]:
        return [i + bisect_right(below, i) for i in draw.choices(allowed, k=count)]

    prefixes = [ids(shared, spec.prefix_tokens) for _ in range(spec.num_prefixes)]
    found = []
    for i in range(spec.count):
        length = spec.input_tokens[i % len(spec.input_tokens)]
        prefix = prefixes[i % spec.num_prefixes][:length]
        found.append([*prefix, *ids(draw, length - len(prefix))])
    return found


def special_token_ids(model: str) -> set[int]:
    """List ids that the tokenizer's and the model's JSON call special. Raises CheckpointError for bad
    JSON."""
    ids: set[int] = set()
    folder = model_folder(model)
    path = folder / "tokenizer.json"
    if path.is_file():
        added = read_json(path).get("added_tokens", [])
        tokens = [t for t in added if isinstance(t, dict)] if isinstance(added, list) else []
        ids |= {t["id"] for t in tokens if t.get("special") and isinstance(t.get("id"), int)}
    path = folder / "config.json"
    if path.is_file():
        config = RawConfig(read_json(path), str(path))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids |= set(config.token_ids(key))
    return ids


def _file_prompts(
    path: Path, model: str, config: DecoderConfig, tokenizer_loader: TokenizerLoader | None
) -> list[list[int]]:
    try:
        lines = read_text(path, PROMPTS_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(problem=f"cannot read the prompts file: {error}", where=str(path)) from error
    encode: Encode | None = None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = _entry(line, where)
        if "prompt" in entry and encode is None:
            if tokenizer_loader is None:
                raise SpecError(problem="text prompts need a tokenizer", where=where)
            encode = tokenizer_loader(model)
        ids = entry.get("prompt_token_ids")
        if ids is None:
            assert encode is not None
            ids = encode(entry["prompt"])
        check_token_ids(ids, config.vocab_size, where)
        prompts.append(list(ids))
    if not prompts:
        raise SpecError(problem="the prompts file has no prompt", where=str(path))
    return prompts


def _entry(line: str, where: str) -> dict[str, Any]:
    """Parse one line of the file: {"prompt": text} or {"prompt_token_ids": [ids]}."""
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise SpecError(problem=f"not valid JSON: {error}", where=where) from error
    keys = set(entry) if isinstance(entry, dict) else set()
    if keys not in ({"prompt"}, {"prompt_token_ids"}):
        raise SpecError(
            problem="a line must be an object with exactly one of `prompt`, `prompt_token_ids`",
            where=where,
            mend='{"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}',
        )
    if "prompt" in entry and not isinstance(entry["prompt"], str):
        raise SpecError(problem="`prompt` must be a text", where=where)
    ids = entry.get("prompt_token_ids", [])
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise SpecError(problem="`prompt_token_ids` must be a list of integers", where=where)
    return dict(entry)


def check_token_ids(ids: list[int], vocab_size: int, where: str) -> None:
    """Refuse an empty prompt and ids outside [0, vocab_size). Raises SpecError."""
    if not ids:
        raise SpecError(problem="the prompt is empty (no token)", where=where)
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise SpecError(
            problem=f"token id {bad} is outside the vocabulary of {vocab_size} tokens", where=where
        )
