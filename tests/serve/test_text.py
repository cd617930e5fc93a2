"""Growing text against the tokenizer's own decoding of all tokens."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.text import MANY_TOKENS, Detokenizer, Text
from rayk.types.errors import UserError

PHRASES = (
    "Grüße aus Köln, déjà vu.",
    "你好，世界。 how many",
    "a 🦙 b 🦙🦙 c",
    "the the  then",
    " x",
    "\ufffd?",
)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """The checkpoints' kind: every byte is a token, and characters are split over tokens."""
    return build_tokenizer(400, adds_bos=True)


@cache
def sentence_pieces() -> PreTrainedTokenizerFast:
    """Llama 2's kind: `▁` for spaces, the first of which is no text, and bytes where there is no piece; a run
    of them that is no UTF-8 becomes as many U+FFFD, valid characters included."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "▁the", "n", "▁how", "x", "▁x", "\ufffd"]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


KINDS = {"bytes": byte_level, "pieces": sentence_pieces}


def grown(text: Text, token_ids: list[int], *, skip: bool) -> list[str]:
    """What every token told, and the end."""
    stream = Detokenizer(text, skip_special_tokens=skip)
    return [*(stream.feed(t) for t in token_ids), stream.end()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_tokenizers_own_text(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    text, size = Text(tokenizer), len(tokenizer)
    phrases = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in PHRASES]
    # Any ids at all, those of no token included; with phrases among them, whole or cut anywhere.
    part = st.one_of(
        st.lists(st.integers(0, size + 3), max_size=12),
        st.builds(
            lambda p, a, n: p[a : a + n], st.sampled_from(phrases), st.integers(0, 9), st.integers(1, 30)
        ),
        st.builds(lambda t, n: [t] * n, st.integers(0, size - 1), st.integers(1, 2 * MANY_TOKENS)),
    )
    token_ids = [t for p in data.draw(st.lists(part, max_size=6)) for t in p]
    assert "".join(grown(text, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(phrases=st.lists(st.tuples(st.sampled_from(PHRASES), st.integers(0, 30)), max_size=4))
def test_marks_are_told_where_they_stand_among_characters_that_are_cut(
    phrases: list[tuple[str, int]],
) -> None:
    tokenizer = byte_level()
    mark, other = tokenizer.eos_token_id, tokenizer.bos_token_id
    token_ids = []
    for phrase, length in phrases:
        token_ids += [*tokenizer(phrase, add_special_tokens=False)["input_ids"][:length], mark, other]
    stream = Detokenizer(Text(tokenizer), skip_special_tokens=True, marks=(tokenizer.eos_token, "no token"))
    told = [*(stream.feed(t) for t in token_ids), stream.end()]
    assert "".join(told) == tokenizer.decode([t for t in token_ids if t != other])
    assert all(
        text.endswith(tokenizer.eos_token) for text, t in zip(told, token_ids, strict=False) if t == mark
    )


@pytest.mark.parametrize("phrase", PHRASES[:4])
def test_a_character_is_told_with_its_last_byte(phrase: str) -> None:
    tokenizer = byte_level()
    token_ids = tokenizer(phrase, add_special_tokens=False)["input_ids"]
    told = grown(Text(tokenizer), token_ids, skip=True)
    for n in range(1, len(token_ids) + 1):
        whole = tokenizer.decode(token_ids[:n], skip_special_tokens=True).rstrip("\ufffd")
        assert "".join(told[:n]) == whole


def test_bytes_that_are_no_character_are_not_waited_for_forever() -> None:
    tokenizer = byte_level()
    byte = tokenizer.convert_tokens_to_ids("ÿ")  # 0xFF stands for itself in the byte alphabet
    assert tokenizer.decode([byte]) == "\ufffd"
    told = grown(Text(tokenizer), [byte] * 100, skip=True)
    assert all(len("".join(told[:n])) >= n - MANY_TOKENS - 1 for n in range(1, 101))
    assert "".join(told) == "\ufffd" * 100


@pytest.mark.parametrize("character", ["é", "你", "🦙"])
def test_what_is_given_up_ends_before_a_character_that_still_comes(character: str) -> None:
    tokenizer = byte_level()
    alphabet = {b: i for i in range(len(tokenizer)) for b in [Text(tokenizer).token(i).raw] if len(b) == 1}
    own = [alphabet[bytes([b])] for b in character.encode()]
    for n in range(3 * MANY_TOKENS):
        token_ids = [alphabet[b"\xff"]] * n + own + [alphabet[b"\xff"]] * n + own[:-1] + own
        told = grown(Text(tokenizer), token_ids, skip=True)
        assert "".join(told) == tokenizer.decode(token_ids)


def test_tokens_have_the_bytes_that_their_text_is_made_of() -> None:
    for tokenizer in (byte_level(), sentence_pieces()):
        text = Text(tokenizer)
        for phrase in PHRASES[:5]:
            token_ids = tokenizer(phrase, add_special_tokens=False)["input_ids"]
            raw = b"".join(text.token(t).raw for t in token_ids)
            assert raw.decode() == phrase, tokenizer.convert_ids_to_tokens(token_ids)
    half = Text(byte_level()).token(byte_level()("你", add_special_tokens=False)["input_ids"][0])
    assert half.text == "bytes:" + "".join(f"\\x{b:02x}" for b in half.raw)


def test_starts_are_where_tokens_begin() -> None:
    tokenizer = byte_level()
    text = Text(tokenizer)
    for phrase in PHRASES[:4]:
        token_ids = tokenizer(phrase)["input_ids"]
        assert token_ids[0] == tokenizer.bos_token_id
        # The characters before a token are those that the tokens before it complete.
        expected = [
            len(tokenizer.decode(token_ids[:n], skip_special_tokens=True).rstrip("\ufffd"))
            for n in range(len(token_ids))
        ]
        assert text.starts_of(token_ids, skip_special_tokens=True) == expected
        assert text.starts(phrase) == expected


def test_a_chat_is_the_templates() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "how many"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    text = Text(tokenizer)
    assert text.encode(text.conversation(messages), add_special_tokens=False) == expected
    with pytest.raises(UserError, match="no chat template"):
        Text(sentence_pieces()).conversation(messages)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_text_has_fewer_tokens_than_was_said(kind: str, data: st.DataObject) -> None:
    text = Text(KINDS[kind]())
    longest = max(text._tokenizer.get_vocab(), key=len)
    told = data.draw(st.text() | st.integers(0, 50).map(lambda n: longest * n))
    assert text.fewest_tokens(told) <= len(text.encode(told, add_special_tokens=False))
    assert text.fewest_tokens("x" * 10**6) > 10**4, "or else it would bound nothing"
