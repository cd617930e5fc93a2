"""Only one of the processes that run tests side by side has the Ray cluster."""

from __future__ import annotations

import pytest


def test_tests_of_the_marker_ray_are_one_group(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all tests")
    on_ray = [item.nodeid for item in request.session.items if item.get_closest_marker("ray") is not None]
    assert [name for name in on_ray if not name.endswith("@ray")] == []
