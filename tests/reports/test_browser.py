"""The report in a real browser: no error, tables sort, choices draw, nothing is wider than the window."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rayk.reports import ResultWriter
from rayk.reports.compare import write_compare_html
from rayk.reports.html import write_page
from rayk.reports.plan_answers import shell_lines
from rayk.reports.plan_page import plan_page
from rayk.reports.result import load
from rayk.reports.stages import PARTS
from rayk.reports.validation_page import validation_page
from tests.markers import sweep, thorough
from tests.reports.browser import CONTRAST, needs_chromium, probe
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows, write_run
from tests.reports.synthetic_load import write_bench
from tests.reports.synthetic_plan import SPEC as PLAN_SPEC
from tests.reports.synthetic_plan import synthetic_facts, synthetic_plans
from tests.reports.synthetic_validation import synthetic_validation

WIDTHS = (1280, 400)
SORT = """
  var head = Array.from(document.querySelectorAll("th[data-sort]")).find(function (th) {
    return th.textContent === "%s";
  });
  var table = head.closest("table"), orders = [];
  for (var i = 0; i < 2; i++) {
    head.click();
    orders.push(Array.from(table.tBodies[0].rows).map(function (row) {
      return row.cells[head.cellIndex].dataset.value || row.cells[head.cellIndex].textContent;
    }));
  }
"""
SCROLL = 'document.getElementById("waterfall").scrollIntoView();'
REPORT = (
    SORT % "TTFT ms"
    + """
  var early = ["waterfall", "transfers"].map(function (id) {
    return document.getElementById(id).querySelectorAll("svg.main-svg").length > 0;
  });
  window.dispatchEvent(new Event("beforeprint"));
  var cell = document.getElementById("waterfall-cell");
  var request = document.getElementById("waterfall-request");
  function labels() {
    var ticks = document.querySelectorAll("#waterfall .ytick");
    return Array.from(ticks).map(function (tick) { return tick.textContent; });
  }
  var whole = labels();
  cell.value = "1";
  cell.dispatchEvent(new Event("change"));
  request.value = "3";
  request.dispatchEvent(new Event("change"));
  document.querySelector("td[data-tip]").focus();
  return {
    early: early, orders: orders, whole: whole, one: labels(),
    tip: document.getElementById("tip").textContent,
    chosen: request.selectedOptions[0].textContent,
    drawn: Array.from(document.querySelectorAll(".plot")).map(function (plot) {
      return [plot.id, plot.querySelectorAll("svg.main-svg").length];
    })
  };
"""
)


def assert_sound(page: dict[str, Any], width: int) -> None:
    assert page["troubles"] == []
    assert page["console"] == []
    assert page["width"] == width
    assert page["content"] == width, "the page is wider than its window"


def assert_sorted(orders: list[list[str]]) -> None:
    numbers = [[float(text) for text in order if text] for order in orders]
    assert len(numbers[0]) > 2
    assert numbers[0] == sorted(numbers[0])
    assert numbers[1] == sorted(numbers[1], reverse=True)
    assert numbers[0] != numbers[1]


@needs_chromium
def test_a_report_works_wide_and_narrow(tmp_path: Path) -> None:
    page = write_run(tmp_path / "run")
    for width, seen in zip(WIDTHS, probe(page, tmp_path, WIDTHS, REPORT, SCROLL), strict=True):
        assert_sound(seen, width)
        found = seen["found"]
        assert_sorted(found["orders"])
        assert sorted(found["whole"]) == [f"r{i}" for i in range(6)]
        assert set(found["one"]) == {part.name for part in PARTS if part.limit != "host tier"}
        assert found["chosen"] == "r2"
        assert found["tip"].startswith("p1-d1-BHLNC-BHLNC: PASS")
        assert {"pareto", "ttft", "waterfall", "spread-itl"} <= {name for name, _ in found["drawn"]}
        assert found["early"] == [True, True], "few figures are drawn when the page is loaded"
        assert all(drawings for _, drawings in found["drawn"])


@thorough
@needs_chromium
def test_a_comparison_works_wide_and_narrow(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", failures=False, seed=1)
    page = write_compare_html([load(tmp_path / name) for name in "ab"], tmp_path / "compare.html")
    script = SORT % "TTFT ms, a" + "return orders;"
    for width, seen in zip(WIDTHS, probe(page, tmp_path, WIDTHS, script), strict=True):
        assert_sound(seen, width)
        assert_sorted(seen["found"])


READABLE = 4.5
"""Contrast of text with what is behind it: WCAG 2, level AA."""
VISIBLE = 3.0
"""Of lines and marks."""
COLOURS = (
    CONTRAST
    + """
  window.dispatchEvent(new Event("beforeprint"));
  document.querySelectorAll("details").forEach(function (item) { item.open = true; });
  document.querySelectorAll("[data-tip]").forEach(function (item, i) {
    if (i === 0) { item.dispatchEvent(new Event("mouseenter")); }
  });
  var card = backdrop(document.querySelector(".card"));
  function mark(name) {
    var probe = document.createElement("i");
    probe.style.color = "var(--" + name + ")";
    document.body.appendChild(probe);
    return contrast(parse(getComputedStyle(probe).color), card);
  }
  var names = [1, 2, 3, 4, 5, 6].map(function (i) { return "series" + i; }).concat(["mark", "mark2", "soft"]);
  return {
    texts: texts(), card: luminance(card), dark: matchMedia("(prefers-color-scheme: dark)").matches,
    marks: names.map(function (name) { return [mark(name), name]; }),
    lines: Array.from(document.querySelectorAll("#spread-ttft .scatterlayer path.js-line")).map(function (p) {
      return [getComputedStyle(p).stroke, getComputedStyle(p).strokeDasharray].join(" ");
    })
  };
