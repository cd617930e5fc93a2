"""Sum up for a cell's row what its host tier did, over its engines, its tiers and its repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rayk.types.offload import ENDED

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome

# column -> an engine's counter
OF_ENGINES = {
    "host_stored_bytes": "stored_bytes",
    "host_loaded_bytes": "loaded_bytes",
    "swapped_out_bytes": "swapped_out_bytes",
    "swapped_in_bytes": "swapped_in_bytes",
    "num_loads_declined": "loads_declined",
    "num_swaps_declined": "swaps_declined",
}
OF_TIERS = {"host_tier.hits": "hits", "host_tier.misses": "misses"}  # column -> a tier's counter
# column -> a disk tier's counter
OF_DISKS = {
    "disk_tier.num_written": "pages_written",
    "disk_tier.num_read": "pages_read",
    "disk_tier.num_evicted": "pages_evicted",
    "disk_tier.num_dropped": "pages_dropped",
}
BAD = "bad_"  # begins the names of a disk tier's counters of damaged pages
MIB = 2**20
# an engine's counter -> what is said of it where it is not 0
FAILED = {
    "stores_failed": "stores failed",
    "stores_too_large": "stores did not fit into outboxes (offload.outbox_mib)",
    "swaps_too_large": "requests were not swapped out, which do not fit into outboxes (offload.outbox_mib)",
    "handovers_too_large": "hand-overs were read past outboxes, which cannot hold them (offload.outbox_mib)",
    "loads_failed": "loads failed and were computed",
    "swaps_failed": "swaps failed and were computed",
    "lookups_late": "questions were not answered in time",
    "loads_held_back": "prompts were not looked up, after failures in a row",
    "swaps_held_back": "requests were not swapped out, after failures in a row",
}
# an engine's counter -> where the engine says why it counted last
REASONS = {"stores_failed": "last_store_failure"}

Counters = Mapping[str, Any]


def offloaded(outcomes: Sequence[CellOutcome]) -> dict[str, float | str]:
    """Fill the columns of reports.fields.OFFLOAD_FIELDS; empty where no engine and no tier told anything."""
    engines = [counters for o in outcomes for counters in o.offload.values()]
    tiers = [counters for o in outcomes for counters in o.tiers.values()]
    losses = [loss for o in outcomes for loss in o.tier_losses]
    if not (engines or tiers or losses):
        return {}
    found: dict[str, float | str] = {}
    if engines:
        found |= {column: sum(e.get(name, 0) for e in engines) for column, name in OF_ENGINES.items()}
        found |= _beliefs(engines)
    if tiers:
        found |= _of_tiers(outcomes)
    of_all = (*_of_engines(outcomes), *_of_memory(outcomes), *_of_disks(outcomes))
    lost = (f"the host tier was lost: {loss}" for loss in losses)
    note = "; ".join(dict.fromkeys([*lost, *of_all]))
    return found | ({"offload_note": note} if note else {})


def _beliefs(engines: Sequence[Counters]) -> dict[str, float]:
    """Take the median over engines of what cost models expect of a MiB each way and of a prompt, in ms."""
    expectations = [_expected(e["costs"]) for e in engines]
    names = dict.fromkeys(name for t in expectations for name in t)
    return {name: median(t[name] for t in expectations if name in t) for name in names}


def _expected(costs: Counters) -> dict[str, float]:
    """Read costs.CostModel.describe: a rate is absent where bytes cost nothing, steps until they are
    known."""
    found = {}
    for direction in ("out", "in"):
        byte_ns = 1 / costs[f"{direction}_gb_per_s"] if f"{direction}_gb_per_s" in costs else 0.0
        found[f"offload_{direction}_1mib_ms"] = (costs[f"{direction}_latency_ns"] + MIB * byte_ns) / 1e6
    if "prefill_512_ns" in costs:
        found["offload_compute_512_ms"] = costs["prefill_512_ns"] / 1e6
    return found


def _of_tiers(outcomes: Sequence[CellOutcome]) -> dict[str, float]:
    """Tell what tiers hold in the end, and what they counted in these repeats."""
    last = list(next(o.tiers for o in reversed(outcomes) if o.tiers).values())
    found: dict[str, float] = {
        "host_tier.num_blocks": sum(t["num_blocks"] for t in last),
        "host_tier.num_cached_blocks": sum(t["num_cached_blocks"] for t in last),
    }
    found |= {column: _counted(outcomes, name) for column, name in OF_TIERS.items()}
    disks = [t["disk"] for t in last if "disk" in t]
    if disks:
        found["disk_tier.num_pages"] = sum(d["num_pages"] for d in disks)
        found["disk_tier.num_bad"] = sum(_bad_pages(outcomes).values())
        found |= {column: _counted(outcomes, name, "disk") for column, name in OF_DISKS.items()}
    return found


def _counted(outcomes: Sequence[CellOutcome], name: str, part: str = "") -> int:
    """Count within these repeats what a tier, or its part, counted: it may have begun earlier."""
    return sum(after.get(name, 0) - before.get(name, 0) for before, after in _spans(outcomes, part))


def _bad_pages(outcomes: Sequence[CellOutcome]) -> Counter[str]:
    names = {name for _, after in _spans(outcomes, "disk") for name in after if name.startswith(BAD)}
    return +Counter({name.removeprefix(BAD): _counted(outcomes, name, "disk") for name in sorted(names)})


def _spans(outcomes: Sequence[CellOutcome], part: str) -> Iterable[tuple[Counters, Counters]]:
    """Yield what each tier said before and after each repeat."""
    for outcome in outcomes:
        for tier, after in outcome.tiers.items():
            before = outcome.tiers_before.get(tier, {})
            yield (before.get(part, {}), after.get(part, {})) if part else (before, after)


def _of_engines(outcomes: Sequence[CellOutcome]) -> Iterable[str]:
    for outcome in outcomes:
        for engine, counters in outcome.offload.items():
            # Of a tier that was lost, its own words say more.
            if counters["why_off"] not in ("", ENDED) and not outcome.tier_losses:
                yield f"{engine} had no host tier: {counters['why_off']}"
            if counters.get("why_few"):
                yield counters["why_few"]
    for name, words in FAILED.items():
        number = sum(counters.get(name, 0) for o in outcomes for counters in o.offload.values())
        if number:
            whys = (
                counters.get(REASONS.get(name, ""), "") for o in outcomes for counters in o.offload.values()
            )
            why = next((why for why in whys if why), "")
            yield f"{number} {words}" + (f" (such as: {why})" if why else "")


def _of_memory(outcomes: Sequence[CellOutcome]) -> Iterable[str]:
    number = _counted(outcomes, "changed_pages")
    if number:
        yield f"{number} pages in host memory were changed after they had been stored"


def _of_disks(outcomes: Sequence[CellOutcome]) -> Iterable[str]:
    bad = _bad_pages(outcomes)
    if bad:
        reasons = ", ".join(f"{number} {reason}" for reason, number in bad.items())
        yield f"pages on disk were not served, but computed: {reasons}"
    for outcome in outcomes:
        for counters in outcome.tiers.values():
            state = counters.get("disk", {}).get("state", "on")
            if state != "on":
                yield f"the disk tier was {state}"
