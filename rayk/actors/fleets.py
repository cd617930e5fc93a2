"""The servers of a Ray cluster, seen from outside: whoever may join the cluster may ask their fleets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError

from rayk.actors.launch import NAMESPACE, connect
from rayk.actors.naming import FLEETS, JOB_NAME
from rayk.types.errors import UserError
from rayk.types.serving import EngineState


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join the cluster within the block. Raises DeviceError where there is none."""
    with connect(address, about={"rayk": "top", JOB_NAME: "rayk top"}):
        yield


def fleet_names() -> list[str]:
    """List the names of every server of the cluster that was joined."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [f["name"] for f in named if f["namespace"] == NAMESPACE]
    # Their host tiers' names go on behind theirs.
    return sorted(n for n in names if n.startswith(FLEETS) and "/" not in n.removeprefix(FLEETS))


def find_fleet(name: str) -> Any:
    """Return the actor of this name. Raises ValueError where it is gone."""
    return ray.get_actor(name, namespace=NAMESPACE)


def engines_of_fleets(timeout_s: float) -> list[dict[str, Any]]:
    """List every engine of every server of the joined cluster, with the fields of types.serving.EngineState.
    Where there are several servers, names begin with theirs. Raises UserError where there is none, or one
    does not answer."""
    names = fleet_names()
    if not names:
        raise UserError(
            problem="no rayk server in this cluster", where="--address", mend="rayk serve MODEL --address RAY"
        )
    told = []
    for name in names:
        prefix = f"{name.removeprefix(FLEETS)}: " if len(names) > 1 else ""
        told += [asdict(e) | {"name": prefix + e.name} for e in _engines(name, timeout_s)]
    return told


def _engines(name: str, timeout_s: float) -> tuple[EngineState, ...]:
    try:
        fleet = find_fleet(name)
        states: tuple[EngineState, ...] = ray.get(fleet.engines.remote(), timeout=timeout_s)
    except (RayError, ValueError) as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            problem=f"its fleet does not answer: {text or type(error).__name__}", where=name
        ) from error
    return states
