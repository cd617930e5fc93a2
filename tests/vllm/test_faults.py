"""Engines of vLLM that are killed in the middle of a request, that hang, and that have no memory: each ends
in a typed error, in bounded time, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.actors.vllm_engine import VllmEngine
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import DeadlineExceeded, EngineDied, RaykError
from tests.conftest import CheckpointFactory
from tests.markers import needs_vllm, slow

pytestmark = [needs_vllm, slow, pytest.mark.timeout(1800)]

REQUEST_S = 10.0
"""Of one that no engine can answer: it hangs."""
SAMPLING = {"max_tokens": 700, "ignore_eos": True}


@pytest.fixture
def config(vllm_python: Path, checkpoint: CheckpointFactory) -> VllmEngineConfig:
    model = str(checkpoint("qwen3", overrides={"head_dim": 32}))
    return VllmEngineConfig(python=str(vllm_python), model=model, block_size=32)


def processes_of(owner: int) -> dict[int, str]:
    """Those that came of a process of this one's, with their command lines."""
    found: dict[int, str] = {}
    for pid in Path(f"/proc/{owner}/task/{owner}/children").read_text().split():
        found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found |= processes_of(int(pid))
    return found


def generate(engine: VllmEngine, timeout_s: float) -> Coroutine[Any, Any, tuple[dict[str, Any], bytes]]:
    prompt = list(range(5, 305))
    asked: dict[str, Any] = {"prompt": prompt, "sampling": SAMPLING, "kv_transfer_params": None}
    return engine.ask(timeout_s, "generate", request_id="r", **asked)


async def failure(config: VllmEngineConfig, role: str, number: signal.Signals) -> tuple[RaykError, list[int]]:
    """Send a process of an engine a signal in the middle of a request: how that ends, and what is left."""
    engine = VllmEngine("prefill0")
    await engine.start("prefill0", config, "127.0.0.1", "s" * 16)
    assert engine._pid is not None
    began = {engine._pid, *processes_of(engine._pid)}
    (victim,) = [pid for pid, words in processes_of(engine._pid).items() if role in words]
    request_s = REQUEST_S if number == signal.SIGSTOP else config.start_s
    asked = asyncio.create_task(generate(engine, request_s))
    await engine.ask(config.start_s, "ping")  # the request came before it
    assert not asked.done()
    os.kill(victim, number)
    with pytest.raises(RaykError) as raised:
        await asked
    await engine.end()
    return raised.value, [pid for pid in began if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("role", ["EngineCore", "Worker"])
def test_an_engine_with_a_process_killed_in_a_request_is_dead(config: VllmEngineConfig, role: str) -> None:
    error, left = asyncio.run(failure(config, role, signal.SIGKILL))
    assert isinstance(error, EngineDied), error
    assert left == []


def test_an_engine_whose_worker_hangs_misses_its_deadline(config: VllmEngineConfig) -> None:
    error, left = asyncio.run(failure(config, "Worker", signal.SIGSTOP))
    assert isinstance(error, DeadlineExceeded), error
    assert left == []


def test_a_cache_larger_than_the_machine_is_no_refusal_of_vllms(config: VllmEngineConfig) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    greedy = replace(config, cache_bytes=8 * memory)

    async def start() -> None:
        engine = VllmEngine("prefill0")
        await engine.start("prefill0", greedy, "127.0.0.1", "s" * 16)

    with pytest.raises(EngineDied, match="memory"):
        asyncio.run(start())
