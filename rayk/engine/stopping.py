"""Stop strings: does a request's text contain one of them yet?

The engine knows token ids; whoever owns it supplies the text decoder of the model's tokenizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rayk.types.errors import UserError

# token ids to visible text: no special tokens, U+FFFD for bytes that are no UTF-8
Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"


class LazyDecoder:
    """Loads a text decoder when a request first needs one. Any thread."""

    def __init__(self, load: Callable[[], Decode] | None) -> None:
        """Take `load`, which raises UserError where the model has no tokenizer; None: there is none here."""
        self._load = load
        self._decode: Decode | None = None
        self._error: UserError | None = None
        self._loading = threading.Lock()

    def get(self) -> Decode:
        """Return the decoder. Raises UserError, at once when it did before."""
        with self._loading:
            if self._decode is None and self._error is None:
                self._try()
            if self._error is not None:
                raise self._error
            assert self._decode is not None
            return self._decode

    def _try(self) -> None:
        if self._load is None:
            mend = "give stop_token_ids"
            self._error = UserError("stop strings need a tokenizer, and this engine has none", mend=mend)
            return
        try:
            self._decode = self._load()
        except UserError as error:
            self._error = error


class StopStrings:
    """Watches one request's output. Implements sched.batching.StopText.

    Its text is decode(all its output token ids). Only the tokens since the last settled text are decoded
    again, with the ones before them as context: some tokenizers write a token in one way at the start of a
    text and in another inside. A character whose bytes have not all come is not looked at yet, but what
    comes before it in the same token is.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        assert stop, "nothing to watch for"
        assert all(stop), "an empty stop string is in every text"
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []  # context, then what is not settled
        self._num_context = 0
        self._tail = ""  # the end of the settled text: where a stop string may have begun

    def feed(self, token_id: int) -> str | None:
        """Find the stop string that ends first in the text with this token (of several, the one given
        first)."""
        self._token_ids.append(token_id)
        context = self._decode(self._token_ids[: self._num_context])
        new = self._decode(self._token_ids)[len(context) :]
        text = self._tail + new.rstrip(REPLACEMENT)
        ends = [(text.find(s) + len(s), s) for s in self._stop if s in text]
        if new and not new.endswith(REPLACEMENT):
            self._token_ids = self._token_ids[self._num_context :]
            self._num_context = len(self._token_ids)
            longest = max(len(s) for s in self._stop)
            self._tail = text[max(0, len(text) - longest + 1) :]
        return min(ends, key=lambda e: e[0])[1] if ends else None
