"""Names and reasons that others wrote stay texts: in the page, its figures, Markdown, a terminal."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from rayk.reports import ResultWriter, load, verdict_table
from rayk.reports.report import markdown
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows

EVIL = "a\\|b|<img src=x onerror=alert(1)></script><a href='javascript:alert(1)'>c</a>\x1b[2J\u202e"


class Tags(HTMLParser):
    """Tags outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = ResultWriter(tmp_path_factory.mktemp("run"), spec_yaml=SPEC, environment={EVIL: EVIL})
    for tp in (1, 2):
        cell = cell_row(tp, 2, ("BHLNC", "BHLNC"), cell_id=f"{tp}{EVIL}", verdict="TIMEOUT", reason=EVIL)
        cell.axes["engine.note"] = f"{tp}{EVIL}"
        writer.write_cell(cell, request_rows(cell, Random(0)), transfer_rows(cell, Random(0)))
    return writer.finish()


def test_no_tag_comes_from_a_name(page: Path) -> None:
    text = page.read_text()
    assert {"img", "a"}.isdisjoint(Tags(text).found)
    plots = re.search(r'id="plots">(.*?)</script>', text, re.DOTALL)
    assert plots is not None
    for plot in json.loads(plots[1]):
        for trace in plot["data"]:
            named = [trace.get("name", ""), trace.get("hovertemplate", ""), *trace.get("text", [])]
            tags = {tag for name in named for tag in re.findall(r"<(\w+)", name)}
            assert tags <= {"br", "extra"}, f"{plot['id']}: Plotly reads tags in texts"


def test_a_name_is_one_column_of_a_table_in_markdown(page: Path) -> None:
    lines = markdown(load(page.parent)).splitlines()
    table = lines[lines.index("## Cells") + 2 :]
    bars = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table if line.startswith("|")]
    assert len(set(bars)) == 1
    assert "\x1b" not in "".join(lines)
    assert not re.search(r"(?<!\\)(?:\\\\)*<", "\n".join(lines)), "no tag"


def test_nothing_steers_a_terminal(page: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(verdict_table(load(page.parent).cells))
    assert "\x1b" not in out.getvalue()
    assert "\u202e" not in out.getvalue()
    assert "\\x1b[2J" in "".join(out.getvalue().split())
