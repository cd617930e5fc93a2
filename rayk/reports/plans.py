"""Keep what `rayk plan` found: plans.parquet, a row per plan that was simulated, and plan.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rayk.reports.columns import make_table
from rayk.reports.fields import BOOL, FLOAT, INT, TEXT, Field, kinds
from rayk.reports.files import atomic_path, make_folder, write_text
from rayk.reports.folder import check_directory
from rayk.reports.schema import stamped
from rayk.types.errors import UserError
from rayk.types.files import parse_json, read_text

VERSION = 1
TABLE, FACTS = "plans.parquet", "plan.json"
FACTS_BYTES = 16 << 20

PLANS = (
    Field("plan_id", TEXT, "", "engines, TP, chunk, rows and policy"),
    Field("mode", TEXT, "", "aggregated or disaggregated"),
    Field("prefill_engines", INT, "engines", "that prefill; in an aggregated plan all of them"),
    Field("decode_engines", INT, "engines", "that decode; 0 in an aggregated plan"),
    Field("prefill_tp", INT, "ranks", "TP of prefill engines, or of aggregated ones"),
    Field("decode_tp", INT, "ranks", "TP of decode engines"),
    Field("num_gpus", INT, "GPUs", "of all engines; CPU slots on a machine without"),
    Field("max_batch_tokens", INT, "tokens", "of a step, at most"),
    Field("max_seqs", INT, "requests", "rows of an engine"),
    Field("block_size", INT, "tokens", "of a block"),
    Field("prefill_num_blocks", INT, "blocks", "of a prefill engine, or of an aggregated one"),
    Field("decode_num_blocks", INT, "blocks", "of a decode engine"),
    Field("policy", TEXT, "", "by which requests are placed"),
    Field("num_drafts", INT, "tokens", "drafted at once, at most; 0: engines do not draft"),
    Field("tokens_per_step", FLOAT, "tokens", "of a request, that a decode step gave on average"),
    Field("break_even", FLOAT, "tokens", "per step from which drafts pay at that batch, by the tables alone"),
    Field("rate", FLOAT, "requests/s", "at which what follows holds"),
    Field("num_requests", INT, "requests", "counted in the simulation"),
    Field("good_share", FLOAT, "share", "of requests that keep every limit"),
    Field("met", BOOL, "", "whether so many are good as the SLO asks for"),
    Field("goodput", FLOAT, "requests/s", "good ones"),
    Field("goodput_per_gpu", FLOAT, "requests/s", "of them, per GPU"),
    Field("ttft_ms_p50", FLOAT, "ms", "TTFT, median"),
    Field("ttft_ms_p90", FLOAT, "ms", "TTFT, 90th percentile"),
    Field("tpot_ms_p50", FLOAT, "ms", "TPOT, median"),
    Field("tpot_ms_p90", FLOAT, "ms", "TPOT, 90th percentile"),
    Field("interactivity", FLOAT, "tokens/s", "that a user sees: 1000 by the median TPOT in ms"),
    Field("output_tokens_per_s_per_gpu", FLOAT, "tokens/s", "of all users, per GPU"),
    Field("max_rate", FLOAT, "requests/s", "highest that keeps the SLO, where it was looked for"),
    Field("busy_prefill", FLOAT, "share", "of time inside steps, of prefill or aggregated engines"),
    Field("busy_decode", FLOAT, "share", "of time inside steps, of decode engines"),
    Field("kv_peak_share_prefill", FLOAT, "share", "of blocks in use at once, on the fullest such engine"),
    Field("kv_peak_share_decode", FLOAT, "share", "likewise of decode engines"),
    Field("preemptions", FLOAT, "per request", "of requests that blocks were short for"),
    Field("cached_share", FLOAT, "share", "of prompt tokens that a prefix cache had"),
    Field("queue_ms_p50", FLOAT, "ms", "before the first engine computes, median"),
    Field("link_busy", FLOAT, "share", "of time in which a decode engine reads"),
    Field("limit", TEXT, "", "what the plan runs out of first"),
    Field("limit_text", TEXT, "", "how that shows"),
    Field("good_share_low", FLOAT, "share", "lowest over seeds and costs +-10 %"),
    Field("good_share_high", FLOAT, "share", "highest of these"),
    Field("outside_hull", FLOAT, "share", "of steps unlike those measured"),
    Field("unmeasured", BOOL, "", "whether costs are from data sheets"),
    Field("on_front", BOOL, "", "whether no plan has more goodput per GPU and more interactivity"),
    Field("is_best", BOOL, "", "whether it is the one to start"),
    Field("why_not", TEXT, "", "why it is not the best"),
    Field("command", TEXT, "", "that starts it"),
)
PLAN_FIELDS = kinds(PLANS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a search for a plan came to."""

    plans: pd.DataFrame
    """A row per plan that was simulated, the best first: columns of PLANS, as `rayk report --columns` tells
    them."""
    facts: Mapping[str, Any]
    """What plan.json holds: the best plan, why, its range and sensitivity, and how far to trust it."""

    @property
    def is_met(self) -> bool:
        """Whether the best plan keeps the SLO."""
        return bool(self.facts["met"])

    @property
    def best(self) -> str:
        """The best plan's `plan_id`."""
        return str(self.facts["best"])

    @property
    def command(self) -> str:
        """The `rayk serve` command that starts it."""
        return str(self.facts["command"])

    @property
    def why(self) -> Sequence[str]:
        return tuple(self.facts["why"])

    @property
    def front(self) -> pd.DataFrame:
        """The plans that no other beats in both goodput per GPU and interactivity."""
        found: pd.DataFrame = self.plans[self.plans["on_front"]]
        return found


def plan_result(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> PlanResult:
    """Make a result of rows of PLANS."""
    found: pd.DataFrame = _table(rows).to_pandas()
    return PlanResult(plans=found, facts=facts)


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return stamped(make_table([dict(row) for row in rows], PLAN_FIELDS).select(list(PLAN_FIELDS)))


def write_plans(
    folder: Path, spec_text: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    """Write a plan's files but its page. Raises UserError where another run's are."""
    check_plan_folder(folder, spec_text)
    make_folder(folder)
    write_text(folder / "spec.yaml", spec_text)
    with atomic_path(folder / TABLE) as path:
        pq.write_table(_table(rows), path)
    text = json.dumps({"version": VERSION, **facts}, indent=2, allow_nan=False)
    write_text(folder / FACTS, text + "\n")


def check_plan_folder(folder: Path, spec_text: str) -> None:
    """Raise UserError where a folder has another run's results: before anything is simulated."""
    check_directory(folder, spec_text, resume=False)
    if is_plan(folder):
        raise UserError("a plan is here", where=str(folder), mend="another --out")


def is_plan(folder: str | Path) -> bool:
    """Tell whether `rayk plan` wrote this folder."""
    return (Path(folder) / FACTS).is_file()


def read_plans(folder: str | Path) -> PlanResult:
    """Read what `write_plans` wrote. Raises UserError."""
    path = Path(folder)
    try:
        facts = parse_json(read_text(path / FACTS, FACTS_BYTES))
        table = pq.read_table(path / TABLE)
    except (OSError, ValueError) as error:
        raise UserError(f"no plan can be read here: {error}", where=str(folder)) from error
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise UserError(f"not a plan of version {VERSION}", where=str(path / FACTS))
    found: pd.DataFrame = table.to_pandas()
    return PlanResult(plans=found, facts=facts)