"""
)


@sweep(3)
@thorough
@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "bench", "comparison", "plan", "validation"])
def test_every_text_can_be_read_in_either_mode(tmp_path: Path, kind: str, dark: bool) -> None:
    page = write_pages(tmp_path, kind)
    for width, seen in zip(WIDTHS, probe(page, tmp_path, WIDTHS, COLOURS, dark=dark), strict=True):
        assert_sound(seen, width)
        found = seen["found"]
        assert found["dark"] is dark
        assert (found["card"] < 0.1) is dark, "the page follows what its reader prefers"
        assert len(found["texts"]) > 60
        assert [text for text in found["texts"] if text[0] < READABLE] == []
        assert [mark for mark in found["marks"] if mark[0] < VISIBLE] == []
        if kind == "run":
            assert len(found["lines"]) == len(set(found["lines"])) == 12, (
                "every curve looks unlike all others"
            )


def write_pages(folder: Path, kind: str) -> Path:
    """A report of each kind, with as much in it as there can be."""
    if kind == "plan":
        return write_page(plan_page(synthetic_plans(), synthetic_facts(), PLAN_SPEC), folder / "report.html")
    if kind == "validation":
        return write_page(validation_page(synthetic_validation()), folder / "report.html")
    if kind == "bench":
        write_bench(folder / "a", ("poisson rate=2", "poisson rate=4"), verdict="NOISY")
        return folder / "a" / "report.html"
    page = write_run(folder / "a")
    if kind == "run":
        return page
    write_run(folder / "b", failures=False, seed=1)
    return write_compare_html([load(folder / name) for name in "ab"], folder / "compare.html")


@thorough
@needs_chromium
def test_a_benchs_report_works_wide_and_narrow(tmp_path: Path) -> None:
    page = write_pages(tmp_path, "bench")
    script = """
      window.dispatchEvent(new Event("beforeprint"));
      var cell = document.getElementById("waterfall-cell");
      cell.value = "1";
      cell.dispatchEvent(new Event("change"));
      var request = document.getElementById("waterfall-request");
      request.value = "2";
      request.dispatchEvent(new Event("change"));
      var ticks = document.querySelectorAll("#waterfall .ytick");
      return {
        one: Array.from(ticks).map(function (tick) { return tick.textContent; }),
        chosen: request.selectedOptions[0].textContent,
        drawn: Array.from(document.querySelectorAll(".plot")).map(function (plot) {
          return [plot.id, plot.querySelectorAll("svg.main-svg").length];
        })
      };
    """
    for width, seen in zip(WIDTHS, probe(page, tmp_path, WIDTHS, script), strict=True):
        assert_sound(seen, width)
        assert seen["found"]["chosen"] == "request 1"
        assert set(seen["found"]["one"]) == {"sent late", "first token", "later tokens"}
        names = [name for name, _ in seen["found"]["drawn"]]
        assert names == [*(f"spread-{m}" for m in ("ttft", "itl", "tpot", "e2e")), "waterfall", "ttft", "e2e"]
        assert all(drawings for _, drawings in seen["found"]["drawn"])


FADES = """
  return Array.from(document.querySelectorAll(".scroll")).filter(function (box) {
    return box.scrollWidth > box.clientWidth;
  }).map(function (box) {
    return [box.closest(".card").querySelector("h2").textContent, box.scrollWidth, box.clientWidth].join(" ");
  });
