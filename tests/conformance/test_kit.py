"""The kit as its users meet it: the command, the pytest plugin, the example of docs/connector-kit.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.conformance.catalog import all_checks, choose
from rayk.conformance.scenarios import SCENARIOS
from rayk.kv import specs
from rayk.kv.layout import LAYOUTS
from rayk.types.errors import UserError
from tests.markers import thorough
from tests.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
FEW = ("requests.one_request", "requests.whole_blocks", "tp.1-2")


def command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=cwd,
        # The plugin is named where it is wanted, whether or not it is installed.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def rayk(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command("rayk.cli.main", "conformance", *arguments, cwd=cwd)


def only(*names: str) -> list[str]:
    return [text for name in names for text in ("--only", name)]


@thorough
def test_the_pages_connector_works(tmp_path):
    code, _ = blocks((ROOT / "docs/connector-kit.md").read_text(encoding="utf-8"), "python")
    (tmp_path / "through_files.py").write_text(code, encoding="utf-8")
    chosen = only("requests", "layouts.LBHNC-LBHNC", "tp.2-2", "groups.full+sliding", "faults", "tp.1-2")
    done = rayk("through_files:ThroughFiles", "--out", "out", *chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = pd.read_parquet(tmp_path / "out" / "checks.parquet").set_index("id")
    told = dict(checks["verdict"])
    assert told.pop("tp.1-2") == "UNSUPPORTED"
    assert checks.loc["tp.1-2", "reason"] == "both engines must be laid out alike"
    refused = {name for name, verdict in told.items() if verdict == "UNSUPPORTED"}
    assert refused == {name for name in told if "-tp-" in name}
    assert {verdict for name, verdict in told.items() if name not in refused} == {"PASS"}
    assert told["faults.second_registration"] == "PASS"
    assert told["groups.full+sliding"] == "PASS"


@thorough
def test_the_command_fails_and_leaves_tables(tmp_path):
    broken = "tests.conformance.broken:WholeBlocksOnly"
    done = rayk(broken, "--out", "out", *only(*FEW), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"requests.whole_blocks +PASS", done.stdout)
    assert re.search(
        r"requests.one_request +FAIL +consumer rank 0 reported request-0 as done: KV of", done.stdout
    )
    out = tmp_path / "out"
    checks = pd.read_parquet(out / "checks.parquet").set_index("id")
    assert list(checks.index) == list(FEW)
    assert list(checks["verdict"]) == ["FAIL", "PASS", "FAIL"]
    assert "token 32" in checks.loc["requests.one_request", "reason"]
    assert list(checks["decode_tp"]) == [1, 1, 2]
    requests = pd.read_parquet(out / "requests.parquet")
    whole = requests[requests["check"] == "requests.whole_blocks"]
    assert sorted(zip(whole["side"], whole["outcome"], strict=True)) == [
        ("consumer", "done"),
        ("producer", "done"),
    ]
    assert "wrong" in set(requests[requests["check"] == "requests.one_request"]["outcome"])
    pd.testing.assert_series_equal(pd.read_csv(out / "checks.csv")["id"], pd.Series(FEW, name="id"))
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "WholeBlocksOnly: 1 of 3 PASS, 2 FAIL" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "| requests.one_request | FAIL |" in (out / "report.md").read_text(encoding="utf-8")
    assert json.loads((out / "environment.json").read_text())["connector"] == broken
    again = rayk(broken, "--out", "out", *only(*FEW), cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run's tables" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:X"], "no_such_module cannot be imported: No module named 'no_such_module'"),
        (["rayk.transfer.connectors:Nope"], "rayk.transfer.connectors has no Nope\n  mend: one of "),
        (["rayk.transfer"], "not of the form MODULE:CLASS"),
        (["raises:X"], "raises ZeroDivisionError"),
        (["x:Y", "--only", "layout"], "no check is called layout\n  mend: did you mean layouts"),
        (["x:Y", "--timeout", "0"], "too short"),
        ([], "no connector was named"),
    ],
)
def test_bad_input_exits_2_with_what_would_mend_it(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["conformance", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_connector_that_supports_nothing_exits_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refuses.py").write_text(
        "class No:\n    @staticmethod\n    def supports(case):\n        return 'never'\n"
    )
    done = CliRunner().invoke(app, ["conformance", "refuses:No", "--out", "out", "--only", "tp"])
    assert done.exit_code == 2, done.output
    assert "it supports none of these checks" in done.stderr


@thorough
def test_the_plugin_makes_a_test_of_every_check(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    chosen = [text for name in FEW for text in ("--rayk-only", name)]
    shared = ("pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "rayk.conformance.plugin")
    broken = ("--rayk-connector", "tests.conformance.broken:WholeBlocksOnly")
    done = command(*shared, *broken, *chosen, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 2 passed" in done.stdout
    assert "PASSED conformance::requests.whole_blocks" in done.stdout
    assert "not so: a request whose last block is not full arrives" in done.stdout
    assert "tokens 32 to 36 hold only 0x5a" in done.stdout
    assert "Traceback" not in done.stdout
    done = command(*shared, *broken, *chosen, "-k", "conformance and whole", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 3 deselected" in done.stdout
    done = command(*shared, "--rayk-connector", "no_such_module:X", *chosen, cwd=tmp_path)
    assert done.returncode == 4
    assert "no_such_module cannot be imported" in done.stdout + done.stderr


def test_the_plugin_imports_nothing_where_it_is_not_asked(tmp_path):
    heavy = "{'torch', 'numpy', 'rayk.transfer'}"
    (tmp_path / "test_own.py").write_text(
        f"import sys\n\ndef test_own():\n    assert not {heavy} & set(sys.modules)\n"
    )
    done = command("pytest", "-q", "-p", "rayk.conformance.plugin", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "rayk.conformance.plugin" in project["entry-points"]["pytest11"].values()


def test_checks_cover_what_they_claim():
    checks = all_checks(every_layout=True)
    assert len({c.id for c in checks}) == len(checks)
    assert {c.scenario for c in checks} == set(SCENARIOS)
    pairs = {c.pair.layouts for c in choose(checks, ["layouts"])}
    assert pairs == {(a, b) for a in LAYOUTS for b in LAYOUTS}
    some = {c.pair.layouts for c in choose(all_checks(), ["layouts"])}
    assert {a for a, _ in some} == {b for _, b in some} == set(LAYOUTS)
    kinds = {kind for c in checks for kind in c.case.kinds}
    assert kinds == {
        kind for spec in vars(specs).values() if isinstance(kind := getattr(spec, "kind", 0), str)
    }
    divided = {(c.case.dcp, c.case.pp) for c in checks} - {((1, 1), (1, 1))}
    pairs = {(1, 2), (2, 1), (3, 2)}
    assert divided == {(pair, (1, 1)) for pair in pairs} | {((1, 1), pair) for pair in pairs}
    assert not any(c.case.is_alike for c in checks if (c.case.dcp, c.case.pp) in divided)
    assert {c.case.kv_format for c in checks} == {"bfloat16", "fp8_e4m3_token_head", "nvfp4"}
    with pytest.raises(UserError, match="did you mean faults"):
        choose(checks, ["fault"])
