"""Tables fitted to a run say what its engines took: here engines of a simulation, whose costs are planted."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.costs import CostBook, EngineCosts, engine_key, step_features
from rayk.costs.losses import StepLosses
from rayk.costs.table import (
    Gap,
    GapTable,
    HostTable,
    LinearCost,
    ReadCosts,
    StepTable,
    TransferTable,
    read_name,
)
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.planner.coverage import RESIDUALS, told, write_residuals
from rayk.planner.fitting import FittedBook, fit_runs
from rayk.planner.measure import GridRequest, grid_spec
from rayk.planner.neighbours import fit_losses
from rayk.planner.recorded import RecordedCell, read_run
from rayk.reports import ResultWriter
from rayk.simulate.arrivals import cell_arrivals
from rayk.simulate.outcome import cell_row
from rayk.simulate.run import simulate_cell
from rayk.specs import Cell, LoadedSpec, dump_spec, expand, load_spec, resolve_prompts
from rayk.types.config import EngineConfig
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError
from rayk.types.rows import CellRow
from rayk.types.speculative import SpeculativeConfig
from tests.conftest import CheckpointFactory
from tests.costs.test_tables import batch

DECODE = StepTable(
    terms=("one", "requests", "seen"), constants=(2e6, 150_000.0, 300.0), ratios=(0.9, 0.95, 1.0, 1.05, 1.1)
)
PREFILL = StepTable(
    terms=("one", "tokens<64", "tokens>64", "pairs"),
    constants=(1e6, 40_000.0, 15_000.0, 20.0),
    ratios=(0.9, 0.95, 1.0, 1.05, 1.1),
)
DISPATCH_NS, STREAM_NS, HANDOVER_NS = 900_000.0, 20_000.0, 600_000.0
COMMANDS = {
    "each": LinearCost(fixed_ns=70_000.0),
    "MakeTicket": LinearCost(fixed_ns=80_000.0, byte_ns=1.5),
    "fence": LinearCost(fixed_ns=30_000.0),
    "verify": LinearCost(fixed_ns=60_000.0, byte_ns=1.2),
}
READS = ReadCosts(
    post=LinearCost(fixed_ns=9_000.0, descriptor_ns=2_500.0, byte_ns=0.2),
    wait=LinearCost(fixed_ns=12_000.0, byte_ns=0.05),
)


class Measured(NamedTuple):
    fitted: FittedBook
    book: CostBook  # the planted one
    config: DecoderConfig
    engine: EngineConfig
    cells: list[Cell]
    folder: Path


def planted(config: DecoderConfig, engine: EngineConfig) -> CostBook:
    key = engine_key(config, engine)
    hosts = {"host_ns": 250_000.0, "request_host_ns": 9_000.0, "prefill_host_ns": 120_000.0}
    costs = EngineCosts(key=key, decode=DECODE, prefill=PREFILL, commands=COMMANDS, **hosts)
    spreads = [tuple(ns * (0.8 + 0.04 * n) for n in range(11)) for ns in (DISPATCH_NS, HANDOVER_NS)]
    gaps = GapTable(
        dispatch=Gap(quantiles=spreads[0], stream_ns=STREAM_NS), handover=Gap(quantiles=spreads[1])
    )
    reads = TransferTable(reads={read_name(engine, engine): READS})
    return CostBook(engines={key: costs}, gaps=gaps, transfers=reads)


def write_run(
    folder: Path,
    loaded: LoadedSpec,
    cells: list[Cell],
    book: CostBook,
    config: DecoderConfig,
    drafts: DraftRates | None = None,
) -> None:
    """Simulate the cells, and write them as a run that measured them. `drafts`: how often they are right."""
    environment = {
        "devices": {"num_cores": 2, "cpu": "simulated"},
        "git_commit": "abc",
        "packages": {"rayk": "1"},
    }
    writer = ResultWriter(folder, spec_yaml=dump_spec(loaded.spec), environment=environment)
    for number, cell in enumerate(cells):
        prompts = resolve_prompts(cell.spec, config)
        arrivals = cell_arrivals(cell, prompts)
        found = simulate_cell(cell, config, arrivals, book, noise=True, seed=number, drafts=drafts)
        row = replace(cell_row(cell, [found]), verdict="PASS")
        writer.write_cell(row, found.requests, found.transfers, found.steps)
    writer.finish()
    writer.close()


@pytest.fixture(scope="module")
def measured(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    model = checkpoint("llama")
    config = read_config(model)
    asked = GridRequest(
        model=str(model),
        max_tokens=256,
        max_seqs=8,
        max_batch_tokens=128,
        has_neighbours=False,
        is_quick=True,
        pairs=((1, 1),),
    )
    loaded = load_spec(grid_spec(asked, config))
    cells = expand(loaded.spec, config)
    engine = cells[0].prefill
    book = planted(config, engine)
    folder = tmp_path_factory.mktemp("costs") / "run"
    write_run(folder, loaded, cells, book, config)
    return Measured(fit_runs([read_run(folder)]), book, config, engine, cells, folder)


def test_planted_costs_come_out_of_a_run(measured: Measured, tmp_path: Path) -> None:
    fitted, book, config, engine, cells, _ = measured
    found, true = (b.find(engine_key(config, engine)) for b in (fitted.book, book))
    decodes = [[(1, 30)], [(1, 200)] * 5, [(1, 100)] * 8]
    for shares in (*decodes, [(64, 0)], [(100, 100)], [(20, 0), *[(1, 60)] * 3]):
        features = step_features(batch(*shares))
        assert found.step_ns(features) == pytest.approx(true.step_ns(features), rel=0.04), shares
    assert found.host_ns == pytest.approx(true.host_ns, rel=0.05)
    assert found.request_host_ns == pytest.approx(true.request_host_ns, rel=0.1)
    assert found.prefill_host_ns == pytest.approx(true.prefill_host_ns, rel=0.1)
    assert all(c.is_good for c in fitted.classes)
    fitted.book.save(tmp_path)
    assert replace(CostBook.load(tmp_path), folder="") == fitted.book
    assert fitted.book.provenance.cells == tuple(cell.cell_id for cell in cells)
    assert (fitted.book.provenance.num_cores, fitted.book.provenance.commit) == (2, "abc")


def test_gaps_are_split_into_a_spread_and_what_a_stream_adds(measured: Measured) -> None:
    dispatch = measured.fitted.book.gaps.dispatch
    assert dispatch.stream_ns == pytest.approx(STREAM_NS, rel=0.5)
    assert dispatch.ns() == pytest.approx(DISPATCH_NS, rel=0.2)
    assert dispatch.quantiles[0] < dispatch.ns() < dispatch.quantiles[-1]


def test_what_hand_overs_cost_comes_out(measured: Measured) -> None:
    fitted, _, config, engine, _, folder = measured
    book, costs = fitted.book, fitted.book.find(engine_key(config, engine))
    assert book.gaps.handover.ns() == pytest.approx(HANDOVER_NS, rel=0.1)
    (reads,) = book.transfers.reads.values()
    assert reads == book.transfers.find(engine, engine)
    moved = [row for cell in read_run(folder).cells for row in cell.transfers]
    for row in moved:
        size, descriptors = row["bytes"], row["num_descriptors_merged"]
        assert reads.post.ns(size, descriptors) == pytest.approx(READS.post.ns(size, descriptors), rel=0.02)
        assert reads.wait.ns(size, descriptors) == pytest.approx(READS.wait.ns(size, descriptors), rel=0.02)
        for name, planted_cost in COMMANDS.items():
            assert costs.commands[name].ns(size) == pytest.approx(planted_cost.ns(size), rel=0.02), name
    assert len({row["bytes"] for row in moved}) > 1


def test_what_neighbours_take_comes_out_of_a_run(measured: Measured, tmp_path: Path) -> None:
    """A simulated step pays in its next one for what was not as foreseen: that blurs it."""
    _, book, config, engine, _, _ = measured
    asked = GridRequest(
        model=engine.model, max_tokens=256, max_seqs=8, max_batch_tokens=128, pairs=((1, 1),), is_quick=True
    )
    loaded = load_spec(grid_spec(asked, config))
    cells = [cell for cell in expand(loaded.spec, config) if len(cell.all_engines) > 1]
    (key,) = book.engines
    losses = StepLosses(
        prefill_beside_prefill=0.1,
        prefill_beside_decode=0.35,
        decode_beside_prefill=0.2,
        decode_beside_decode=0.6,
    )
    engines = {key: replace(book.engines[key], losses=losses)}
    beside = replace(book, engines=engines, host=HostTable(num_cores=2))
    write_run(tmp_path / "run", loaded, cells, beside, config)
    found = fit_losses(read_run(tmp_path / "run").cells, book.engines, num_cores=2)
    assert not found.unknown[key]
    for name in StepLosses.__slots__:
        assert getattr(found.losses[key], name) == pytest.approx(getattr(losses, name), abs=0.05), name


def test_a_book_has_what_each_engine_loses(measured: Measured, tmp_path: Path) -> None:
    """And it is told."""
    _, book, config, engine, _, folder = measured
    asked = GridRequest(model=engine.model, max_tokens=256, max_seqs=8, max_batch_tokens=128, is_quick=True)
    loaded = load_spec(grid_spec(asked, config))
    beside = [cell for cell in expand(loaded.spec, config) if len(cell.all_engines) > 1]
    losses = StepLosses(**dict.fromkeys(StepLosses.__slots__, 0.5))
    engines = {key: replace(costs, losses=losses) for key, costs in book.engines.items()}
    planted_book = replace(book, engines=engines, host=HostTable(num_cores=2))
    write_run(tmp_path / "run", loaded, beside, planted_book, config)
    alone = read_run(folder)
    alone = replace(alone, cells=tuple(cell for cell in alone.cells if cell.is_alone))
    fitted = fit_runs([alone, read_run(tmp_path / "run")])
    (costs,) = fitted.book.engines.values()
    for name in StepLosses.__slots__:
        assert getattr(costs.losses, name) == pytest.approx(0.5, abs=0.1), name
    assert fitted.book.host == HostTable(num_cores=2)
    lines = list(told(fitted))
    text = " ".join(" ".join(lines).split())
    assert re.search(r"decode steps 1\.[45]\d and 1\.[45]\d \(llama", text), text
    assert max(map(len, lines)) <= 80
    assert "to neighbours" not in text


@pytest.mark.parametrize("of_pair", [False, True])
def test_a_cell_simulated_by_the_fitted_tables_is_as_by_the_planted(
    measured: Measured, of_pair: bool
) -> None:
    fitted, book, config, _, cells, _ = measured
    cell = [cell for cell in cells if (cell.decode is not None) == of_pair][-1]
    prompts = resolve_prompts(cell.spec, config)
    found = [simulate_cell(cell, config, cell_arrivals(cell, prompts), b) for b in (fitted.book, book)]
    first, second = (
        median((row.token_times_ns[-1] - row.arrival_ns) for row in outcome.requests) for outcome in found
    )
    assert first == pytest.approx(second, rel=0.03)


def test_what_a_fit_is_worth_is_told(measured: Measured) -> None:
    lines = list(told(measured.fitted))
    text = "\n".join(lines)
    assert "decode steps\n" in text
    assert "prefill steps\n" in text
    once = re.search(r"decode steps\n(?:  .*\n)+?    +([\d.]+) ms once\n", text)
    assert once is not None, text
    assert float(once[1]) == pytest.approx(DECODE.constants[0] / 1e6, rel=0.05)
    assert re.search(r"^ +[\d.]+ [num]?s per token, the first 64$", text, re.MULTILINE), text
    assert "no transfers were measured" not in text
    assert "OVER" not in text
    assert max(map(len, lines)) <= 80


def test_a_machine_that_was_busy_is_told_of(measured: Measured) -> None:
    (found, *_) = measured.fitted.classes
    assert not found.interrupted
    few_long = (0.1,) * 15 + (2.0,) * 6
    held_up = replace(found, fitted=replace(found.fitted, ratios=few_long))
    assert "took under 10% of the mean" in held_up.interrupted


def test_the_error_at_every_place_is_written(measured: Measured, tmp_path: Path) -> None:
    write_residuals(measured.fitted, tmp_path)
    rows = list(csv.DictReader((tmp_path / RESIDUALS).read_text().splitlines()))
    assert len(rows) == sum(len(found.fitted.places) for found in measured.fitted.classes)
    steps = sum(found.fitted.num_samples - found.fitted.num_trimmed for found in measured.fitted.classes)
    assert sum(int(row["num_steps"]) for row in rows) == steps
    judged = [abs(float(r["error"])) for r in rows if r["kind"] == "decode" and r["is_judged"] == "1"]
    assert max(judged) == pytest.approx(abs(measured.fitted.classes[0].fitted.worst.error), abs=1e-4)


def test_runs_of_other_models_are_not_fitted(measured: Measured, checkpoint: CheckpointFactory) -> None:
    other = checkpoint("qwen3")
    run = read_run(measured.folder)
    assert run.of_model(measured.config, measured.engine.model) == run
    with pytest.raises(UserError, match=f"no cell has a model with the sizes of {other}"):
        run.of_model(read_config(other), str(other))


VERIFY = StepTable(
    terms=("one", "tokens", "pairs"), constants=(1.5e6, 60_000.0, 25.0), ratios=(0.95, 1.0, 1.05)
)
TURNS = StepTable(
    terms=("one", "requests", "prefills", "drafts"), constants=(300_000.0, 12_000.0, 90_000.0, 5_000.0)
)


def test_planted_costs_of_drafts_come_out_of_a_run(measured: Measured, tmp_path: Path) -> None:
    """So do those of the same engine without drafts, which that run has no other tables for."""
    _, book, config, engine, _, _ = measured
    asked = GridRequest(
        model=engine.model, max_tokens=256, max_seqs=8, max_batch_tokens=128, has_neighbours=False, drafts=3
    )
    loaded = load_spec(grid_spec(asked, config))
    cells = [cell for cell in expand(loaded.spec, config) if cell.decode is None]
    assert {c.prefill.speculative.num_tokens for c in cells if c.prefill.speculative} == {1, 3}
    (key,) = book.engines
    true = replace(book.engines[key], verify=VERIFY, drafting={"ngram": TURNS})
    rates = DraftRates((0.6, 0.4, 0.3), (0.9, 0.9, 0.8))
    write_run(tmp_path / "run", loaded, cells, replace(book, engines={key: true}), config, drafts=rates)
    fitted = fit_runs([read_run(tmp_path / "run")])
    found = fitted.book.find(key)
    for shares in ([(2, 30)], [(4, 200)] * 5, [(4, 100)] * 3 + [(1, 60)] * 3):
        features = step_features(batch(*shares, drafts=shares[0][0] - 1))
        assert found.is_inside(features)
        assert found.step_ns(features) == pytest.approx(true.step_ns(features), rel=0.04), shares
        assert found.drafting["ngram"].ns(features) == pytest.approx(TURNS.ns(features), rel=0.1), shares
    for shares in ([(1, 30)], [(1, 200)] * 5, [(64, 0)]):
        features = step_features(batch(*shares))
        assert found.step_ns(features) == pytest.approx(true.step_ns(features), rel=0.04), shares
        assert found.turn_ns(features) == pytest.approx(true.turn_ns(features), rel=0.05), shares
    assert [c.kind for c in fitted.classes] == ["decode", "verify", "prefill"]
    assert all(c.is_good for c in fitted.classes)
    text = " ".join(" ".join(told(fitted)).split())
    assert "verify steps" in text
    assert re.search(r"ngram .* a drafted token where it drafts \(llama", text), text
    fitted.book.save(tmp_path)
    assert replace(CostBook.load(tmp_path), folder="") == fitted.book


def test_too_few_steps_with_drafts_are_told_of(measured: Measured) -> None:
    run = read_run(measured.folder)
    cells = tuple(drafting(cell) for cell in run.cells)  # their decode engines draft nothing
    fitted = fit_runs([replace(run, cells=cells)])
    (costs,) = fitted.book.engines.values()
    assert costs.verify is None
    assert [note for note in fitted.notes if "drafts" in note] == [
        f"{costs.key.text}: 0 steps with drafts, too few to fit"
    ]


def drafting(cell: RecordedCell) -> RecordedCell:
    engine = replace(cell.cell.prefill, speculative=SpeculativeConfig(method="ngram"))
    return replace(cell, cell=replace(cell.cell, prefill=engine))


def test_steps_that_do_not_say_what_was_drafted_are_left_out(measured: Measured) -> None:
    """Those of older runs: they would count as steps of prompts."""
    run = read_run(measured.folder)
    older = tuple(replace(drafting(cell), tells_drafts=False) for cell in run.cells)
    fitted = fit_runs([run, replace(run, cells=older)])
    assert fitted.book == measured.fitted.book
    assert [note for note in fitted.notes if "drafts" in note] == [
        f"{cell.cell_id}: an older run does not say which steps had drafts" for cell in measured.cells
    ]
    with pytest.raises(UserError, match="engines draft in every cell"):
        fit_runs([replace(run, cells=older)])


def test_a_run_without_steps_is_refused(tmp_path: Path, checkpoint: CheckpointFactory) -> None:
    model = checkpoint("llama")
    config = read_config(model)
    loaded = load_spec(grid_spec(GridRequest(model=str(model), max_seqs=1, max_tokens=16), config))
    (cell, *_) = expand(loaded.spec, config)
    writer = ResultWriter(tmp_path, spec_yaml=dump_spec(loaded.spec), environment={})
    writer.write_cell(CellRow(cell_id=cell.cell_id, axes=cell.axes, verdict="PASS"), [], [])
    writer.finish()
    with pytest.raises(UserError, match="record_steps=true"):
        read_run(tmp_path)


def costs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["costs", *map(str, arguments)])


def test_the_command_fits_a_run_that_is_there(measured: Measured, tmp_path: Path) -> None:
    of_tables = measured.folder.parent  # its `run` is the run
    found = costs(measured.engine.model, "--from", of_tables, "--out", tmp_path / "costs")
    assert found.exit_code == 0, found.output
    assert "decode steps\n" in found.stdout
    assert (tmp_path / "costs" / RESIDUALS).is_file()
    saved = CostBook.load(tmp_path / "costs")
    assert saved.engines == measured.fitted.book.engines
    assert saved.is_measured


def test_the_command_derives_tables_and_says_that_they_are_unmeasured(
    measured: Measured, tmp_path: Path
) -> None:
    sheet = tmp_path / "gpu.yaml"
    sheet.write_text("name: round\ntflops: {float32: 10}\nmemory_gb_per_s: 1000\nlink_gb_per_s: 100\n")
    found = costs(
        measured.engine.model,
        "--hardware",
        sheet,
        "--tp",
        "1,2",
        "--pairs",
        "none",
        "--out",
        tmp_path / "costs",
    )
    assert found.exit_code == 0, found.output
    assert "UNMEASURED: 2 tables from the data sheet of round" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert not CostBook.load(tmp_path / "costs").is_measured


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--tp", "one"], "not a list of numbers"),
        (["--tp", "0"], "0 is no TP size"),
        (["--pairs", "1:2:3"], "not a list of pairs"),
        (["--from", "nowhere"], "no such run folder"),
        (["--hardware", "nowhere.yaml"], "cannot be read"),
        (["--hardware", "h300"], "one of b200, h100, h200, mi300x"),
        (["--for", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_exits_2(options: list[str], why: str, tmp_path: Path) -> None:
    found = costs("model", "--out", tmp_path, *options)
    assert found.exit_code == 2
    assert why in found.stderr
