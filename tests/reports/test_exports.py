"""Exports for AIPerf's and llm-d's tools: accepted by their own schemas, and equal to the tables."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from llmd_benchmark_report import BenchmarkReportV02, import_benchmark_report
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.reports import ResultWriter, load
from rayk.reports.export import cell_exports, folder_name
from rayk.types.rows import RequestRow
from tests.markers import slow
from tests.reports.synthetic import MS, SPEC, cell_row, write_run
from tests.reports.test_columns import write_load

ROOT = Path(__file__).resolve().parent.parent.parent
AIPERF = ROOT / ".venv-aiperf" / "bin" / "python"
UNITS = {
    **dict.fromkeys(("request_latency", "time_to_first_token", "time_to_second_token"), "ms"),
    **dict.fromkeys(("inter_token_latency", "inter_chunk_latency"), "ms"),
    "output_token_throughput_per_user": "tokens/sec/user",
    **dict.fromkeys(("input_sequence_length", "output_sequence_length", "output_token_count"), "tokens"),
    **dict.fromkeys(
        ("usage_prompt_cache_read_tokens", "total_isl", "total_osl", "total_output_tokens"), "tokens"
    ),
    **dict.fromkeys(("request_count", "error_request_count", "good_request_count"), "requests"),
    "request_error_rate": "%",
    "benchmark_duration": "sec",
    **dict.fromkeys(("request_throughput", "goodput"), "requests/sec"),
    **dict.fromkeys(
        ("input_token_throughput", "output_token_throughput", "total_token_throughput"), "tokens/sec"
    ),
}
"""Tags of aiperf 0.13.0's metrics and the units it exports them in; held to its registry by the slow test."""
ABOUT = """
import json, sys
from aiperf.common.models.export_models import JsonExportData, JsonMetricResult
from aiperf.metrics.metric_registry import MetricRegistry
told = {"schema_version": JsonExportData.SCHEMA_VERSION, "units": {}, "metrics": []}
for path in sys.argv[1:]:
    text = open(path).read()
    JsonExportData.model_validate_json(text)
    found = JsonMetricResult.project_summary_dict(json.loads(text))
    told["metrics"].append(sorted(found))
    for tag in found:
        metric = MetricRegistry.get_class(tag)
        told["units"][tag] = str(metric.display_unit or metric.unit)
print(json.dumps(told))
"""
"""What the real package makes of files."""


def export(folder: Path, name: str, out: Path) -> list[Path]:
    """The files that the command writes; it prints their paths."""
    answer = CliRunner().invoke(app, ["report", str(folder), "--format", name, "--out", str(out)])
    assert answer.exit_code == 0, answer.stderr
    paths = [Path(line) for line in answer.stdout.split("\n") if line]
    assert all(path.is_relative_to(out) and path.is_file() for path in paths)
    return paths


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("exports") / "run").parent


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_load(tmp_path_factory.mktemp("exports") / "load", num_requests=200)


def check_statistics(found: dict[str, Any], values: Any, mean: str, spread: str) -> None:
    """Against numpy, by the definition of each statistic."""
    values = np.asarray(list(values), dtype=np.float64)
    assert found[mean] == pytest.approx(values.sum() / len(values))
    assert found[spread] == pytest.approx(np.sqrt(((values - values.mean()) ** 2).mean()), abs=1e-9)
    assert (found["min"], found["max"]) == (values.min(), values.max())
    for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(np.quantile(values, percent / 100)), percent


def check_aiperf(
    found: dict[str, Any], rows: pd.DataFrame, output: pd.Series, lag: Any, span_s: float
) -> None:
    """Every metric that a run and a load share, against the tables."""
    gaps = rows["itl_ms"]
    for tag, values in {
        "request_latency": rows["e2e_ms"] - lag,
        "time_to_first_token": rows["ttft_ms"] - lag,
        "time_to_second_token": [g[0] for g in gaps],
        "inter_token_latency": rows["tpot_ms"],
        "output_token_throughput_per_user": 1000 / rows["tpot_ms"],
        "input_sequence_length": rows["num_prompt_tokens"],
        "output_sequence_length": output,
        "output_token_count": output,
        "usage_prompt_cache_read_tokens": rows["num_cached_tokens"],
    }.items():
        check_statistics(found[tag], values, "avg", "std")
        assert found[tag]["count"] == len(rows)
        assert found[tag]["sum"] == pytest.approx(sum(values))
    num_input, num_output = rows["num_prompt_tokens"].sum(), output.sum()
    for tag, value in {
        "request_count": len(rows),
        "total_isl": num_input,
        "total_osl": num_output,
        "total_output_tokens": num_output,
        "benchmark_duration": span_s,
        "request_throughput": len(rows) / span_s,
        "input_token_throughput": num_input / span_s,
        "output_token_throughput": num_output / span_s,
        "total_token_throughput": (num_input + num_output) / span_s,
    }.items():
        assert found[tag]["avg"] == pytest.approx(value), tag
    for tag, metric in found.items():
        if isinstance(metric, dict) and "unit" in metric:
            assert metric["unit"] == UNITS[tag], tag


