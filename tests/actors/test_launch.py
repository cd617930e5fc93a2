"""What keeps Ray from being used ends in one message, whatever Ray raises."""

from __future__ import annotations

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
