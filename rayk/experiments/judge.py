"""Asks the oracle about a cell's prompts and turns outcomes into the cell's row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.engine.plan import plan_engine
from rayk.experiments.compare import NEAR_TIE_LOGITS, compare_tokens, compare_values
from rayk.experiments.references import References
from rayk.experiments.verdict import Findings
from rayk.models.config import DecoderConfig
from rayk.specs import Cell
from rayk.types.errors import KVMismatch
from rayk.types.rows import CellRow

if TYPE_CHECKING:
    from rayk.actors.coordinator import CellOutcome

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class _Counts:
    """What a cell's checks counted. None: not checked."""

    num_token_mismatches: int | None = None
    first_divergence: tuple[int, int] | None = None
    num_values: int | None = None
    max_value_error: float | None = None
    checks_done: list[str] = field(default_factory=list)


class CellJudge:
    """Judges the cells of one model."""

    def __init__(self, model: str, config: DecoderConfig, directory: Path) -> None:
        self._config = config
        self._references = References(model, directory / "reference")

    def ask(self, cell: Cell, prompts: Prompts) -> None:
        """Have the reference's answers ready for a cell."""
        if "tokens" in cell.checks:
            self._references.outputs(prompts, cell.sampling)
        if self.needs_capture(cell):
            for prompt in prompts:
                self._references.kv(prompt)

    def needs_capture(self, cell: Cell) -> bool:
        """Whether the prefill engine's rows must be brought here."""
        return "kv_values" in cell.checks

    def judge(self, cell: Cell, prompts: Prompts, outcomes: Sequence[CellOutcome]) -> CellRow:
        """The cell's row, over all its repeats."""
        findings, counts = Findings(), _Counts()
        for outcome in outcomes:
            findings.add_errors(outcome.errors)
            if "tokens" in cell.checks:
                self._check_tokens(cell, prompts, outcome, findings, counts)
            if self.needs_capture(cell):
                self._check_values(cell, prompts, outcome, findings, counts)
        checked = sum(o.num_kv_bytes_checked for o in outcomes)
        if "kv_bytes" in cell.checks and cell.decode is not None and checked:
            counts.checks_done.append("kv_bytes")
        mismatches = [e for o in outcomes for e in o.errors if isinstance(e, KVMismatch)]
        verdict, reason = findings.judge()
        if verdict == "PASS" and cell.decode is not None and not checked:
            reason = "no KV was handed over: every request ended with its first token"
        facts = outcomes[-1].facts
        return CellRow(
            cell_id=cell.cell_id,
            axes=cell.axes,
            verdict=verdict,
            reason=reason,
            num_token_mismatches=counts.num_token_mismatches,
            first_divergence=counts.first_divergence,
            checks_done=list(dict.fromkeys(counts.checks_done)),
            near_tie_tolerance=NEAR_TIE_LOGITS if "tokens" in cell.checks else None,
            expected_verdict=cell.expected_verdict,
            prefill_effective_block_sizes=facts.get("prefill0", {}).get("block_sizes"),
            decode_effective_block_sizes=facts.get("decode0", {}).get("block_sizes"),
            effective=_effective(facts),
            num_kv_bytes_checked=checked if cell.decode is not None else None,
            num_kv_bytes_mismatched=(
                sum(m.num_bytes_mismatched for m in mismatches) if cell.decode is not None else None
            ),
            num_kv_values_checked=counts.num_values,
            max_kv_value_error=counts.max_value_error,
            wall_ns=sum(o.wall_ns for o in outcomes),
        )

    def _check_tokens(
        self, cell: Cell, prompts: Prompts, outcome: CellOutcome, findings: Findings, counts: _Counts
    ) -> None:
        finished = [row for row in outcome.requests if row.error is None]
        if not finished:
            return  # nothing was compared, and the table must not say that it was
        expected = self._references.outputs(prompts, cell.sampling)
        counts.checks_done.append("tokens")
        counts.num_token_mismatches = counts.num_token_mismatches or 0
        for row in finished:
            answer = expected[row.prompt_index]
            compared = compare_tokens(row, answer.token_ids, self._references, cell.sampling)
            if compared.first_divergence is None:
                continue
            if counts.first_divergence is None:
                counts.first_divergence = (row.prompt_index, compared.first_divergence)
            if not compared.near_tie:
                counts.num_token_mismatches += 1
            findings.add("NEAR_TIE" if compared.near_tie else "TOKEN_MISMATCH", compared.reason)

    def _check_values(
        self, cell: Cell, prompts: Prompts, outcome: CellOutcome, findings: Findings, counts: _Counts
    ) -> None:
        groups = plan_engine(cell.prefill, self._config).groups
        for index, captured in sorted(outcome.captured.items()):
            prompt = prompts[index]
            compared = compare_values(
                f"{cell.cell_id}/{index}", captured, self._references.kv(prompt), groups, len(prompt)
            )
            counts.num_values = (counts.num_values or 0) + compared.num_values
            counts.max_value_error = max(counts.max_value_error or 0.0, compared.max_error)
            if compared.mismatch is not None:
                findings.add("KV_MISMATCH", str(compared.mismatch))
        # A request that ends with its first token leaves nothing to look at.
        if outcome.captured and all(r.error or r.prompt_index in outcome.captured for r in outcome.requests):
            counts.checks_done.append("kv_values")


def _effective(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """What the first engine of each side ran with."""
    named = {"effective_layout": "layout", "attention_implementation": "backend"}
    named |= {fact: fact for fact in ("comm", "comm_reason", "decode_graphs", "node")}
    return {
        f"{side}.{column}": facts[f"{side}0"].get(fact)
        for side in ("prefill", "decode")
        for column, fact in named.items()
        if f"{side}0" in facts
    }