"""


@thorough
@needs_chromium
def test_nothing_lies_behind_a_fade_on_a_usual_screen(tmp_path: Path) -> None:
    """Wide tables fade at their edges where they go on: at 1280 px none of a run has to."""
    writer = ResultWriter(tmp_path / "run", spec_yaml=SPEC, environment={})
    reason = "p4-d2-BHLNC-LBHNC/r3: layer 2, group 0, v, head 1, token 36: last block not written\n" * 3
    for number in range(8):
        name = f"qwen3-tiny-p4-d{number}-BHLNC-LBHNC-decode.block_size=32-faults=[drop_block]"
        more = {"verdict": "KV_MISMATCH", "reason": reason} if number % 3 else {}
        counts = {"num_token_layers": 1_234_567, "num_fast_prefill_layers": 12, **more}
        cell = cell_row(4, 1 + number, ("BHLNC", "LBHNC"), cell_id=name, **counts)
        draw = random.Random(number)
        writer.write_cell(cell, request_rows(cell, draw), transfer_rows(cell, draw))
    (seen,) = probe(writer.finish(), tmp_path, (1280,), FADES)
    assert_sound(seen, 1280)
    assert seen["found"] == []


FIRST_SCREEN_PX = 900
ANSWERS = """
  return Array.from(document.querySelectorAll(".answer")).map(function (item) {
    var isFolded = item.matches("details");
    return (isFolded ? ["h3"] : ["h3", "p"]).map(function (name) {
      var range = document.createRange(), text = item.querySelector(name).firstChild;
      range.setStart(text, 0);
      range.setEnd(text, Math.min(8, text.length));
      var box = range.getBoundingClientRect();
      var seen = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
      return {
        text: text.textContent, left: box.left, right: box.right, bottom: box.bottom,
        is_seen: Boolean(seen) && item.contains(seen)
      };
    });
  });
"""


@thorough
@needs_chromium
def test_the_four_answers_are_on_the_first_screen(tmp_path: Path) -> None:
    """Wide: questions and the beginnings of their answers are seen before anything is scrolled. Narrow: the
    first is, and none is reached by scrolling sideways."""
    page = write_pages(tmp_path, "run")
    wide, narrow = probe(page, tmp_path, WIDTHS, ANSWERS)
    for seen, width in ((wide, 1280), (narrow, 400)):
        assert_sound(seen, width)
        questions = [parts[0]["text"] for parts in seen["found"]]
        assert questions == [
            "Did it pass?",
            "Where is time spent?",
            "What did unequal TP sizes cost?",
            "How do I run it again?",
        ]
        for parts in seen["found"]:
            assert all(part["left"] >= 0 and part["right"] <= width for part in parts)
            assert parts[-1]["text"].strip(), "there is an answer"
        assert [len(parts) for parts in seen["found"]] == [2, 2, 1, 2], "a question without one is folded"
    for parts in wide["found"]:
        assert all(part["is_seen"] and part["bottom"] < FIRST_SCREEN_PX for part in parts), parts
    assert all(part["is_seen"] for part in narrow["found"][0])


LAYOUT = """
  window.dispatchEvent(new Event("beforeprint"));
  function box(element) {
    var b = element.getBoundingClientRect();
    return [b.left, b.top, b.right, b.bottom];
  }
  function meet(a, b) { return a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 1 && b[1] < a[3] - 1; }
  var found = [];
  document.querySelectorAll(".plot").forEach(function (plot) {
    var frame = box(plot), legend = plot.querySelector("g.legend"), parts = {};
    plot.querySelectorAll(".xtitle, .ytitle, .colorbar").forEach(function (part) {
      parts[part.getAttribute("class")] = box(part);
    });
    if (legend) { parts.legend = box(legend); }
    var names = Object.keys(parts);
    names.forEach(function (name, i) {
      var b = parts[name];
      if (b[0] < frame[0] - 1 || b[2] > frame[2] + 1 || b[1] < frame[1] - 1 || b[3] > frame[3] + 1) {
        found.push(plot.id + ": " + name + " is cut off");
      }
      names.slice(i + 1).forEach(function (other) {
        if (meet(b, parts[other])) { found.push(plot.id + ": " + name + " lies on " + other); }
      });
    });
    var grid = plot.querySelector(".gridlayer");
    if (legend && grid && meet(parts.legend, box(grid))) {
      found.push(plot.id + ": the legend lies on the figure");
    }
  });
  document.querySelectorAll(".legend span, .chip, .stat, .grid td, .grid th").forEach(function (item) {
    if (item.scrollWidth > item.clientWidth + 1 && item.clientWidth) {
      found.push((item.textContent || item.dataset.tip) + " is cut off");
    }
  });
  return found;
