"""A plan's tables, made up: two modes, a front, one plan that misses the objective."""

from __future__ import annotations

from typing import Any

import pandas as pd

SPEC = "name: qwen-on-8\nmodel: Qwen/Qwen3-8B\ngpus: 8xH200\n"


def plan_row(prefills: int, decodes: int, tp: int, **changes: Any) -> dict[str, Any]:
    """A plan of so many engines; aggregated without decode engines."""
    mode = "disaggregated" if decodes else "aggregated"
    name = f"p{prefills}xtp{tp}-d{decodes}xtp{tp}" if decodes else f"agg{prefills}xtp{tp}"
    gpus = (prefills + decodes) * tp
    share = changes.get("good_share", 0.95)
    tpot = changes.get("tpot_ms_p50", 30.0)
    return {
        "plan_id": f"{name}-b8192-s64-least_loaded",
        "mode": mode,
        "prefill_engines": prefills,
        "decode_engines": decodes,
        "prefill_tp": tp,
        "decode_tp": tp if decodes else None,
        "num_gpus": gpus,
        "max_batch_tokens": 8192,
        "max_seqs": 64,
        "block_size": 16,
        "prefill_num_blocks": 20_000,
        "decode_num_blocks": 20_000 if decodes else None,
        "policy": "least_loaded",
        "rate": 12.0,
        "num_requests": 2000,
        "good_share": share,
        "met": share >= 0.9,
        "goodput": 12 * share,
        "goodput_per_gpu": 12 * share / gpus,
        "ttft_ms_p50": 180.0,
        "ttft_ms_p90": 420.0,
        "tpot_ms_p50": tpot,
        "tpot_ms_p90": 1.3 * tpot,
        "interactivity": 1000 / tpot,
        "output_tokens_per_s_per_gpu": 2400 / gpus,
        "max_rate": None,
        "busy_prefill": 0.62,
        "busy_decode": 0.91 if decodes else None,
        "kv_peak_share_prefill": 0.3,
        "kv_peak_share_decode": 0.7 if decodes else None,
        "preemptions": 0.0,
        "cached_share": 0.0,
        "queue_ms_p50": 12.0,
        "link_busy": None,
        "limit": "decode" if decodes else "prefill",
        "limit_text": "The decode engines are inside steps 91 % of the time.",
        "good_share_low": None,
        "good_share_high": None,
        "outside_hull": 0.0,
        "unmeasured": False,
        "on_front": False,
        "is_best": False,
        "why_not": "4 more GPUs for 1.2 points of good requests",
        "command": f"rayk serve Qwen/Qwen3-8B --num-prefill {prefills} --num-decode {decodes}",
    } | changes


def synthetic_plans() -> pd.DataFrame:
    return pd.DataFrame(
        [
            plan_row(1, 3, 1, good_share=0.968, is_best=True, on_front=True, max_rate=14.2, why_not=""),
            plan_row(2, 2, 1, good_share=0.921, tpot_ms_p50=38.0, on_front=True, max_rate=12.6),
            plan_row(2, 6, 1, good_share=0.998, tpot_ms_p50=22.0, on_front=True),
            plan_row(1, 1, 4, good_share=0.981, tpot_ms_p50=18.0, on_front=True),
            plan_row(4, 0, 1, good_share=0.71, tpot_ms_p50=47.0),
            plan_row(8, 0, 1, good_share=0.93, tpot_ms_p50=33.0),
        ]
    )


def synthetic_facts(**changes: Any) -> dict[str, Any]:
    best, second = synthetic_plans().to_dict("records")[:2]
    changed = [
        ("as asked", 12.0, 0.968, 180.0),
        ("traffic -20 %", 9.6, 0.991, 120.0),
        ("traffic +20 %", 14.4, 0.884, 410.0),
        ("costs -10 %", 12.0, 0.983, 150.0),
        ("costs +10 %", 12.0, 0.931, 240.0),
        ("seed 1", 12.0, 0.961, 186.0),
    ]
    return {
        "version": 1,
        "name": "qwen-on-8",
        "model": "Qwen/Qwen3-8B",
        "machine": "8 x H200",
        "num_gpus": 8,
        "seed": 0,
        "objective": "fewest_gpus",
        "rate": 12.0,
        "slo": {"ttft_ms": 500, "tpot_ms": 50, "good": 0.9},
        "traffic": "12 requests/s (Poisson), prompts of 512 to 2,048 tokens, answers of 200",
        "met": True,
        "best": best["plan_id"],
        "best_text": "1 prefill engine and 3 decode engines, all at TP 1: 4 of 8 GPUs",
        "command": "rayk serve Qwen/Qwen3-8B --num-prefill 1 --prefill-tp 1 --num-decode 3 --decode-tp 1 "
        "--policy least_loaded --set engine.max_batch_tokens=8192 --set engine.max_seqs=64",
        "limit": "decode",
        "why": ["A fourth decode engine would raise the highest rate to 17.1 requests/s."],
        "next_best": {
            "plan_id": second["plan_id"],
            "text": "2 prefill engines and 2 decode engines",
            "costs": "as many GPUs, 92.1 % good instead of 96.8 %, TPOT p50 38 ms instead of 30 ms.",
            "command": second["command"],
        },
        "range": {
            "ttft_ms_p50": [150.0, 180.0, 240.0],
            "ttft_ms_p90": [350.0, 420.0, 560.0],
            "tpot_ms_p50": [27.0, 30.0, 33.0],
            "tpot_ms_p90": [35.0, 39.0, 44.0],
            "good_share": [0.931, 0.968, 0.983],
            "max_rate": [12.9, 14.2, 15.6],
        },
        "sensitivity": [
            {
                "change": name,
                "rate": rate,
                "good_share": share,
                "met": share >= 0.9,
                "ttft_ms_p50": ttft,
                "ttft_ms_p90": 2.3 * ttft,
                "tpot_ms_p50": 30.0,
                "tpot_ms_p90": 39.0,
                "goodput_per_gpu": rate * share / 4,
            }
            for name, rate, share, ttft in changed
        ],
        "trust": {
            "costs": "costs/qwen3-8b",
            "unmeasured": False,
            "source": "run costs/qwen3-8b/run of 2026-11-28, one H200",
            "provenance": {"machine": "h200-node-3", "commit": "abc1234"},
            "num_outside_hull": 0,
            "num_steps": 120_000,
            "extrapolated": False,
            "doubts": [],
        },
        "search": {
            "num_candidates": 148,
            "num_pruned": 96,
            "num_simulated": 52,
            "num_bisected": 8,
            "num_left_out": 0,
            "wall_s": 74.2,
            "budget_s": 120,
            "notes": [],
        },
        "environment": {"rayk": "0.1", "python": "3.12"},
    } | changes
