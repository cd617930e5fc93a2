"""A validation finds errors that were planted: its measured run is a simulation by other costs."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from typer import Exit

from rayk.cli.validation import validate_runs
from rayk.costs import CostBook, EngineCosts, engine_key
from rayk.costs.book import Provenance
from rayk.costs.hull import Hull
from rayk.costs.table import Gap, GapTable, HostTable, StepTable
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.planner.validate import ValidationPlan, validate
from rayk.reports import ResultWriter, load
from rayk.reports.compare import compare, compare_markdown, compare_page, labels
from rayk.reports.report import report_page
from rayk.reports.validation import (
    Judged,
    Validation,
    kendall_tau,
    metric_rows,
    read_validation,
    within_text,
    worst_cell,
)
from rayk.reports.validation_page import validation_lines
from rayk.simulate import cell_arrivals, cell_row, simulate_cell
from rayk.specs import Cell, dump_spec, expand, load_spec, resolve_prompts
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError
from rayk.types.slo import Slo
from tests.conftest import CheckpointFactory

DECODE_NS, PREFILL_NS, DISPATCH_NS = 4_000_000, 9_000_000, 1_000_000


class Truth(NamedTuple):
    folder: Path
    cells: list[Cell]
    config: DecoderConfig

    def book(self, *, decode: float = 1, prefill: float = 1, dispatch: float = 1, **others: Any) -> CostBook:
        """Make tables whose constants are the true ones times the factors."""
        costs = EngineCosts(
            key=engine_key(self.config, self.cells[0].prefill),
            decode=StepTable(terms=("one",), constants=(decode * DECODE_NS,)),
            prefill=StepTable(terms=("one",), constants=(prefill * PREFILL_NS,)),
        )
        gaps = GapTable(dispatch=Gap(quantiles=(dispatch * DISPATCH_NS,)))
        return CostBook(engines={costs.key: costs}, gaps=gaps, **others)

    def validate(self, book: CostBook, out: Path, **settings: Any) -> Validation:
        book.save(out / "costs")
        return validate(
            ValidationPlan(runs=[self.folder], costs=out / "costs", out=out / "validation", **settings)
        )


def write_run(truth: Truth, spec_yaml: str) -> None:
    """Write what the true costs make of the cells, as a run that measured it."""
    writer = ResultWriter(truth.folder, spec_yaml=spec_yaml, environment={"devices": {"num_cores": 2}})
    for number, cell in enumerate(truth.cells):
        prompts = resolve_prompts(cell.spec, truth.config)
        # Answers end before their limit, which a prediction has to be told.
        lengths = [4 + index % 8 for index in range(len(prompts))]
        found = [
            simulate_cell(
                cell,
                truth.config,
                cell_arrivals(cell, prompts, repeat=repeat, num_output_tokens=lengths),
                truth.book(),
                repeat=repeat,
            )
            for repeat in range(cell.repeat)
        ]
        verdict = "TOKEN_MISMATCH" if number == len(truth.cells) - 1 else "PASS"
        writer.write_cell(
            replace(cell_row(cell, found), verdict=verdict), [r for f in found for r in f.requests], []
        )
    writer.finish()
    writer.close()


@pytest.fixture(scope="module")
def truth(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Seven cells, the last of which did not end well."""
    model = checkpoint("llama")
    spec = load_spec(
        {
            "name": "truth",
            "model": str(model),
            "device": "cpu",
            "mode": "aggregated",
            "prompts": {"random": {"count": 20, "input_tokens": [16, 48]}},
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            "repeat": 2,
            "checks": ["kv_bytes"],
            "engine": {"num_blocks": 200, "max_batch_tokens": 64},
            "matrix": [
                {"arrival.rate": [5, 20, 60], "prefill.num_engines": [1, 2]},
                {"arrival.rate": [7]},
            ],
        }
    ).spec
    config = read_config(model)
    found = Truth(tmp_path_factory.mktemp("truth") / "run", expand(spec, config), config)
    write_run(found, dump_spec(spec))
    return found


def by_cell(found: Validation, metric: str) -> pd.DataFrame:
    return found.errors[found.errors["metric"] == metric].set_index("cell_id")


