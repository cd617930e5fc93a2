"""Say what limits a plan, and why another is not the best."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.planner.candidates import Candidate, Space
from rayk.planner.search import PlanTrials
from rayk.planner.trial import TrialResult

FULL = 0.98  # of an engine's blocks
BUSY, SATURATED = 0.7, 0.95  # shares of the time inside steps
READING = 0.8  # share of the time in which a decode engine reads
WAITS = {
    "queue": "in the waiting room",
    "prefill_queue": "for a prefill engine",
    "prefill": "for their own prefill",
    "ticket": "for the prefill engine's turn to end",
    "reserve": "for blocks of a decode engine",
    "read": "for the KV to arrive",
    "decode_queue": "for a decode engine",
}
"""Stages before a decode step, and what a request waits for in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    name: str  # prefill, decode, kv blocks, transfers, queue, ttft, tpot, e2e or none
    text: str


def limit_of(plan: PlanTrials) -> Limit:
    """Find what a plan runs out of first: from the lowest rate that it did not keep up with, where one was
    tried, else from what it was asked."""
    at = plan.beyond or plan.result
    broken = max(at.missed, key=lambda name: at.missed[name], default=None)
    if broken is None or not at.missed[broken]:
        return Limit(name="none", text="No request misses a limit, as far as was tried.")
    missed = f"At {at.trial.rate:,.3g} requests/s {at.missed[broken]:.0%} miss {broken.upper()}"
    name, because = _cause(plan.candidate, at, broken)
    return Limit(name=name, text=f"{missed}: {because}.")


def _cause(candidate: Candidate, at: TrialResult, broken: str) -> tuple[str, str]:
    for side, share in at.kv_peak.items():
        waits = at.stages_ms.get("reserve" if side == "decode" else "prefill_queue", 0.0)
        if share >= FULL and (at.preemptions > 0 or waits > at.stages_ms.get("prefill", 0.0)):
            engines = _side(candidate, side)
            return (
                "kv blocks",
                f"the blocks of {engines} are full ({at.preemptions:.2f} preemptions a request)",
            )
    if at.link_busy is not None and at.link_busy >= READING:
        return "transfers", f"a decode engine reads {at.link_busy:.0%} of the time"
    longest = max(WAITS, key=lambda stage: at.stages_ms.get(stage, 0.0))
    longest_ms = at.stages_ms.get(longest, 0.0)
    if broken == "tpot" or longest_ms == 0:
        if candidate.family.is_aggregated:
            return "decode", "steps of many requests, and of prompts in between, take longer than that"
        return "decode", "decode steps of so many requests take longer than that"
    waited = f"requests wait {longest_ms:,.0f} ms {WAITS[longest]}"
    busy = at.busy.get("prefill", 0.0)
    computes = f"{waited}; {_side(candidate, 'prefill')} compute {busy:.0%} of the time"
    if busy >= SATURATED and not candidate.family.is_aggregated:
        # Prefill engines have nothing to do while no prompt waits: these always do.
        return "prefill", computes
    if longest in ("queue", "decode_queue", "reserve"):
        rows = candidate.family.max_seqs
        return "queue", f"{waited}, as all {rows} rows of {_side(candidate, 'decode')} are taken"
    if longest == "read":
        return "transfers", waited
    return ("prefill" if busy >= BUSY else broken), computes


def _side(candidate: Candidate, side: str) -> str:
    return "the engines" if candidate.family.is_aggregated else f"the {side} engines"


def why_of(plan: PlanTrials, *, rate: float | None, good: float) -> list[str]:
    """Say in sentences why a plan is the best, and what it comes to."""
    result, candidate = plan.result, plan.candidate
    told = []
    shares = [
        f"{side.title()} engines compute {share:.0%} of the time" for side, share in result.busy.items()
    ]
    if candidate.family.is_aggregated:
        shares = [f"Engines compute {result.busy.get('prefill', 0.0):.0%} of the time"]
    blocks = ", ".join(f"{share:.0%}" for share in result.kv_peak.values())
    told.append(f"{'; '.join(shares)}; at most {blocks} of their blocks are in use.")
    if plan.max_rate:
        kept = f"It keeps {good:.0%} good answers up to {plan.max_rate:,.3g} requests/s"
        told.append(kept + (f", {plan.max_rate / rate:.2f} times what is asked." if rate else "."))
    return told


def why_drafts(plan: PlanTrials, space: Space) -> list[str]:
    """Say what drafts are worth to a plan, or would be: tokens per step, how many it takes for them to pay,
    and the time per token against the same engines without."""
    tried = space.spec.search.num_drafts
    if len(tried) == 1:
        return []
    beside = next((r for _, r in plan.ranged if _drafts(r) != _drafts(plan.result)), None)
    of = plan.result if _drafts(plan.result) else beside
    if of is None or not of.num_requests:
        return []
    pays = space.break_even(of.trial.candidate, of.decodes_at_once)
    text = (
        f"Drafts of {_drafts(of)} give {of.tokens_per_step:.2f} tokens a step, where "
        f"{of.decodes_at_once:.1f} requests decode at once; from {pays:.2f} on they pay"
    )
    if beside is None or not beside.num_requests:
        return [f"{text}."]
    without = beside if of is plan.result else plan.result
    if not of.tpot_ms[0] > 0:
        return [f"{text}."]
    ratio = without.tpot_ms[0] / of.tpot_ms[0]
    return [f"{text}. A token comes {ratio:.2f} times as fast as without: {_pair(without, of)}."]


def _pair(without: TrialResult, of: TrialResult) -> str:
    return f"median TPOT {of.tpot_ms[0]:,.2f} ms, not {without.tpot_ms[0]:,.2f}"


def _drafts(result: TrialResult) -> int:
    return result.trial.candidate.family.num_drafts


def why_not(plan: PlanTrials, best: PlanTrials, *, good: float, fewest: bool) -> str:
    """Say why a plan is not the best; empty of the best."""
    if plan is best:
        return ""
    result = plan.result
    if result.refusal:
        return f"outside of what was measured: {result.refusal}"
    if result.good_share < good:
        broken = max(result.missed, key=lambda name: result.missed[name], default="")
        return f"{result.good_share:.0%} good: {result.missed.get(broken, 0.0):.0%} miss {broken.upper()}"
    more = plan.candidate.num_gpus - best.candidate.num_gpus
    if fewest and more > 0:
        return f"{more} more GPU{'s' if more > 1 else ''}"
    if plan.max_rate is None:
        return "as good in a short simulation; not simulated at length"
    if best.max_rate is not None and plan.max_rate < best.max_rate:
        return f"keeps the SLO up to {plan.max_rate:,.3g} requests/s, the best up to {best.max_rate:,.3g}"
    return f"{more} more GPUs at the same rate" if more > 0 else "as good as the best"
