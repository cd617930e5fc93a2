"""Stop strings against the definition: the first token after which the decoded text contains one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.actors.tokenizer import load_decoder
from rayk.engine.build import ThreadEngine
from rayk.engine.stopping import Decode, LazyDecoder, StopStrings
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.tokenizer import build_tokenizer
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, UserError
from rayk.types.request import FinishReason
from tests.pd import HANG_S, Pair, make_request

TEXTS = ("Grüße aus Köln, déjà vu.", "你好，世界。 how many", "a 🦙 b 🦙🦙 c", "the the  then", "x")


def byte_level() -> tuple[Decode, Callable[[str], list[int]]]:
    """The checkpoints' kind: every byte is a token, and characters are split over tokens."""
    tokenizer = build_tokenizer(300, adds_bos=False)
    return (
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        lambda text: tokenizer(text)["input_ids"],
    )


def sentence_pieces() -> tuple[Decode, Callable[[str], list[int]]]:
    """Llama 2's kind: `▁` for spaces, the first of which is no text, and bytes where there is no piece."""
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "n", "▁how", "x", "▁x"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def encode(text: str) -> list[int]:
        """Any division into tokens will do: spaces and bytes."""
        return [i for c in text for i in ([257] if c == " " else [1 + b for b in c.encode()])]

    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), encode


def merged_bytes() -> tuple[Decode, Callable[[str], list[int]]]:
    """Tokens of 5 bytes, wherever these cut characters: text and half a character in one token."""
    tokens = [bytes([b]) for b in range(256)]

    def encode(text: str) -> list[int]:
        data = text.encode()
        parts = [data[at : at + 5] for at in range(0, len(data), 5)]
        tokens.extend(p for p in parts if p not in tokens)
        return [tokens.index(p) for p in parts]

    return lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace"), encode


KINDS = {"bytes": byte_level(), "pieces": sentence_pieces(), "merged": merged_bytes()}


def first_stop(decode: Decode, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str] | None:
    """(number of tokens, the string): the whole text decoded again after every token."""
    for n in range(1, len(token_ids) + 1):
        # A character that is still to come shows as U+FFFD, which is not text yet.
        text = decode(token_ids[:n]).rstrip("\ufffd")
        ends = [(text.find(s) + len(s), i) for i, s in enumerate(stop) if s in text]
        if ends:
            return n, stop[min(ends)[1]]
    return None


def watched(decode: Decode, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str] | None:
    watch = StopStrings(decode, stop)
    for n, token in enumerate(token_ids, start=1):
        found = watch.feed(token)
        if found is not None:
            return n, found
    return None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_stop_string_is_found_with_the_token_that_completes_it(kind: str, data: st.DataObject) -> None:
    """Texts with characters of 1 to 4 bytes, special tokens and stray bytes between them."""
    decode, encode = KINDS[kind]
    stray = st.lists(st.integers(0, {"pieces": 262, "bytes": 299, "merged": 255}[kind]), max_size=3)
    parts = data.draw(st.lists(st.sampled_from(TEXTS).map(encode) | stray, min_size=1, max_size=6))
    token_ids = [t for part in parts for t in part]
    text = decode(token_ids)
    stop = data.draw(st.lists(st.text("the🦙ü,. x好", min_size=1, max_size=3), max_size=1))
    for _ in range(data.draw(st.integers(0 if stop else 1, 3))):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        stop.append(text[start : start + data.draw(st.integers(1, 9))].replace("\ufffd", "") or "the")
    assert watched(decode, token_ids, stop) == first_stop(decode, token_ids, stop)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_character_counts_when_its_last_byte_is_there(kind: str) -> None:
    decode, encode = KINDS[kind]
    ids = encode("ab🦙c")
    llama = next(n for n in range(len(ids)) if "🦙" in decode(ids[:n]))
    assert watched(decode, ids, ["🦙"]) == (llama, "🦙")
    assert watched(decode, ids, ["b"]) == (2, "b")
    assert llama - 2 >= 3, "the character is split over tokens"


def test_of_several_the_one_that_ends_first_wins() -> None:
    decode, encode = KINDS["bytes"]
    ids = encode("one two three")
    assert watched(decode, ids, ["three", "wo t", "two"]) == watched(decode, ids, ["two"])
    whole = StopStrings(decode, ["ab", "b"])
    assert [whole.feed(t) for t in (encode("a")[0], encode("b")[0])] == [None, "ab"]


def test_the_decoder_is_loaded_once_and_only_when_asked() -> None:
    loads: list[int] = []

    def load() -> Decode:
        loads.append(1)
        return lambda ids: ""

    lazy = LazyDecoder(load)
    assert loads == []
    assert lazy.get() is lazy.get()
    assert loads == [1]

    def fail() -> Decode:
        loads.append(1)
        raise CheckpointError("no tokenizer")

    lazy = LazyDecoder(fail)
    for _ in range(3):
        with pytest.raises(CheckpointError):
            lazy.get()
    assert loads == [1, 1]


