"""The checkpoint writer asks a judge about the config.json it is about to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.models.families import load_config, parse_config
from rayk.oracle.checkpoint import SUPPORTED, write_checkpoint
from rayk.types.errors import UserError
from tests.conftest import CheckpointFactory


@pytest.mark.parametrize("family", SUPPORTED)
def test_the_judge_sees_what_config_json_will_say(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str
) -> None:
    """Of old keys as well, which transformers completes; the model is not made where it refuses."""
    overrides = {"rope_theta": 5000.0} if family == "qwen3" else {}
    path = checkpoint(family)
    seen: list[dict[str, object]] = []

    def judge(values: dict[str, object], where: str) -> None:
        seen.append(values)
        assert where == family + " with rope_theta=5000.0" * bool(overrides)
        raise UserError("no")

    with pytest.raises(UserError, match="^no$"):
        write_checkpoint(family, tmp_path / "model", overrides=overrides, judge=judge)
    assert list(tmp_path.iterdir()) == []
    (values,) = seen
    judged = parse_config(values)
    assert family == "qwen3" or judged == load_config(path)
    if overrides:
        assert [layer.rope.theta for layer in judged.layers if layer.rope] == [5000.0] * 4
    # A finished folder has been judged.
    write_checkpoint(family, path, judge=judge)
    assert len(seen) == 1


def test_the_judge_has_the_first_word_on_what_transformers_refuses(tmp_path: Path) -> None:
    """On that key alone: transformers stays with what the judge finds no fault in."""
    asked: list[object] = []

    def judge(values: dict[str, object], where: str) -> None:
        asked.append((values["num_hidden_layers"], values["hidden_size"], where))
        if len(asked) == 2:
            raise UserError("hidden_size is no number")

    options: dict[str, Any] = {"overrides": {"num_hidden_layers": 6, "hidden_size": "x"}, "judge": judge}
    with pytest.raises(UserError, match="transformers cannot build or run it: .*'hidden_size'"):
        write_checkpoint("gemma3n", tmp_path / "model", **options)
    with pytest.raises(UserError, match="^hidden_size is no number$"):
        write_checkpoint("gemma3n", tmp_path / "model", **options)
    assert asked == [(6, "x", "gemma3n with hidden_size=x")] * 2
