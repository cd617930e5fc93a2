"""`rayk costs` measures real engines, and its tables are what a simulation goes by."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.costs import CostBook, engine_key
from rayk.costs.table import read_name
from rayk.models.families import read_config
from rayk.planner.recorded import read_run, settled
from rayk.simulate.arrivals import cell_arrivals
from rayk.simulate.run import simulate_cell
from rayk.specs import resolve_prompts
from tests.conftest import CheckpointFactory
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(280), thorough]


def test_a_grid_is_measured_fitted_and_simulated(
    ray_address: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    model, out = checkpoint("llama"), tmp_path / "costs"
    sizes = ["--max-tokens", "64", "--max-seqs", "2", "--quick", "--device", "cpu"]
    options = [str(model), *sizes, "--out", str(out), "--accept", "--address", ray_address]
    told = CliRunner().invoke(app, ["costs", *options])
    assert told.exit_code == 0, told.output

    book, run, config = CostBook.load(out), read_run(out / "run"), read_config(model)
    modes = [(cell.cell.mode, cell.cell.num_prefill_engines) for cell in run.cells]
    assert {("aggregated", 1), ("aggregated", 2), ("disaggregated", 1)} == set(modes), "no cell failed"
    assert book.is_measured
    assert book.provenance.cells == tuple(cell.cell.cell_id for cell in run.cells)
    pair = next(cell for cell in run.cells if cell.cell.decode is not None)
    costs = book.find(engine_key(config, pair.cell.prefill))
    assert {"MakeTicket", "verify"} <= costs.commands.keys()
    read = book.transfers.reads[read_name(pair.cell.prefill, pair.cell.decode)]
    assert read.post.ns(2**16, 8) > 0
    assert min(gap.ns() for gap in (book.gaps.dispatch, book.gaps.handover)) > 0
    assert 0 < book.host.form_s < 280

    # Each table says of the steps that it was fitted to something between their least and their most.
    alone = [step.recorded for cell in run.cells if cell.is_alone for step in settled(cell)]
    for decode in (True, False):
        steps = [step for step in alone if step.features.is_decode == decode]
        predicted = [costs.step_ns(step.features) for step in steps]
        assert min(step.model_ns for step in steps) <= sum(predicted) / len(steps)
        assert sum(predicted) / len(steps) <= max(step.model_ns for step in steps)
    with (out / "residuals.csv").open() as file:
        assert {row["kind"] for row in csv.DictReader(file)} == {"decode", "prefill"}

    for cell in run.cells:
        prompts = resolve_prompts(cell.cell.spec, config)
        arrivals = cell_arrivals(cell.cell, prompts)
        outcome = simulate_cell(cell.cell, config, arrivals, book, strict=False)
        # Which requests meet in a step depends on times: of so few sizes some steps are unlike all measured.
        assert outcome.num_outside_hull <= len(outcome.steps) / 4
        num_output = cell.cell.sampling.max_tokens
        assert [len(row.output_token_ids) for row in outcome.requests] == [num_output] * len(prompts)
        num_measured = sum(step.recorded.features.num_tokens for step in cell.steps)
        assert sum(step.num_tokens for step in outcome.steps) == num_measured, cell.cell.cell_id
