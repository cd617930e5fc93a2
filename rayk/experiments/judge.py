"""Ask the oracle about a cell's prompts and turn outcomes into the cell's row. Torch is imported when there
is an outcome to judge, or an answer to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rayk.experiments.drafted import (
    DraftReferences,
    compare_proposals,
    in_engine,
    is_near_tie,
    own_layers,
    parting_in_words,
)
from rayk.experiments.offloaded import offloaded
from rayk.experiments.paced import expected_tokens, first_difference, is_paced, judge_pace
from rayk.experiments.quantised import compare_forced, follow, rounding_of
from rayk.experiments.references import LayerKV, References
from rayk.experiments.twins import Twins, draft_twin_of, token_twin_of
from rayk.experiments.verdict import Findings, blamed, recovered, unrecovered, untraced
from rayk.kv.groups import KVCacheGroup, measure_groups, measure_waste, waste_tokens
from rayk.kv.request_memory import measure_request_memory
from rayk.models.config import DecoderConfig
from rayk.models.drafters.riders import engine_riders
from rayk.models.kv_specs import engine_groups
from rayk.oracle.cache import AnswerStore
from rayk.specs import Cell
from rayk.specs.experiment import FaultSpec
from rayk.types.config import EngineConfig
from rayk.types.errors import KVMismatch
from rayk.types.rows import CellRow, RequestRow

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome
    from rayk.experiments.compare import KVBounds
    from rayk.experiments.logprobs import LogprobErrors
    from rayk.handover.commands import CapturedRows

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class _CheckCounts:
    """Collects what a cell's checks counted. None: not checked."""

    num_token_mismatches: int | None = None
    first_divergence: tuple[int, int] | None = None
    near_tie_tolerance: float | None = None
    num_values: int | None = None
    max_value_error: float | None = None
    measured: dict[str, float] = field(default_factory=dict)
    checks_done: list[str] = field(default_factory=list)


