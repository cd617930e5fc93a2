"""What the job of vLLM's servers reads in /metrics and makes of it; and a whole run before servers that are
played."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from jobs import vllm_serve
from jobs.vllm_serve import CASES, NAMED, Case, Proofs, judge, read_proofs
from rayk.vllm.planted import PLANTED
from tests.markers import one_per

SHIFTED = "layer 0, k, head 0, token 0: head 0 holds head 1 of the producer"
TOLD = """\
# HELP vllm:kv_proof_requests_total Proofs, one per request and rank.
# TYPE vllm:kv_proof_requests_total counter
vllm:kv_proof_requests_total{engine="0",model_name="m",status="equal"} 2.0
vllm:kv_proof_requests_total{engine="0",model_name="m",status="mismatch"} 12.0
vllm:kv_proof_requests_total{engine="0",model_name="m",status="unverified"} 0.0
vllm:kv_proof_requests_created{engine="0",model_name="m",status="equal"} 1.7642e+09
vllm:kv_proof_words_total{engine="0",model_name="m",status="mismatch"} 2432.0
vllm:kv_proof_mismatched_words_total{engine="0",field="k",head="0",layer="0",model_name="m"} 152.0
vllm:kv_proof_first_mismatch_total{classification="head 0 holds head 1 of the producer",engine="0",field="k",head="0",layer="0",model_name="m",token="0"} 10.0
vllm:kv_proof_first_mismatch_total{classification="other content in 35191 bytes of tokens 0 to 290",engine="0",field="k",head="0",layer="0",model_name="m",token="128"} 2.0
vllm:kv_proof_first_mismatch_created{classification="K and V swapped",engine="0",field="k",head="0",layer="0",model_name="m",token="0"} 1.7642e+09
vllm:kv_proof_digest_seconds_sum{engine="0",model_name="m"} 0.88
vllm:kv_proof_digest_seconds_count{engine="0",model_name="m"} 14.0
vllm:kv_proof_digest_seconds_created{engine="0",model_name="m"} 1.7642e+09
vllm:kv_proof_digest_seconds_bucket{engine="0",le="0.1",model_name="m"} 10.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""  # noqa: E501 - as vLLM 0.32.0 told it


def test_metrics_are_read_as_vllm_tells_them() -> None:
    found = read_proofs(TOLD)
    other = "layer 0, k, head 0, token 128: other content in 35191 bytes of tokens 0 to 290"
    assert found.statuses == Counter(equal=2, mismatch=12)
    assert found.places == Counter({SHIFTED: 10, other: 2})
    assert found.named("heads_shifted") == SHIFTED
    assert found.named("stale_block_ids") == other, "what most requests say is not always the bug's"
    assert found.named("kv_swapped") == ""
    assert found.since(Proofs(Counter(equal=2), Counter({SHIFTED: 10}))).places == Counter({other: 2})
    before = Proofs(seconds=Counter(digest_seconds_sum=0.48, digest_seconds_count=10))  # type: ignore[arg-type]
    assert found.since(before).mean_ms("digest") == pytest.approx(100.0)
    assert found.mean_ms("fetch") is None
    assert read_proofs('vllm:num_requests_running{engine="0"} 0.0\n') == Proofs()


def test_every_bug_has_a_case_and_so_have_right_servers() -> None:
    assert {case.planted for case in CASES} == {"", *PLANTED}
    assert set(NAMED) == set(PLANTED)
    assert {case.tp for case in CASES if not case.planted} == {1, 2}


EQUAL = Proofs(Counter(equal=12))
MISMATCH = Proofs(Counter(equal=1, mismatch=11), Counter({SHIFTED: 11}))


SAMPLED = Proofs(Counter(equal=4, skipped=8))


