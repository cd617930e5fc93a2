"""Engines that would read the same bytes differently are refused, field by field."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.types.errors import HandshakeMismatch
from tests.handover.cases import Model
from tests.pd import Pair, make_request


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def changed_copy(model: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    copy = folder / "changed"
    shutil.copytree(model, copy)
    change(copy)
    return copy


def replace_in_config(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / "config.json").read_text()
        assert text.count(old) == 1, text
        (folder / "config.json").write_text(text.replace(old, new))

    return change


def flip_last_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda t: f"{t[0]}to{t[1]}")
@pytest.mark.parametrize(
    ("family", "change", "fields"),
    [
        ("qwen3", flip_last_weight, ["model.weights"]),
        ("qwen3", replace_in_config('"rope_theta": 10000.0', '"rope_theta": 10001.0'), ["model.rope"]),
        (
            "mistral",
            replace_in_config('"sliding_window": 50', '"sliding_window": 51'),
            ["model.windows", "layers 0-3.attention.live_rows(1000000)"],
        ),
        (
            "qwen3",
            replace_in_config('"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06'),
            ["model.norm"],
        ),
    ],
    ids=["weights", "rope", "window", "eps"],
)
def test_unlike_models_are_refused_field_by_field(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    change: Callable[[Path], None],
    fields: list[str],
    tp: tuple[int, int],
) -> None:
    path = checkpoint(family)
    other = changed_copy(path, tmp_path, change)
    with Pair.open((path, other), tp=tp, connect=False) as pair:
        with pytest.raises(HandshakeMismatch) as caught:
            pair.connect()
        assert [name for name, _, _ in caught.value.fields] == fields
        for name, producer, consumer in caught.value.fields:
            assert producer != consumer
            assert name in str(caught.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_ticket_of_an_engine_that_is_not_connected(qwen3: Model, tp: int) -> None:
    with Pair.open(qwen3.path, tp=(1, tp), connect=False) as pair:
        request = make_request("r", qwen3.prompts[1])
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, HandshakeMismatch)
        assert "not connected" in str(done.error)
        pair.connect()
        assert pair.decode(request, prefilled).token_ids == qwen3.expected[1][1:]
        pair.check_all_free()
