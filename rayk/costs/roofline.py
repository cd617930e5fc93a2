"""Derive tables from data sheets, for machines that nobody has measured. Nothing here is a measurement.

A step is its matrix products, then its attention, each as long as its arithmetic or its memory traffic takes,
whichever is longer (S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009), at the share of the
peaks that `Hardware` says; then launches, and all-reduces between ranks. Per rank:

    products   max(weights / bandwidth, 2 elements tokens / peak): flat, then linear in tokens
    experts    weights of as many experts as tokens may choose, then linear
    attention  flops per pair / peak + KV per token seen / bandwidth; of decode steps the larger of the two
    states     read and written once per request

A step with drafts is one of short prompts. Looking n-grams up takes no time of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rayk.costs.table import EngineCosts, EngineKey, StepTable

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device as its data sheet says, and what to expect of it."""

    name: str
    tflops: Mapping[str, float]  # dense, by the model's dtype
    memory_gb_per_s: float
    memory_gb: float = 0.0
    link_gb_per_s: float = 0.0  # between devices of a node, one way
    network_gb_per_s: float = 0.0  # between engines: what hand-overs get
    launch_us: float = 5.0  # per layer and step
    allreduce_us: float = 10.0  # its latency
    turn_us: float = 500.0  # of the host, per step
    request_us: float = 5.0  # of the host, per step and request
    dispatch_us: float = 1000.0  # of a request's way to its engine, and of a ticket's
    flops_share: float = 0.6  # of the peak that products reach
    bandwidth_share: float = 0.75
    keeps_fp8: bool = False  # whether matrices stored in e4m3 are multiplied so


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttention:
    """Layers with the same window, on one rank, added up."""

    window: int | None = None  # its place among the model's windows; None: all of it is seen
    pair_flops: float = 0.0
    kv_bytes: float = 0.0  # per token seen


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What a rank holds, multiplies and reads."""

    num_layers: int
    tp: int
    elements: float  # of the matrices that every token is multiplied by
    weight_bytes: float  # of these
    head_elements: float = 0.0
    head_bytes: float = 0.0
    expert_elements: float = 0.0  # of all experts
    expert_bytes: float = 0.0
    expert_share: float = 0.0  # of the experts that one token chooses
    attending: Sequence[RankAttention] = field(default_factory=tuple)
    state_bytes: float = 0.0  # per request
    token_bytes: float = 0.0  # of the residual stream, which all-reduces add up


def roofline_costs(machine: Hardware, key: EngineKey, sizes: RankSizes) -> EngineCosts:
    """Derive an engine's tables. Needs the machine's peak in the key's dtype."""
    flops_per_s = machine.tflops[key.dtype] * 1e12 * machine.flops_share
    terms = _products(machine, sizes, flops_per_s)
    attended = list(_attention(machine, sizes, flops_per_s))
    prefill = _summed(terms, ((f"{name}{at}", ns) for name, at, ns in attended))
    # In a decode step pairs are what is seen, and the two take the longer of their times.
    longest: dict[str, float] = {}
    for _, at, ns in attended:
        longest[f"seen{at}"] = max(longest.get(f"seen{at}", 0.0), ns)
    turn_ns, request_ns = machine.turn_us * 1e3, machine.request_us * 1e3
    return EngineCosts(
        key=key,
        decode=_table(_summed(terms, longest.items())),
        prefill=_table(prefill),
        verify=_table(prefill),
        drafting={"ngram": StepTable(terms=("one", "requests"), constants=(turn_ns, request_ns))},
        host_ns=turn_ns,
        request_host_ns=request_ns,
        kind="unmeasured",
        source=f"data sheets: {machine.name}",
    )


def _products(machine: Hardware, sizes: RankSizes, flops_per_s: float) -> dict[str, float]:
    """Return the terms of all but attention, in ns each."""
    bytes_per_s = machine.memory_gb_per_s * 1e9 * machine.bandwidth_share
    found: dict[str, float] = {"one": machine.launch_us * 1e3 * sizes.num_layers}
    _add_product(found, "tokens", sizes.elements, sizes.weight_bytes, flops_per_s, bytes_per_s)
    _add_product(found, "logits", sizes.head_elements, sizes.head_bytes, flops_per_s, bytes_per_s)
    if sizes.expert_share:
        # Up to so many tokens may each choose experts that no other did.
        most = max(1, round(1 / sizes.expert_share))
        read_ns = NS * sizes.expert_bytes / bytes_per_s
        found[f"tokens<{most}"] = found.get(f"tokens<{most}", 0.0) + read_ns / most
        flops_ns = NS * 2 * sizes.expert_elements * sizes.expert_share / flops_per_s
        bend = max(most, round(read_ns / flops_ns))
        found[f"tokens>{bend}"] = found.get(f"tokens>{bend}", 0.0) + flops_ns
    found["requests"] = NS * 2 * sizes.state_bytes / bytes_per_s
    if sizes.tp > 1:
        found["one"] += 2 * sizes.num_layers * machine.allreduce_us * 1e3
        moved = 2 * sizes.token_bytes * (sizes.tp - 1) / sizes.tp
        found["tokens"] = NS * 2 * sizes.num_layers * moved / (machine.link_gb_per_s * 1e9)
    return found


def _add_product(
    found: dict[str, float],
    unit: str,
    elements: float,
    num_bytes: float,
    flops_per_s: float,
    bytes_per_s: float,
) -> None:
    """Add max(reading the weights, multiplying by them)."""
    if not elements:
        return
    read_ns, each_ns = NS * num_bytes / bytes_per_s, NS * 2 * elements / flops_per_s
    found["one"] += read_ns
    bend = round(read_ns / each_ns)
    found[f"{unit}>{bend}"] = found.get(f"{unit}>{bend}", 0.0) + each_ns


def _attention(machine: Hardware, sizes: RankSizes, flops_per_s: float) -> Iterator[tuple[str, str, float]]:
    """Yield (pairs or seen, window, ns each)."""
    bytes_per_s = machine.memory_gb_per_s * 1e9 * machine.bandwidth_share
    for a in sizes.attending:
        at = "" if a.window is None else f"@{a.window}"
        yield "pairs", at, NS * a.pair_flops / flops_per_s
        yield "seen", at, NS * a.kv_bytes / bytes_per_s


def _summed(terms: Mapping[str, float], more: Iterable[tuple[str, float]]) -> dict[str, float]:
    found = dict(terms)
    for term, ns in more:
        found[term] = found.get(term, 0.0) + ns
    return found


def _table(terms: Mapping[str, float]) -> StepTable:
    used = {term: ns for term, ns in terms.items() if ns > 0}
    return StepTable(terms=tuple(used), constants=tuple(used.values()))
