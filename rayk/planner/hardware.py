"""Read what a data sheet says of a machine, and derive a model's tables from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import rayk.costs
from rayk.costs.book import CostBook
from rayk.costs.features import step_of, windows_of
from rayk.costs.roofline import Hardware, RankAttention, RankSizes, roofline_costs
from rayk.costs.stored import read
from rayk.costs.table import Gap, GapTable, LinearCost, ReadCosts, TransferTable, engine_key, read_name
from rayk.kv.formats import engine_format
from rayk.kv.specs import page_bytes
from rayk.models.config import DecoderConfig, ExpertsConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.stored_sizes import held_bytes
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.specs.marks import parse_yaml
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.files import read_text

FILE_BYTES = 1 << 16
_SHEETS = Path(rayk.costs.__file__).with_name("hardware")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MATRICES = {"relu2": 2}  # of an expert; 3 of other kinds


def known_hardware() -> list[str]:
    """Name the data sheets that rayk brings along."""
    return sorted(path.stem for path in _SHEETS.glob("*.yaml"))


def read_hardware(name: str | Path) -> Hardware:
    """Read a data sheet: one that rayk brings along, by its name, or a YAML file with the fields of
    `costs.roofline.Hardware`. Raises UserError."""
    path = _SHEETS / f"{str(name).lower()}.yaml" if str(name).lower() in known_hardware() else Path(name)
    try:
        data, _ = parse_yaml(read_text(path, FILE_BYTES), str(path))
    except (OSError, UnicodeDecodeError) as error:
        mend = f"a YAML file, or one of {', '.join(known_hardware())}"
        raise UserError(f"cannot be read: {error}", where=str(path), mend=mend) from error
    found = read(Hardware, data, str(path))
    shares = [found.flops_share, found.bandwidth_share]
    if not all(number > 0 for number in (found.memory_gb_per_s, *found.tflops.values(), *shares)):
        raise UserError("peaks and their shares must be over 0", where=str(path))
    if max(shares) > 1:
        raise UserError("shares of peaks must be at most 1", where=str(path))
    for name in (f.name for f in fields(Hardware) if f.type == "float"):
        if not 0 <= getattr(found, name) < math.inf:
            raise UserError(f"{name} must be a number from 0 on", where=str(path))
    return found


def roofline_book(
    machine: Hardware,
    config: DecoderConfig,
    *,
    tp: Sequence[int],
    dtype: str,
    block_size: int,
    like: EngineConfig | None = None,
) -> CostBook:
    """Derive tables of a model's engines at each TP size that it can have; `like`: with these settings
    otherwise. Raises UserError for a dtype of which the machine's peak is not given, and where links between
    ranks are needed and not given."""
    dtype = config.dtype if dtype == "auto" else dtype
    if dtype not in machine.tflops:
        known = ", ".join(machine.tflops)
        mend = f"tflops: {{{dtype}: ...}} beside {known}"
        raise UserError(f"{machine.name}: no peak in {dtype}", mend=mend)
    sizes = [n for n in tp if why_tp_unsupported(config, n) is None]
    if max(sizes, default=1) > 1 and not machine.link_gb_per_s:
        raise UserError(f"{machine.name}: link_gb_per_s is needed for TP {max(sizes)}")
    plain = replace(like or EngineConfig(model="", device="cuda"), dtype=dtype, block_size=block_size)
    kept_as = engine_format(dtype, plain.kv_dtype, plain.kv_scales)
    configs = [replace(plain, tp=n) for n in sizes]
    keys = {engine_key(config, engine): engine for engine in configs}
    engines = {
        key: roofline_costs(
            machine,
            key,
            rank_sizes(config, e.tp, dtype, keeps_fp8=machine.keeps_fp8, kept_as=kept_as),
        )
        for key, e in keys.items()
    }
    way = Gap(quantiles=(machine.dispatch_us * 1e3,))
    return CostBook(
        engines=engines, transfers=_reads(machine, configs), gaps=GapTable(dispatch=way, handover=way)
    )


def sheet_told(machine: Hardware, config: DecoderConfig, book: CostBook) -> Iterator[str]:
    """Yield lines: that nothing was measured, and what some steps of each engine are said to take."""
    yield f"UNMEASURED: {len(book.engines)} tables from the data sheet of {machine.name}"
    shares = f"{machine.flops_share:.0%} of its arithmetic, {machine.bandwidth_share:.0%} of its bandwidth"
    yield f"taken to reach {shares}"
    yield f"{'a step of':38}{'1 token':>10}{'64 tokens':>13}{'2,048 of a prompt':>19}"
    steps = [step_of(shares, windows_of(config)) for shares in ([(1, 1023)], [(1, 1023)] * 64, [(2048, 0)])]
    for key, costs in book.engines.items():
        each = [(costs.step_ns(step) + costs.turn_ns(step)) / 1e6 for step in steps]
        yield f"{key.text:38}{each[0]:>7,.2f} ms{each[1]:>10,.2f} ms{each[2]:>16,.2f} ms"


def _reads(machine: Hardware, engines: Sequence[EngineConfig]) -> TransferTable:
    rate = machine.network_gb_per_s or machine.link_gb_per_s
    if not rate:
        return TransferTable()
    costs = ReadCosts(post=LinearCost(fixed_ns=15_000, descriptor_ns=100), wait=LinearCost(byte_ns=1 / rate))
    return TransferTable(reads={read_name(p, d): costs for p in engines for d in engines})


def rank_sizes(
    config: DecoderConfig, tp: int, dtype: str, *, keeps_fp8: bool = False, kept_as: str | None = None
) -> RankSizes:
    """Count what rank 0 holds and reads, from a model's config alone; embeddings are looked up, not read.
    `kept_as`: the format of KV (kv.formats); None: `dtype`."""
    item = _ITEM_BYTES[dtype]
    plain = replace(config, dtype=dtype)
    held = held_bytes(plain, tp, 0, keeps_fp8=keeps_fp8)
    elements = held_bytes(plain, tp, 0, keeps_fp8=False) / item
    head = config.vocab_size * config.hidden_size / tp
    experts = sum(_expert_elements(config)) / tp
    embedded = head * (1 if config.tie_embeddings else 2)
    shrunk = held / (elements * item)  # below 1 where matrices stay in fp8
    dense = max(0.0, elements - embedded - experts)
    chosen = [
        layer.mlp.num_chosen / layer.mlp.num_experts
        for layer in config.layers
        if isinstance(layer.mlp, ExpertsConfig)
    ]
    return RankSizes(
        num_layers=config.num_layers,
        tp=tp,
        elements=dense,
        weight_bytes=dense * item * shrunk,
        head_elements=head,
        head_bytes=head * item,
        expert_elements=experts,
        expert_bytes=experts * item * shrunk,
        expert_share=math.fsum(chosen) / len(chosen) if chosen else 0.0,
        attending=tuple(_attending(config, tp, kept_as or dtype)),
        state_bytes=_state_bytes(config, dtype) / tp,
        token_bytes=config.hidden_size * item,
    )


def _expert_elements(config: DecoderConfig) -> Iterator[float]:
    for layer in config.layers:
        if isinstance(layer.mlp, ExpertsConfig):
            width = layer.mlp.latent_size or config.hidden_size
            yield (
                _MATRICES.get(layer.mlp.kind, 3) * layer.mlp.num_experts * width * layer.mlp.intermediate_size
            )


def _attending(config: DecoderConfig, tp: int, dtype: str) -> Iterator[RankAttention]:
    windows = windows_of(config)
    specs = kv_cache_specs(config, block_size=1, dtype=dtype)
    found: dict[int | None, list[float]] = {}
    for index in config.attending_layers:
        layer = config.layers[index]
        if config.mla is not None and "mla" in layer.mixers:
            sizes, ranks = 2 * config.mla.latent_size + config.mla.rope_size, 1
        else:
            sizes, ranks = config.head_size_k + config.head_size_v, min(tp, config.num_kv_heads)
        source = index if layer.kv_source is None else layer.kv_source
        window = layer.window or layer.chunk
        sums = found.setdefault(None if window is None else windows.index(window), [0.0, 0.0])
        sums[0] += 2 * config.num_query_heads / tp * sizes
        sums[1] += page_bytes(specs[source, "attention"]) / ranks
    for at, (flops, kv_bytes) in found.items():
        yield RankAttention(window=at, pair_flops=flops, kv_bytes=kv_bytes)


def _state_bytes(config: DecoderConfig, dtype: str) -> float:
    """Count a request's recurrent states, over all layers and ranks."""
    specs = kv_cache_specs(config, block_size=1, dtype=dtype).values()
    return sum(page_bytes(spec) for spec in specs if not spec.has_token_rows)
