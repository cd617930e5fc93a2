"""Engines of vLLM whose driver is a fake that fails as it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rayk.types.config import VllmEngineConfig
from tests.house import ROOT
from tests.pd import HANG_S

Fake = Callable[[str], VllmEngineConfig]


def make_fake(folder: Path) -> Fake:
    """Give engines whose interpreter runs a driver with a fault, each in a folder of its own."""

    def make(fault: str) -> VllmEngineConfig:
        own = folder / str(len(list(folder.iterdir())))
        own.mkdir()
        python = own / "python"
        command = f"{sys.executable} -m tests.actors.fake_vllm '{fault}' {own}"
        python.write_text(f"#!/bin/sh\ncd {ROOT} && exec {command}\n")
        python.chmod(0o755)
        return VllmEngineConfig(python=str(python), model="/nowhere", start_s=HANG_S)

    return make


def left(config: VllmEngineConfig) -> list[int]:
    """Processes that fake drivers were or began, and that are there still."""
    told = Path(config.python).parent / "pids"
    pids = told.read_text().split() if told.exists() else []
    return [pid for pid in map(int, pids) if Path(f"/proc/{pid}").exists()]


def was_asked(config: VllmEngineConfig) -> bool:
    """Whether a request came to an engine that holds it."""
    return (Path(config.python).parent / "asked").exists()
