"""What reports carry of plotly.js, and that an installed rayk has all that a report is made of."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs_version

from rayk.reports.html import TEMPLATES, VENDOR, plotly_js
from tests.reports.synthetic import write_run

ROOT = Path(__file__).parents[2]


def test_plotly_js_is_the_release_that_plotly_py_carries() -> None:
    """Mend: `npm pack plotly.js-cartesian-dist-min@VERSION`; its .min.js and LICENSE go to vendor/."""
    head = plotly_js()[:400]
    assert "plotly.js (cartesian - minified)" in head
    found = re.search(r" v(\d+\.\d+\.\d+)", head)
    assert found is not None
    assert found[1] == get_plotlyjs_version()
    assert "MIT License" in (VENDOR / "plotly-LICENSE").read_text()


def test_nothing_in_it_ends_the_script_that_holds_it() -> None:
    assert "</script" not in plotly_js().lower()


def test_an_installed_rayk_has_every_file() -> None:
    """Files that are no modules, against what setuptools is told to take along."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["rayk"]
    package = ROOT / "rayk"
    data = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert {TEMPLATES / "parts.j2", VENDOR / "plotly-cartesian.min.js"} <= data
    assert data <= {path for pattern in patterns for path in package.glob(pattern)}


@pytest.mark.parametrize("failures", [True, False])
def test_a_report_of_twenty_cells_is_under_two_megabytes(tmp_path: Path, failures: bool) -> None:
    page = write_run(tmp_path, failures=failures)
    assert 1_400_000 < page.stat().st_size < 2_000_000