@pytest.mark.parametrize(
    ("case", "proofs", "num_failed", "num_unlike", "wrong"),
    [
        (Case("qwen3"), EQUAL, 0, 0, []),
        (Case("qwen3"), MISMATCH, 0, 0, [f"accused 11 times with nothing planted: {SHIFTED}"]),
        (Case("qwen3"), Proofs(Counter(unverified=12)), 0, 0, ["nothing was proven"]),
        (Case("qwen3"), EQUAL, 1, 0, ["1 of 13 requests failed"]),
        (Case("qwen3"), EQUAL, 0, 2, ["2 of 13 answers have other tokens"]),
        (Case("qwen3"), SAMPLED, 0, 0, ["8 skipped at a sampling rate of 1"]),
        (Case("qwen3", sampling_rate=0.25), SAMPLED, 0, 0, []),
        (Case("qwen3", sampling_rate=0.25), EQUAL, 0, 0, ["0 skipped at a sampling rate of 0.25"]),
        (Case("qwen3", planted="heads_shifted"), MISMATCH, 0, 9, []),
        (Case("qwen3", planted="heads_shifted"), EQUAL, 0, 0, ["heads_shifted is not named: no mismatch"]),
        (Case("qwen3", planted="kv_swapped"), MISMATCH, 0, 0, [f"kv_swapped is not named: {SHIFTED}"]),
        (Case("qwen3", planted="heads_shifted", on_mismatch="fail"), MISMATCH, 11, 11, []),
        (
            Case("qwen3", planted="heads_shifted", on_mismatch="fail"),
            MISMATCH,
            9,
            9,
            ["9 requests failed, and 11 were wrong"],
        ),
        (
            Case("qwen3", planted="heads_shifted", on_mismatch="recompute"),
            MISMATCH,
            0,
            1,
            ["1 of 13 answers have other tokens"],
        ),
    ],
)
def test_a_bug_must_be_named_and_nobody_accused(
    case: Case, proofs: Proofs, num_failed: int, num_unlike: int, wrong: list[str]
) -> None:
    assert judge(case, proofs, 13, num_failed, num_unlike) == [f"{case.name}: {line}" for line in wrong]


PLAYED = '''#!{python}
"""vLLM's server as far as the job asks it: a proof per request and rank, wrong if a bug is planted."""

import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(zip(sys.argv[3:], sys.argv[4:]))
config = json.loads(options["--kv-transfer-config"])
extra = config["kv_connector_extra_config"]
proves = "kv_connector_module_path" in config
if proves:
    assert len(open(extra["secret_file"]).read()) >= 16
ranks, planted, number = int(options.get("--tensor-parallel-size", 1)), extra.get("planted"), 0
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(os.path.join({folder!r}, str(os.getpid())), "w").write(str(child.pid))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        status = "equal" if planted is None else "mismatch"
        text = json.dumps(dict(version="0.32.0"))
        if self.path == "/metrics":
            text = 'vllm:kv_proof_requests_total{{status="%s"}} %d.0\\n' % (status, number * ranks) * proves
            if planted is not None:
                text += 'vllm:kv_proof_first_mismatch_total{{classification="K and V swapped",field="k",'
                text += 'head="0",layer="0",token="0"}} %d.0\\n' % number
        self.say(text)

    def do_POST(self):
        global number
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number += 1
        fails = extra.get("on_mismatch") == "fail" and config.get("kv_load_failure_policy") != "recompute"
        wrong = planted is not None and "kv_load_failure_policy" not in config
        choice = dict(token_ids=[number if wrong else 7], finish_reason="length")
        answer = dict(kv_transfer_params=dict(), choices=[choice])
        self.say(json.dumps(answer), 500 if fails and wrong else 200)

    def say(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
'''


PLACE = "layer 0, k, head 0, token 0: K and V swapped"


@one_per()
@pytest.mark.parametrize(
    ("only", "rows", "status"),
    [
        (
            "kv_swapped",
            [
                f"| kv_swapped | qwen3 | 1 | {of} | 0 | 3 | 0 | 0 | 0 | {PLACE} |"
                for of in (
                    "report | 100% | 3 | 0 | ",
                    "fail | 100% | 3 | 3 | ",
                    "recompute | 100% | 3 | 0 | 0",
                )
            ],
            0,
        ),
        (
            "heads_shifted",
            ["| heads_shifted | qwen3 | 1 | report | 100% | 3 | 0 |  | 0 | 3 | 0 | 0 | 0 | none |"],
            1,
        ),
        ("tp2", ["| nothing | qwen3 | 2 | report | 100% | 3 | 0 | 0 | 6 | 0 | 0 | 0 | 0 | none |"], 0),
    ],
)
def test_a_run_before_played_servers(
    only: str,
    rows: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    played, pids, out = tmp_path / "python", tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    played.write_text(PLAYED.format(python=sys.executable, folder=str(pids)))
    played.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = ["--requests", "3", "--only", only, "--python", str(played), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["jobs/vllm_serve.py", *words])
    assert vllm_serve.main() == status
    printed = capsys.readouterr()
    assert [row for row in rows if row not in printed.out] == []
    assert (f"{only} is not named" in printed.err) == (status == 1)
    assert json.loads((out / "environment.json").read_text())["vllm"] == "0.32.0"
    told = [int(pid) for file in pids.iterdir() for pid in (file.name, file.read_text())]
    assert len(told) == 2 * (3 + len(rows)), (
        "P and D, bare and proving, and a child of each that left its group"
    )
    assert [pid for pid in told if Path(f"/proc/{pid}").exists()] == []