class CellJudge:
    """Judges the cells of one model. `answers` keeps what the reference says of it."""

    def __init__(self, model: str, config: DecoderConfig, answers: AnswerStore) -> None:
        self._model = model
        self._config = config
        self._answers = answers
        self._known: dict[str, References] = {}
        self._bounds: dict[tuple[str, tuple[tuple[int, ...], ...]], KVBounds] = {}
        self.twins = Twins()
        self._drafters = DraftReferences(answers)

    def needs_reference(self, cell: Cell) -> bool:
        return not is_paced(cell) and ("tokens" in cell.checks or self.needs_capture(cell))

    def prepare(self, cell: Cell, prompts: Prompts) -> None:
        """Have the reference compute what no earlier run kept."""
        if not self.needs_reference(cell):
            return
        if "tokens" in cell.checks and not cell.is_quantised:
            self._references(cell).outputs(prompts, cell.sampling)
        if self.needs_capture(cell) and not self._references(cell).keeps_kv(prompts):
            self._kv_bounds(cell, prompts)

    def needs_capture(self, cell: Cell) -> bool:
        """Tell whether the prefill engine's rows must be brought here."""
        return "kv_values" in cell.checks

    def judge(self, cell: Cell, prompts: Prompts, outcomes: Sequence[CellOutcome]) -> CellRow:
        """Make the cell's row over all its repeats."""
        findings, counts = Findings(), _CheckCounts()
        for outcome in outcomes:
            findings.add_errors(outcome.errors, outcome.survived)
            if self.needs_capture(cell):
                self._check_values(cell, prompts, outcome, findings, counts)
        if self.needs_capture(cell) and _all_captured(outcomes):
            counts.checks_done.append("kv_values")
        # A failed request's tokens are not compared, and the table must not say that they were.
        finished = [row for o in outcomes for row in o.requests if row.error is None]
        if is_paced(cell):
            self._check_paced(cell, prompts, outcomes, findings, counts)
        elif "tokens" in cell.checks and finished:
            self._check_tokens(cell, prompts, finished, findings, counts)
        self._check_drafts(cell, prompts, finished, findings, counts)
        if "logprobs" in cell.checks and finished:
            self._check_logprobs(cell, outcomes, findings, counts)
        checked = sum(o.num_kv_bytes_checked for o in outcomes)
        if "kv_bytes" in cell.checks and checked:
            counts.checks_done.append("kv_bytes")
        mismatches = [e for o in outcomes for e in o.errors if isinstance(e, KVMismatch)]
        verdict, reason = findings.judge()
        if cell.vllm:
            reason = blamed(verdict, reason, findings.items, mismatches, counts.checks_done)
        idle: list[FaultSpec] = []
        if verdict in ("PASS", "NEAR_TIE"):
            idle, notes = _of_faults(cell, outcomes)
            remarks = (*notes, reason, self._unseen(cell, prompts, counts, _handed_over(outcomes)))
            reason = "; ".join(remark for remark in remarks if remark)
        facts = outcomes[-1].facts
        # What rayk knows of KV groups is of its own engines.
        groups = {} if cell.vllm else _kv_groups(cell, self._config)
        tokens = waste_tokens(self._config.max_positions)
        wastes = {side: measure_waste(of_side, tokens) for side, of_side in groups.items()}
        moves_kv = cell.decode is not None or cell.spec.offload.settings() is not None
        return CellRow(
            cell_id=cell.cell_id,
            axes=cell.axes,
            verdict=verdict,
            reason=reason,
            refused_by=("vllm" if cell.vllm else "rayk") if verdict == "UNSUPPORTED" else None,
            num_token_mismatches=counts.num_token_mismatches,
            first_divergence=counts.first_divergence,
            checks_done=list(dict.fromkeys(counts.checks_done)),
            near_tie_tolerance=counts.near_tie_tolerance,
            reference_kept_since=self._kept_since(cell),
            expected_verdict=cell.expected_verdict,
            has_idle_faults=bool(idle),
            prefill_effective_block_sizes=facts.get("prefill0", {}).get("block_sizes"),
            decode_effective_block_sizes=facts.get("decode0", {}).get("block_sizes"),
            prefill_effective_kernel_block_sizes=facts.get("prefill0", {}).get("kernel_block_sizes"),
            decode_effective_kernel_block_sizes=facts.get("decode0", {}).get("kernel_block_sizes"),
            kv_waste={side: (waste.bytes, waste.percent) for side, waste in wastes.items()},
            kv_groups={side: [asdict(m) for m in measure_groups(g, tokens)] for side, g in groups.items()},
            kv_held={} if cell.vllm else _kv_held(cell, self._config, finished),
            load_memory=_load_memory(facts),
            effective=_effective(facts),
            num_fast_prefill_layers=facts.get("prefill0", {}).get("num_fast_prefill_layers"),
            num_token_layers=_token_layers(outcomes, "prefill", cell.num_prefill_engines),
            decode_num_token_layers=_token_layers(outcomes, "decode", cell.num_decode_engines),
            num_kv_bytes_checked=checked if moves_kv else None,
            num_kv_bytes_mismatched=sum(m.num_bytes_mismatched for m in mismatches) if moves_kv else None,
            num_kv_values_checked=counts.num_values,
            max_kv_value_error=counts.max_value_error,
            **_ledger(outcomes),
            measured=counts.measured,
            offloaded=offloaded(outcomes),
            wall_ns=sum(o.wall_ns for o in outcomes),
        )

    def _kept_since(self, cell: Cell) -> str | None:
        """Tell of a cell that was judged by answers of an earlier run when the first of them was computed."""
        known = self._known.get(_key(cell))
        return known.kept_since if known is not None else None

    def _references(self, cell: Cell) -> References:
        dtype, rounding, key = cell.prefill.dtype, rounding_of(cell), _key(cell)
        if key not in self._known:
            self._known[key] = References(
                self._model, self._answers, dtype, routed=self._config.is_routed, rounding=rounding
            )
        return self._known[key].under(cell.sampling.structured_outputs)

    def _kv_bounds(self, cell: Cell, prompts: Prompts) -> KVBounds:
        from rayk.experiments.compare import measure_values

        key = _key(cell), tuple(tuple(prompt) for prompt in prompts)
        if key not in self._bounds:
            self._bounds[key] = measure_values(self._references(cell), prompts, self._config)
        return self._bounds[key]

    def _unseen(self, cell: Cell, prompts: Prompts, counts: _CheckCounts, handed_over: bool) -> str:
        """Say what a cell that passes did not look at. `handed_over`: whether it compared bytes of
        hand-overs."""
        if cell.vllm and cell.decode is not None and not handed_over:
            return "no KV of a hand-over was compared"
        if cell.decode is not None and not handed_over:
            return "no KV was handed over: every request ended with its first token"
        remarks = []
        if "logprobs" in counts.checks_done and cell.prefill.fast_prefill:
            remarks.append("logprobs did not see prompt tokens: with fast_prefill they have no logits")
        if draft_twin_of(cell) is not None and "drafts" not in counts.checks_done:
            remarks.append("drafts saw nothing: nothing was proposed after a hand-over")
        if self.needs_capture(cell) and "kv_values" not in counts.checks_done:
            remarks.append("kv_values did not see every request: some ended with their first token")
        elif self.needs_capture(cell):
            remarks.append(self._unjudged(cell, prompts))
        return "; ".join(remark for remark in remarks if remark)

    def _unjudged(self, cell: Cell, prompts: Prompts) -> str:
        """Say which states kv_values cannot judge in the cell's dtype, if any."""
        if not self._config.is_routed or cell.prefill.dtype == "float32":
            return ""
        from rayk.experiments.compare import UNBOUNDED

        layers = sorted({layer for (layer, _), b in self._kv_bounds(cell, prompts).items() if b == UNBOUNDED})
        if not layers:
            return ""
        return (
            f"kv_values does not judge the states of layers {', '.join(map(str, layers))} in "
            f"{cell.prefill.dtype}: they follow routed experts (float32 proves them)"
        )

    def _check_tokens(
        self,
        cell: Cell,
        prompts: Prompts,
        finished: Sequence[RequestRow],
        findings: Findings,
        counts: _CheckCounts,
    ) -> None:
        from rayk.experiments.compare import NEAR_TIE_LOGITS, compare_tokens
        from rayk.experiments.logprobs import near_tie_tolerance

        references = self._references(cell)
        tolerance = NEAR_TIE_LOGITS
        if not references.is_exact:
            tolerance = near_tie_tolerance(finished, references)
        expected: dict[int, list[int]]
        if cell.is_quantised:
            alone = self.twins.rows(token_twin_of(cell), prompts)
            expected = {i: row.output_token_ids for i, row in alone.items()}
        else:
            answers = references.outputs(prompts, cell.sampling)
            expected = {i: list(answer.token_ids) for i, answer in enumerate(answers)}
        counts.checks_done.append("tokens")
        counts.num_token_mismatches = 0
        counts.near_tie_tolerance = tolerance
        for row in finished:
            if cell.is_quantised:
                compared = compare_forced(row, expected.get(row.prompt_index), references, tolerance)
            else:
                answer = expected[row.prompt_index]
                compared = compare_tokens(row, answer, references, cell.sampling, tolerance)
            if compared.first_divergence is None:
                continue
            if counts.first_divergence is None:
                counts.first_divergence = (row.prompt_index, compared.first_divergence)
            if not compared.near_tie:
                counts.num_token_mismatches += 1
            findings.add(compared.verdict, compared.reason)

    def _check_drafts(
        self,
        cell: Cell,
        prompts: Prompts,
        finished: Sequence[RequestRow],
        findings: Findings,
        counts: _CheckCounts,
    ) -> None:
        """Compare what was proposed after hand-overs, if asked to, with an aggregated engine's proposals."""
        twin = draft_twin_of(cell)
        if twin is None or not finished:
            return
        others = self.twins.rows(twin, prompts)
        known = self._drafters.of(twin.prefill, self._config)
        num_compared = num_differing = 0
        for row in finished:
            if row.prompt_index not in others:
                continue
            compared = compare_proposals(row, others[row.prompt_index], from_tokens=known is not None)
            num_compared += compared.num_compared
            wrong = [p for p in compared.partings if not is_near_tie(row, p, known and known[1])]
            num_differing += len(wrong)
            if wrong:
                text = parting_in_words(row, wrong[0], len(wrong), compared.num_compared)
                findings.add("DRAFT_MISMATCH", text)
        counts.measured |= {"num_proposals_compared": num_compared, "num_proposals_differing": num_differing}
        if num_compared:
            counts.checks_done.append("drafts")

    def _check_paced(
        self,
        cell: Cell,
        prompts: Prompts,
        outcomes: Sequence[CellOutcome],
        findings: Findings,
        counts: _CheckCounts,
    ) -> None:
        """Check that engines kept their pace, and answered by the rule."""
        measured, reason = judge_pace(outcomes)
        counts.measured |= measured
        if reason:
            findings.add("OUT_OF_PACE", reason)
        finished = [row for o in outcomes for row in o.requests if row.error is None]
        if "tokens" not in cell.checks or not finished:
            return
        expected = expected_tokens(cell, self._config, prompts)
        counts.checks_done.append("tokens")
        counts.num_token_mismatches = 0
        for row in finished:
            difference = first_difference(row, expected[row.prompt_index])
            if difference is not None:
                counts.num_token_mismatches += 1
                counts.first_divergence = counts.first_divergence or (row.prompt_index, difference[0])
                findings.add("TOKEN_MISMATCH", difference[1])

    def _check_logprobs(
        self, cell: Cell, outcomes: Sequence[CellOutcome], findings: Findings, counts: _CheckCounts
    ) -> None:
        from rayk.experiments.logprobs import compare_logprobs

        references = self._references(cell)
        finished = [(row, o) for o in outcomes for row in o.requests if row.error is None]
        groups = engine_groups(cell.prefill, self._config)
        judged = [follow(row, o.captured.get(row.prompt_index), references, groups) for row, o in finished]
        for (row, _), (_, refused) in zip(finished, judged, strict=True):
            if refused:
                findings.add("KV_MISMATCH", f"kv_values: request {row.prompt_index}, {refused}")
        followed = [own for own, _ in judged]
        compared = compare_logprobs([row for row, _ in finished], references, cell.sampling, followed)
        counts.checks_done.append("logprobs")
        counts.measured |= _columns("", compared.output) | _columns("prompt_", compared.prompt)
        for reason in compared.reasons:
            findings.add("TOKEN_MISMATCH", reason)
        for reason in compared.not_finite:
            findings.add("NOT_FINITE", reason)

    def _check_values(
        self, cell: Cell, prompts: Prompts, outcome: CellOutcome, findings: Findings, counts: _CheckCounts
    ) -> None:
        if not outcome.captured:
            return
        from rayk.experiments.compare import compare_values
        from rayk.experiments.dequantised import dequantised, e4m3_scales

        kept = engine_groups(cell.prefill, self._config)
        bounds = self._kv_bounds(cell, prompts)
        references = self._references(cell)
        for index in sorted(outcome.captured):
            captured, groups = dequantised(outcome.captured[index], kept, references.kv_scales)
            name, prompt = f"{cell.cell_id}/{index}", prompts[index]
            if cell.vllm:
                hands_over = cell.decode is not None
                prompt = prompt[: _num_computed(captured, groups, len(prompt), hands_over=hands_over)]
            compare = partial(
                compare_values,
                name,
                captured,
                references.kv(prompt),
                groups,
                len(prompt),
                bounds=bounds,
                model=self._config,
                others={i: references.kv(p) for i, p in enumerate(prompts) if i != index},
                e4m3=e4m3_scales(kept, references.kv_scales),
            )
            compared = compare()
            if compared.mismatch is not None and cell.decode is None:
                compared = compare(ends=_ends(references, outcome, index))
            counts.num_values = (counts.num_values or 0) + compared.num_values
            counts.max_value_error = max(counts.max_value_error or 0.0, compared.max_error)
            share = counts.measured.get("max_kv_value_error_of_bound", 0.0)
            counts.measured["max_kv_value_error_of_bound"] = max(share, compared.max_error_of_bound)
            if compared.mismatch is not None:
                findings.add("KV_MISMATCH", str(compared.mismatch))
            if compared.not_finite:
                findings.add("NOT_FINITE", f"kv_values: request {index}: {compared.not_finite}")
        self._check_draft_values(cell, prompts, outcome, findings, counts)

    def _check_draft_values(
        self, cell: Cell, prompts: Prompts, outcome: CellOutcome, findings: Findings, counts: _CheckCounts
    ) -> None:
        """Compare what a smaller model that drafts keeps at the prefill engine with transformers' cache."""
        known = None if cell.vllm or cell.is_quantised else self._drafters.of(cell.prefill, self._config)
        if known is None:
            return
        from rayk.experiments.compare import compare_values, measure_values

        drafter, references = known
        groups = _all_groups(cell.prefill, self._config)
        bounds = measure_values(references, prompts, drafter.decoder)
        for index in sorted(outcome.captured):
            rows, own = own_layers(outcome.captured[index], groups)
            name, prompt = f"{cell.cell_id}/{index}", prompts[index]
            others = {i: references.kv(p) for i, p in enumerate(prompts) if i != index}
            compared = compare_values(
                name,
                rows,
                references.kv(prompt),
                own,
                len(prompt),
                bounds=bounds,
                model=drafter.decoder,
                others=others,
            )
            counts.num_values = (counts.num_values or 0) + compared.num_values
            counts.max_value_error = max(counts.max_value_error or 0.0, compared.max_error)
            if compared.mismatch is not None:
                findings.add("KV_MISMATCH", str(in_engine(compared.mismatch, drafter.first_layer)))
            if compared.not_finite:
                findings.add("NOT_FINITE", f"kv_values: request {index}, drafter: {compared.not_finite}")