"""


@thorough
@needs_chromium
@pytest.mark.parametrize("kind", ["run", "bench", "comparison", "plan", "validation"])
def test_nothing_lies_on_anything_else(tmp_path: Path, kind: str) -> None:
    page = write_pages(tmp_path, kind)
    for width, seen in zip(WIDTHS, probe(page, tmp_path, WIDTHS, LAYOUT), strict=True):
        assert_sound(seen, width)
        assert seen["found"] == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 300 cells with 40 requests each."""
    draw = random.Random(0)
    writer = ResultWriter(tmp_path_factory.mktemp("large"), spec_yaml=SPEC, environment={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_tables", lambda: None)  # once, not after every cell: a minute less
        for number in range(300):
            sizes = (1 + number % 5, 1 + number // 5 % 5)
            cell = cell_row(*sizes, ("BHLNC", "LBHNC"))
            cell.cell_id = f"cell-{number}-{cell.cell_id}"
            cell.axes["decode.block_size"] = 16 * (1 + number // 25)
            writer.write_cell(cell, request_rows(cell, draw, 40), transfer_rows(cell, draw, 40))
    return writer.finish()


@thorough
def test_a_large_run_is_no_large_file(large: Path) -> None:
    assert 1_000_000 < large.stat().st_size < 10_000_000
    assert large.read_text(encoding="utf-8").count("cell-299-") > 2


@thorough
@needs_chromium
def test_a_large_run_opens_without_trouble(large: Path, tmp_path: Path) -> None:
    script = "return document.querySelectorAll('.grid td[data-tip]').length;"
    for width, seen in zip(WIDTHS, probe(large, tmp_path, WIDTHS, script), strict=True):
        assert_sound(seen, width)
        assert seen["found"] > 300


@thorough
@needs_chromium
def test_a_plans_command_is_seen_at_once_and_copied(tmp_path: Path) -> None:
    """The answer, its uncertainty and the command are on the first screen of a wide window; a click on Copy
    gives the clipboard the command, or where there is none selects it."""
    page = write_pages(tmp_path, "plan")
    script = """
      var box = document.querySelector(".command"), button = box.querySelector("button");
      Object.defineProperty(navigator, "clipboard", {value: undefined});
      button.click();
      return {
        selected: String(window.getSelection()), bottom: box.getBoundingClientRect().bottom,
        range: document.querySelectorAll(".answer table")[0].getBoundingClientRect().bottom
      };
    """
    wide, narrow = probe(page, tmp_path, WIDTHS, script)
    for seen in (wide, narrow):
        assert seen["found"]["selected"].strip() == shell_lines(synthetic_facts()["command"])
    assert wide["found"]["bottom"] < FIRST_SCREEN_PX
    assert wide["found"]["range"] < FIRST_SCREEN_PX
