"""`rayk plan`: exit codes, what it prints first, and that its command starts what was planned."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.costs.book import CostBook
from rayk.costs.hull import Hull
from rayk.planner.command import command_of, planned_server, server_options
from rayk.specs import server_plan
from rayk.specs.server_plan import ServerOptions, plan_server_of
from tests.planner.plans import book, make_plan, plan_spec

COSTS = book(decode={"one": 2.0}, prefill={"one": 2.0, "tokens": 0.1})
BOUNDED = book(decode={"one": 2.0}, prefill={"one": 2.0}, hull=Hull(bounds={"num_tokens": (1, 16)}))
SMALL: dict[str, Any] = {
    "traffic": {"rate": 20, "num_requests": 10},
    "search": {"mode": "aggregated", "num_prefill": [1, 2]},
}


def planned(folder: Path, *options: str, costs: CostBook = COSTS, **changes: Any) -> Any:
    """Run the command on a spec whose tables are these."""
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(plan_spec(folder, **(SMALL | changes))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostBook, "load", lambda path: costs)
        return CliRunner().invoke(
            app, ["plan", str(spec), "--jobs", "1", "--out", str(folder / "out"), *options]
        )


def test_the_answer_stands_before_the_tables(tmp_path: Path) -> None:
    found = planned(tmp_path)
    assert found.exit_code == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "PREDICTED, not measured"
    told = " ".join(lines[:12])
    assert "Start this: 1 aggregated engine at TP 1: 1 CPU slot" in told
    assert "rayk serve" in told
    assert max(map(len, lines[: lines.index(next(x for x in lines if x.startswith("How sure")))])) <= 80
    assert (tmp_path / "out" / "report.html").is_file()
    assert "How sure" in found.stdout
    assert "traffic +20 %" in found.stdout


def test_exit_1_where_no_plan_keeps_the_limits(tmp_path: Path) -> None:
    found = planned(tmp_path, "--set", "traffic.rate=100000")
    assert found.exit_code == 1, found.stderr
    assert "No plan keeps the SLO; this one comes closest" in found.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "traffic.rat=3"], "did you mean 'traffic.rate'?"),
        (["--set", "slo.ttft=soon"], "'soon' is no time over 0"),
        (["--costs", "a", "--hardware", "b"], "costs are given twice"),
        (["--validate", "run"], "a validation takes cells as they were run"),
    ],
)
def test_bad_input_exits_2_with_what_would_mend_it(tmp_path: Path, options: list[str], said: str) -> None:
    found = planned(tmp_path, *options)
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_misspelt_key_of_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: m\ngpus: 8xH200\ncosts: c\nslo: {ttft: 1s}\ntraffic:\n  inputs: 3\n")
    found = CliRunner().invoke(app, ["plan", str(spec)])
    assert found.exit_code == 2
    assert "spec.yaml:6: unknown key 'inputs' in 'traffic'" in found.stderr
    assert "did you mean 'input_tokens'?" in found.stderr


def test_steps_outside_of_the_tables_exit_2_unless_told_and_are_told_then(tmp_path: Path) -> None:
    refused = planned(tmp_path, costs=BOUNDED)
    assert refused.exit_code == 2
    assert "--extrapolate" in refused.stderr
    found = planned(tmp_path, "--extrapolate", costs=BOUNDED)
    assert found.exit_code == 0, found.stderr
    assert re.search(r"EXTRAPOLATED: \d+% of steps", found.stdout)
    assert "outside of" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_a_shell_that_reads_the_command_starts_the_planned_engines(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is parsed by the command line's own parser, and planned as `rayk serve` plans it."""
    plan = make_plan(
        tmp_path,
        COSTS,
        search={"tp": [1, 2], "mode": [mode], "max_seqs": [3]},
        engine={"prefix_caching": True, "kernel_block_sizes": {"full": 16}},
        policy_settings={"output_cost": 2.0},
    )
    given: list[ServerOptions] = []

    def caught(options: ServerOptions, **_: Any) -> Any:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(server_plan, "plan_server", caught)
    for family in plan.inputs.space.families:
        candidate = list(plan.inputs.space.counts(family))[-1]
        words = shlex.split(command_of(server_options(plan.inputs.spec, candidate)))
        assert words[:2] == ["rayk", "serve"]
        CliRunner().invoke(app, words[1:])
        parsed = plan_server_of(given.pop(), plan.inputs.config, device="cpu").settings
        assert (
            parsed.engines == planned_server(plan.inputs.spec, candidate, plan.inputs.config).settings.engines
        )
        assert (parsed.policy, parsed.policy_settings) == (
            "least_loaded",
            plan.inputs.spec.policy_settings.settings(),
        )
