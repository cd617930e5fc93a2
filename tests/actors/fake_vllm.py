"""A driver of rayk.vllm with no engine behind it, which fails as it is told: for faults only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from rayk.vllm.messages import Frame, read_frame


def _sleep() -> NoReturn:
    while True:
        time.sleep(3600)


def _begin(pids: Path) -> None:
    """Note this process, and begin two, as vLLM's engine core and workers are: one leaves its group."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(3600)"]
    begun = [subprocess.Popen(sleeps, start_new_session=leaves).pid for leaves in (False, True)]  # noqa: S603
    with pids.open("a") as file:
        file.write("".join(f"{pid} " for pid in (os.getpid(), *begun)))


def main() -> None:
    fault, folder = sys.argv[1], Path(sys.argv[2])
    _begin(folder / "pids")
    frames, answers = os.fdopen(0, "rb"), os.fdopen(1, "wb")

    def answer(number: int, **header: object) -> None:
        answers.write(Frame({"id": number, **header}).encode())
        answers.flush()

    if fault == "garbage":
        os.write(1, b"INFO 11-26 23:10:01 Starting vLLM\n" * 2)
        _sleep()
    if fault == "killed at start":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "dies at start":
        words = "(EngineCore pid=7) ERROR [core.py:9] RuntimeError: CPUAllocator: can't allocate memory"
        print(
            words, "\nRuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr
        )  # noqa: T201
        sys.exit(1)
    while (frame := read_frame(frames)) is not None:
        number, op = frame.header["id"], frame.header["op"]
        if fault == "never starts":
            _sleep()
        elif fault == "refuses" and op == "start":
            said = (
                "ValidationError: 1 validation error\n  Value error, architectures ['Foo'] are not supported"
            )
            answer(number, error=said, version="0.32.0")
        elif op == "start":
            transfer = frame.header["arguments"].get("kv_transfer_config") or {}
            secret = Path(transfer.get("kv_connector_extra_config", {}).get("secret_file", "/nowhere"))
            if secret.exists():
                told = {
                    "mode": secret.stat().st_mode & 0o777,
                    "secret": secret.read_text(),
                    "at": str(secret),
                }
                (folder / "secret").write_text(json.dumps(told))
            answer(
                number, facts={"version": "0.32.0", "backend": "none", "block_sizes": [16], "layout": "LBHNC"}
            )
        elif op == "forget":
            answer(number, is_empty=True)
        elif op == "generate" and fault == "dies mid-request":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif op == "generate" and fault == "engine dies":
            print(
                "ERROR [multiproc_executor.py:1] ValueError: the scheduler is lost",
                file=sys.stderr,
                flush=True,
            )  # noqa: T201
            answer(number, error="EngineDeadError: EngineCore encountered an issue.", version="0.32.0")
        elif op == "generate" and fault == "fails a request":
            at = "ERROR 11-27 01:28:04 [base_worker.py:1250]"
            words = (
                "handshake_failed | Context: {}",
                "Traceback (most recent call last):",
                "zmq.error.Again: busy",
            )
            answer(number, finish_reason="error", token_ids=[])  # before the words are there
            print(*(f"(Worker pid=7) {at} {line}" for line in words), sep="\n", file=sys.stderr, flush=True)  # noqa: T201
        elif op == "generate" and fault == "holds":
            (folder / "asked").touch()
        elif op == "generate" and fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif op == "generate" and fault == "refuses a request":
            answer(number, error="VLLMValidationError: too long", version="0.32.0")
        else:
            answer(number)


if __name__ == "__main__":
    main()