def test_a_runs_cells_as_aiperf_tells_them(run: Path, tmp_path: Path) -> None:
    result = load(run)
    paths = export(run, "aiperf", tmp_path / "out")
    assert [path.name for path in paths] == ["profile_export_aiperf.json"] * len(result.cells)
    for path, (index, cell) in zip(paths, result.cells.iterrows(), strict=True):
        found = json.loads(path.read_text())
        rows = result.requests[result.requests["cell_id"] == cell["cell_id"]]
        check_aiperf(found, rows, rows["output_token_ids"].map(len), 0.0, rows["e2e_ms"].max() / 1e3)
        assert "inter_chunk_latency" not in found
        assert found["schema_version"] == "1.4"
        assert found["request_error_rate"]["avg"] == 0
        assert found["metadata"]["verdict"] == cell["verdict"]
        info = found["run_info"]
        assert (info["run_label"], info["variation_index"]) == (cell["cell_id"], index)
        assert info["variation_values"]["prefill.tp"] == cell["prefill.tp"]


def test_a_load_as_aiperf_tells_it(bench: Path, tmp_path: Path) -> None:
    result = load(bench)
    (path,) = export(bench, "aiperf", tmp_path / "out")
    found = json.loads(path.read_text())
    rows = result.requests[result.requests["phase"] == "measured"]
    assert 0 < len(rows) < len(result.requests)
    lag = rows["send_lag_ms"]
    assert (lag > 0).all()
    span_s = ((rows["due_ms"] + rows["e2e_ms"]).max() - (rows["due_ms"] + lag).min()) / 1e3
    check_aiperf(found, rows, rows["num_output_tokens"], lag, span_s)
    check_statistics(found["inter_chunk_latency"], [g for of in rows["itl_ms"] for g in of], "avg", "std")
    assert found["good_request_count"]["avg"] == rows["is_good"].sum()
    assert found["goodput"]["avg"] == pytest.approx(rows["is_good"].sum() / span_s)
    warmup = result.requests[result.requests["phase"] == "warmup"]
    assert found.get("warmup_metrics", {}).get("request_latency", {}).get("count", 0) == len(warmup)


def check_llmd(
    report: BenchmarkReportV02, rows: pd.DataFrame, output: pd.Series, latency: dict[str, Any]
) -> None:
    """Requests and latencies against the tables."""
    aggregate = report.results.request_performance.aggregate
    assert aggregate.requests.total == len(rows)
    check_statistics(
        aggregate.requests.input_length.model_dump(), rows["num_prompt_tokens"], "mean", "stddev"
    )
    check_statistics(aggregate.requests.output_length.model_dump(), output, "mean", "stddev")
    for name, (units, values) in latency.items():
        found = getattr(aggregate.latency, name)
        assert found.units == units, name
        check_statistics(found.model_dump(), values, "mean", "stddev")


def latencies(rows: pd.DataFrame, output: pd.Series) -> dict[str, Any]:
    return {
        "time_to_first_token": ("ms", rows["ttft_ms"]),
        "normalized_time_per_output_token": ("ms/token", rows["e2e_ms"] / output),
        "time_per_output_token": ("ms/token", rows["tpot_ms"]),
        "inter_token_latency": ("ms/token", [g for of in rows["itl_ms"] for g in of]),
        "request_latency": ("ms", rows["e2e_ms"]),
    }


def test_a_runs_cells_as_llmd_tells_them(run: Path, tmp_path: Path) -> None:
    result = load(run)
    paths = export(run, "llm-d", tmp_path / "out")
    assert len(paths) == len(result.cells)
    uids = set()
    for path, (_, cell) in zip(paths, result.cells.iterrows(), strict=True):
        report = import_benchmark_report(str(path))  # raises for what the schema does not have
        assert isinstance(report, BenchmarkReportV02)
        assert report.version == "0.2.1"
        uids.add(report.run.uid)
        rows = result.requests[result.requests["cell_id"] == cell["cell_id"]]
        output = rows["output_token_ids"].map(len)
        check_llmd(report, rows, output, latencies(rows, output))
        rates = report.results.request_performance.aggregate.throughput
        assert rates.output_token_rate.mean == pytest.approx(cell["output_tokens_per_s"])
        assert rates.request_rate.mean == pytest.approx(len(rows) / (rows["e2e_ms"].max() / 1e3))
        engines = {c.metadata.label: c.standardized for c in report.scenario.stack}
        if cell["mode"] == "aggregated":
            assert {label: e.role for label, e in engines.items()} == {"aggregated": "replica"}
            assert engines["aggregated"].accelerator.parallelism.tp == cell["prefill.tp"]
        else:
            assert {label: e.role for label, e in engines.items()} == {
                "prefill": "prefill",
                "decode": "decode",
            }
            assert engines["decode"].accelerator.parallelism.tp == cell["decode.tp"]
            assert engines["prefill"].model.name == "checkpoints/qwen3-tiny"
        own = report.results.observability.model_extra["rayk"]
        assert own["verdict"] == cell["verdict"]
    assert len(uids) == len(paths)


