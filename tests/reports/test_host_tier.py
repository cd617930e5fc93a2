"""The report's section on a host tier: shares of prompt tokens, rates, notes; absent where no run had one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.host_tier import tier_plot, tier_rows
from rayk.reports.html import page_html
from rayk.reports.run_page import run_page
from rayk.types.rows import CellRow, RequestRow, TransferRow
from tests.markers import thorough
from tests.reports.browser import needs_chromium, probe
from tests.reports.synthetic import MS, SPEC, cell_row, request_rows
from tests.reports.test_browser import assert_sound

SIDES = ("BHLNC", "BHLNC")


def tier_cell(tp: int, **offloaded: Any) -> CellRow:
    told = {"host_stored_bytes": 4 << 20, "num_swaps_declined": 3, "offload_out_1mib_ms": 1.5, **offloaded}
    return cell_row(tp, None, SIDES, offloaded=told)


def told_rows(cell: CellRow, **fields: int) -> list[RequestRow]:
    rows = request_rows(cell, random.Random(0), count=2)
    for row in rows:
        row.num_prompt_tokens = 100
        for name, value in fields.items():
            setattr(row, name, value)
    return rows


def load_row(number: int, begin_ms: int, end_ms: int, num_bytes: int, purpose: str = "load") -> TransferRow:
    return TransferRow(
        cell_id="agg-tp2",
        repeat=0,
        request_id=f"r{number}",
        producer_rank=0,
        consumer_rank=0,
        group=0,
        bytes=num_bytes,
        num_descriptors=1,
        purpose=purpose,
        transfer_ns=(end_ms - begin_ms) * MS,
        begin_ns=begin_ms * MS,
        end_ns=end_ms * MS,
    )


def write(folder: Path) -> Path:
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    first, second = tier_cell(1), tier_cell(2, offload_note="the host tier was lost: it was killed")
    writer.write_cell(first, told_rows(first, num_cached_tokens=10), [])
    loads = [
        load_row(0, 10, 14, 4_000_000),
        load_row(0, 12, 20, 4_000_000),
        load_row(1, 10, 20, 12_000_000),
        load_row(1, 0, 1, 10**9, "swap"),
    ]
    fields = {"num_cached_tokens": 80, "num_host_tokens": 60, "num_disk_tokens": 50, "num_swaps": 1}
    writer.write_cell(second, told_rows(second, **fields), loads)
    plain = cell_row(4, None, SIDES)
    writer.write_cell(plain, told_rows(plain), [])
    return writer.finish()


def test_shares_add_up_and_rates_are_of_loads(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = tier_rows(load(tmp_path))
    sources = ("device", "host", "disk", "computed")
    assert [first[name] for name in sources] == [10, 0, 0, 90]
    # 20 lay on the device; of the 60 from the tier, 30 lie before the end of the last block from disk.
    assert [second[name] for name in sources] == [20, 30, 30, 20]
    # 8 MB from 10 to 20 ms, and 12 MB in 10 ms.
    assert (first["load_gb_per_s"], second["load_gb_per_s"]) == (None, pytest.approx(1.0))
    assert (second["num_swaps"], second["num_swaps_declined"]) == (2, 3)
    [plot] = tier_plot([first, second])
    assert [sum(bar) for bar in zip(*(trace["x"] for trace in plot.data), strict=True)] == [100, 100]


def test_a_run_without_a_tier_has_no_section(tmp_path: Path) -> None:
    cell = cell_row(1, None, SIDES)
    writer = ResultWriter(tmp_path / "plain", spec_yaml=SPEC, environment={})
    writer.write_cell(cell, told_rows(cell), [])
    writer.finish()
    assert tier_rows(load(tmp_path / "plain")) == []
    assert "Host tier" not in page_html(run_page(load(tmp_path / "plain")))
    write(tmp_path / "tier")
    text = page_html(run_page(load(tmp_path / "tier")))
    assert "<h2>Host tier</h2>" in text
    assert "the host tier was lost: it was killed" in text


@thorough
@needs_chromium
def test_the_section_fits_wide_and_narrow(tmp_path: Path) -> None:
    page = write(tmp_path / "run")
    script = """
      window.dispatchEvent(new Event("beforeprint"));
      return document.querySelectorAll("#host-tier .bars .point").length;
    """
    for width, seen in zip((1280, 400), probe(page, tmp_path, (1280, 400), script), strict=True):
        assert_sound(seen, width)
        assert seen["found"] == 2 * 4
