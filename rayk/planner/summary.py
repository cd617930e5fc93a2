"""Turn what a search found into rows of plans.parquet and plan.json."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rayk.costs.stored import as_json
from rayk.planner.candidates import Space
from rayk.planner.command import command_of, planned_server, server_options
from rayk.planner.front import on_front
from rayk.planner.search import PlanTrials, Search
from rayk.planner.trial import TrialResult
from rayk.planner.why import limit_of, why_drafts, why_not, why_of
from rayk.reports.environment import git_commit, package_versions
from rayk.reports.validation import within_text
from rayk.types.model_names import weights_name

if TYPE_CHECKING:
    from rayk.planner.inputs import PlanInputs
    from rayk.planner.pool import TrialPool

RANGED = ("ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50", "tpot_ms_p90", "good_share")
SURE = ("costs", "seed")
"""Beginnings of the changes that may come about by themselves: a range is over these."""


def plan_rows(search: Search, best: PlanTrials, space: Space) -> list[dict[str, Any]]:
    """Make a row of each plan that was simulated, the best first."""
    plans = sorted(search.found.values(), key=lambda p: (p is not best, search.rank(p)))
    rows = [_row(search, plan, best, space) for plan in plans]
    shown = [row for row in rows if row["met"]] or [row for row in rows if row["num_requests"]]
    points = [(row["goodput_per_gpu"], row["interactivity"] or 0.0) for row in shown]
    for row, is_on in zip(shown, on_front(points), strict=True):
        row["on_front"] = is_on
    return rows


def _row(search: Search, plan: PlanTrials, best: PlanTrials, space: Space) -> dict[str, Any]:
    c, f, r = plan.candidate, plan.candidate.family, plan.result
    limit = limit_of(plan)
    spec = space.spec
    shares = [of.good_share for _, of in _likely(plan)]
    return {
        "plan_id": c.plan_id,
        "mode": f.mode,
        "prefill_engines": c.num_prefill,
        "decode_engines": c.num_decode,
        "prefill_tp": f.prefill_tp,
        "decode_tp": f.decode_tp,
        "num_gpus": c.num_gpus,
        "max_batch_tokens": f.max_batch_tokens,
        "max_seqs": f.max_seqs,
        "block_size": f.block_size,
        "prefill_num_blocks": f.prefill_blocks,
        "decode_num_blocks": f.decode_blocks,
        "policy": c.policy,
        **_drafts_of(plan, space),
        "met": search.is_met(r),
        **numbers_of(r, c.num_gpus),
        "max_rate": plan.max_rate,
        "busy_prefill": r.busy.get("prefill"),
        "busy_decode": r.busy.get("decode"),
        "kv_peak_share_prefill": r.kv_peak.get("prefill"),
        "kv_peak_share_decode": r.kv_peak.get("decode"),
        "preemptions": r.preemptions,
        "cached_share": r.cached_share,
        "queue_ms_p50": r.queue_ms,
        "link_busy": r.link_busy,
        "limit": limit.name,
        "limit_text": limit.text,
        "good_share_low": min(shares) if len(shares) > 1 else None,
        "good_share_high": max(shares) if len(shares) > 1 else None,
        "outside_hull": r.num_outside_hull / r.num_steps if r.num_steps else 0.0,
        "unmeasured": not space.costs.is_measured,
        "on_front": False,
        "is_best": plan is best,
        "why_not": why_not(plan, best, good=spec.slo.good, fewest=search.goal == "fewest_gpus"),
        "command": command_of(server_options(spec, c)),
    }


def _drafts_of(plan: PlanTrials, space: Space) -> dict[str, Any]:
    """Name what drafts came to; None where none are tried, or nothing was simulated."""
    num, result = plan.candidate.family.num_drafts, plan.result
    tried = len(space.spec.search.num_drafts) > 1
    known = bool(num and result.num_requests)
    return {
        "num_drafts": num if tried else None,
        "tokens_per_step": result.tokens_per_step if known else None,
        "break_even": space.break_even(plan.candidate, result.decodes_at_once) if known else None,
    }


def numbers_of(result: TrialResult, num_gpus: int) -> dict[str, Any]:
    """Name what a simulation came to as columns do; None where nothing tells it."""
    return {
        "rate": result.trial.rate,
        "num_requests": result.num_requests,
        "good_share": result.good_share,
        "goodput": result.goodput,
        "goodput_per_gpu": result.goodput / num_gpus,
        "ttft_ms_p50": _known(result.ttft_ms[0]),
        "ttft_ms_p90": _known(result.ttft_ms[1]),
        "tpot_ms_p50": _known(result.tpot_ms[0]),
        "tpot_ms_p90": _known(result.tpot_ms[1]),
        "interactivity": _known(1000 / result.tpot_ms[0]) if result.tpot_ms[0] else None,
        "output_tokens_per_s_per_gpu": result.output_tokens_per_s / num_gpus,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _likely(plan: PlanTrials) -> list[tuple[str, TrialResult]]:
    """List a plan's results that differ by seeds and costs alone."""
    return [
        ("as asked", plan.result),
        *((n, r) for n, r in plan.ranged if n.startswith(SURE) and not r.refusal),
    ]