def test_a_load_as_llmd_tells_it(bench: Path, tmp_path: Path) -> None:
    result = load(bench)
    (path,) = export(bench, "llm-d", tmp_path / "out")
    report = import_benchmark_report(str(path))
    rows = result.requests[result.requests["phase"] == "measured"]
    cell = result.cells.iloc[0]
    check_llmd(report, rows, rows["num_output_tokens"], latencies(rows, rows["num_output_tokens"]))
    asked = report.scenario.load.standardized
    assert (asked.tool, asked.source, asked.rate_qps, asked.input_seq_len.value) == (
        "rayk",
        "random",
        100.0,
        3,
    )
    rates = report.results.request_performance.aggregate.throughput
    assert rates.output_token_rate.mean == cell["output_tokens_per_s"]
    assert rates.request_rate.mean == cell["answered_per_s"]
    assert report.results.observability.model_extra["rayk"]["goodput_per_s"] == cell["goodput_per_s"]
    assert path.read_text() == export(bench, "llm-d", tmp_path / "again")[0].read_text()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two repeats of two requests, of which the second fails; and a cell where none was answered."""
    folder = tmp_path_factory.mktemp("exports") / "broken"
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    for name, num_answered in (("some/cell", 1), ("no cell", 0)):
        rows = [
            RequestRow(
                cell_id=name,
                repeat=repeat,
                request_id=f"r{i}",
                prompt_index=i,
                prompt_token_ids=[1, 2, 3],
                output_token_ids=[7, 8, 9] if i < num_answered else [7],
                num_prompt_tokens=3,
                arrival_ns=5 * MS,
                token_times_ns=[25 * MS, 30 * MS, 45 * MS + repeat * 10 * MS]
                if i < num_answered
                else [25 * MS],
                error=None if i < num_answered else "TimeoutError: request_s",
                finish_reason="length" if i < num_answered else "error",
            )
            for repeat in range(2)
            for i in range(2)
        ]
        writer.write_cell(cell_row(1, 1, ("BHLNC", "BHLNC"), cell_id=name, verdict="TIMEOUT"), rows, [])
    writer.close()
    return folder


def test_failures_are_told_and_not_measured(broken: Path, tmp_path: Path) -> None:
    (path,) = export(broken, "aiperf", tmp_path / "a")
    assert path.parent.name == "some_cell"
    found = json.loads(path.read_text())
    assert found["request_latency"]["count"] == found["request_count"]["avg"] == 2
    assert found["error_request_count"]["avg"] == 2
    assert found["request_error_rate"]["avg"] == 50
    (told,) = found["error_summary"]
    assert (told["error_details"]["message"], told["count"]) == ("TimeoutError: request_s", 2)
    assert found["benchmark_duration"]["avg"] == pytest.approx(0.040 + 0.050)  # repeats added up
    (path,) = export(broken, "llm-d", tmp_path / "l")
    requests = import_benchmark_report(str(path)).results.request_performance.aggregate.requests
    assert (requests.total, requests.failures, requests.incomplete) == (4, 2, 0)


def test_what_is_refused(broken: Path, run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments in ([str(run), str(run)], [str(run), "--out", "-"]):
        for name in ("aiperf", "llm-d"):
            answer = runner.invoke(app, ["report", *arguments, "--format", name])
            assert (answer.exit_code, "of one run" in answer.stderr) == (2, True)
    writer = ResultWriter(tmp_path / "none", spec_yaml=SPEC, environment={})
    writer.write_tables()
    writer.close()
    answer = runner.invoke(app, ["report", str(tmp_path / "none"), "--format", "aiperf"])
    assert (answer.exit_code, "no request of this run was answered" in answer.stderr) == (2, True)


def test_tables_that_do_not_know_when_requests_were_due_have_no_rates(run: Path, tmp_path: Path) -> None:
    for name in ("cells", "requests", "transfers"):
        lacking = ["due_ms"] if name == "requests" else []
        getattr(load(run), name).drop(columns=lacking).to_parquet(tmp_path / f"{name}.parquet")
    found = json.loads(export(tmp_path, "aiperf", tmp_path / "out")[0].read_text())
    assert found["request_latency"]["count"] == 6
    assert "request_throughput" not in found
    assert next(cell_exports(load(tmp_path))).span_s() == 0


def test_names_of_folders() -> None:
    assert folder_name("poisson rate=4") == "poisson_rate=4"
    assert folder_name("../p1/d2") == "p1_d2"
    assert folder_name("///") == "cell"


@slow
def test_aiperf_itself_reads_them(run: Path, bench: Path, tmp_path: Path) -> None:
    if not AIPERF.exists():
        pytest.skip(f"no {AIPERF.relative_to(ROOT)}: `make test-generators` installs it")
    paths = export(run, "aiperf", tmp_path / "run") + export(bench, "aiperf", tmp_path / "load")
    done = subprocess.run(
        [AIPERF, "-c", ABOUT, *paths], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["schema_version"] == "1.4"
    assert told["units"] == {tag: UNITS[tag] for tag in told["units"]}
    assert set(told["units"]) == set(UNITS) - {"error_request_count"}  # nothing failed
    assert len(told["metrics"]) == len(paths)
