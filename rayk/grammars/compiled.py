"""Grammars compiled for one vocabulary, and where outputs stand in them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rayk.grammars.descriptions import check_start, in_words, library, make_matcher
from rayk.types.errors import UserError
from rayk.types.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_KEPT = 64
"""Compiled grammars that are kept, those used last."""
_BITS = 32  # of a mask's word


class OutputGrammar:
    """Says where one output stands in its grammar. Belongs to one thread.

    It is a function of the grammar and the tokens fed so far: nothing else is remembered, and nothing drawn.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.error: str | None = None
        """Why the output cannot go on: the grammar came to be too complex, or a token did not fit it."""

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next: int32 [ceil(vocab / 32)], bit t % 32 of word t // 32 for
        token t. All may where there is an error, which ends the request."""
        words = np.full(-(-self._vocab_size // _BITS), -1, np.int32)
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._has_error():
                words[:] = -1
        return words

    def masks(self, draft: Sequence[int]) -> list[np.ndarray]:
        """Return `mask` before each token of a draft and behind the last one, if it were the output's. Behind
        one that does not fit, or completes the output, nothing is looked at: all may follow."""
        masks = [self.mask()]
        ahead = OutputGrammar(self._matcher.deep_copy(), self._vocab_size) if draft else self
        for token in draft:
            fits = masks[-1][token // _BITS] >> (token % _BITS) & 1
            if not fits or ahead.feed(token):
                break
            masks.append(ahead.mask())
        anything = np.full_like(masks[0], -1)
        return masks + [anything] * (1 + len(draft) - len(masks))

    def feed(self, token_id: int) -> bool:
        """Take the output's next token; tells whether the output is complete with it: nothing may follow."""
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        return not self._has_error() and self._matcher.is_stopped()

    def num_taken(self, token_ids: Sequence[int]) -> int:
        """Count the first of these tokens that the output could take, each after a look at what may come, as
        where it is sampled by itself; one at least, whose error then shows when it is fed."""
        ahead = OutputGrammar(self._matcher.deep_copy(), self._vocab_size)
        for index, token in enumerate(token_ids):
            ahead.mask()
            is_complete = ahead.feed(token)
            if ahead.error is not None:
                return max(1, index)
            if is_complete:
                break
        return len(token_ids)

    def _has_error(self) -> bool:
        if self.error is None and self._matcher.is_error():
            self.error = in_words(self._matcher.get_error())
        return self.error is not None


class Grammars:
    """Compiles descriptions for a model's vocabulary, and keeps some. Any thread.

    The library's mask of a place where only one text can follow has the tokens in which the tokenizer itself
    writes that text; elsewhere it has every token that fits.
    """

    def __init__(
        self, load: Callable[[], str] | None, vocab_size: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        """`load` gives the model's tokenizer in the form of tokenizer.json, or raises UserError; None: there
        is none here. `vocab_size`: of the logits. `eos_token_ids` end an output where its text may end."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputs, LLMatcher | UserError] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> LLMatcher:
        """Return the description compiled, at once where it was before. Raises UserError."""
        with self._lock:  # held for moments: an engine's thread comes by
            found = self._kept.get(wanted)
        found = self._compile(wanted) if found is None else found
        with self._lock:
            self._kept[wanted] = found
            self._kept.move_to_end(wanted)
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        if isinstance(found, UserError):
            raise found
        return found

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher | UserError:
        try:
            matcher = make_matcher(wanted, self._vocabulary())
            check_start(wanted, matcher)
        except UserError as error:
            return error
        return matcher

    def begin(self, wanted: StructuredOutputs, output_token_ids: Sequence[int] = ()) -> OutputGrammar:
        """Make the grammar of one output that has these tokens already. Raises UserError."""
        output = OutputGrammar(self.compile(wanted).deep_copy(), self._vocab_size)
        for token in output_token_ids:
            output.feed(token)
        return output

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary()
            return self._tokenizer

    def _load_vocabulary(self) -> LLTokenizer:
        if self._load is None:
            raise UserError("structured output needs a tokenizer, and this engine has none")
        llguidance, tokenizer_json = library(), self._load()
        try:
            tokenizer: LLTokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
            )
        except Exception as error:  # noqa: BLE001 - whatever the library makes of a tokenizer
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"structured output cannot use the model's tokenizer: {problem}") from error
        return tokenizer
