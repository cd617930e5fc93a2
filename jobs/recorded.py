"""What tables of measurements say of themselves: how to run them again, and what ran them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any


def command_line(script: str, environment: Mapping[str, Any], without: Sequence[str] = ("--out",)) -> str:
    """How to run it again. `without`: options, each with a value, that change nothing of what is measured."""
    arguments = [str(a) for a in environment["command"][1:]]
    for i in range(len(arguments) - 1, -1, -1):
        name, equals, _ = arguments[i].partition("=")
        if name in without:
            del arguments[i : i + (1 if equals else 2)]
    return shlex.join(["python", script, *arguments])


def machine(environment: Mapping[str, Any]) -> list[str]:
    """What measured, in short lines. `environment`: see `when`."""
    devices, packages = environment["devices"], environment["packages"]
    threads = ["one thread per process"] if environment.get("threads") == 1 else []
    cpu = ", ".join([f"{devices['cpu']}, {devices['num_cores']} cores", *threads, *devices["gpus"]])
    return [
        f"{cpu}; {environment['platform']}, Python {environment['python']}",
        f"torch {packages['torch']}, ray {packages['ray']}, nixl {packages['nixl-cu13']}",
        *when(environment),
    ]


def when(environment: Mapping[str, Any]) -> list[str]:
    """At which commit, on which day and beside what. `environment`: with load_at_start and load_at_end."""
    return [
        *([f"commit {environment['git_commit']}"] if environment["git_commit"] else []),
        f"{str(environment['started'])[:10]}; load {environment['load_at_start']:.1f} when it began, "
        f"{environment['load_at_end']:.1f} when it ended: trust ratios, not single figures",
    ]
