"""The sweep's grid, its oracle and its reading of what UCX says; a few of its cells on Ray."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from jobs.benchmarks.transfer_ceiling import COLUMNS, chosen_transport
from jobs.sweep_cells import SPEC, load_sweep
from jobs.sweep_oracle import POISON, content, fill, make_specs, wrong_bytes
from jobs.transfer_sweep import parse_options
from rayk.kv.caches import allocate
from rayk.kv.fields import PageField
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS, get_layout
from rayk.parallel.shard import EngineShape
from rayk.reports.html import write_page
from rayk.reports.page import Page, Section
from rayk.transfer.plan import consecutive_tables
from rayk.types.errors import SpecError, UserError
from tests.markers import thorough

ROOT = Path(__file__).resolve().parents[2]

LOG = """\
[1] [vm:9 :0]   +-----------+-------------+--------------------------------+
[1] [vm:9 :0]   | p0 self cfg#0                                             |
[1] [vm:9 :0]   | remote memory read by ucp_get* into host memory from host  |
[1] [vm:9 :0]   |   0..inf  | short       | self/memory                    |
[1] [vm:9 :0]   | p0 intra-node cfg#1                                       |
[1] [vm:9 :0]   | remote memory read by ucp_get*(multi) into host memory     |
[1] [vm:9 :0]   |   0..8184 | copy-out    | posix/memory                   |
[1] [vm:9 :0]   | 8185..inf | zero-copy   | cma/memory                     |
[1] [vm:9 :0]   | p0 intra-node cfg#1                                       |
[1] [vm:9 :0]   | remote memory write by ucp_put*(multi) from host memory    |
[1] [vm:9 :0]   |   0..inf  | zero-copy   | tcp/lo                         |
"""

ENTRY = (
    "matrix: [{shape: [latent], layouts: all, tp: [[1, 2]], block_sizes: [[16, 16]], "
    "mode: [pull], tables: [dense], staging: [auto]}]"
)


def test_the_grid_is_as_wide_as_it_says():
    sweep = load_sweep(SPEC)
    assert len(sweep.cells) >= 500
    assert len({cell.cell_id for cell in sweep.cells}) == len(sweep.cells)
    pairs = {cell.layouts for cell in sweep.cells if cell.shape == "attention"}
    assert len(pairs) == len(LAYOUTS) ** 2
    modes = Counter(cell.mode for cell in sweep.cells)
    assert min(modes["pull"], modes["push"]) > 250
    assert {(3, 2), (4, 6)} <= {cell.tp for cell in sweep.cells}
    assert (16, 24) in {cell.block_sizes for cell in sweep.cells}


def test_the_oracle_tells_coordinates_apart():
    """8 bytes at each of 4,320 coordinates: all different."""
    k, v = (PageField(name, 4, 16, 16, "bfloat16", 12) for name in ("k", "v"))
    tokens = np.arange(90)
    words = [
        content(layer, f, range(4), tokens).reshape(-1).view(np.uint64) for layer in range(6) for f in (k, v)
    ]
    assert len(np.unique(np.concatenate(words))) == 2 * 6 * 4 * 90 * 2


@pytest.mark.parametrize("shape", ["attention", "windows", "latent", "mamba", "delta"])
def test_the_check_sees_one_wrong_byte_anywhere(shape: str):
    groups = group_layers(make_specs(shape, 16))
    geometry = plan_rank(groups, get_layout("BLNHC"), shape=EngineShape(2), rank=1, num_blocks=24)
    caches = allocate(geometry, torch.device("cpu"), fill=POISON)
    tables = consecutive_tables(geometry, 50)
    fill(caches, tables, 50)
    assert wrong_bytes(caches, tables, 50) == (0, "")
    pages = caches.buffer[: geometry.pages_bytes]
    assert 0 < int((pages != POISON).sum()) < len(pages)
    for byte in np.random.default_rng(0).integers(0, len(pages), 20).tolist():
        pages[byte] ^= 1
        wrong, first = wrong_bytes(caches, tables, 50)
        assert wrong == 1
        assert first.startswith(("layer ", "a byte that nobody"))
        pages[byte] ^= 1


def test_what_ucx_says_of_other_processes_counts():
    assert chosen_transport(LOG, "pull", 100) == "posix/memory (copy-out)"
    assert chosen_transport(LOG, "pull", 1 << 20) == "cma/memory (zero-copy)"
    assert chosen_transport(LOG, "push", 1 << 20) == "tcp/lo (zero-copy)"
    assert chosen_transport("", "pull", 1) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("matrix: [{shape: [attention]}]", "an entry names every axis"),
        ("wat: 1", "unknown key 'wat'"),
        ("[1]", "not a mapping"),
        (ENTRY.replace("latent", "x"), "unknown shape 'x'"),
        (ENTRY.replace("layouts: all", "layouts: [[BHLNC, NOPE]]"), "unknown KV-cache layout 'NOPE'"),
        (ENTRY.replace("[[1, 2]]", "[[1]]"), "is no pair"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises((SpecError, UserError), match=problem):
        load_sweep(path)


@pytest.mark.parametrize("number", ["0", "-2"])
def test_options_that_would_check_nothing_are_refused(number: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse_options(["--limit", number])
    assert ended.value.code == 2
    assert f"argument --limit: invalid number above 0 value: '{number}'" in capsys.readouterr().err


def test_short_texts_of_the_ceiling_stand_on_one_line(tmp_path: Path):
    row = dict.fromkeys((column.key for column in COLUMNS), None)
    texts = {"tp": "1->1", "layouts": "BHLNC->LBHNC", "note": "a text of some length, which may take lines"}
    section = Section(title="Rates", columns=COLUMNS, rows=[row | texts])
    write_page(Page(eyebrow="benchmark", title="Ceiling", sections=[section]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    classes = {
        html.unescape(text): kind for kind, text in re.findall(r'<td(?: class="(\w+)")?>([^<]+)</td>', page)
    }
    assert [classes[text] for text in texts.values()] == ["short", "short", "reason"]
    nowrap = re.search(r"([^}]*)\{ white-space: nowrap; \}\s*table.data th\[data-sort", page)
    assert nowrap is not None
    assert "td.short" in nowrap[1]


@thorough
@pytest.mark.ray
@pytest.mark.nixl
def test_some_cells_on_ray(tmp_path: Path):
    command = [sys.executable, "jobs/transfer_sweep.py", "--limit", "24", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pd.read_parquet(tmp_path / "run" / "cells.parquet")
    assert len(rows) == 24
    assert set(rows["verdict"]) == {"PASS"}
    assert set(rows["mode"]) == {"pull", "push"}
    assert (rows["num_bytes"] > 0).all()
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
