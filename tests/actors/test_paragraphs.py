"""Ray's own words about workers that died stay out of what a command prints."""

from __future__ import annotations

import pytest
from ray._private import worker

from rayk.actors.ray_private import without_paragraphs


def test_ray_is_quiet_within_the_block_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names, "by which Ray prints them"
    said = {"lines": ["A worker died"], "pid": "raylet", "is_err": False}
    with without_paragraphs():
        worker.print_to_stdstream(dict(said), ignore_prefix=False)
    assert "".join(capfd.readouterr()) == ""
    worker.print_to_stdstream(dict(said), ignore_prefix=False)
    assert "A worker died" in "".join(capfd.readouterr())
