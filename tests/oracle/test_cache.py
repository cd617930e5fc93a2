"""Answers kept between runs are used where all is equal, and only files that are whole and the user's own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.models.fingerprint import whole_weights_digest
from rayk.oracle import cache, files, reference
from rayk.oracle.cache import AnswerStore
from rayk.oracle.files import checkpoint_hash
from rayk.oracle.quantised import KVRounding
from rayk.oracle.reference import Reference
from rayk.types import noted_hashes
from tests.markers import thorough

PROMPT = [3, 1, 4, 1, 5]
QUESTION = {"ask": "generate", "prompt": PROMPT}
ANSWER = {"token_ids": [1, 2], "logprobs": [-0.1, float("-inf")]}


def quiet(folder: Path, **options: Any) -> AnswerStore:
    return AnswerStore(folder, warn=lambda _: None, **options)


def asked(path: Path, store: AnswerStore, **options: Any) -> tuple[Any, ...]:
    """Ask the reference both kinds of questions."""
    asking = Reference(path, answers=store, **options)
    return asking.generate([PROMPT], 4), asking.caches(PROMPT), asking.kept_since


def test_a_second_run_asks_nothing(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back is equal to the bit, without the model."""
    path, first = checkpoint("qwen3_next"), quiet(tmp_path)  # attention, and states of one row
    outputs, caches, since = asked(path, first)
    assert (since, first.num_kept, first.num_computed) == (None, 0, 2)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    second = quiet(tmp_path)
    again, kept, since = asked(path, second)
    assert again == outputs
    assert [set(of) for of in kept] == [set(of) for of in caches]
    assert all(torch.equal(kept[i][name], t) for i, of in enumerate(caches) for name, t in of.items())
    assert since is not None
    assert (second.num_kept, second.num_computed, second.refused) == (2, 0, [])
    with pytest.raises(AssertionError, match="the model was loaded"):
        asked(path, quiet(tmp_path, fresh=True))


