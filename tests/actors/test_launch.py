"""What keeps Ray from being used ends in one message, whatever Ray raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rayk.types.errors import DeviceError
from tests.listeners import SETTINGS, listening


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Exception("The current node timed out during startup. This could"), "timed out during startup"),
        (RuntimeError("Failed to start GCS.\nsecond line"), "Failed to start GCS."),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_local_cluster_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    from rayk.actors import launch

    def init(**_: object) -> None:
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_NUM_REDIS_GET_RETRIES", raising=False)
    monkeypatch.setattr(launch.ray, "init", init)
    with pytest.raises(DeviceError, match="Ray does not start here") as caught, launch.connect(None):
        raise AssertionError("there is no cluster")
    assert why in str(caught.value)
    assert "second line" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_local_cluster_asks_for_no_port_that_another_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import parameter, ray_constants

    from rayk.actors import launch

    asked = []

    def init(**_: object) -> None:
        asked.append((parameter.RayParams().dashboard_agent_listen_port, ray_constants.NUM_REDIS_GET_RETRIES))
        raise TimeoutError

    before = parameter.RayParams, ray_constants.NUM_REDIS_GET_RETRIES
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch.ray, "init", init)
    with pytest.raises(DeviceError), launch.connect(None):
        raise AssertionError("there is no cluster")
    assert asked == [(0, 6)]
    assert (parameter.RayParams, ray_constants.NUM_REDIS_GET_RETRIES) == before


@pytest.mark.parametrize("is_shared", [True, False])
def test_only_a_cluster_that_others_may_join_has_processes_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_shared: bool
) -> None:
    from ray._private import parameter, services

    from rayk.actors import launch
    from rayk.actors.token_file import TokenFile

    pages, found = services.start_api_server, []

    def init(**settings: object) -> None:
        params = parameter.RayParams()
        params.update_if_absent(include_log_monitor=True)  # as ray._private.node does
        has_pages = services.start_api_server is pages
        found.append((params.include_log_monitor, not params.no_monitor, has_pages))
        raise TimeoutError

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch.ray, "init", init)
    token_file = TokenFile(tmp_path / "token", is_own_cluster=True) if is_shared else None
    with pytest.raises(DeviceError), launch.connect(None, token_file=token_file):
        raise AssertionError("there is no cluster")
    assert found == [(is_shared,) * 3]
    assert services.start_api_server is pages


@pytest.mark.parametrize(
    ("num_nodes", "threads", "resources", "is_told"),
    [
        (1, None, {"CPU": 1.0}, False),
        (1, "1", {"CPU": 1.0}, False),  # of the node, or what Ray gave the coordinator: it is the same
        (1, "8", {"CPU": 1.0}, True),
        (1, "1", {"CPU": 2.0}, True),
        (2, None, {"CPU": 1.0}, True),
        (2, "8", {"CPU": 1.0, "GPU": 1.0}, False),
    ],
)
def test_only_a_worker_that_may_get_more_threads_is_told_to_take_one(
    monkeypatch: pytest.MonkeyPatch,
    num_nodes: int,
    threads: str | None,
    resources: dict[str, float],
    is_told: bool,
) -> None:
    from rayk.actors import placement

    asked = {}

    class Remote:
        def options(self, **options: object) -> Remote:
            asked.update(options)
            return self

        def remote(self, *_: object) -> None: ...

    monkeypatch.setattr(placement.ray, "nodes", lambda: [{}] * num_nodes)
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(placement.ray, "remote", lambda **_: lambda _: Remote())
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    placement.start_worker("w", cast(Any, None), 0, resources)
    assert bool(asked["runtime_env"]) is is_told


def test_a_cluster_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayk.actors import launch, ray_private

    def init(**settings: object) -> None:
        raise RuntimeError(f"Failed to connect to {settings['address']}")

    monkeypatch.setattr(launch.ray, "init", init)
    monkeypatch.setattr(ray_private, "is_protected", lambda _: None)
    with (
        listening(SETTINGS) as address,
        pytest.raises(DeviceError, match=f"no Ray cluster answers at '{address}'") as caught,
        launch.connect(address),
    ):
        raise AssertionError("there is no cluster")
    assert caught.value.where == "--address"


@pytest.mark.parametrize(
    ("says", "closes", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "who listens there is no Ray"),
        (SETTINGS[:5], True, "closes the connection|reset by peer"),
        (b"", False, "timed out"),
    ],
)
def test_an_address_where_something_else_listens(
    monkeypatch: pytest.MonkeyPatch, says: bytes, closes: bool, why: str
) -> None:
    """Ray itself would try for minutes."""
    from rayk.actors import environment, launch

    def init(**_: object) -> None:
        raise AssertionError("Ray was asked")

    monkeypatch.setattr(launch.ray, "init", init)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    if not says:
        monkeypatch.setattr(environment, "ANSWER_S", 0.1)
    with (
        listening(says, closes=closes) as address,
        pytest.raises(DeviceError, match=f"no Ray cluster answers at '{address}': .*({why})"),
        launch.connect(address),
    ):
        raise AssertionError("there is no cluster")
