"""Reports from a made-up run: self-contained, complete, safe."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from rich.console import Console

from rayk.reports import ResultWriter, load, verdict_table
from rayk.reports.compare import compare, compare_headline, compare_markdown, write_compare_html
from rayk.reports.grids import SHORT, verdict_grids
from rayk.reports.report import markdown, write_html
from rayk.reports.table_files import write_csv
from rayk.reports.terminal import STYLES, TONE_STYLES
from rayk.reports.values import axis_label
from rayk.types.verdicts import VERDICTS
from tests.markers import thorough
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    write_run(directory)
    return directory


class _Page(HTMLParser):
    """Collects every attribute that loads something, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.tips: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "data", "srcset", "action")]
        self.tips += [v or "" for k, v in attrs if k == "data-tip"]

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1] not in ("script", "style"):
            self.texts.append(data)


def test_the_page_loads_nothing(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = _Page(text)
    assert page.loads == []
    assert {"link", "img", "iframe", "object"}.isdisjoint(page.tags)
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles
    assert "prefers-color-scheme: dark" in styles


def test_the_page_shows_every_cell_and_reason(run: Path) -> None:
    page = _Page((run / "report.html").read_text())
    text = " ".join(page.texts)
    assert "15 of 18 PASS" in text
    cells = load(run).cells
    assert all(name in text for name in cells["cell_id"])
    assert "layer 2, group 0, v, head 1, token 36" in text
    assert len([tip for tip in page.tips if re.match(r"[\w-]+: [A-Z_]+\n", tip)]) == 18
    assert any("last block not written" in tip for tip in page.tips)
    assert "rayk run spec.yaml --out runs/synthetic-again" in text


def test_failed_cells_come_first_and_their_reasons_before_all_numbers(run: Path) -> None:
    """Columns of numbers are many: behind them a reason would lie outside the window."""
    page = (run / "report.html").read_text()
    table = page[page.index("<h2>Cells") :]
    heads = re.findall(r"<th data-sort[^>]*>([^<]*)</th>", table)
    assert heads[:3] == ["cell_id", "verdict", "requests"]
    first, second, third = table.split("<tr>")[2:5]
    assert '<div class="why unmet">r3: layer 2, group 0, v, head 1, token 36: last block not written' in first
    assert "TOKEN_MISMATCH" in second
    assert "p1-d1-BHLNC-BHLNC" in third
    assert re.findall(r'<td class="(\w+)', first)[:2] == ["name", "num"]


def test_no_bare_nought_stands_beside_kv_that_is_wrong(tmp_path: Path) -> None:
    """Digests count wrong bytes; where another check found KV wrong they counted none."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    wrong = {"verdict": "KV_MISMATCH", "reason": "values differ"}
    for tp, more in ((1, {}), (2, wrong)):
        writer.write_cell(cell_row(1, tp, ("BHLNC", "BHLNC"), **more), [], [])
    page = writer.finish().read_text()
    assert "<b>0 B</b><span>KV bytes wrong" not in page
    assert "<b>wrong</b><span>KV, by other checks" in page
    assert [line.count("KV bytes wrong: 0") for line in page.split("data-tip")].count(1) == 1
    rows = [line for line in markdown(load(tmp_path)).splitlines() if line.startswith("| p1-")]
    assert [row.split(" | ")[5] for row in rows] == ["", "0"], "those that failed come first"
    assert "<b>0 B</b><span>KV bytes wrong" in write_run(tmp_path / "passed", failures=False).read_text()


def test_cells_with_faults_are_coloured_by_what_was_expected(tmp_path: Path) -> None:
    """A fault that was found is good news, and one that passed is not."""
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    faulty = {"expected_verdict": "KV_MISMATCH"}
    ends = [
        ("KV_MISMATCH", faulty),
        ("PASS", faulty),
        ("ENGINE_ERROR", faulty),
        ("UNSUPPORTED", {}),
        ("NEAR_TIE", {}),
        ("PASS", {}),
    ]
    for tp, (verdict, more) in enumerate(ends, start=1):
        writer.write_cell(cell_row(1, tp, ("BHLNC", "BHLNC"), verdict=verdict, **more), [], [])
    page = writer.finish().read_text()
    cells = load(tmp_path).cells
    tones = ["met", "unmet", "unmet", "UNSUPPORTED", "NEAR_TIE", "PASS"]
    grid, table = page.split("<h2>Cells")
    assert re.findall(r'<td class="(\w+)" tabindex', grid) == tones
    told = [(tone, verdict) for tone, (verdict, _) in zip(tones, ends, strict=True)]
    # Those that are not as expected first, the gravest before all.
    assert re.findall(r'<span class="chip (\w+)">(\w+)', table) == [told[i] for i in (2, 1, 0, 3, 4, 5)]
    assert '<span class="chip unmet">1 PASS, not as expected</span>' in grid
    assert ">expected</th>" in table
    styles = [column._cells for column in verdict_table(cells).columns][1]
    assert [text.style for text in styles][:2] == ["green", "bold red"]


def test_the_plots_hold_the_runs_numbers(run: Path) -> None:
    text = (run / "report.html").read_text()
    match = re.search(r'id="plots">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    plots = {p["id"]: p for p in json.loads(match.group(1))}
    spreads = {f"spread-{name}" for name in ("ttft", "itl", "e2e")}
    assert set(plots) == {"transfers", "ttft", "tpot", "pareto"} | spreads
    result = load(run)
    assert sorted(plots["ttft"]["data"][0]["x"]) == sorted(result.requests["ttft_ms"])
    traces = {trace["name"]: trace for trace in plots["transfers"]["data"]}
    assert sum(sum(trace["x"]) for trace in traces.values()) == result.transfers["bytes"].sum()
    # Every mark has a name, in the legend by its TP sizes and where one points at it by its cell.
    assert list(traces) == [f"P {p}, D {d}" for p in (1, 2, 4) for d in (1, 2, 4)]
    assert {text.split("<br>")[0] for text in traces["P 4, D 2"]["text"]} == {"p4-d2-BHLNC-BHLNC"}
    assert {trace["name"] for trace in plots["pareto"]["data"]} == {"best", *traces, "TP 1", "TP 2", "TP 4"}


def test_text_from_the_run_cannot_leave_its_place(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    writer = ResultWriter(tmp_path, spec_yaml=f"name: '{evil}'\nmodel: m\n", environment={"x": evil})
    writer.write_cell(cell_row(1, 2, ("BHLNC", "BHLNC"), verdict="TIMEOUT", reason=evil), [], [])
    page = _Page(writer.finish().read_text())
    assert page.loads == []
    assert page.tags.count("img") == 0
    assert any(evil in tip for tip in page.tips)


def test_a_run_without_cells_still_has_a_report(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    assert "0 of 0 PASS" in writer.finish().read_text()


@thorough
def test_what_fast_prefill_saves_is_shown_where_a_cell_used_it(run: Path, tmp_path: Path) -> None:
    """In the page, in Markdown and in the terminal; a run without it has no columns of zeros."""
    names = {"token-layers", "fast layers"}
    counts = [{"num_token_layers": 12_345, "num_fast_prefill_layers": n} for n in (0, 7)]
    cells = [cell_row(tp, None, ("BHLNC", "BHLNC"), **c) for tp, c in zip((1, 2), counts, strict=True)]
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for cell in cells:
        writer.write_cell(cell, [], [])
    writer.finish()
    for folder, told in ((tmp_path, names), (run, set())):
        result = load(folder)
        page = _Page(write_html(folder, tmp_path / "page.html").read_text())
        head = next(line for line in markdown(result).splitlines() if line.startswith("| cell_id | verdict"))
        assert names & set(page.texts) == told
        assert names & set(head.strip("| ").split(" | ")) == told
        assert names & {str(column.header) for column in verdict_table(result.cells).columns} == told
    assert "| 12,345 | 7 |" in markdown(load(tmp_path))
    assert "layers with fast prefill: 7" in (tmp_path / "report.html").read_text()


def test_what_prefix_caches_had_is_shown_where_they_had_something(run: Path, tmp_path: Path) -> None:
    names = {"cached tokens", "held MiB"}
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for tp in (1, 2):
        cell = cell_row(tp, 1, ("BHLNC", "BHLNC"))
        requests, transfers = request_rows(cell, Random(0)), transfer_rows(cell, Random(0))
        if tp == 2:
            requests[1].num_cached_tokens, requests[3].num_cached_tokens = 288, 1000
            transfers[0].held_bytes = 3 * 2**19
        writer.write_cell(cell, requests, transfers)
    writer.finish()
    for folder, told in ((tmp_path, names), (run, set())):
        result = load(folder)
        page = _Page(write_html(folder, tmp_path / "page.html").read_text())
        head = next(line for line in markdown(result).splitlines() if line.startswith("| cell_id | verdict"))
        assert names & set(page.texts) == told
        assert names & set(head.strip("| ").split(" | ")) == told
        assert names & {str(column.header) for column in verdict_table(result.cells).columns} == told
    assert "| 1,288 | 1.5 |" in markdown(load(tmp_path))
    tips = "\n".join(_Page((tmp_path / "report.html").read_text()).tips)
    assert tips.count("prompt tokens found in caches: 1,288") == 1
    assert tips.count("KV held already, MiB: 1.5") == 1
    assert tips.count("prompt tokens found") == tips.count("KV held") == 1


@thorough
def test_kernel_blocks_are_shown_where_they_are_less_than_blocks(run: Path, tmp_path: Path) -> None:
    """Chunks of 7 leave kernel blocks of one token in blocks of 16: nobody asked for them, so it is told."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    whole = {"prefill_effective_kernel_block_sizes": [16], "decode_effective_kernel_block_sizes": [16]}
    cut = {f"{side}_effective_block_sizes": [48, 16, 512] for side in ("prefill", "decode")}
    cut |= {
        "prefill_effective_kernel_block_sizes": [12, 16, 512],
        "decode_effective_kernel_block_sizes": [48, 1, 512],
    }
    for tp, sizes in ((1, whole), (2, cut)):
        writer.write_cell(cell_row(tp, 1, ("BHLNC", "BHLNC"), **sizes), [], [])
    writer.finish()
    cells = load(tmp_path).cells
    assert cells["prefill.effective_kernel_block_sizes"].map(list).tolist() == [[16], [12, 16, 512]]
    assert cells["decode.effective_kernel_block_sizes"].map(list).tolist() == [[16], [48, 1, 512]]
    assert cells["min_cut_kernel_block_size"].fillna(0).tolist() == [0, 1]
    for folder, told in ((tmp_path, {"kernel block"}), (run, set())):
        page = _Page(write_html(folder, tmp_path / "page.html").read_text())
        head = next(
            line for line in markdown(load(folder)).splitlines() if line.startswith("| cell_id | verdict")
        )
        titles = {str(column.header) for column in verdict_table(load(folder).cells).columns}
        assert {"kernel block"} & set(page.texts) == told
        assert {"kernel block"} & set(head.strip("| ").split(" | ")) == told
        assert {"kernel block"} & titles == told
    tips = "\n".join(_Page((tmp_path / "report.html").read_text()).tips)
    assert tips.count("smallest kernel block, tokens: 1") == 1


def test_every_verdict_has_a_style() -> None:
    css = (Path(write_html.__code__.co_filename).parent / "templates" / "report.css").read_text()
    for verdict in VERDICTS:
        assert verdict in STYLES
        assert verdict in SHORT
    for verdict in (*VERDICTS, "met", "unmet"):
        assert verdict in TONE_STYLES
        assert re.search(rf"\.{verdict}\b", css), verdict


def test_grids_are_one_per_layout_pair(run: Path) -> None:
    grids = {g["title"]: g for g in verdict_grids(load(run).cells)}
    assert list(grids) == [
        "BHLNC → BHLNC",
        "BHLNC → LBHNC",
        "LBHNC → BHLNC",
        "LBHNC → LBHNC",
        "aggregated, layout BHLNC",
    ]
    full = grids["BHLNC → BHLNC"]
    assert full["columns"] == ["D 1", "D 2", "D 4"]
    verdicts = [[cell["verdict"] for cell in cells] for _, cells in full["rows"]]
    assert verdicts == [
        ["PASS", "PASS", "PASS"],
        ["PASS", "PASS", "NEAR_TIE"],
        ["TOKEN_MISMATCH", "KV_MISMATCH", "PASS"],
    ]
    holes = [[cell is None for cell in cells] for _, cells in grids["BHLNC → LBHNC"]["rows"]]
    assert holes == [[True, False], [False, True]]


def test_other_axes_that_vary_split_the_grids(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    for size in (16, 32):
        cell = cell_row(1, 2, ("BHLNC", "BHLNC"), cell_id=f"c{size}")
        cell.axes["decode.block_size"] = size
        writer.write_cell(cell, [], [])
    titles = [g["title"] for g in verdict_grids(load(tmp_path).cells)]
    assert titles == ["BHLNC → BHLNC, decode.block_size 16", "BHLNC → BHLNC, decode.block_size 32"]


def test_markdown_has_the_matrices_and_the_cells(run: Path) -> None:
    text = markdown(load(run))
    assert text.startswith("# 15 of 18 PASS")
    assert "| P 4 | TOKEN_MISMATCH | KV_MISMATCH | PASS |" in text
    assert "| p4-d2-BHLNC-BHLNC | KV_MISMATCH | 6 | 0 | 2,408,448 | 512 |" in text


def test_csv_holds_the_tables(run: Path, tmp_path: Path) -> None:
    paths = write_csv(load(run), tmp_path)
    assert [p.name for p in paths] == ["cells.csv", "requests.csv", "transfers.csv"]
    cells, requests = pd.read_csv(paths[0]), pd.read_csv(paths[1])
    assert cells["verdict"].tolist() == load(run).cells["verdict"].tolist()
    assert json.loads(requests["output_token_ids"][0]) == list(range(24))
    assert cells["first_divergence"].dropna().map(json.loads).tolist() == [{"request": 2, "token_index": 7}]


def test_the_verdict_table_names_every_cell(run: Path) -> None:
    cells = load(run).cells
    table = verdict_table(cells)
    assert table.row_count == 18
    assert table.columns[-1].header == "reason"
    assert verdict_table(cells[cells["verdict"] == "PASS"]).columns[-1].header == "wall s"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_verdict_table_never_cuts_a_number(run: Path, width: int) -> None:
    """Narrow terminals see fewer columns, each whole; verdicts and wrong counts stay longest."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(verdict_table(load(run).cells, width=width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "TOKEN_MISMATCH" in text
    assert "512" in text
    assert ("2,408,448" in text) == (width == 160)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_terminal_shows_three_lines_of_a_reason(tmp_path: Path, width: int) -> None:
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    reason = "KV of long/0 differs: " + "a cache of another kind " * 30 + "end"
    for name, text in (("long", reason), ("short", "full")):
        cell = cell_row(1, 2, ("auto", "auto"), cell_id=name, verdict="KV_MISMATCH", reason=text)
        writer.write_cell(cell, [], [])
    cells = load(tmp_path).cells

    def shown(lines: int | None) -> str:
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(verdict_table(cells, width=width, reason_lines=lines))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    text = shown(3)
    assert text.count("\n") == 3 + 1 + 3 + 1 + 1, "title, head, long, short, foot"
    assert max(map(len, text.splitlines())) == width
    assert "long/0" not in text
    assert len(re.findall(r"\w …", text)) == 1
    assert "full" in text
    assert "end" in shown(None)
    assert "…" not in shown(None)


@thorough
def test_two_runs_are_compared_cell_by_cell(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "good"
    write_run(other, failures=False, seed=1)
    results = [load(run), load(other)]
    table = compare(results)
    assert len(table) == 18
    assert compare_headline(results) == "3 of 18 cells differ in verdict"
    base, changed = table[f"ttft_ms_p50/{run.name}"][0], table["ttft_ms_p50/good"][0]
    text = compare_markdown(results)
    assert f"{changed:.1f} ({100 * (changed / base - 1):+.0f}%)" in text
    page = _Page(write_compare_html(results, tmp_path / "c.html").read_text())
    assert page.loads == []
    assert "3 of 18 cells differ in verdict" in " ".join(page.texts)


def test_runs_of_one_name_and_absent_cells(run: Path, tmp_path: Path) -> None:
    other = tmp_path / run.name
    writer = ResultWriter(other, spec_yaml="name: n\n", environment={})
    writer.write_cell(cell_row(8, 8, ("BHLNC", "BHLNC")), [], [])
    results = [load(run), load(other)]
    assert len(compare(results)) == 19
    assert f"verdict, {run.name} (2)" in compare_markdown(results)
    assert "absent" in compare_markdown(results)


def test_a_set_that_covers_pairs_has_one_grid_per_model(tmp_path: Path) -> None:
    """Every cell has layouts or settings of its own, so that a grid for each would hold one cell."""
    layouts = ("BHLNC", "BLHNC", "LBHNC")
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    for m, model in enumerate(("a/first", "b/second")):
        for i, (p, d) in enumerate(((2, 1), (1, 2), (4, 1), (2, None))):
            pair = (layouts[(i + m) % 3], layouts[(i + 2 * m + 1) % 3])
            cell = cell_row(p, d, pair, cell_id=f"{model}-{i}")
            cell.axes["model"] = model
            cell.axes["prefill.block_size"] = 32 if (m, i) == (1, 2) else 16
            writer.write_cell(cell, [], [])
    writer.finish()
    first, second = verdict_grids(load(tmp_path).cells)
    assert (first["title"], second["title"]) == ("first", "second")
    assert first["columns"] == second["columns"] == ["2", "1 → 2", "2 → 1", "4 → 1"]
    assert [label for label, _ in first["rows"]] == [
        "aggregated, layout BHLNC",
        "BLHNC → LBHNC",
        "BHLNC → BLHNC",
        "LBHNC → BHLNC",
    ]
    assert second["rows"][3][0].endswith(", prefill.block_size 32")
    for grid in (first, second):
        shown = [[cell is not None for cell in cells] for _, cells in grid["rows"]]
        assert shown == [[i == j for j in range(4)] for i in range(4)]


def fault(**fields: object) -> list[dict[str, object]]:
    return [{"kind": "wrong_kv", "layer": 1, "seed": 0} | fields]


def test_faults_are_rows_of_one_grid(tmp_path: Path) -> None:
    """A grid for each would hold one cell, under a title of JSON."""
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    planted = [[], fault(point="rope"), fault(point="rope", role="prefill", rank=0), fault(point="k_norm")]
    for i, faults in enumerate(planted):
        cell = cell_row(2, 1, ("auto", "auto"), cell_id=f"c{i}")
        cell.axes["faults"] = faults
        writer.write_cell(cell, [], [])
    (grid,) = verdict_grids(load(tmp_path).cells)
    assert grid["title"] == "auto → auto"
    assert [label for label, _ in grid["rows"]] == [
        "P 2, no fault",
        "P 2, wrong_kv rope layer 1",
        "P 2, wrong_kv rope layer 1 (prefill rank 0)",
        "P 2, wrong_kv k_norm layer 1",
    ]


def test_faults_of_several_cells_each_have_grids(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml="name: n\n", environment={})
    for point in ("rope", "k_norm"):
        for tp in (1, 2):
            cell = cell_row(1, tp, ("auto", "auto"), cell_id=f"{point}{tp}")
            cell.axes["faults"] = fault(point=point)
            writer.write_cell(cell, [], [])
    titles = [grid["title"] for grid in verdict_grids(load(tmp_path).cells)]
    assert titles == ["auto → auto, wrong_kv rope layer 1", "auto → auto, wrong_kv k_norm layer 1"]


@pytest.mark.parametrize(
    ("axis", "value", "label"),
    [
        ("faults", "[]", "no fault"),
        ("faults", '[{"kind": "kill", "point": "decode", "step": 3}]', "kill decode step 3"),
        ("faults", '[{"kind": "a", "seed": 7}, {"kind": "b", "rank": 2}]', "a seed 7 + b (rank 2)"),
        ("decode.kernel_block_sizes", '{"full": 16, "sliding": 8}', "full: 16, sliding: 8"),
        ("decode.layer_backends", "{}", "none"),
        ("sampling.stop", "[not JSON", "[not JSON"),
        ("temperature", 0.5, "0.5"),
    ],
)
def test_labels_of_axis_values(axis: str, value: object, label: str) -> None:
    assert axis_label(axis, value) == (label if axis == "faults" else f"{axis} {label}")