def test_true_costs_predict_every_cell_and_its_requests_to_the_ns(truth: Truth, tmp_path: Path) -> None:
    found = truth.validate(truth.book(), tmp_path, judged=Judged(slos=Slo(limits_ms={"ttft": 20.0})))
    assert len(found.errors) == 6 * 7
    assert (found.errors["error"] == 0).all()
    assert (found.errors["spread"] == 0).all()
    assert not found.errors["is_missed"].any()
    shares = by_cell(found, "goodput_per_s")["measured"] / by_cell(found, "output_tokens_per_s")["measured"]
    assert len(set(shares.round(3))) > 1, "the limit is too wide or too narrow to tell anything"
    ((cell_id, why),) = found.facts["left_out"]
    assert (cell_id, why) == (truth.cells[-1].cell_id, "it ended as TOKEN_MISMATCH")
    assert all(row["tau"] == pytest.approx(1) for row in metric_rows(found.errors))
    predicted = load(tmp_path / "validation" / found.facts["runs"][str(truth.folder)])
    assert set(predicted.cells["verdict"]) == {"PREDICTED"}
    measured = load(truth.folder)
    times = [r.requests.set_index("request_id")["ttft_ms"] for r in (measured, predicted)]
    pd.testing.assert_series_equal(times[0].reindex(times[1].index), times[1])


def test_costs_that_are_off_are_off_by_as_much(truth: Truth, tmp_path: Path) -> None:
    """Decode steps of a quiet engine are the whole of its TPOT, a dispatch and a prefill of its TTFT."""
    found = truth.validate(truth.book(decode=1.2, dispatch=3), tmp_path)
    quiet = truth.cells[0].cell_id
    assert "rate=5" in quiet
    assert by_cell(found, "tpot_ms_p50").loc[quiet, "error"] == pytest.approx(0.2, abs=0.01)
    longer = 2 * DISPATCH_NS / (DISPATCH_NS + PREFILL_NS)
    assert by_cell(found, "ttft_ms_p50").loc[quiet, "error"] == pytest.approx(longer, abs=0.01)
    rows = {row["metric"]: row for row in metric_rows(found.errors)}
    assert rows["tpot_ms_p50"]["is_missed"]
    assert rows["tpot_ms_p50"]["num_missed"] == 6
    assert not rows["output_tokens_per_s"]["is_missed"], "arrivals decide it"
    worst = worst_cell(found)
    assert worst is not None
    assert worst.metric.startswith("tpot")
    page = (tmp_path / "validation" / "report.html").read_text()
    assert worst.cell_id in page
    assert f"{worst.stage}: {worst.predicted_share:.0%} of the time" in page


def test_a_run_beside_its_prediction_shows_errors_and_no_regressions(truth: Truth, tmp_path: Path) -> None:
    found = truth.validate(truth.book(decode=1.5), tmp_path)
    results = [load(truth.folder), load(tmp_path / "validation" / found.facts["runs"][str(truth.folder)])]
    assert not compare(results)["changed"].any(), "PREDICTED is unlike no verdict"
    assert labels(results) == ["run", "run, predicted"]
    page = compare_page(results)
    assert page.title == "6 cells measured and predicted, 1 in some runs only"
    assert page.lead.startswith("Predicted worse than measured: ")
    text = compare_markdown(results)
    assert "| predicted worse |" in text
    assert "| regression |" not in text
    assert "values differ" not in text
    assert "PREDICTED, not measured: times are those of the cost tables" in text
    answer = report_page(results[1]).answers[0]
    assert (answer.text[:8], answer.tone) == ("Unknown:", "")


def test_tables_know_how_far_they_were_off(truth: Truth, tmp_path: Path) -> None:
    """Until they are fitted anew."""
    found = truth.validate(truth.book(decode=1.2), tmp_path)
    rows = {row["metric"]: row["median"] for row in metric_rows(found.errors) if row["bound"]}
    book = CostBook.load(tmp_path / "costs")
    assert book.validated.num_cells == 6
    assert book.validated.within == rows
    assert within_text(6, {"tpot_ms_p50": 0.123}, "2026-11-28") == (
        "half of 6 cells were off by at most 12.3% (TPOT p50), on 2026-11-28"
    )
    truth.book().save(tmp_path / "costs")
    assert CostBook.load(tmp_path / "costs").validated.num_cells == 0


