"""A hub on loopback with one tiny model, for tests of models by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from rayk.models import hub as models_hub
from tests.conftest import CheckpointFactory
from tests.local_hub import LocalHub, local_hub, with_tiny_model


@pytest.fixture
def hub(checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Play a hub with one tiny model, and give this process an empty cache."""
    models_hub._pinned_snapshot.cache_clear()
    with local_hub() as served:
        with_tiny_model(served, checkpoint("qwen3"), tmp_path / "source")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            served.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield served


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what sets HF_HUB_OFFLINE."""
    return lambda: monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
