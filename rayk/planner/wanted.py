"""Find out what to measure from an experiment or a plan whose engines are to be predicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rayk.costs.book import CostBook
from rayk.costs.table import engine_key
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.planner.candidates import Space, engine_of
from rayk.planner.drafts import settings_of
from rayk.planner.machine import machine_of
from rayk.planner.traffic import Traffic
from rayk.specs import Cell, expand, load_spec
from rayk.specs.cells import resolved_dtype
from rayk.specs.load import read_spec_data
from rayk.specs.plan import load_plan
from rayk.specs.prompts import TokenizerLoader, resolve_prompts
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError

_PLAIN = EngineConfig(model="")
ALIKE = ("device", "dtype", "block_size")
"""Settings of which a grid has one, and it can have any."""
PLAIN = ("pp", "dcp", "kv_dtype", "layout", "attention_backend")
"""Settings that a grid leaves as they are by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What tables must hold so that somebody's engines lie within them."""

    tp: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    device: str
    dtype: str
    block_size: int
    max_tokens: int  # of the longest prompt and its output
    max_seqs: int
    max_batch_tokens: int
    drafts: int = 0
    """Tokens that n-gram drafters propose at once, at most."""


def wanted_by(spec: Path, model: str, tokenizer_loader: TokenizerLoader) -> Wanted:
    """Read an experiment, or a plan (it has an `slo`), and say what its engines of the model need. Raises
    UserError where there are none, and where their engines differ in what a grid has one of."""
    is_plan = "slo" in read_spec_data(spec, str(spec))[0]
    sizes = read_config(config_file(model)[1])
    if is_plan:
        return _by_plan(spec, model, sizes)
    loaded = load_spec(spec)
    configs = {name: read_config(config_file(name)[1]) for name in loaded.spec.models()}
    cells = [c for c in expand(loaded.spec, configs) if _is_of(configs[c.spec.model], sizes)]
    if not cells:
        raise _no_such(spec, model)
    pairs = {(c.prefill.tp, c.decode.tp) for c in cells if c.decode is not None}
    longest = max(_longest(cell, sizes, tokenizer_loader) for cell in cells)
    return _summed([engine for cell in cells for engine in cell.engines], pairs, longest, str(spec))


def _by_plan(path: Path, model: str, sizes: DecoderConfig) -> Wanted:
    loaded = load_plan(path)
    spec = loaded.spec
    config = read_config(config_file(spec.model)[1])
    if not _is_of(config, sizes):
        raise _no_such(path, model)
    config = replace(config, dtype=resolved_dtype(spec.dtype, config))
    traffic = Traffic(spec.traffic, vocab_size=config.vocab_size, has_prefixes=False)
    profile = traffic.profile(spec.slo.good)
    space = Space(spec, config, machine_of(loaded, None), CostBook(), profile)
    prefill, decode = (space.tp_sizes(role) for role in ("prefill", "decode"))
    pairs = set(product(prefill, decode)) if "disaggregated" in spec.search.mode else set()
    alone = prefill if "aggregated" in spec.search.mode else ()
    drafts = spec.search.speculative
    settings = product(spec.search.block_size, space.choices("max_batch_tokens"), space.choices("max_seqs"))
    engines = [
        engine_of(
            spec,
            config,
            tp=tp,
            block_size=block_size,
            max_batch_tokens=tokens,
            max_seqs=seqs,
            speculative=None if drafts is None else settings_of(drafts, max(drafts.num_tokens)),
        )
        for block_size, tokens, seqs in settings
        for tp in {*alone, *(size for pair in pairs for size in pair)}
    ]
    return _summed(engines, pairs, profile.most_tokens, str(path))


def _no_such(spec: Path, model: str) -> UserError:
    return UserError(f"no engine of a model with the sizes of {model}", where=str(spec))


def _summed(
    engines: Iterable[EngineConfig], pairs: Iterable[tuple[int, int]], longest: int, where: str
) -> Wanted:
    engines = list(engines)
    for name in PLAIN:
        if any(getattr(engine, name) != getattr(_PLAIN, name) for engine in engines):
            raise UserError(
                f"a grid leaves {name} at {getattr(_PLAIN, name)}, and engines here do not",
                where=where,
                mend="an experiment of such engines with --set engine.record_steps=true, and --from",
            )
    drafting = [engine.speculative for engine in engines if engine.speculative is not None]
    if others := sorted({drafts.method for drafts in drafting if drafts.method != "ngram"}):
        raise UserError(
            f"a grid measures n-gram drafts alone, and engines here draft by {', '.join(others)}", where=where
        )
    for name in ALIKE:
        values = sorted({str(getattr(engine, name)) for engine in engines})
        if len(values) > 1:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"engines with several {name}: {', '.join(values)}",
                where=where,
                mend=f"one grid for each, by {option} and without --for",
            )
    return Wanted(
        tp=tuple(sorted({engine.tp for engine in engines})),
        pairs=tuple(sorted(pairs)),
        device=engines[0].device,
        dtype=engines[0].dtype,
        block_size=engines[0].block_size,
        max_tokens=longest,
        max_seqs=max(engine.max_seqs for engine in engines),
        max_batch_tokens=max(engine.max_batch_tokens for engine in engines),
        drafts=max((drafts.num_tokens for drafts in drafting), default=0),
    )


def _is_of(config: DecoderConfig, sizes: DecoderConfig) -> bool:
    return engine_key(config, _PLAIN).model == engine_key(sizes, _PLAIN).model


def _longest(cell: Cell, config: DecoderConfig, tokenizer_loader: TokenizerLoader) -> int:
    """Count the tokens of a cell's longest prompt and its output."""
    prompts = resolve_prompts(cell.spec, config, tokenizer_loader)
    return max(map(len, prompts)) + cell.spec.sampling.max_tokens