def _key(cell: Cell) -> str:
    """Name the references that a cell is judged by."""
    return repr((cell.prefill.dtype, rounding_of(cell)))


def _handed_over(outcomes: Sequence[CellOutcome]) -> bool:
    """Tell whether bytes of hand-overs were compared, not only what a host tier moved."""
    checked = sum(o.num_kv_bytes_checked for o in outcomes)
    transfers = [t for o in outcomes for t in o.transfers]
    return bool(checked) and (not transfers or any(t.purpose == "handover" for t in transfers))


def _of_faults(cell: Cell, outcomes: Sequence[CellOutcome]) -> tuple[list[FaultSpec], tuple[str, str]]:
    """List the faults of a passing cell that never struck, with what to say of its faults."""
    requests = [row for o in outcomes for row in o.requests]
    survived = [e for o in outcomes for e in o.survived]
    idle = unrecovered(cell, requests, survived)
    return idle, (untraced(cell, idle), recovered(requests, survived))


def _ends(references: References, outcome: CellOutcome, index: int) -> dict[int, LayerKV]:
    """Take the reference's caches of an aggregated cell's other requests at their end, which their pages held
    from then on. The last token is not computed."""
    return {
        row.prompt_index: references.kv([*row.prompt_token_ids, *row.output_token_ids[:-1]])
        for row in outcome.requests
        if row.error is None and row.prompt_index != index
    }


