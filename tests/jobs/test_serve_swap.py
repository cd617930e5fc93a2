"""What jobs/serve_swap.py makes of a load, what it refuses, and what it says must not be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import serve_swap, serving, stress_load
from jobs.benchmarks import harness
from jobs.benchmarks.harness import Page, machine
from rayk.actors import launch
from rayk.bench.client import FAILED, OK, Observed
from rayk.bench.prompts import Planned
from rayk.cli.guard import run_guarded
from rayk.reports import collect_environment
from rayk.types.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SECOND = 10**9
TOLD = {
    "load": "tier killed",
    "num_kills": 2,
    "swaps": 31,
    "swaps_failed": 3,
    "swapped_out_bytes": 1_600_000,
    "swapped_in_bytes": 1_500_000,
    "loads": 23,
    "tier_losses": 4,
}


def _met(outcome: str, sent_s: float, first_s: float, ended_s: float, num_tokens: int) -> Any:
    planned = Planned(index=0, due_ns=None, prompt=[5, 6], max_tokens=8, seed=0)
    times = [round(s * SECOND) for s in (sent_s, first_s, ended_s)]
    seen = Observed(planned=planned, outcome=outcome, output_token_ids=list(range(num_tokens)))
    seen.sent_ns, seen.chunk_ns, seen.ended_ns = times[0], times[1:] if num_tokens else [], times[2]
    return stress_load.Met(stress_load.Case(0, 8, None), seen)


def _run(blocks: dict[str, tuple[int, int]]) -> Any:
    met = [_met(OK, 0.0, 1.0, 2.0, 8), _met(OK, 1.0, 4.0, 7.0, 8), _met(OK, 2.0, 4.0, 6.0, 8)]
    met.append(_met(FAILED, 0.0, 9.0, 9.0, 4))
    run = serve_swap.Run(family="qwen3", met=met, began_ns=0, ended_ns=10 * SECOND)
    run.blocks = blocks
    return run


def test_a_row_counts_what_engines_and_clients_saw() -> None:
    verdicts = [("right", ""), ("right", ""), ("near_tie", "by 0.001"), ("failed", "503")]
    row = serve_swap.row_of(_run({"a": (23, 24), "b": (20, 24)}), TOLD, verdicts)
    wanted = TOLD | {
        "num_requests": 4,
        "num_right": 2,
        "num_near_tie": 1,
        "num_failed": 1,
        "num_wrong": 0,
        "num_hung": 0,
        "out_mb": 1.6,
        "in_mb": 1.5,
        "tokens_per_s": 2.8,  # 3 x 8 + 4 in 10 s
        "ttft_s_p50": 2.0,  # of 1, 3 and 2 s: what failed does not count
        "e2e_s_p99": 6.0,  # of 2, 6 and 4 s
        "num_blocks_held": 3,  # the null blocks are nobody's
        "num_engines": 2,
    }
    assert row == wanted


def _row(**changes: Any) -> dict[str, Any]:
    verdicts = [("right", "")] * 4
    return serve_swap.row_of(_run({"a": (23, 24), "b": (23, 24)}), TOLD, verdicts) | changes


def test_a_load_in_which_all_is_well_has_no_failures() -> None:
    peace = _row(load="in peace", num_kills=0, tier_losses=0)
    assert serve_swap.failures([peace, _row()], 4, 2) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_failed": 2}, "2 requests failed"),
        ({"num_wrong": 1}, "1 requests wrong"),
        ({"num_hung": 3}, "3 requests hung"),
        ({"num_requests": 3}, "3 of 4 requests ended"),
        ({"swaps": 0}, "nobody was swapped out and in"),
        ({"swapped_in_bytes": 0}, "nobody was swapped out and in"),
        ({"num_blocks_held": 2}, "2 blocks are held at the end"),
        ({"num_kills": 1}, "engines lost their tier 4 times in 2 kills"),
        ({"tier_losses": 3}, "engines lost their tier 3 times in 2 kills"),
    ],
)
def test_what_must_not_be_is_told(changes: dict[str, Any], told: str) -> None:
    assert serve_swap.failures([_row(**changes)], 4, 2) == [f"tier killed: {told}"]


def test_a_tier_that_is_lost_in_peace_is_told() -> None:
    row = _row(load="in peace", num_kills=0, tier_losses=1)
    assert serve_swap.failures([row], 4, 2) == ["in peace: engines lost their tier 1 times in 0 kills"]


def test_the_table_says_what_failed_and_what_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load of which one engine saw a kill too few: the page is written, and recorded nowhere."""

    def made_up(options: Any, page: Page) -> None:
        rows = [_row(tier_losses=3)]
        page.section("Loads", serve_swap.SWAPS, rows)
        page.wrong += serve_swap.failures(rows, 4, options.kills)

    monkeypatch.setattr(serve_swap, "fill", made_up)
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "nowhere")
    made_up.__module__ = serve_swap.__name__
    assert serve_swap.main(["--kills", "2", "--out", str(tmp_path), "--record"]) == 1
    text = (tmp_path / "serve_swap.md").read_text()
    assert text.endswith("    python jobs/serve_swap.py --kills 2 --record\n")
    names, _, cells = (line for line in text.splitlines() if line.startswith("|"))
    found = dict(zip(names.split(" | "), cells.split(" | "), strict=True))
    assert (found["swapped out"], found["swaps failed"], found["MB out"]) == ("31", "3", "1.6")
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert f"torch {environment['packages']['torch']}, ray {environment['packages']['ray']}" in text
    assert re.search(r"load \d+\.\d when it began, \d+\.\d when it ended", text)
    assert "tier killed: engines lost their tier 3 times in 2 kills" in capsys.readouterr().err