def test_tables_that_cannot_be_written_to_are_told_of(truth: Truth, tmp_path: Path) -> None:
    costs, out = tmp_path / "costs", tmp_path / "validation"
    truth.book(decode=1.2).save(costs)
    (costs / "validated.json").unlink()
    (costs / "validated.json").mkdir()  # refused to root as well, who may write into any folder
    found = validate(ValidationPlan(runs=[truth.folder], costs=costs, out=out))
    told = "Plans will not tell of this: it could not be kept with the tables (Is a directory)."
    assert validation_lines(found)[-1] == told
    assert told in html.unescape((out / "report.html").read_text())
    assert validation_lines(read_validation(out))[-1] == told
    (costs / "validated.json").rmdir()
    found = validate(ValidationPlan(runs=[truth.folder], costs=costs, out=out))
    assert told not in validation_lines(found)


def test_the_stage_at_fault_is_named(truth: Truth, tmp_path: Path) -> None:
    found = truth.validate(truth.book(dispatch=20), tmp_path)
    worst = worst_cell(found)
    assert worst is not None
    assert worst.stage == "dispatch"
    assert worst.metric == "ttft_ms_p50"
    assert worst.measured_ms == pytest.approx(1, abs=0.01)
    assert worst.predicted_ms == pytest.approx(20, abs=0.01)
    read = read_validation(tmp_path / "validation")
    pd.testing.assert_frame_equal(read.errors, found.errors, check_dtype=False)
    assert worst_cell(read) == worst


def test_fitted_cells_are_refused_or_marked(truth: Truth, tmp_path: Path) -> None:
    cell_id = truth.cells[0].cell_id
    book = truth.book(decode=2, provenance=Provenance(cells=(cell_id,)))
    with pytest.raises(UserError, match="the tables were fitted to"):
        truth.validate(book, tmp_path)
    found = truth.validate(book, tmp_path, include_fitted=True)
    fitted = found.errors[found.errors["was_fitted"]]
    assert set(fitted["cell_id"]) == {cell_id}
    assert {row["num_cells"] for row in metric_rows(found.errors)} == {5}, "it counts for no bound"
    worst = worst_cell(found)
    assert worst is not None
    assert worst.cell_id != cell_id


def test_cells_outside_of_the_tables_are_left_out_or_extrapolated(truth: Truth, tmp_path: Path) -> None:
    book = truth.book()
    (key,) = book.engines
    narrow = replace(book.engines[key].decode, hull=Hull(bounds={"num_requests": (1, 1)}))
    book = replace(book, engines={key: replace(book.engines[key], decode=narrow)})
    found = truth.validate(book, tmp_path)
    left_out = dict(found.facts["left_out"])
    busiest = truth.cells[4].cell_id
    assert "rate=60" in busiest
    assert "num_requests" in left_out[busiest]
    assert busiest not in set(found.errors["cell_id"])
    whole = truth.validate(book, tmp_path / "more", extrapolate=True)
    assert (by_cell(whole, "tpot_ms_p50")["error"] == 0).all()
    assert whole.facts["predicted"]["outside_hull"] > 0


