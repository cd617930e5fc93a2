"""jobs/attack.py: it gets in where nothing is asked for, and nowhere else."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from jobs import attack
from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from rayk.serve.text import Text
from rayk.types.serving import ModelCard
from tests.completer import ScriptedCompleter, serve, tokens_then_end

KEY = "0123456789abcdef"
CARD = ModelCard(model_id="qwen3", folder="nowhere", vocab_size=300, max_positions=64)
LIMIT_S = 800


@pytest.mark.parametrize("is_asked", [True, False])
def test_requests_get_in_where_no_key_is_asked_for(is_asked: bool) -> None:
    completer = ScriptedCompleter(CARD, tokens_then_end([70]))
    text = Text(build_tokenizer(CARD.vocab_size, adds_bos=False))
    settings = HttpSettings(api_key=KEY if is_asked else None)
    with serve(make_app(completer, settings, text=text)) as url:
        tries = list(attack.http_attacks(urlsplit(url).netloc, KEY))
    assert len(tries) > 15
    assert not [t for t in tries if t.got_in is None]
    got_in = {t.attack for t in tries if t.got_in}
    assert got_in == (set() if is_asked else {"ask without the key", "learn from /health"})
    assert not any(KEY in t.reached or KEY in t.refused for t in tries)


def test_what_is_not_known_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "ANSWER_S", 10.0)
    monkeypatch.setattr(attack, "join", lambda *_: attack.Try("join", "x", "nothing", None))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = attack.Port(host="127.0.0.1", port=free.getsockname()[1], program="gcs_server", pid=1)
    answer = attack.PortAnswer(status=attack.LATE, text="gRPC (HTTP")
    target: Any = attack.Target(
        process=None,  # type: ignore[arg-type]
        folder=tmp_path,
        ports=[(port, answer)],
        is_loopback=True,
    )
    tries = [*attack.port_attacks(target), *attack.job_attacks(target), *attack.join_attacks(target)]
    tries += attack.pickle_attacks(target)
    assert {t.got_in for t in tries if t.reached != "no port"} == {None}
    refused, skipped = attack.Try("x", "here", "HTTP 401"), attack.Try("x", "not tried", "no root", None)
    for told, status in (([refused, skipped], 0), ([refused, tries[0]], 1)):
        words, found = attack.verdict(told, is_control=False)
        assert (words.partition(" attacks")[0], found) == (f"0 of {1 + status}", status)
    assert attack.verdict([tries[0]], is_control=True)[1] == 1


def test_a_pickle_that_is_taken_leaves_the_mark(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(attack.Bomb(str(tmp_path / "mark"))))  # noqa: S301 - our own
    assert attack.appears(tmp_path / "mark")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("options", [("--http", "serve"), ("--http", "uvicorn"), ("--control",)])
def test_nothing_gets_in_but_where_nothing_is_asked_for(options: tuple[str, ...], tmp_path: Path) -> None:
    script = Path(attack.__file__)
    done = subprocess.run(
        [sys.executable, str(script), *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(script.parent.parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("submit a job", "write to the GCS", "join without a token", "be served by raylet"):
        assert what in done.stdout
