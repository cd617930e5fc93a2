"""The comparison of serving setups: which there are, which is unbeaten, and the job on servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import serve_bench
from jobs import serving as servers
from jobs.serve_bench import Setup, all_setups, main
from jobs.serve_goodput import goodput_table, pareto
from jobs.serving import stop, wait_ready
from rayk import load
from rayk.types.errors import DeadlineExceeded, UserError
from tests.bench.fake_server import Script, serving
from tests.markers import thorough


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 6])
def test_every_split_of_the_workers_is_a_setup(num_workers: int) -> None:
    sizes = [1, 2, 4]
    found = all_setups(num_workers, sizes)
    counts = range(num_workers + 1)
    expected = {
        (p, p_tp, d, d_tp if d else 1)
        for p in counts
        for p_tp in sizes
        for d in counts
        for d_tp in sizes
        if p and p * p_tp + d * d_tp == num_workers
    }
    told = [(s.num_prefill, s.prefill_tp, s.num_decode, s.decode_tp) for s in found]
    assert len(told) == len(set(told))
    assert set(told) == expected
    assert {s.num_workers for s in found} == {num_workers}
    assert len({s.name for s in found}) == len(found)


def test_a_setup_is_what_rayk_serve_is_told() -> None:
    assert Setup(num_prefill=2, prefill_tp=2).options() == [
        *("--mode", "aggregated", "--num-prefill", "2", "--prefill-tp", "2")
    ]
    assert Setup(num_prefill=1, prefill_tp=2, num_decode=3, decode_tp=4).options() == [
        *("--mode", "disaggregated", "--num-prefill", "1", "--prefill-tp", "2"),
        *("--num-decode", "3", "--decode-tp", "4"),
    ]


COORDINATES = st.one_of(st.none(), st.integers(0, 6).map(float))


@given(st.lists(st.tuples(COORDINATES, COORDINATES), max_size=12))
def test_unbeaten_is_what_no_other_point_beats(points: list[tuple[float | None, float | None]]) -> None:
    def beats(a: tuple[float | None, float | None], b: tuple[float | None, float | None]) -> bool:
        if None in a:
            return False
        return a != b and a[0] >= b[0] and a[1] >= b[1]  # type: ignore[operator]

    expected = {
        i for i, point in enumerate(points) if None not in point and not any(beats(p, point) for p in points)
    }
    assert pareto(points) == expected


def test_goodput_is_told_by_setup_and_rate_best_first() -> None:
    rows = [
        {"setup": "slow", "rate": 1.0, "goodput_per_s": 0.9},
        {"setup": "slow", "rate": 2.0, "goodput_per_s": None},
        {"setup": "fast", "rate": 1.0, "goodput_per_s": 1.0},
        {"setup": "fast", "rate": 2.0, "goodput_per_s": 1.8},
    ]
    columns, table = goodput_table(rows)
    assert [column.title for column in columns] == ["setup", "best", "at 1/s", "at 2/s"]
    assert table == [
        {"setup": "fast", "best": 1.8, "at 1": 1.0, "at 2": 1.8},
        {"setup": "slow", "best": 0.9, "at 1": 0.9, "at 2": None},
    ]


@thorough
def test_the_job_compares_setups_on_one_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers of known speed: TP 2 answers at once, disaggregated refuses, and one does not start."""
    bodies: dict[str, list[dict[str, Any]]] = {}

    @contextmanager
    def fake(setup: Setup, options: Any, log: Path) -> Iterator[str]:
        del options
        if setup.name == "P 1xTP1 D 1xTP1":
            raise UserError(problem="planted", where=str(log))
        script = Script() if setup.prefill_tp == 2 else Script(status=429)
        with serving(script) as server:
            yield server.url
            bodies[setup.name] = [seen.body for seen in server.seen]

    monkeypatch.setattr(serve_bench, "served", fake)
    out = tmp_path / "out"
    arguments = ["--workers", "2", "--rates", "50,100", "--requests", "24", "--output-tokens", "2-4"]
    arguments += ["--slo", "ttft=100s", "--out", str(out)]
    assert main(arguments) == 1, "a setup did not start, and the refused loads are INVALID"
    rows = pd.read_parquet(out / "setups.parquet")
    assert list(rows["setup"]) == ["A 2xTP1", "A 2xTP1", "A 1xTP2", "A 1xTP2"]
    assert list(rows["good_share"]) == [0, 0, 1, 1]
    assert list(rows["num_measured"]) == [18] * 4
    refused, answered = (rows[rows["setup"] == name] for name in ("A 2xTP1", "A 1xTP2"))
    # One window for all: what is offered is the same, and every answer is good or there is none.
    assert (
        refused["offered_per_s"].round(3).to_numpy() == answered["offered_per_s"].round(3).to_numpy()
    ).all()
    assert (answered["goodput_per_s"] == answered["answered_per_s"]).all()
    assert (answered["goodput_per_s"] > 0).all()
    assert (refused["goodput_per_s"] == 0).all()
    half = answered["worker_tokens_per_s"] * 2
    assert half.to_numpy() == pytest.approx(answered["output_tokens_per_s"].to_numpy())
    sent = [sorted((tuple(b["prompt"]), b["max_tokens"]) for b in bodies[name]) for name in bodies]
    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert len(sent[0]) == 2 * 8 + 2 * 24
    text = (out / "serve_bench.md").read_text(encoding="utf-8")
    assert "| A 1xTP2 |" in text
    assert "P 1xTP1 D 1xTP1" in text
    page = (out / "report.html").read_text(encoding="utf-8")
    assert '"id": "pareto"' in page
    assert "A 2xTP1 at 50/s: INVALID" in page
    told = capsys.readouterr().err.splitlines()
    assert "A 2xTP1 at 50/s: INVALID" in told
    assert any(line.startswith("P 1xTP1 D 1xTP1: ") and "planted" in line for line in told)


