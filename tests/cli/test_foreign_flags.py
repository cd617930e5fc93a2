"""Flags of vLLM that rayk lacks name what to use, and what they name is there."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from rayk.cli.foreign_flags import HINTS
from rayk.cli.main import app
from rayk.specs.experiment import dotted_keys


@pytest.mark.parametrize("words", [["--gpu-memory-utilization", "0.9"], ["--gpu_memory_utilization=0.9"]])
def test_a_flag_that_rayk_lacks(words: list[str]) -> None:
    found = CliRunner().invoke(app, ["serve", "nowhere", *words])
    assert found.exit_code == 2
    assert "--gpu-memory-utilization" in found.stderr
    assert "mend: --set engine.num_blocks=N" in found.stderr


def test_hints_are_of_flags_that_are_none_and_name_what_is() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command, hints in HINTS.items():
        options = {flag for p in commands[command].params for flag in p.opts}
        assert not options & hints.keys()
        for hint in hints.values():
            assert set(re.findall(r"--[a-z-]+", hint)) <= options
            assert set(re.findall(r"[a-z]+\.[a-z_]+(?==)", hint)) <= set(dotted_keys())
