"""The servers of a Ray cluster, seen from outside: whoever may join the cluster may ask their fleets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError

from rayk.actors.launch import NAMESPACE, connect
from rayk.types.errors import UserError
from rayk.types.serving import EngineState

FLEETS = "rayk/fleet/"
"""What the names of fleets begin with (serve/command.py)."""


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Within the block this process is one of the cluster's. Raises DeviceError where there is none."""
    with connect(address, about={"rayk": "top"}):
        yield


def engines_of_fleets(timeout_s: float) -> list[dict[str, Any]]:
    """Every engine of every server of the cluster that was joined, as types.serving.EngineState has them;
    where there are several servers, names begin with theirs. Raises UserError where there is none, or one
    does not answer."""
    names = sorted(f["name"] for f in ray.util.list_named_actors(all_namespaces=True) if _is_fleet(f))
    if not names:
        raise UserError(
            problem="no rayk server in this cluster", where="--address", mend="rayk serve MODEL --address RAY"
        )
    told = []
    for name in names:
        prefix = f"{name.removeprefix(FLEETS)}: " if len(names) > 1 else ""
        told += [asdict(e) | {"name": prefix + e.name} for e in _engines(name, timeout_s)]
    return told


def _is_fleet(found: dict[str, str]) -> bool:
    return found["namespace"] == NAMESPACE and found["name"].startswith(FLEETS)


def _engines(name: str, timeout_s: float) -> tuple[EngineState, ...]:
    try:
        fleet: Any = ray.get_actor(name, namespace=NAMESPACE)
        states: tuple[EngineState, ...] = ray.get(fleet.engines.remote(), timeout=timeout_s)
    except (RayError, ValueError) as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            problem=f"its fleet does not answer: {text or type(error).__name__}", where=name
        ) from error
    return states