def test_the_machine_says_how_many_threads_measured() -> None:
    lines = machine(collect_environment(threads=1, load_at_start=0.0, load_at_end=0.0))
    assert "one thread per process" in lines[0]


# --- what is refused before anything starts -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--clients", "0"], "--clients 0: a number above 0 is needed"),
        (["--requests", "0"], "--requests 0: a number above 0 is needed"),
        (["--num-blocks", "0"], "--num-blocks 0: a number above 0 is needed"),
        (["--host-gib", "0"], "--host-gib 0.0: a number above 0 is needed"),
        (["--host-gib", "nan"], "--host-gib nan: a number above 0 is needed"),
        (["--kills", "-1"], "--kills -1: 0 or more"),
        (["--kills", "9", "--requests", "9"], "--kills 9: 0 or more, and fewer than --requests 9"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_guarded(lambda: serve_swap.main([*arguments, "--out", str(tmp_path / "out")])) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tp", "3x"], "--tp 3x: a TP size is a whole number above 0"),
        (["--tp", "3"], "TP 3 does not divide"),
        (["--set", "nope=1"], "--set nope=1: a server has no key 'nope'"),
        (["--host-gib", "0.000001"], "cannot hold a block of each"),
        (["--num-blocks", "12"], "--num-blocks 12: a prompt of 160 tokens and its answer of 64 are 224"),
        (["--family", "qwen9"], "qwen9"),
    ],
)
def test_a_server_that_cannot_be_is_refused_at_once(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch, "connect", lambda *_: pytest.fail("Ray was started"))
    out = tmp_path / "out"
    assert run_guarded(lambda: serve_swap.main([*arguments, "--out", str(out)])) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    told = ["rayk: warming", "rayk: --set x=1: a server has no key 'x'", "  mend: valid: y", "other words"]
    log.write_text("\n".join(told))
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)
    with process, pytest.raises(UserError) as caught:
        serving.wait_ready(process, 30.0, log)
    assert str(caught.value).startswith(
        f"{log}: the server did not start: --set x=1: a server has no key 'x'"
    )
    assert str(caught.value).endswith("\n  mend: valid: y")
    log.write_text("a log without words of ours")
    assert serving.last_words(log) == ""