@thorough
def test_a_second_start_reads_no_weights(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to find the answers nor to tell the weights of a folder of pages."""
    path = checkpoint("qwen3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 1 << 16)
    monkeypatch.setattr(noted_hashes, "NOTED_BYTES", 0)
    monkeypatch.setattr(noted_hashes, "SETTLED_NS", -(10**12))
    first = checkpoint_hash(path, whole=True), whole_weights_digest(path)
    noted_hashes._known.clear()
    monkeypatch.setattr(hashlib, "file_digest", None)
    monkeypatch.setattr("rayk.models.fingerprint.WHOLE_BYTES", None)
    assert (checkpoint_hash(path, whole=True), whole_weights_digest(path)) == first
    _other_weight(Path(shutil.copytree(path, tmp_path / "copy")))
    with pytest.raises(TypeError):
        checkpoint_hash(tmp_path / "copy", whole=True)
    with pytest.raises(TypeError):
        whole_weights_digest(tmp_path / "copy")


def _other_weight(folder: Path) -> None:
    """Change a byte amid the weights, and nothing else that a file system tells at once."""
    file = next(folder.glob("*.safetensors"))
    before, data = file.stat(), bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _other_config(folder: Path) -> None:
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 7}))


def _version_of(package: str) -> Callable[[pytest.MonkeyPatch], None]:
    version = importlib.metadata.version

    def change(patch: pytest.MonkeyPatch) -> None:
        told = lambda name: "99" if name == package else version(name)  # noqa: E731
        patch.setattr(importlib.metadata, "version", told)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_other_weight, id="weights"),
        pytest.param(_other_config, id="generation_config"),
        *(
            pytest.param(_version_of(n), id=n)
            for n in ("rayk", "torch", "transformers", "compressed-tensors")
        ),
        pytest.param(lambda patch: patch.setattr(reference, "code_digest", lambda: "x"), id="code"),
        pytest.param({"dtype": "bfloat16"}, id="dtype"),
        pytest.param({"weights_dtype": "bfloat16"}, id="weights_dtype"),
        pytest.param({"rounding": KVRounding("fp8")}, id="kv_dtype"),
        pytest.param([3, 1, 4, 1, 6], id="prompt"),
        pytest.param({"ignore_eos": True}, id="ignore_eos"),
        pytest.param({"stop_token_ids": [9]}, id="stops"),
        pytest.param({"max_tokens": 5}, id="max_tokens"),
    ],
)
def test_whatever_differs_is_asked_anew(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    folder, kept = tmp_path / "model", tmp_path / "kept"
    shutil.copytree(checkpoint("qwen3"), folder)
    # As with files of some GB, which other hashes sample at both ends.
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 1 << 16)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 1 << 10)
    prompt, options = PROMPT, dict[str, Any]()
    settings: dict[str, Any] = {"max_tokens": 4}
    Reference(folder, answers=quiet(kept)).generate([prompt], **settings)
    unchanged = quiet(kept)
    Reference(folder, answers=unchanged).generate([prompt], **settings)
    assert (unchanged.num_kept, unchanged.num_computed) == (1, 0)
    if change in (_other_weight, _other_config):
        change(folder)
    elif callable(change):
        change(monkeypatch)
    elif isinstance(change, list):
        prompt = change
    else:
        settings |= {name: value for name, value in change.items() if name in ("ignore_eos", "max_tokens")}
        settings |= {name: value for name, value in change.items() if name == "stop_token_ids"}
        options = {name: value for name, value in change.items() if name not in settings}
    store = quiet(kept)
    Reference(folder, answers=store, **options).generate([prompt], **settings)
    assert (store.num_kept, store.num_computed, store.refused) == (0, 1, [])


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _edit(change: Callable[[dict[str, Any]], object], *, sealed: bool) -> Callable[[Path], object]:
    """Change what a file says, and where `sealed` make its hash right again."""

    def edit(path: Path) -> None:
        stored = json.loads(path.read_text())
        change(stored)
        if sealed:
            stored["digest"] = cache._digest({n: v for n, v in stored.items() if n != "digest"})
        path.write_text(json.dumps(stored))

    return edit


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-9]), id="cut"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\x80\x04K\x01."), id="pickle"),
        pytest.param(lambda path: path.write_text("[" * 100_000), id="deep"),
        pytest.param(lambda path: path.write_text("[1]"), id="list"),
        pytest.param(_edit(lambda s: s["answer"].update(token_ids=[8]), sealed=False), id="other answer"),
        pytest.param(_edit(lambda s: s.update(computed="1999"), sealed=False), id="other time"),
        pytest.param(_edit(lambda s: s["question"].update(ask="score"), sealed=True), id="other question"),
        pytest.param(_edit(lambda s: s.update(answer=[1]), sealed=True), id="answer of another kind"),
        pytest.param(lambda path: path.chmod(0o666), id="others may write"),
        pytest.param(lambda path: _replace(path, Path.mkdir), id="folder"),
        pytest.param(lambda path: _replace(path, os.mkfifo), id="pipe"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_told_of_and_not_trusted(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    quiet(tmp_path).put(QUESTION, ANSWER)
    (path,) = tmp_path.iterdir()
    kept = quiet(tmp_path).get(QUESTION)
    assert kept is not None
    assert kept.answer == ANSWER
    spoil(path)
    told: list[str] = []
    store = AnswerStore(tmp_path, warn=told.append)
    assert store.get(QUESTION) is None
    assert store.refused == told
    assert "is not trusted, and its answer is computed anew" in told[0]
    assert str(path) in told[0]
    if path.is_dir():
        path.rmdir()
    store.put(QUESTION, ANSWER)
    mended = quiet(tmp_path).get(QUESTION)
    assert mended is not None
    assert mended.answer == ANSWER


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_not_trusted(tmp_path: Path) -> None:
    quiet(tmp_path).put(QUESTION, ANSWER)
    (path,) = tmp_path.iterdir()
    os.chown(path, 65534, 65534)
    assert quiet(tmp_path).get(QUESTION) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damaged_tensors_are_not_trusted(tmp_path: Path, damage: str) -> None:
    layers = [{"k": torch.arange(6.0).reshape(1, 2, 3).transpose(1, 2)}, {}]
    quiet(tmp_path).put_tensors(QUESTION, layers)
    found = quiet(tmp_path).get_tensors(QUESTION)
    assert found is not None
    assert torch.equal(found[0][0]["k"], layers[0]["k"])
    assert found[0][1] == {}
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data if damage == "flip" else data[:-4])
    if damage == "missing":
        path.unlink()
    store = quiet(tmp_path)
    assert store.get_tensors(QUESTION) is None
    # One that is gone was evicted.
    assert (store.num_kept, len(store.refused)) == (0, damage != "missing")


def test_fresh_finds_what_it_computed_itself_and_leaves_it_to_later_runs(tmp_path: Path) -> None:
    quiet(tmp_path).put(QUESTION, ANSWER)
    fresh = quiet(tmp_path, fresh=True)
    assert fresh.get(QUESTION) is None
    other = ANSWER | {"token_ids": [7]}
    fresh.put(QUESTION, other)
    found = fresh.get(QUESTION)
    assert found is not None
    assert (found.answer, found.since) == (other, None)
    later = quiet(tmp_path).get(QUESTION)
    assert later is not None
    assert later.answer == other
    assert later.since is not None


def test_a_full_store_gives_up_what_was_used_least_lately(tmp_path: Path) -> None:
    store = quiet(tmp_path, limit_bytes=10_000)
    questions = [{"ask": i} for i in range(20)]
    for age, question in enumerate(questions[:3]):
        store.put(question, {"text": "x" * 2_000})
        path = tmp_path / f"{cache._name(question)}.json"
        os.utime(path, (1_000 + age, 1_000 + age))
    assert store.get(questions[0]) is not None  # and so it is not the oldest any more
    for question in questions[3:6]:
        store.put(question, {"text": "x" * 2_000})
    assert store.size()[1] <= 10_000
    assert [quiet(tmp_path).get(q) is not None for q in questions[:3]] == [True, False, False]
    store.put({"ask": "large"}, {"text": "x" * 9_000})
    assert quiet(tmp_path).get({"ask": "large"}) is None


def test_tensors_that_are_used_stay(tmp_path: Path) -> None:
    layers = [{"k": torch.zeros(1, 1, 1)}]
    quiet(tmp_path).put_tensors(QUESTION, layers)
    for path in tmp_path.iterdir():
        os.utime(path, (1_000, 1_000))
    assert quiet(tmp_path).get_tensors(QUESTION) is not None
    assert all(path.stat().st_mtime > 1_000 for path in tmp_path.iterdir())


def test_a_disk_that_takes_nothing_is_told_of_and_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = quiet(tmp_path / "file")
    store.put(QUESTION, ANSWER)
    store.put_tensors(QUESTION, [{"k": torch.zeros(1, 1, 1)}])
    assert store.num_computed == 2
    assert "cannot be kept" in store.refused[0]


def test_readers_never_see_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies before the end leaves the old answer, and no other file."""
    quiet(tmp_path).put(QUESTION, ANSWER)

    def die(self: Path, target: Path) -> None:
        raise OSError("killed")

    monkeypatch.setattr(Path, "replace", die)
    store = quiet(tmp_path)
    store.put(QUESTION, {"token_ids": []})
    assert len(store.refused) == 1
    assert len(list(tmp_path.iterdir())) == 1
    found = quiet(tmp_path).get(QUESTION)
    assert found is not None
    assert found.answer == ANSWER