def test_a_damaged_tokenizer_is_a_bad_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    for damage in ("{", "{}", '{"version": "1.0", "model": {"type": "None"}}'):
        (tmp_path / "model" / "tokenizer.json").write_text(damage)
        with pytest.raises(CheckpointError):
            load_decoder(str(tmp_path / "model"))


class Model:
    """A checkpoint, its decoder, and what it says to a prompt by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.load = partial(load_decoder, str(path))
        self.decode = self.load()
        self.prompt: list[int] = read_marker(path)["probes"][1]["prompt"]
        with self.engine() as engine:
            (done,) = engine.generate([make_request("r", self.prompt, 20, **self.sampling)])
        self.output = done.token_ids
        self.text = self.decode(self.output)

    sampling = {"temperature": 1.5, "seed": 4}  # noqa: RUF012 - a constant
    """Varied text."""

    def engine(self, **options: Any) -> ThreadEngine:
        config = EngineConfig(model=str(self.path), num_blocks=64)
        return ThreadEngine(config, timeout_s=HANG_S, **({"load_decoder": self.load} | options))

    def request(self, *stop: str) -> Any:
        return make_request("r", self.prompt, 20, stop=stop, **self.sampling)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Model:
    return Model(checkpoint("qwen3"))


def some_stops(model: Model) -> list[tuple[str, ...]]:
    clean = [p for p in model.text.split("\ufffd") if p]
    return [
        (max(clean, key=len)[-3:],),
        (clean[-1], clean[0]),
        tuple(c[:2] for c in clean),
        ("this is not in it", clean[len(clean) // 2]),
        ("nor this",),
    ]


@pytest.mark.parametrize("tp", [None, (1, 2), (2, 1)], ids=["aggregated", "p1 d2", "p2 d1"])
def test_requests_end_at_their_stop_strings(model: Model, tp: tuple[int, int] | None) -> None:
    for stop in some_stops(model):
        expected = first_stop(model.decode, model.output, stop)
        if tp is None:
            with model.engine() as engine:
                (done,) = engine.generate([model.request(*stop)])
        else:
            with Pair.open(model.path, tp=tp, load_decoder=model.load) as pair:
                (done,) = pair.complete([model.request(*stop)])
                pair.check_all_free()
        assert done.error is None
        if expected is None:
            assert (done.token_ids, done.finish_reason, done.stop_reason) == (
                model.output,
                FinishReason.LENGTH,
                None,
            )
        else:
            assert done.token_ids == model.output[: expected[0]]
            assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, expected[1])


def test_a_stop_string_may_span_the_hand_over(model: Model) -> None:
    """Its beginning is in P's token, its end in D's first."""
    parts = [model.decode([t]) for t in model.output]
    assert "\ufffd" not in parts[0] + parts[1]
    stop = parts[0][-1] + parts[1][0]
    with Pair.open(model.path, load_decoder=model.load) as pair:
        (done,) = pair.complete([model.request(stop)])
        assert done.payload is not None, "it was handed over"
        assert done.token_ids == model.output[:2]
        assert done.stop_reason == stop


def test_a_request_that_stops_with_its_first_token_stays_at_p(model: Model) -> None:
    stop = model.decode(model.output[:1])[-1]
    with Pair.open(model.path, load_decoder=model.load) as pair:
        (done,) = pair.complete([model.request(stop)])
        assert done.payload is None
        assert (done.token_ids, done.stop_reason) == (model.output[:1], stop)
        assert pair.p.engine.leader.manager.leases == ()
        pair.check_all_free()


def test_a_preempted_request_goes_on_watching(model: Model) -> None:
    """Recomputed tokens are not fed twice."""
    stop = next(c for c in model.text[8:].split("\ufffd") if c)
    expected = first_stop(model.decode, model.output, (stop,))
    assert expected is not None
    config = EngineConfig(model=str(model.path), num_blocks=16, block_size=8, max_batch_tokens=16)
    with ThreadEngine(config, load_decoder=model.load) as engine:
        requests = [make_request(f"r{i}", model.prompt, 20, stop=(stop,), **model.sampling) for i in range(3)]
        done = engine.generate(requests)
        assert engine.leader.scheduler.num_preemptions > 0
    assert [d.token_ids for d in done] == [model.output[: expected[0]]] * 3


def test_without_a_tokenizer_stop_strings_are_refused_and_the_engine_lives(
    model: Model, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model.path, bare, ignore=shutil.ignore_patterns("*tokenizer*", "chat_template*"))
    for options in ({"load_decoder": None}, {"load_decoder": partial(load_decoder, str(bare))}):
        with model.engine(**options) as engine:
            (done,) = engine.generate([model.request("x")])
            assert isinstance(done.error, UserError)
            assert "tokenizer" in str(done.error)
            assert "stop_token_ids" in done.error.mend
            (done,) = engine.generate([model.request()])
            assert done.token_ids == model.output