def _all_captured(outcomes: Sequence[CellOutcome]) -> bool:
    finished = [(o, r) for o in outcomes for r in o.requests if r.error is None]
    return any(o.captured for o in outcomes) and all(r.prompt_index in o.captured for o, r in finished)


def _num_computed(
    captured: Sequence[CapturedRows], groups: Sequence[KVCacheGroup], num_tokens: int, *, hands_over: bool
) -> int:
    """Count the tokens of a prompt that vLLM's prefill engine computed. Of a model with states NixlConnector
    leaves the last one to the decode engine (nixl/base_scheduler.py, _prefill_backoff), as rows of attention
    tell."""
    if num_tokens == 1 or all(group.spec.has_token_rows for group in groups):
        return num_tokens
    full = [g.layers[0] for g in groups if g.spec.live_rows(num_tokens) == range(num_tokens)]
    counts = [len(rows) for rank in captured for layer in full for rows in rank[layer].values()]
    is_whole = max(counts) == num_tokens if counts else not hands_over
    return num_tokens if is_whole else num_tokens - 1


def _columns(kind: str, errors: LogprobErrors) -> dict[str, float]:
    if not errors.num_checked:
        return {}
    settled = {
        f"num_{kind}logprobs_settled": errors.num_settled,
        f"max_settled_{kind}logprob_error": errors.max_settled_error,
    }
    return (settled if errors.num_settled else {}) | {
        f"num_{kind}logprobs_checked": errors.num_checked,
        f"max_{kind}logprob_error": errors.max_error,
        f"{kind}logprob_bound": errors.bound.worst,
        f"typical_{kind}logprob_error": errors.typical_error,
        f"typical_{kind}logprob_bound": errors.bound.limit(errors.num_checked),
    }


