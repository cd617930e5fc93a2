"""Count what vLLM's NixlConnector posts for a sequence, by its own algorithm, without running it: as version
TESTED_VLLM does (distributed/kv_transfer/kv_connector/v1/nixl: tp_mapping.compute_tp_mapping,
base_worker._compute_desc_ids and _build_fa_remote, base_scheduler.get_exchange_clipped_blocks)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rayk.explain.explanation import DEFAULT_TOKENS, explain_pair
from rayk.kv.specs import page_bytes
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.models.kv_specs import engine_groups
from rayk.specs import Cell, expand, load_spec
from rayk.specs.checks import check_cell
from rayk.specs.vllm_checks import check_kinds
from rayk.specs.vllm_limits import CPU_BLOCK_SIZE, engine_refusal, handshake_refusal, is_plain
from rayk.types.config import TESTED_VLLM, VllmEngineConfig
from rayk.types.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmRead:
    """What one rank of vLLM's decode engine reads from one of its prefill engine, in one transfer."""

    producer_rank: int
    consumer_rank: int
    num_descriptors: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmExplanation:
    """What vLLM would post, beside what rayk would. Where it is not supported `reason` says why, and the rest
    is empty; so it is where vLLM runs the pair and `not_counted` says why nothing is counted."""

    supported: bool
    reason: str
    vllm: str  # the version whose words and algorithm these are
    num_tokens: int
    not_counted: str = ""
    bytes: int = 0
    num_descriptors: int = 0
    reads: tuple[VllmRead, ...] = ()
    # the same engines of rayk's, in blocks of the same size; None where rayk refuses them
    rayk_bytes: int | None = None
    rayk_num_descriptors: int | None = None
    rayk_num_descriptors_merged: int | None = None  # left when neighbouring blocks are read as one

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_vllm(
    model: str, settings: Mapping[str, Any], *, num_tokens: int | None = None
) -> VllmExplanation:
    """Explain a pair of vLLM's engines on CPUs. Raises UserError for bad input."""
    config = read_config(config_file(model)[1])
    tokens = num_tokens or min(DEFAULT_TOKENS, config.max_positions)
    if tokens > config.max_positions:
        raise UserError(f"{tokens} tokens: at most {config.positions_text}", where="--num-tokens")
    about: dict[str, Any] = {"vllm": TESTED_VLLM, "num_tokens": tokens}
    cell = _cell(model, settings, config)
    why = cell.unsupported or _refusal(cell, config)
    if why:
        return VllmExplanation(supported=False, reason=why, **about)
    if why := _not_counted(cell, config):
        return VllmExplanation(supported=True, reason="", not_counted=why, **about)
    prefill, decode = (replace(e, block_size=e.block_size or CPU_BLOCK_SIZE) for e in cell.vllm)
    reads = tuple(_reads(prefill, decode, cell, config, tokens))
    return VllmExplanation(
        supported=True,
        reason="",
        bytes=sum(read.bytes for read in reads),
        num_descriptors=sum(read.num_descriptors for read in reads),
        reads=reads,
        **about,
        **_of_rayk(model, settings, (prefill, decode), tokens),
    )


def _cell(model: str, settings: Mapping[str, Any], config: DecoderConfig) -> Cell:
    given = {"model": model, "prompts": {"random": {}}, "checks": ["kv_bytes"], **settings}
    loaded = load_spec(given, source="options")
    (cell,) = expand(loaded.spec, config, device="cpu")
    check_kinds([cell], loaded)
    check_cell(cell, config, loaded)
    return cell


def _refusal(cell: Cell, config: DecoderConfig) -> str | None:
    for side, engine in zip(("prefill", "decode"), cell.vllm, strict=True):
        why = engine_refusal(engine, config)
        if why is not None:
            return f"{side}: vLLM {TESTED_VLLM}: {why}"
    prefill, decode = cell.vllm
    why = handshake_refusal(prefill, decode, config)
    if why is not None:
        return f"vLLM {TESTED_VLLM}: {why}"
    return None