def plan_facts(
    search: Search, best: PlanTrials, plan: PlanInputs, pool: TrialPool, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Make what plan.json holds."""
    spec = plan.spec
    server = planned_server(spec, best.candidate, plan.config)
    rate = plan.traffic.rate
    return {
        "name": spec.name,
        "model": spec.model,
        "machine": plan.machine.name,
        "num_gpus": plan.machine.num_gpus,
        "seed": spec.traffic.seed,
        "objective": spec.resolved_objective,
        "rate": rate,
        "slo": {f"{name}_ms": limit for name, limit in spec.slo.limits_ms.items()} | {"good": spec.slo.good},
        "traffic": traffic_text(plan),
        "met": search.is_met(best.result),
        "best": best.candidate.plan_id,
        "best_text": f"{best.candidate.text}: {_size(plan, best.candidate.num_gpus)}",
        "command": server.command,
        "limit": limit_of(best).name,
        "max_rate_below": None if best.beyond is None else best.beyond.trial.rate,
        "why": [*why_of(best, rate=rate, good=spec.slo.good), *why_drafts(best, plan.space)],
        "next_best": _next_best(search, best, plan),
        "range": _range(best),
        "sensitivity": [
            {
                "change": name,
                "met": search.keeps(r),
                "outside": r.refusal,
                **numbers_of(r, best.candidate.num_gpus),
            }
            for name, r in [(search.base_name(best), best.result), *best.ranged]
        ],
        "trust": trust_of(best, plan, rows),
        "search": {
            "num_candidates": search.num_candidates,
            "num_pruned": search.num_estimated_away,
            "num_simulated": len(search.found),
            "num_bisected": search.num_bisected,
            "num_trials": pool.num_run,
            "num_left_out": pool.num_left_out,
            "wall_s": pool.spent_s,
            "budget_s": plan.budget_s,
            "notes": [*search.notes, *_budget_note(pool, plan), *plan.refused],
        },
        "environment": {"packages": package_versions(), "git_commit": git_commit()},
    }


def _size(plan: PlanInputs, num: int) -> str:
    unit = "GPU" if plan.spec.device == "cuda" else "CPU slot"
    return f"{num} {unit}{'s' if num != 1 else ''}"


def traffic_text(plan: PlanInputs) -> str:
    """Say in one line what comes."""
    spec = plan.spec.traffic
    if spec.trace is not None:
        return f"{plan.profile.text}, at {plan.traffic.rate:,.3g} requests/s"
    rate = "as many as possible" if spec.rate is None else f"{spec.rate:,.4g} requests/s"
    sessions = "" if spec.num_sessions is None else f", {spec.num_sessions} sessions"
    return f"{rate}, {spec.process} arrivals, {plan.profile.text}{sessions}"


def _budget_note(pool: TrialPool, plan: PlanInputs) -> list[str]:
    if not pool.num_left_out:
        return []
    return [
        f"the budget of {plan.budget_s:,.0f} s ended the search: {pool.num_left_out} simulations were left "
        "out (--budget-s)"
    ]


def _next_best(search: Search, best: PlanTrials, plan: PlanInputs) -> dict[str, Any] | None:
    """Say what the plan of other engines that comes next costs."""
    spec = plan.spec

    def shape(trials: PlanTrials) -> tuple[Any, ...]:
        c = trials.candidate
        return c.family.mode, c.num_prefill, c.num_decode, c.family.prefill_tp, c.family.decode_tp

    others = [p for p in search.found.values() if shape(p) != shape(best) and not p.result.refusal]
    if not others:
        return None
    found = min(others, key=search.rank)
    told = why_not(found, best, good=spec.slo.good, fewest=search.goal == "fewest_gpus")
    return {
        "plan_id": found.candidate.plan_id,
        "text": f"{found.candidate.text}: {_size(plan, found.candidate.num_gpus)}",
        "costs": told,
        "command": command_of(server_options(spec, found.candidate)),
    }


def _range(best: PlanTrials) -> dict[str, list[float | None]]:
    """Give low, predicted and high of each number over seeds and costs."""
    found: dict[str, list[float | None]] = {}
    of = [numbers_of(result, best.candidate.num_gpus) for _, result in _likely(best)]
    for name in RANGED:
        known = [numbers[name] for numbers in of if numbers[name] is not None]
        found[name] = [min(known), of[0][name], max(known)] if known else [None, None, None]
    return found


def trust_of(best: PlanTrials, plan: PlanInputs, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Say what predictions rest on, and what to doubt."""
    outside, steps = best.result.num_outside_hull, best.result.num_steps
    measured = plan.costs.is_measured
    doubts = []
    if best.result.reads_as_coded:
        doubts.append(
            "Reads between these engines were not measured: the code's own estimate stands for them."
        )
    refused = sum(row["why_not"].startswith("outside of what was measured") for row in rows)
    if refused:
        doubts.append(
            f"{refused} of {len(rows)} plans take steps unlike those measured, and were not predicted "
            "(--extrapolate)."
        )
    if weights_name(plan.spec.model) != plan.spec.model:
        doubts.append("The model was read from its config alone: the command needs its weights beside it.")
    validated = plan.costs.validated
    sources = sorted({costs.source for costs in plan.costs.engines.values() if costs.source})
    return {
        "costs": plan.costs.folder,
        "unmeasured": not measured,
        "source": "; ".join(sources[:3]),
        "provenance": as_json(plan.costs.provenance),
        "num_outside_hull": outside,
        "num_steps": steps,
        "extrapolated": plan.extrapolates,
        "doubts": doubts,
        "validation": within_text(validated.num_cells, validated.within, validated.date)
        if validated.num_cells
        else "",
    }
