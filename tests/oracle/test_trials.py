"""Trials that were found before: measured like any other, and of no effect on the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayk.oracle import checkpoint as checkpoint_module
from rayk.oracle import draw
from rayk.oracle.checkpoint import MARKER, read_marker, write_checkpoint
from rayk.oracle.trials import TRIALS, trial_key

FAMILY, TRIAL = "qwen3", 1
"""What the search takes for the family's own values."""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that are drawn."""
    drawn: list[int] = []
    original = draw.draw_weights

    def note(*arguments: object, trial: int, **options: object) -> None:
        drawn.append(trial)
        original(*arguments, trial=trial, **options)

    monkeypatch.setattr(draw, "draw_weights", note)
    return drawn


def test_a_known_trial_is_the_only_one_and_an_unfit_one_leads_to_a_search(
    tmp_path: Path, trials: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = write_checkpoint(FAMILY, tmp_path / "known")
    assert trials == [TRIAL]
    key = trial_key(read_marker(known)["parameters"])
    assert TRIALS[key] == TRIAL
    for table, expected in (({}, [0, TRIAL]), ({key: 0}, [0, 0, TRIAL])):
        trials.clear()
        monkeypatch.setattr(checkpoint_module, "TRIALS", table)
        searched = write_checkpoint(FAMILY, tmp_path / f"searched-{len(table)}")
        assert trials == expected, "trial 0 breaks the promise, as it did when it was searched first"
        assert files(searched) == files(known)
        assert MARKER in files(known)


def test_what_decides_about_the_weights_is_in_the_key(tmp_path: Path) -> None:
    parameters = {"format": 1, "family": FAMILY, "seed": 0, "config": {"a": 1}, "dtype": "float32"}
    key = trial_key({**parameters, "max_shard_size": None})
    assert key == trial_key({**parameters, "max_shard_size": "100KB"})
    others = [{"format": 2}, {"family": "llama"}, {"seed": 1}, {"config": {"a": 2}}, {"dtype": "float16"}]
    assert len({key, *(trial_key(parameters | other) for other in others)}) == 6
