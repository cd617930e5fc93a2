"""Who gets into a Ray cluster that rayk starts: its own processes and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayk.actors.environment import AUTH_MODE, BEYOND_LOOPBACK, TOKEN, own_cluster


def test_ray_goes_by_what_is_set_and_then_by_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import _raylet
    from ray.util import get_node_ip_address

    from rayk.actors.ray_private import ray_environment

    monkeypatch.setenv(AUTH_MODE, "disabled")

    def sent() -> str:
        headers = _raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()
        return str(headers.get("authorization", ""))

    before, host = dict(os.environ), get_node_ip_address()
    with ray_environment({AUTH_MODE: "disabled", TOKEN: None, BEYOND_LOOPBACK: None}):
        assert not sent()
        for values in (own_cluster(), own_cluster()):
            with ray_environment(values):
                assert sent() == f"Bearer {values[TOKEN]}"
                assert get_node_ip_address() == "127.0.0.1"
            assert not sent()
    assert dict(os.environ) == before
    assert get_node_ip_address() == host


def test_importing_rayk_leaves_nothing_in_the_environment(tmp_path: Path) -> None:
    code = (
        "import os, ray, ray.serve; before = dict(os.environ)\n"
        "import rayk, rayk.actors.launch, rayk.serve.ray_serve, rayk.serve.llm\n"
        "assert dict(os.environ) == before, set(os.environ) ^ set(before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
