"""All that rayk uses of Ray without a public name. pyproject.toml names the releases that have it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ray import _raylet
from ray._private import parameter, profiling, ray_constants, services, state, worker
from ray.exceptions import AuthenticationError

from rayk.actors.environment import (
    BEYOND_LOOPBACK,
    FOLLOW_UV,
    check_address,
    is_host_and_port,
    is_protected,
    joined_cluster,
)
from rayk.types.errors import DeviceError

__all__ = ["profiling"]
_core: Any = _raylet
_parameter: Any = parameter
_services: Any = services
_state: Any = state
_worker: Any = worker


@contextmanager
def without_paragraphs() -> Iterator[None]:
    """Keep Ray from printing its messages about dead workers in this driver, within the block."""
    before = _worker.print_to_stdstream
    _worker.print_to_stdstream = _drop
    try:
        yield
    finally:
        _worker.print_to_stdstream = before


def _drop(*_: object, **__: object) -> None:
    pass


_GCS_TRIES = 6
"""A GCS that hangs lets each of Ray's tries last 41 s."""


@contextmanager
def starting_own_cluster(*, is_shared: bool = True) -> Iterator[None]:
    """Have new nodes' job agents listen on free ports within the block, and give up a GCS that does not
    answer after 4 minutes instead of 14. Where no other driver is to join (not `is_shared`), leave out what
    serves others alone: the process of Ray's pages, which without pages only counts usage, that of the
    autoscaler, and the one that brings workers' output to drivers. Their start takes 2 s of processor time.

    Ray would give 52365 to every cluster on a machine. An agent that finds it taken tries for 3 s, for which
    the raylet waits, and then never listens: that cluster takes no jobs.
    """
    before = _parameter.RayParams, ray_constants.NUM_REDIS_GET_RETRIES
    start_pages = _services.start_api_server
    left_out = {} if is_shared else {"include_log_monitor": False, "no_monitor": True}
    _parameter.RayParams = partial(before[0], dashboard_agent_listen_port=0, **left_out)
    if not is_shared:
        _services.start_api_server = _no_pages
    if "RAY_NUM_REDIS_GET_RETRIES" not in os.environ:
        ray_constants.NUM_REDIS_GET_RETRIES = _GCS_TRIES
    try:
        yield
    finally:
        _parameter.RayParams, ray_constants.NUM_REDIS_GET_RETRIES = before
        _services.start_api_server = start_pages


def _no_pages(*_: object, **__: object) -> tuple[None, None]:
    """Start nothing, in place of services.start_api_server: no URL, no process."""
    return None, None


@contextmanager
def ray_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set these variables (None: unset) within the block so that Ray follows them; restore the former ones
    afterwards.

    Ray remembers what it read of them when it was imported. No cluster may be joined as the block begins or
    ends.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_constants.ENABLE_RAY_CLUSTER = _is_on(BEYOND_LOOPBACK)
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = _is_on(FOLLOW_UV)
    # In this order: a thread that still ends must not miss a token that nobody asks for any more.
    _core.Config.initialize("")
    _core.AuthenticationTokenLoader.instance().reset_cache()


def _is_on(name: str) -> bool:
    return os.environ.get(name, "1").lower() in ("1", "true")


@contextmanager
def joining(address: str) -> Iterator[tuple[str, bool | None]]:
    """Yield what ray.init takes for this address, and whether the cluster there asks for a token (None: not
    known); Ray follows the latter within the block.

    Raises DeviceError where none answers.
    """
    if address == "auto":
        with suppress(ConnectionError):  # ray.init will say so
            address = _services.get_ray_address_from_environment(address, None)
    check_address(address)
    if not is_host_and_port(address):
        yield address, None
        return
    # What other machines call this one.
    own_host = _services.node_ip_address_from_perspective()
    protected = is_protected(address)
    with ray_environment(joined_cluster(address, own_host, protected=protected)):
        if protected:
            _check_token(address)
        yield address, protected


def _check_token(address: str) -> None:
    """Refuse a wrong token at once; Ray itself would try it for half a minute, and then not say that it is
    wrong."""
    try:
        token = _core.AuthenticationTokenLoader.instance().get_raw_token(ignore_auth_mode=True)
        why = "this is another" if token else "none is set"
    except AuthenticationError as error:  # RAY_AUTH_TOKEN_PATH names no file, or an empty one
        token, why = "", str(error).partition(". ")[0]  # then advice, which is below
    if not token or is_protected(address, token):
        raise DeviceError(
            f"the Ray cluster at {address} asks for a token; {why}",
            where="RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN",
            mend="RAY_AUTH_TOKEN_PATH=FILE where `rayk serve --ray-token-file FILE` started it",
        )


def running_clusters() -> list[str]:
    """List HOST:PORT of the GCS of each cluster that has processes on this machine."""
    _services.find_gcs_addresses.cache_clear()
    return sorted(_services.find_gcs_addresses())


def free_resources() -> dict[str, dict[str, float]]:
    """Return the unreserved resources of each live node, by its id."""
    found: dict[str, dict[str, float]] = _state.available_resources_per_node()
    return found


def live_jobs() -> set[str]:
    """Return the ids of the cluster's jobs that have not ended."""
    return {job["JobID"] for job in _state.jobs() if not job["IsDead"]}


def record(counter: Any, value: float, tags: Mapping[str, str]) -> None:
    """Add to a counter; unlike `inc` this takes 0."""
    counter._record(value, tags)