def _not_counted(cell: Cell, config: DecoderConfig) -> str | None:
    """Say why nothing is counted of a pair that is not known to be refused; None: it is counted."""
    told = "a run of engine.kind: vllm tells them"
    if not is_plain(config):
        return (
            f"vLLM chooses the blocks of models with states, latents or shared layers when it starts ({told})"
        )
    if cell.spec.transfer.mode != "pull" or cell.vllm[0].connector != "NixlConnector":
        return f"only descriptors that vLLM's NixlConnector pulls are counted ({told})"
    return None


def _reads(
    prefill: VllmEngineConfig, decode: VllmEngineConfig, cell: Cell, config: DecoderConfig, num_tokens: int
) -> Iterator[VllmRead]:
    """Each decode rank reads from every prefill rank that holds heads of its own; of those that hold the same
    ones, from the first. A descriptor is a block of one layer, at the smaller size of both sides' blocks."""
    assert prefill.block_size is not None
    size = prefill.block_size  # divides the decode side's, or equals it
    groups = engine_groups(replace(cell.prefill, block_size=size), config)
    num_descriptors = block_bytes = 0
    for group in groups:
        num_blocks = -(-num_tokens // size)
        windows = {config.layers[layer].window for layer in group.layers}
        window = windows.pop() if len(windows) == 1 else None
        if window is not None and cell.prefill.hybrid_kv:
            num_blocks = min(num_blocks, -(-window // size) + 1)
        num_descriptors += num_blocks * len(group.layers)
        block_bytes += num_blocks * len(group.layers) * page_bytes(group.spec) * size // group.spec.block_size
    heads_of_rank = max(1, config.num_kv_heads // decode.tp)
    for rank in range(decode.tp):
        sources = _sources(rank, prefill.tp, decode.tp, config.num_kv_heads)
        for source in sources:
            share = block_bytes * heads_of_rank // config.num_kv_heads // len(sources)
            yield VllmRead(
                producer_rank=source, consumer_rank=rank, num_descriptors=num_descriptors, bytes=share
            )


def _sources(rank: int, prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[int]:
    """Ask vLLM's compute_tp_mapping for the source ranks of attention."""
    if decode_tp >= prefill_tp:
        return [rank * prefill_tp // decode_tp]
    each = prefill_tp // decode_tp
    first: dict[int, int] = {}
    for source in range(rank * each, (rank + 1) * each):
        first.setdefault(source * num_kv_heads // prefill_tp, source)
    return sorted(first.values())


def _of_rayk(
    model: str, settings: Mapping[str, Any], sides: tuple[VllmEngineConfig, VllmEngineConfig], num_tokens: int
) -> dict[str, Any]:
    """Return what rayk's engines would read in the same blocks and layouts."""
    own = {
        name: {"tp": engine.tp, "block_size": engine.block_size, "layout": engine.layout}
        for name, engine in zip(("prefill", "decode"), sides, strict=True)
    }
    engine = {key: value for key, value in settings.get("engine", {}).items() if key == "prefix_caching"}
    found = explain_pair(model, {**settings, "engine": engine, **own}, num_tokens=num_tokens)
    if not found.supported:
        return {}
    return {
        "rayk_bytes": found.bytes,
        "rayk_num_descriptors": found.num_descriptors,
        "rayk_num_descriptors_merged": sum(read.num_descriptors_merged for read in found.reads),
    }


def text_lines(explanation: VllmExplanation) -> Iterator[str]:
    if not explanation.supported:
        yield f"not supported: {explanation.reason}"
        return
    if explanation.not_counted:
        yield f"vLLM {explanation.vllm} is not known to refuse it; not counted: {explanation.not_counted}"
        return
    yield (
        f"supported: {explanation.bytes:,} bytes in {explanation.num_descriptors:,} descriptors for a "
        f"sequence of {explanation.num_tokens:,} tokens, as NixlConnector of vLLM {explanation.vllm} posts "
        "them: whole blocks, each layer's by itself"
    )
    if explanation.rayk_bytes is not None:
        yield (
            f"rayk: {explanation.rayk_bytes:,} bytes in {explanation.rayk_num_descriptors:,} descriptors, "
            f"{explanation.rayk_num_descriptors_merged:,} after merging neighbours"
        )
    for read in explanation.reads:
        ranks = f"decode rank {read.consumer_rank} from prefill rank {read.producer_rank}"
        yield f"  {ranks}: {read.bytes:,} bytes in {read.num_descriptors:,} descriptors"
