"""What keeps Ray from being used ends in one message, whatever Ray raises."""

from __future__ import annotations

import socket

import pytest

from rayk.types.errors import DeviceError


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
    monkeypatch.setattr(launch.ray, "init", init)
    with pytest.raises(DeviceError, match="Ray does not start here") as caught, launch.connect(None):
        raise AssertionError("there is no cluster")
    assert why in str(caught.value)
    assert "second line" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_address_where_something_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayk.actors import launch

    def init(**settings: object) -> None:
        raise RuntimeError(f"Failed to connect to {settings['address']}")

    monkeypatch.setattr(launch.ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(DeviceError, match=f"no Ray cluster answers at '{address}'") as caught,
            launch.connect(address),
        ):
            raise AssertionError("there is no cluster")
    assert caught.value.where == "--address"
