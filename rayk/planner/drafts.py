"""Say how many drafted tokens would be right, as a plan assumes or as a run shows, and what that is worth."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from rayk.planner.recorded import Row, number, planned_cells
from rayk.reports import load
from rayk.reports.values import is_null
from rayk.specs.plan_drafts import DraftSearch
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError
from rayk.types.speculative import SpeculativeConfig


def rates_of(asked: DraftSearch) -> DraftRates:
    """Return how often tokens are proposed and right. Raises UserError for a run that does not tell."""
    most = max(asked.num_tokens)
    if isinstance(asked.acceptance, str):
        return _rates_of_run(asked.acceptance, asked.method, most)
    proposed = 1.0 if asked.proposed is None else asked.proposed
    if isinstance(asked.acceptance, list):
        return DraftRates(tuple(asked.acceptance), (proposed,) * len(asked.acceptance))
    return DraftRates.even(asked.acceptance, most, proposed=proposed)


def settings_of(asked: DraftSearch, num_tokens: int) -> SpeculativeConfig | None:
    """Make the settings of engines that draft so many tokens at once; 0: they do not."""
    if not num_tokens:
        return None
    given = asked.model_dump(exclude={"num_tokens", "acceptance", "proposed"}, exclude_none=True)
    return SpeculativeConfig(num_tokens=num_tokens, **given)


def server_option(wanted: SpeculativeConfig) -> str:
    """Write these settings as the option --speculative-config takes them: by vLLM's names."""
    found: dict[str, Any] = {
        "method": "draft_model" if wanted.method == "draft" else wanted.method,
        "num_speculative_tokens": wanted.num_tokens,
    }
    if wanted.model is not None:
        found["model"] = wanted.model
    if wanted.tp is not None:
        found["draft_tensor_parallel_size"] = wanted.tp
    lookup = {name: getattr(wanted, name) for name in ("prompt_lookup_max", "prompt_lookup_min")}
    if lookup != {name: SpeculativeConfig.__dataclass_fields__[name].default for name in lookup}:
        found |= lookup  # one of them alone would be both
    return json.dumps(found)


def request_rates(row: Row) -> DraftRates:
    """Return the rates of one request of requests.parquet."""
    return counted_rates([row])


def counted_rates(rows: Iterable[Row]) -> DraftRates:
    """Return the rates of rows of requests.parquet, all of engines that were to draft."""
    num_steps, drafted, accepted = 0, [0], [0]
    for row in rows:
        steps = number(row, "num_decode_steps")
        if steps is None:  # nothing was proposed: each token had a step
            steps = max(0, len(row["output_token_ids"]) - 1)
        num_steps += int(steps)
        drafted, accepted = (
            [a + int(b) for a, b in zip_longest(sums, _listed(row, name), fillvalue=0)]
            for sums, name in ((drafted, "drafted_by_position"), (accepted, "accepted_by_position"))
        )
    return DraftRates.counted(num_steps, drafted, accepted)


def _listed(row: Row, name: str) -> list[int]:
    found = row.get(name)
    return [] if found is None or is_null(found) else list(found)


def _rates_of_run(folder: str, method: str, most: int) -> DraftRates:
    """Read the rates of the cells of a run that drafted the most tokens at once: of those that drafted fewer,
    nothing is known of later positions."""
    result = load(folder)
    sizes = {}
    for name, (cell, _) in planned_cells(result).items():
        wanted = cell.engines[-1].speculative  # of engines that decode
        if wanted is not None and wanted.method == method:
            sizes[name] = wanted.num_tokens
    found = max(sizes.values(), default=0)
    if found < most:
        told = f"at most {found} tokens at once" if found else "nothing"
        raise UserError(
            f"{method} drafts of {most} tokens are asked for, and this run drafted {told}",
            where=f"search.speculative.acceptance: {folder}",
            mend=f"a run with speculative: {{method: {method}, num_tokens: {most}}}, or numbers",
        )
    cells = {name for name, size in sizes.items() if size == found}
    rows = [row for row in result.requests.to_dict("records") if row["cell_id"] in cells]
    answered = [row for row in rows if is_null(row["error"])]
    if not answered:
        raise UserError("no request of its drafting cells was answered", where=folder)
    return counted_rates(answered)