def _kv_groups(cell: Cell, config: DecoderConfig) -> dict[str, tuple[KVCacheGroup, ...]]:
    """Group each side's layers as its engines do, those of a drafter included."""
    engines = {"prefill": cell.prefill, "decode": cell.decode}
    return {side: _all_groups(engine, config) for side, engine in engines.items() if engine is not None}


def _all_groups(engine: EngineConfig, config: DecoderConfig) -> tuple[KVCacheGroup, ...]:
    return engine_groups(engine, config, engine_riders(engine, config))


def _kv_held(
    cell: Cell, config: DecoderConfig, finished: Sequence[RequestRow]
) -> dict[str, list[dict[str, str | int]]]:
    """Count what these requests held on each side: of all tokens but the last, whose KV nobody computes; at a
    prefill engine whose requests went on elsewhere, of the prompt."""
    lengths: dict[str, list[int]] = {"prefill": [], "decode": []}
    for row in finished:
        whole = row.num_prompt_tokens + max(len(row.output_token_ids) - 1, 0)
        stays = cell.decode is None or row.decode_engine in (None, row.prefill_engine)
        lengths["prefill"].append(whole if stays else row.num_prompt_tokens)
        if not stays:
            lengths["decode"].append(whole)
    engines = {"prefill": cell.prefill, "decode": cell.decode}
    return {
        side: [
            asdict(memory)
            for memory in measure_request_memory(
                _all_groups(engine, config), engine.tp, lengths[side], engine.dcp, _draft_tp(engine)
            )
        ]
        for side, engine in engines.items()
        if engine is not None and lengths[side]
    }