READY = "print('rayk: ready http://127.0.0.1:5 model=m', flush=True)"
WAIT = "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: exit(0))\n"


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_server_is_waited_for_and_stopped() -> None:
    process = start(f"{WAIT}{READY}\ntime.sleep(600)")
    assert wait_ready(process, 60, Path("log")) == "http://127.0.0.1:5"
    assert stop(process) == 0
    failed = start("exit(2)")
    with pytest.raises(UserError, match="did not start"):
        wait_ready(failed, 60, Path("log"))
    assert stop(failed) == 2
    silent = start("import time; time.sleep(600)")
    with pytest.raises(DeadlineExceeded):
        wait_ready(silent, 0.5, Path("log"))
    assert stop(silent) != 0


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_S", 1.0)
    deaf = start(
        f"import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{READY}\ntime.sleep(600)"
    )
    wait_ready(deaf, 60, Path("log"))
    monkeypatch.setattr(servers, "KILL_S", 60.0)
    assert stop(deaf) == -9


def test_unknown_setups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="A 2xTP1, A 1xTP2, P 1xTP1 D 1xTP1"):
        main(["--workers", "2", "--only", "P 9xTP9 D 1xTP1", "--out", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_real_servers_are_compared(tmp_path: Path) -> None:
    """Two workers, aggregated and disaggregated: every request of the load is answered as asked, by both."""
    out = tmp_path / "out"
    command = [sys.executable, "jobs/serve_bench.py", "--workers", "2", "--tp", "1", "--rates", "4"]
    command += ["--requests", "32", "--input-tokens", "8-64", "--output-tokens", "4-12", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    rows = pd.read_parquet(out / "setups.parquet")
    assert list(rows["setup"]) == ["A 2xTP1", "P 1xTP1 D 1xTP1"], done.stderr
    assert done.returncode == int("INVALID" in set(rows["verdict"])), done.stderr
    assert list(rows["num_failed"]) == [0, 0]
    assert (rows["num_measured"] == 24).all()
    outputs = []
    for name in ("A-2xTP1", "P-1xTP1-D-1xTP1"):
        requests = load(out / name / "bench").requests.sort_values("prompt_index")
        assert (requests["outcome"] == "ok").all()
        assert (requests["num_output_tokens"] == requests["max_tokens"]).all()
        assert (requests["num_prompt_tokens"] == requests["prompt_token_ids"].map(len)).all()
        outputs.append([list(map(int, ids)) for ids in requests["output_token_ids"]])
    assert outputs[0] == outputs[1], "greedy tokens do not depend on who prefills"
