"""What tests of actors share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.actors.vllm_engines import Fake, make_fake


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """An engine of vLLM whose driver fails as it is told."""
    return make_fake(tmp_path)
