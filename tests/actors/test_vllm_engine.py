"""The process of a vLLM engine: whatever becomes of it is a typed error, and nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rayk.actors import vllm_engine
from rayk.actors.vllm_engine import VllmEngine
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import (
    CheckpointError,
    DeadlineExceeded,
    EngineDied,
    InternalError,
    RaykError,
    Unsupported,
)
from rayk.vllm.refusals import complaint_in, refusal
from tests.actors.vllm_engines import Fake, left
from tests.pd import HANG_S

SHORT_S = 1.0


async def _start(config: VllmEngineConfig) -> VllmEngine:
    engine = VllmEngine("prefill0")
    await engine.start("prefill0", config, "127.0.0.1", "secret")
    return engine


async def _failure(config: VllmEngineConfig, request_s: float = HANG_S) -> RaykError:
    engine = VllmEngine("prefill0")
    try:
        await engine.start("prefill0", config, "127.0.0.1", "secret")
        await engine.ask(request_s, "generate", prompt=[1])
    except RaykError as error:
        await engine.end()
        return error
    raise AssertionError("it does not fail")


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("garbage", EngineDied, r"does not speak as rayk's does: b'INFO"),
        ("killed at start", EngineDied, "was killed by SIGKILL"),
        ("dies at start", EngineDied, "does not start: RuntimeError: .* can't allocate memory"),
        ("refuses", Unsupported, "vLLM 0.32.0 refuses: ValidationError: .*'Foo'. are not supported"),
        ("dies mid-request", EngineDied, "was killed by SIGSEGV"),
        ("engine dies", EngineDied, "ValueError: the scheduler is lost"),
        ("refuses a request", Unsupported, "vLLM 0.32.0 refuses: VLLMValidationError: too long"),
    ],
)
def test_each_fault_is_a_typed_error_and_leaves_no_process(
    fake: Fake, fault: str, kind: type[RaykError], words: str
) -> None:
    config = fake(fault)
    error = asyncio.run(_failure(config))
    assert isinstance(error, kind)
    assert re.search(words, str(error))
    assert left(config) == []


def test_a_model_that_cannot_be_fetched_starts_no_process(fake: Fake) -> None:
    config = replace(fake("none"), model="tiny-org/not-here@" + "0" * 40)
    error = asyncio.run(_failure(config))
    assert isinstance(error, CheckpointError)
    assert "tiny-org/not-here" in str(error)
    assert not (Path(config.python).parent / "pids").exists()


def test_the_secret_of_proofs_is_in_a_file_of_the_users_alone_until_the_engine_has_started(
    fake: Fake,
) -> None:
    async def start_and_end(config: VllmEngineConfig) -> None:
        engine = await _start(config)
        await engine.end()

    config = fake("none")
    asyncio.run(start_and_end(config))
    told = json.loads((Path(config.python).parent / "secret").read_text())
    assert (told["mode"], told["secret"]) == (0o600, "secret")
    assert not Path(told["at"]).exists()


def test_what_vllm_logged_of_a_request_that_it_failed_comes_with_the_answer(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "LAST_WORDS_S", HANG_S)

    async def why() -> str:
        engine = await _start(fake("fails a request"))
        told, _ = await engine.ask(HANG_S, "generate", request_id="r")
        await engine.end()
        return str(told["why"])

    words = "base_worker.py:1250: handshake_failed | Context: {}: zmq.error.Again: busy"
    assert asyncio.run(why()) == words


@pytest.mark.parametrize(("fault", "what"), [("never starts", "start"), ("stops", "generate")])
def test_what_hangs_ends_at_its_deadline(fake: Fake, fault: str, what: str) -> None:
    start_s = SHORT_S if fault == "never starts" else HANG_S
    config = replace(fake(fault), start_s=start_s)
    error = asyncio.run(_failure(config, SHORT_S))
    assert isinstance(error, DeadlineExceeded)
    assert error.what == f"{what} on prefill0"
    assert left(config) == []


def test_an_interpreter_that_is_not_there_is_named(fake: Fake) -> None:
    error = asyncio.run(_failure(replace(fake("none"), python="/nowhere/bin/python")))
    assert isinstance(error, EngineDied)
    assert "/nowhere/bin/python cannot be run: No such file or directory" in str(error)


def test_a_death_between_requests_is_told_at_once(fake: Fake) -> None:
    config = fake("none")

    async def run() -> None:
        engine = await _start(config)
        watch = asyncio.create_task(engine.run())
        os.kill(left(config)[0], signal.SIGKILL)
        with pytest.raises(EngineDied, match="prefill0 died: its process was killed by SIGKILL"):
            await watch

    asyncio.run(run())
    assert left(config) == []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_engine_rests_until_it_is_asked(fake: Fake) -> None:
    config = fake("none")

    async def all_stopped(is_so: bool) -> None:
        """Signals take effect a moment later."""
        pids = left(config)
        group = [pid for pid in pids if os.getpgid(pid) == pids[0]]
        assert group
        # Another session would be another scheduling group of Linux, which may starve this one.
        assert {os.getsid(pid) for pid in group} == {os.getsid(0)}
        async with asyncio.timeout(HANG_S):
            while any((_state(pid) == "T") != is_so for pid in group):
                await asyncio.sleep(0.01)

    async def run() -> None:
        engine = await _start(config)
        await engine.rest()
        await all_stopped(True)
        assert await engine.ask(HANG_S, "ping")
        await all_stopped(False)
        await engine.rest()
        await engine.end()

    asyncio.run(run())
    assert left(config) == []


def test_nothing_outlives_an_owner_that_is_killed(fake: Fake) -> None:
    config = fake("none")
    script = (
        "import asyncio, sys\n"
        "from tests.actors.test_vllm_engine import VllmEngineConfig, _start\n"
        "async def main():\n"
        f"    engine = await _start(VllmEngineConfig(python={config.python!r}, model='m'))\n"
        "    print('started', flush=True)\n"
        "    await engine.run()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:  # noqa: S603
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"started\n"
        pids = left(config)
        owner.kill()
    assert len(pids) == 3
    deadline = time.monotonic() + HANG_S
    while outlive := left(config):
        assert time.monotonic() < deadline, f"{outlive} outlive their owner"
        time.sleep(0.01)


SHARES = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=4096)
print(shared.name, multiprocessing.Semaphore()._semlock.name, file=sys.stderr, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_shared_outlives_an_engine(is_stopped: bool) -> None:
    reading, writing = os.pipe()
    keeper = [sys.executable, "-m", "rayk.vllm.keeper", str(writing), sys.executable, "-c", SHARES]
    with subprocess.Popen(  # noqa: S603
        keeper, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writing], text=True
    ) as owner:
        os.close(writing)
        assert owner.stdin is not None
        assert owner.stderr is not None
        memory, semaphore = owner.stderr.readline().split()
        with os.fdopen(reading) as told:
            pid = int(told.readline().removeprefix("began "))
            assert Path(f"/dev/shm/{memory}").exists()  # noqa: S108
            if is_stopped:
                os.killpg(pid, signal.SIGSTOP)
            owner.stdin.close()
            assert told.readline() == "ended -9\n"
    assert not Path(f"/dev/shm/{memory}").exists()  # noqa: S108
    assert not Path(f"/dev/shm/sem.{semaphore.lstrip('/')}").exists()  # noqa: S108


FAILED = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("log", "words", "kind"),
    [
        ("", "", None),
        (f"ERROR [core.py:1] NotImplementedError: no MoE backend\n{FAILED}", FAILED, Unsupported),
        ("ERROR rayk.types.errors.Unsupported: no probe of backend FOO", FAILED, Unsupported),
        ('  File "/x/rayk/vllm/proving.py", line 3, in f\nKeyError: 7', FAILED, InternalError),
        ('  File "/x/rayk/vllm/driver.py", line 3, in f', "TypeError: an unexpected argument", Unsupported),
        ("OSError: [Errno 98] Address already in use", "", EngineDied),
        ("ValueError: Available memory on node 0 (9.1/23.5 GiB) is less than requested", FAILED, EngineDied),
        ("", "ModuleNotFoundError: No module named 'vllm'", EngineDied),
    ],
)
def test_a_start_that_fails_is_blamed_on_who_failed(
    log: str, words: str, kind: type[RaykError] | None
) -> None:
    found = refusal("prefill0", log, "0.32.0", words)
    assert found is None if kind is None else type(found) is kind


def logged(*lines: str, place: str = "base_worker.py:1354") -> str:
    return "\n".join(f"(Worker pid=7) ERROR 11-27 01:28:04 [{place}] {line}" for line in lines)


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/v/vllm/nixl/base_worker.py", line 1351, in request_ready',
    "    f.result()",
    "    ^^^^^^^^^^",
    '  File "/v/vllm/nixl/base_worker.py", line 2120, in _validate_remote_agent_handshake',
    "    assert nixl_agent_meta.block_lens[0] == remote_len",
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
)
FAILS = "base_worker.py:2120: assert nixl_agent_meta.block_lens[0] == remote_len"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("INFO 11-27 [core.py:1] all is well", ""),
        (
            logged("handshake_failed", *TRACEBACK, "AssertionError: not divisible")
            + "\n"
            + logged("later", place="core.py:1"),
            "base_worker.py:1354: handshake_failed: AssertionError: not divisible",
        ),
        (logged(*TRACEBACK, "AssertionError: no"), "base_worker.py:1354: AssertionError: no"),
        (logged("    ^^^^^^^", "AssertionError"), "base_worker.py:1354: AssertionError"),
        (
            logged("failed", *TRACEBACK, "AssertionError"),
            f"base_worker.py:1354: failed: AssertionError ({FAILS})",
        ),
        (logged("        ^^^^^^^", "", *TRACEBACK), ""),
        (
            logged(
                *TRACEBACK,
                "KeyError: 7",
                "",
                "During handling of the above exception, another exception occurred:",
            ),
            "base_worker.py:1354: KeyError: 7",
        ),
    ],
)
def test_a_complaint_is_what_was_raised_not_lines_of_a_traceback(log: str, words: str) -> None:
    assert complaint_in(log) == words
