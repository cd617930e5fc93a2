"""Find out what to measure from an experiment whose cells are to be predicted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayk.costs.table import engine_key
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.specs import Cell, expand, load_spec
from rayk.specs.prompts import TokenizerLoader, resolve_prompts
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError

_PLAIN = EngineConfig(model="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What tables must hold so that somebody's cells lie within them."""

    tp: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    device: str
    dtype: str
    block_size: int
    max_tokens: int  # of the longest prompt and its output
    max_seqs: int
    max_batch_tokens: int


def wanted_by(spec: Path, model: str, tokenizer_loader: TokenizerLoader) -> Wanted:
    """Read an experiment and say what its cells of the model need. Raises UserError where there are none, and
    where their engines differ in what a grid has one of."""
    loaded = load_spec(spec)
    configs = {name: read_config(config_file(name)[1]) for name in loaded.spec.models()}
    sizes = read_config(config_file(model)[1])
    cells = [c for c in expand(loaded.spec, configs) if _is_of(configs[c.spec.model], sizes)]
    if not cells:
        raise UserError(f"no cell has a model with the sizes of {model}", where=str(spec))
    engines = [engine for cell in cells for engine in cell.engines]
    one = {name: {getattr(engine, name) for engine in engines} for name in ("device", "dtype", "block_size")}
    for name, values in one.items():
        if len(values) > 1:
            told = ", ".join(sorted(map(str, values)))
            mend = f"measure once for each, with its own --out and --{name.replace('_', '-')}"
            raise UserError(f"engines with several {name}: {told}", where=str(spec), mend=mend)
    return Wanted(
        tp=tuple(sorted({engine.tp for engine in engines})),
        pairs=tuple(sorted({(c.prefill.tp, c.decode.tp) for c in cells if c.decode is not None})),
        device=one["device"].pop(),
        dtype=one["dtype"].pop(),
        block_size=one["block_size"].pop(),
        max_tokens=max(_longest(cell, sizes, tokenizer_loader) for cell in cells),
        max_seqs=max(engine.max_seqs for engine in engines),
        max_batch_tokens=max(engine.max_batch_tokens for engine in engines),
    )


def _is_of(config: DecoderConfig, sizes: DecoderConfig) -> bool:
    return engine_key(config, _PLAIN).model == engine_key(sizes, _PLAIN).model


def _longest(cell: Cell, config: DecoderConfig, tokenizer_loader: TokenizerLoader) -> int:
    """Count the tokens of a cell's longest prompt and its output."""
    prompts = resolve_prompts(cell.spec, config, tokenizer_loader)
    return max(map(len, prompts)) + cell.spec.sampling.max_tokens