def test_cells_whose_engines_draft_are_predicted_by_their_own_acceptance(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """Each request's drafts are right as often as they were in the run, which drew otherwise. Tables without
    drafts predict the other cell."""
    model = checkpoint("llama")
    spec = load_spec(
        {
            "name": "drafts",
            "model": str(model),
            "device": "cpu",
            "mode": "aggregated",
            "prompts": {"random": {"count": 12, "input_tokens": 16}},
            "sampling": {"max_tokens": 120, "ignore_eos": True},
            "checks": ["kv_bytes"],
            "engine": {"num_blocks": 400},
            "speculative": {"num_tokens": 3},
            "matrix": {"speculative.method": ["none", "ngram"]},
        }
    ).spec
    config = read_config(model)
    truth = Truth(tmp_path / "run", expand(spec, config), config)
    tables = {
        "verify": StepTable(terms=("one",), constants=(2.0 * DECODE_NS,)),
        "drafting": {"ngram": StepTable(terms=("one",), constants=(500_000.0,))},
    }
    plain = truth.book()
    engines = {key: replace(costs, **tables) for key, costs in plain.engines.items()}
    drafting = replace(plain, engines=engines)
    writer = ResultWriter(truth.folder, spec_yaml=dump_spec(spec), environment={"devices": {"num_cores": 2}})
    for cell in truth.cells:
        prompts = resolve_prompts(cell.spec, config)
        rates = [DraftRates((0.1 + index / 15,) * 3) for index in range(len(prompts))]
        found = simulate_cell(cell, config, cell_arrivals(cell, prompts, drafts=rates), drafting, seed=9)
        writer.write_cell(replace(cell_row(cell, [found]), verdict="PASS"), found.requests, [])
    writer.finish()
    writer.close()
    tpot = by_cell(truth.validate(drafting, tmp_path), "tpot_ms_p50")["error"]
    assert tpot.iloc[0] == 0
    assert 0 < abs(tpot.iloc[1]) < 0.2
    lacking = truth.validate(plain, tmp_path / "old")
    ((name, why),) = lacking.facts["left_out"]
    assert "ngram" in name
    assert why.startswith("no costs of steps with drafts")
    assert len(by_cell(lacking, "tpot_ms_p50")) == 1


def test_a_bound_is_missed_beyond_the_spread_only(truth: Truth, tmp_path: Path) -> None:
    """One repeat is predicted well and one is not: their spread excuses the cell's error."""
    found = truth.validate(truth.book(), tmp_path)
    folder = tmp_path / "validation" / found.facts["runs"][str(truth.folder)]
    measured, predicted = load(truth.folder), load(folder)
    from rayk.reports.validation import compare_run

    def slowed(factor: float, repeats: set[int]) -> pd.DataFrame:
        rows = predicted.requests.copy()
        late = rows["repeat"].isin(repeats)
        rows.loc[late, "tpot_ms"] *= factor
        return compare_run(measured, replace(predicted, requests=rows), Judged()).errors

    one, both = (e[e["metric"] == "tpot_ms_p50"] for e in (slowed(1.4, {0}), slowed(1.4, {0, 1})))
    assert (one["error"] > 0.15).all()
    assert one["spread"].to_numpy() == pytest.approx(0.2)
    assert not one["is_missed"].any()
    assert both["is_missed"].all()


def test_paced_engines_are_predicted_at_their_pace(truth: Truth) -> None:
    from rayk.planner.validate import paced_book

    cell = truth.cells[0]
    spec = cell.spec.model_copy(
        update={"engine": cell.spec.engine.model_copy(update={"compute": "paced", "pace": 4.0})}
    )
    book = truth.book()
    (key,) = book.engines
    paced = paced_book(replace(book, host=HostTable(num_cores=2)), replace(cell, spec=spec))
    assert paced.engines[key].decode.constants == (4 * DECODE_NS,)
    assert paced.host.num_cores == 0, "they sleep, and take no core"
    assert paced_book(book, cell) is book


def brute_tau(x: list[float], y: list[float]) -> float:
    """Kendall's tau-b, pair by pair."""
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in pairs]
    concordant = sum(a * b for a, b in signs)
    return float(concordant / math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs)))


def test_kendalls_tau_is_that_of_the_definition() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        x, y = (draw.integers(0, 6, 9).astype(float).tolist() for _ in range(2))
        assert kendall_tau(x, y) == pytest.approx(brute_tau(x, y))
    assert kendall_tau([1, 2, 3], [1, 2, 3]) == 1
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert math.isnan(kendall_tau([1, 1], [1, 2]))
    assert kendall_tau([1, 2, 9, math.nan], [2, 1, 9, 0]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 2, 9], [2, 1, 9], noise=[0.6, 0.6, 0.6]) == 1, "1 and 2 are not told apart"


def test_taus_are_scipys() -> None:
    stats: Any = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 9, 30), draw.integers(0, 9, 30)
    known: Mapping[str, float] = {"tau": float(stats.kendalltau(x, y).statistic)}
    assert kendall_tau(x.tolist(), y.tolist()) == pytest.approx(known["tau"])


def test_the_command_prints_errors_and_exits_1_where_a_bound_is_missed(
    truth: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {
        "out": tmp_path / "found", "slo": "ttft=20ms", "include_fitted": False, "extrapolate": False
    }  # fmt: skip
    truth.book(decode=1.3).save(tmp_path / "off")
    with pytest.raises(Exit) as ended:
        validate_runs([truth.folder], costs=tmp_path / "off", **asked)
    assert ended.value.exit_code == 1
    told = capsys.readouterr().out
    assert "TPOT p50: half of 6 cells within" in told
    assert "bound 8% MISSED" in told
    assert "worst cell: agg-tp1" in told
    assert "left out: " in told
    truth.book().save(tmp_path / "true")
    validate_runs([truth.folder], costs=tmp_path / "true", **asked | {"out": tmp_path / "well"})
    assert "MISSED" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no cost tables"):
        validate_runs([truth.folder], costs=None, **asked)
