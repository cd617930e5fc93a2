"""Text to token ids and back for a server: prompts, chats, and output that grows token by token."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from rayk.actors.tokenizer import load_tokenizer
from rayk.serve.templates import Templates
from rayk.types.errors import UserError

REPLACEMENT = "\ufffd"
MANY_TOKENS = 8
"""After so many tokens without a whole character, some of their bytes never will be one."""
_LONGEST_CHARACTER = 4
"""One character may be spread over so many tokens: bytes of UTF-8."""
_LEAST_LONGEST = 16
"""A token may stand for so many characters even where no piece is so long: normalisers join some into one."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def reserved_arguments(given: Mapping[str, Any]) -> list[str]:
    """List those of a chat template's arguments that would change more than its variables."""
    from transformers import PreTrainedTokenizerBase

    reserved = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    return sorted(reserved & given.keys())


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as people read it."""

    text: str
    """`bytes:\\xe4\\xbd` where its bytes are no text by themselves, as OpenAI writes them."""
    raw: bytes


class Text:
    """Wraps a checkpoint's tokenizer for any thread: nothing here changes it."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of transformers."""
        self._tokenizer = tokenizer
        self.token = lru_cache(maxsize=65536)(self._token)
        """Gives the TokenText of a token id."""

    @classmethod
    def load(cls, folder: str) -> Text:
        """Load a checkpoint's. Raises CheckpointError where it has none."""
        text = cls(load_tokenizer(folder, "give prompts as token ids"))
        text.warm_up()
        return text

    def warm_up(self) -> None:
        """Look the vocabulary through while nobody waits: large ones take their time."""
        self.encode("a")
        _ = self.special_ids, self.byte_ids, self.num_tokens, self.longest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise, by default with the tokens that the tokenizer begins texts with. Raises UserError."""
        _check_text(text)
        return [int(i) for i in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def fewest_tokens(self, text: str) -> int:
        """Bound the number of a text's tokens from below, without tokenising it: clients may send long texts,
        which take long."""
        return -(-len(text) // self.longest)

    def starts(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Find where each token of the encoded text begins in it, in characters."""
        _check_text(text)
        if not self._tokenizer.is_fast:
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return self.starts_of(ids, skip_special_tokens=True)
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return [int(start) for start, _ in encoded["offset_mapping"]]

    def starts_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Find where each token begins in the decoded text; a token inside a character begins where that
        begins."""
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        found, length = [], 0
        for token in token_ids:
            text = stream.feed(token)
            found.append(length + self.start_in(text, token))
            length += len(text)
        return found

    def start_in(self, text: str, token_id: int) -> int:
        """Find where a token begins in the text that was told with it: after bytes that waited and were no
        character."""
        own = self.token(token_id).text
        return len(text) - len(own) if own and text.endswith(own) else 0

    def conversation(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Write a conversation by the checkpoint's chat template, up to where the answer begins, special
        tokens spelled out. `arguments`: for the template. Raises UserError where there is none, it refuses
        the messages, or it takes more than its process may."""
        if self.templates is None:
            raise UserError(
                "this model has no chat template", mend="use /v1/completions, or add one to its tokenizer"
            )
        return self.templates.render(messages, {**self._tokenizer.special_tokens_map, **arguments})

    @cached_property
    def templates(self) -> Templates | None:
        """Renders the checkpoint's chat template; None where it has none. Raises UserError."""
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        try:
            return Templates(self._tokenizer.get_chat_template())
        except ValueError as error:  # several, and none of them the default
            raise UserError(f"no chat template can be chosen: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # Cleaning up would take back spaces that were text already.
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that decoding leaves out if told to skip special ones."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        found = {i for i, token in added.items() if getattr(token, "special", False)}
        return frozenset(i for i in found | set(self._tokenizer.all_special_ids) if not self.decode([i]))

    def special_tokens(self, spelled: Sequence[str]) -> dict[int, str]:
        """Find those of these texts that are special tokens: id -> text."""
        ids = {int(self._tokenizer.convert_tokens_to_ids(text) or 0): text for text in spelled}
        return {i: text for i, text in ids.items() if i in self.special_ids and self.token(i).text == text}

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Maps token ids to bytes, in vocabularies that spell unknown characters out in such pieces. Decoders
        take a run of them as a whole."""
        pieces = self._tokenizer.get_vocab().items()
        found = ((i, _BYTE_PIECE.fullmatch(piece)) for piece, i in pieces)
        return {i: int(match[1], 16) for i, match in found if match}

    @cached_property
    def num_tokens(self) -> int:
        """Ids from here on are not tokens, and have no text: models may know more than their tokenizer."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @cached_property
    def longest(self) -> int:
        """Bounds the characters of the longest token: byte-level vocabularies spell each byte as one."""
        return max(_LEAST_LONGEST, *map(len, self._tokenizer.get_vocab()))

    def _token(self, token_id: int) -> TokenText:
        raw = self._raw(token_id)
        try:
            return TokenText(raw.decode(), raw)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)

    def _raw(self, token_id: int) -> bytes:
        if token_id in self.byte_ids:
            return bytes([self.byte_ids[token_id]])
        if token_id >= self.num_tokens:
            return b""
        # Behind another token: some tokenizers take a space from the first.
        before = self.decode(self._anchor, skip_special_tokens=False)
        text = self.decode([*self._anchor, token_id], skip_special_tokens=False)[len(before) :]
        if REPLACEMENT not in text:
            return text.encode()
        piece: str = self._tokenizer.convert_ids_to_tokens(token_id)
        if all(c in _BYTE_OF for c in piece):
            return bytes(_BYTE_OF[c] for c in piece)
        return text.encode()

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]