def _draft_tp(engine: EngineConfig) -> int:
    """Return how many ranks share a drafter."""
    return 1 if engine.speculative is None else engine.speculative.tp or 1


def _token_layers(outcomes: Sequence[CellOutcome], side: str, num_engines: int) -> int | None:
    """Sum what a side's engines computed, over all repeats; None if there are none, or one did not tell."""
    counts = [
        o.facts.get(f"{side}{i}", {}).get("num_token_layers") for o in outcomes for i in range(num_engines)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _ledger(outcomes: Sequence[CellOutcome]) -> dict[str, int]:
    """Sum up blocks put aside, over all engines that lived to tell; empty where none did."""
    ledgers = [ledger for o in outcomes for ledger in o.ledgers.values()]
    if not ledgers:
        return {}
    return {
        "num_blocks_leased": sum(ledger.num_leased for ledger in ledgers),
        "num_blocks_freed": sum(ledger.num_freed for ledger in ledgers),
        "num_blocks_held": sum(ledger.num_held for ledger in ledgers),
    }


def _load_memory(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, int | None]]]:
    """Take what ranks of the first engine of each side told of loading; vLLM's tell nothing."""
    told = {side: facts.get(f"{side}0", {}).get("load_memory") for side in ("prefill", "decode")}
    return {side: by_rank for side, by_rank in told.items() if by_rank is not None}


def _effective(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """Take what the first engine of each side ran with."""
    named = {"effective_layout": "layout", "attention_implementation": "backend", "weights_held": "weights"}
    named |= {fact: fact for fact in ("comm", "comm_reason", "decode_graphs", "scheduling", "node")}
    return {
        f"{side}.{column}": facts[f"{side}0"].get(fact)
        for side in ("prefill", "decode")
        for column, fact in named.items()
        if f"{side}0" in facts
    }
