"""What Ray's dashboard calls the parts of runs and servers: names of actors and tasks, bounded in length."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence

from rayk.types.model_names import short_name

MAX_PART = 32
"""Characters of one part of a name: a model, an experiment."""
MAX_TASK = 96
"""Characters of a task's name."""
JOB_NAME = "job_name"
"""The key of a job's metadata that Ray's list of jobs has a column for."""
_TAG = 6
FLEETS = "rayk/fleet/"
"""What the names of fleets, which own the engines of a server, begin with."""


def bounded(text: str, limit: int = MAX_PART) -> str:
    """Shorten a text to its beginning and a tag of all of it, so that different texts stay different."""
    if len(text) <= limit:
        return text
    tag = hashlib.sha256(text.encode()).hexdigest()[:_TAG]
    return f"{text[: limit - _TAG - 1]}~{tag}"


def models_in_words(models: Sequence[str]) -> str:
    """Name models for people: the name of the only one, or how many there are."""
    names = sorted({short_name(m) for m in models})
    return bounded(names[0]) if len(names) == 1 else f"{len(names)} models"


def run_name(title: str, models: Sequence[str]) -> str:
    """Make a unique name of a run or server: its title, its model, and random hex digits."""
    words = f"{bounded(title)}-{models_in_words(models)}" if title else models_in_words(models)
    plain = re.sub(r"[^A-Za-z0-9._~-]+", "-", words).strip("-")
    return f"{plain}-{secrets.token_hex(3)}"


def rank_in_words(worker: str) -> str:
    """Turn an actor's name rayk/RUN/prefill0/r1 (or .../r1#2, after restarts) into `prefill0 rank 1, RUN`."""
    found = re.fullmatch(r"rayk/(.+)/([^/]+)/r(\d+)(?:#\d+)?", worker)
    return f"{found[2]} rank {found[3]}, {found[1]}" if found is not None else worker


def fleet_name(model: str) -> str:
    return f"{FLEETS}{run_name('', [model])}"


def front_name(fleet: str, num_before: int) -> str:
    """Name the actor that answers HTTP for the fleet rayk/fleet/RUN: rayk/front/RUN. One that was started
    again is RUN#1, because Ray frees a name only some time after its owner's death."""
    again = f"#{num_before}" if num_before else ""
    return f"rayk/front/{fleet.rpartition('/')[2]}{again}"


def loop_name(engine: str, rank: int, num_ranks: int, role: str, model: str) -> str:
    """Name the task that is one rank's life in an engine."""
    words = "" if engine.startswith(role) else f" {role}"
    name = f"{bounded(engine)} rank {rank}/{num_ranks}{words}: {models_in_words([model])}"
    return bounded(name, MAX_TASK)


def cell_name(cell_id: str, repeat: int, model: str) -> str:
    """Name the task that runs a cell once."""
    again = f" #{repeat}" if repeat else ""
    limit = MAX_TASK - MAX_PART - len(again) - len("cell : ")
    return f"cell {bounded(cell_id, limit)}{again}: {models_in_words([model])}"