class Detokenizer:
    """Gives output text as it grows. What `feed` and `end` returned, joined, is the decoding of all token
    ids. Text is told once no later token can change it: a token that ends inside a character waits for the
    rest, and so do pieces that stand for single bytes, which decoders take by the run."""

    def __init__(self, text: Text, *, skip_special_tokens: bool, marks: Sequence[str] = ()) -> None:
        """`marks`: special tokens that are told all the same, each as it is spelled."""
        self._text = text
        self._skip = skip_special_tokens
        self._marks = text.special_tokens(marks) if skip_special_tokens else {}
        self._context: list[int] = []
        """The tokens told last: some tokenizers write a token differently at the start of a text."""
        self._before = ""
        """The text of `_context`."""
        self._waiting: list[int] = []
        self._in_run = False
        """Whether the last visible token stands for a byte."""

    def feed(self, token_id: int) -> str:
        """Take a token; returns the text that is certain with it."""
        if token_id in self._marks:
            return self.end() + self._marks[token_id]
        if token_id >= self._text.num_tokens or (self._skip and token_id in self._text.special_ids):
            return ""
        self._waiting.append(token_id)
        self._in_run = token_id in self._text.byte_ids
        if self._in_run:
            return ""
        new = self._new(self._waiting)
        if new and not new.endswith(REPLACEMENT):
            return self._tell(len(self._waiting), new)
        return self._give_up(new) if len(self._waiting) > MANY_TOKENS else ""

    def end(self) -> str:
        """Return what is left, half characters included."""
        return self._tell(len(self._waiting), self._new(self._waiting)) if self._waiting else ""

    def _new(self, token_ids: list[int]) -> str:
        return self._decode([*self._context, *token_ids])[len(self._before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._text.decode(token_ids, skip_special_tokens=self._skip)

    def _tell(self, num_tokens: int, new: str) -> str:
        self._context, self._waiting = self._waiting[:num_tokens], self._waiting[num_tokens:]
        self._before = self._decode(self._context)
        return new

    def _give_up(self, new: str) -> str:
        """Tell of bytes that no later one can complete: the text falls into two where the next token does not
        go on with their character."""
        for keep in range(1, _LONGEST_CHARACTER + 1):
            first = self._new(self._waiting[:-keep])
            if new == first + self._decode(self._waiting[-keep:]):
                return self._tell(len(self._waiting) - keep, first)
        return ""


def _check_text(text: str) -> None:
    """Refuse half surrogate pairs: JSON can spell them, but UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text has half of a surrogate pair at character {error.start}") from None


def _bytes_of_characters() -> dict[str, int]:
    """Return the alphabet that byte-level vocabularies are written in (that of GPT-2): printable characters
    of Latin-1 stand for themselves, other bytes for characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
