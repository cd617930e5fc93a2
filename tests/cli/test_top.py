"""`rayk top` against a front whose engines are made up: what it shows, with a terminal and without."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from rayk.cli.main import app
from rayk.cli.top import Screen, engine_row
from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from rayk.serve.text import Text
from rayk.types.errors import EngineDied, UserError
from rayk.types.serving import EngineState
from tests.completer import ScriptedCompleter, ScriptedEngines, serve, tokens_then_end
from tests.serve.test_guard import CARD

COLUMNS = 200


class WorkingEngines(ScriptedEngines):
    """Each look finds more work done: 100 tokens computed and 8 written by whoever tells of itself."""

    async def engines(self) -> tuple[EngineState, ...]:
        for name, state in self.states.items():
            if state.num_steps is not None:
                computed, output = state.num_computed_tokens or 0, state.num_sampled_tokens or 0
                self.states[name] = replace(
                    state, num_computed_tokens=computed + 100, num_sampled_tokens=output + 8
                )
        return await super().engines()


@contextmanager
def running(engines: ScriptedEngines, **settings: Any) -> Iterator[str]:
    completer = ScriptedCompleter(CARD, tokens_then_end([70, 71]))
    text = Text(build_tokenizer(CARD.vocab_size, adds_bos=False))
    with serve(make_app(completer, HttpSettings(**settings), text=text, engines=engines)) as url:
        yield url


@pytest.fixture
def engines() -> WorkingEngines:
    found = WorkingEngines(prefill0="prefill", decode0="decode")
    busy: dict[str, Any] = {"num_running": 5, "num_waiting": 1234, "num_free_blocks": 25, "num_blocks": 101}
    found.states["prefill0"] = replace(found.states["prefill0"], num_requests=1239, num_restarts=2, **busy)
    found.states["decode0"] = replace(found.states["decode0"], state="lost", trouble="rank 1 of decode0 died")
    return found


def top(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["top", "--once", "--interval", "0.2", *arguments], env=environment)


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_once_prints_a_line_per_engine(engines: WorkingEngines) -> None:
    with running(engines) as url:
        answer = top("--url", url)
    assert answer.exit_code == 0, answer.stderr
    headline, heads, *rows = answer.stdout.splitlines()
    assert headline.startswith(f"{url}: 1 of 2 engines ready, ")
    assert cells(heads)[:3] == ["engine", "role", "TP"]
    prefill = dict(zip(cells(heads), cells(rows[0]), strict=False))
    computed, output = (float(prefill.pop(key).replace(",", "")) for key in ("computed/s", "tokens/s"))
    assert prefill == {
        "engine": "prefill0",
        "role": "prefill",
        "TP": "2",
        "state": "ready",
        "running": "5",
        "waiting": "1,234",
        "free blocks": "25/100",
        "used %": "75.0",
        "in flight": "1,239",
        "restarts": "2",
    }
    # One look later than the first: 0.2 s, or more on a slow machine.
    assert 0 < output <= 8 / 0.2
    assert computed == pytest.approx(output * 100 / 8, abs=1)
    # What it does not tell of itself stays empty.
    assert cells(rows[1]) == ["decode0", "decode", "2", "lost", "0", "0", "rank 1 of decode0 died"]
    assert len(rows) == 2


def test_what_divides_an_engine_beside_tp_has_columns_where_there_is_one(engines: WorkingEngines) -> None:
    engines.states["decode0"] = replace(engines.states["decode0"], tp=4, dcp=2, state="ready", trouble="")
    with running(engines) as url:
        heads, *rows = map(cells, top("--url", url).stdout.splitlines()[1:])
    assert heads[:5] == ["engine", "role", "TP", "DCP", "state"]
    assert [row[2:5] for row in rows] == [["2", "1", "ready"], ["4", "2", "ready"]]
    older = {"name": "e", "role": "aggregated", "tp": 2, "state": "ready", "trouble": ""}
    asked = dict.fromkeys(("num_running", "num_waiting", "num_free_blocks", "num_blocks"))
    row = engine_row(older | asked | {"num_requests": 0, "num_restarts": 0}, (None, None))
    assert row[:6] == ["e", "aggregated", "2", "1", "1", "ready"], "an older server tells no others"


def test_the_host_tier_has_a_line_where_there_is_one(engines: WorkingEngines) -> None:
    with running(engines) as url:
        assert "host tier" not in top("--url", url, "--once", "--interval", "0.1").stdout
    told: dict[str, object] = {"why_off": "", "stored_bytes": 3 << 20, "loaded_bytes": 1 << 19, "lookups": 5}
    names = list(engines.states)
    first = {**told, "loads": 2, "swaps": 7, "why_paused": "2 failed in a row"}
    engines.states[names[0]] = replace(engines.states[names[0]], offload=first)
    engines.states[names[1]] = replace(
        engines.states[names[1]], offload={**told, "why_off": "it was killed", "loads_failed": 1}
    )
    with running(engines) as url:
        last = top("--url", url, "--once", "--interval", "0.1").stdout.splitlines()[-1]
    assert last == (
        "host tier: stored 6.0 MiB, loaded 1.0 MiB for 2 of 10 prompts, 7 swapped out, 1 moves failed, "
        "1 engines ask for nothing just now, 1 of 2 engines without"
    )


def test_an_engine_that_was_formed_again_has_no_rate_yet(engines: WorkingEngines) -> None:
    states = iter([engines.states["prefill0"], replace(engines.states["prefill0"], epoch=2)])

    def ask() -> list[dict[str, Any]]:
        state = next(states)
        fields = {name: getattr(state, name) for name in EngineState.__slots__}
        return [fields | {"num_computed_tokens": 5 * state.epoch, "num_sampled_tokens": 5 * state.epoch}]

    screen = Screen(where="here", fetch=ask)
    screen.look()
    screen.look()
    assert screen.rates == {"prefill0": (None, None)}
    assert engine_row(screen.engines[0], screen.rates["prefill0"])[10:12] == ["", ""]


@pytest.mark.parametrize("width", [72, 80, 100, 160])
@pytest.mark.parametrize("troubled", [True, False])
def test_a_narrow_terminal_gets_fewer_columns_and_nothing_cut(width: int, troubled: bool) -> None:
    state = replace(ScriptedEngines(prefill0="prefill").states["prefill0"], num_waiting=1234567)
    state = replace(state, trouble="rank 1 of prefill0 was killed by signal 9" if troubled else "")
    screen = Screen(where="here", fetch=lambda: [{n: getattr(state, n) for n in EngineState.__slots__}])
    screen.look()
    console = Console(width=width, file=io.StringIO())
    console.print(screen.table(width))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(part in text for part in ("prefill0", "ready", "1,234,567", "tokens/s"))
    assert ("trouble" in text) == troubled
    assert ("restarts" in text) == (width > 110)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("how", ["option", "environment", "none", "wrong"])
def test_the_key_is_sent(engines: WorkingEngines, how: str) -> None:
    with running(engines, api_key="sk-1") as url:
        key = {"option": ["--api-key", "sk-1"], "wrong": ["--api-key", "sk-2"]}.get(how, [])
        answer = top("--url", url, *key, **({"RAYK_API_KEY": "sk-1"} if how == "environment" else {}))
    if how in ("option", "environment"):
        assert answer.exit_code == 0, answer.stderr
        return
    assert answer.exit_code == 2
    assert "HTTP 401" in answer.stderr
    assert "RAYK_API_KEY" in answer.stderr


def test_what_answers_nothing_or_something_else_is_refused(engines: WorkingEngines) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # nobody listens
        answer = top("--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert answer.exit_code == 2
    assert "no server answers: nothing listens there" in answer.stderr
    assert "rayk serve" in answer.stderr
    engines.error = EngineDied("fleet", "it is gone")
    with running(engines) as url:
        gone, missing = top("--url", url), top("--url", f"{url}/nowhere")
        both = top("--url", url, "--address", "auto")
    assert (gone.exit_code, "HTTP 503" in gone.stderr) == (2, True)
    assert (missing.exit_code, "HTTP 404" in missing.stderr) == (2, True)
    assert (both.exit_code, "not both" in both.stderr) == (2, True)
    assert "not a server's URL" in top("--url", "file:///etc").stderr


def test_a_server_that_goes_away_later_is_told_beside_what_was_known(engines: WorkingEngines) -> None:
    screen: Screen
    with running(engines) as url:
        from rayk.cli.top import _ask_server

        screen = Screen(where=url, fetch=_ask_server(url, None))
        screen.look()
        known = screen.engines
        engines.error = EngineDied("fleet", "it is gone")
        screen.look_again()
        assert screen.engines == known
        assert re.search(r"no answer for \d+ s: HTTP 503", str(screen.table().title))
        with pytest.raises(UserError):
            screen.look()
        engines.error = None
        screen.look_again()
    assert "no answer" not in str(screen.table().title)


def read_terminal(master: int, process: subprocess.Popen[bytes], until: re.Pattern[str]) -> str:
    """What it writes until the pattern is there, or it ends."""
    seen, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline and not until.search(seen.decode(errors="replace")):
        ready, _, _ = select.select([master], [], [], 0.5)
        try:
            part = os.read(master, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
        if ready and not part:
            break
        seen += part
        if process.poll() is not None and not ready:
            break
    return seen.decode(errors="replace")


def test_on_a_terminal_the_table_stays_in_place(engines: WorkingEngines) -> None:
    master, slave = pty.openpty()
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    with running(engines) as url:
        command = [sys.executable, "-m", "rayk.cli.main", "top", "--url", url, "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        # Who was started in the background ignores Ctrl-C, and so would what it starts.
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        signal.signal(signal.SIGINT, ignored)
        os.close(slave)
        try:
            # Drawn again: the cursor goes up over the lines of the table before.
            seen = read_terminal(master, process, re.compile(r"tokens/s(.|\n)*\x1b\[1A(.|\n)*tokens/s"))
            process.send_signal(signal.SIGINT)
            seen += read_terminal(master, process, re.compile(r"$^"))
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            os.close(master)
    assert "prefill0" in seen
    assert "\x1b[1A" in seen
    assert re.search(r"\x1b\[[0-9;]*31m *lost", seen), "a lost engine is red"
    assert "Traceback" not in seen
