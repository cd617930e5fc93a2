"""What a model's name says, apart from what the hub makes of it (tests/models/test_hub.py)."""

from __future__ import annotations

import pytest

from rayk.types.model_names import weights_name


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("checkpoints/tiny/config.json", "checkpoints/tiny"),
        ("config.json", "."),
        ("checkpoints/tiny", "checkpoints/tiny"),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B@main"),
        ("my-config.json", "my-config.json"),
        ("MODEL", "MODEL"),
    ],
)
def test_a_config_lies_beside_its_models_weights(model: str, found: str) -> None:
    assert weights_name(model) == found
