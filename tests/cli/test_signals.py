"""Ctrl-C and SIGTERM: the first ends a run in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rayk.cli.guard import run_guarded
from rayk.types.signals import Interrupted, exit_code_of, interrupts, kept_sigterm, run_coroutine

STUBBORN = """
import sys, time
from rayk.cli.guard import run_guarded
from rayk.types.signals import interrupts

def act():
    with interrupts(lambda: print("first", flush=True)):
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("cleaning", flush=True)
            if sys.argv[1] == "slow":
                time.sleep(60)
            print("clean", flush=True)
    return 0

sys.exit(run_guarded(act))
"""


def stubborn(speed: str) -> subprocess.Popen[str]:
    """A process that cleans up, quickly or slowly, when it is interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, speed], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("signum", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_the_first_signal_ends_in_order(signum: int, code: int, word: str) -> None:
    process = stubborn("quick")
    process.send_signal(signum)
    output, errors = process.communicate(timeout=50)
    assert output == "first\ncleaning\nclean\n"
    assert errors == f"rayk: {word}\n"
    assert process.returncode == code


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGINT, 130), (signal.SIGINT, signal.SIGTERM, 143)],
)
def test_the_second_signal_ends_at_once(first: int, second: int, code: int) -> None:
    process = stubborn("slow")
    process.send_signal(first)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["first\n", "cleaning\n"]
    process.send_signal(second)
    output, _ = process.communicate(timeout=50)
    assert output == ""
    assert process.returncode == code


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_not_lost_in_a_callback_that_takes_every_exception(signum: int) -> None:
    """As aiohttp's data_received does, in the parser of which a signal came at a test of `rayk bench`."""
    passed_over: list[BaseException] = []
    ended: list[str] = []

    def callback() -> None:
        try:
            os.kill(os.getpid(), signum)
            sum(range(1000))  # Python calls handlers between two of its instructions
        except BaseException as error:  # noqa: BLE001 - what the test is about
            passed_over.append(error)

    async def work() -> None:
        asyncio.get_running_loop().call_soon(callback)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("in order")

    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted) as raised, interrupts(lambda: ended.append("told")):
        run_coroutine(work())
    assert raised.value.signum == signum
    assert passed_over == []
    assert ended == ["told", "in order"]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_plain_interrupt_that_a_signal_became_is_of_that_signal() -> None:
    """Ray's wait in C++ forgets which handler raised."""

    def wait() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(Interrupted) as raised, interrupts(lambda: None):
        wait()
    assert exit_code_of(raised.value) == 143
    with pytest.raises(KeyboardInterrupt) as plain, interrupts(lambda: None):
        raise KeyboardInterrupt
    assert type(plain.value) is KeyboardInterrupt


def test_an_interrupt_as_a_coroutine_ends_is_raised_all_the_same() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "done"

    with pytest.raises(Interrupted), interrupts(lambda: None):
        run_coroutine(work())


def test_handlers_are_given_back_and_other_threads_do_without() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with interrupts(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    entered: list[bool] = []

    def work() -> None:
        with interrupts(lambda: None):
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_exit_codes() -> None:
    def stop(error: KeyboardInterrupt) -> int:
        raise error

    assert exit_code_of(KeyboardInterrupt()) == 130
    assert run_guarded(lambda: stop(KeyboardInterrupt())) == 130
    assert run_guarded(lambda: stop(Interrupted(signal.SIGTERM))) == 143


def test_ray_does_not_take_the_handler_over() -> None:
    """Ray's own handlers raise SystemExit and stay: ours gets the signal, and comes back."""

    def connect() -> None:
        with interrupts(lambda: None), kept_sigterm():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        connect()
    with interrupts(lambda: None):
        ours = signal.getsignal(signal.SIGTERM)
        with kept_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == ours
    # Without a handler of somebody's, Ray's stays.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with kept_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_modules_need_no_ray(tmp_path: Path) -> None:
    code = "import sys, rayk.types.signals; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
