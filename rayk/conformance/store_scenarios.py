"""What is done with a store. A scenario raises CheckFailed if it answers for another key, or not at all.

Each begins with an empty store. `StoreRig.look_up` compares every page that it gets, so a scenario only says
how many blocks must be found, or may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rayk.conformance.host import Raised
from rayk.conformance.pool import STARTING_S, HostPool
from rayk.conformance.rig import CheckFailed, Refused, Settings
from rayk.conformance.store import Adapter, MultimodalItem, StoreKey, pages_of

SEPARATORS = ("", "-", "_", ":", "/", "|", ",", ".", "@", "+", " ", "\0", "\n")
"""Between fields that are joined to one text."""
NUM_THREADS = 4
ROUNDS = 4
PLACEHOLDER = 9
"""Token id of every placeholder."""
HASH = "3b1f5c0e9a7d42864d1e8b2c6f90a357" * 2
"""The hash of some image; others differ from it by one digit or by all."""


class StoreRig:
    """A store in a process of its own, and what was saved there."""

    def __init__(self, pool: HostPool, folder: str, settings: Settings) -> None:
        self._pool = pool
        self._folder = folder
        self._settings = settings
        self._saved: dict[bytes, StoreKey] = {}
        self.block_tokens, self.max_blocks = self._open()
        self._finds_prefixes = pool.facts.finds_prefixes

    def key(self, num_blocks: int = 2, *, first: int = 100, **fields: Any) -> StoreKey:
        """Make a prompt of whole blocks; equal arguments give equal ones."""
        tokens = tuple(range(first, first + num_blocks * self.block_tokens))
        return StoreKey(token_ids=tokens, **fields)

    def save(self, *keys: StoreKey, at_once: bool = False) -> None:
        """Save one key after the other, or each in a thread."""
        self._call("save_pages", [(key, self._pages(key)) for key in keys], at_once)

    def look_up(self, key: StoreKey, *, at_least: int = 0, at_most: int | None = None) -> None:
        """Raise CheckFailed where a page of another key answers, or fewer or more blocks than there should
        be."""
        self._compare(key, self._call("look_up", [key], False)[0], at_least, at_most)

    def look_up_part(self, key: StoreKey, num_blocks: int) -> None:
        """The same, where that many blocks were saved of another prompt that begins alike."""
        self.look_up(key, at_least=num_blocks if self._finds_prefixes else 0, at_most=num_blocks)

    def look_up_at_once(self, keys: Sequence[StoreKey], *, at_least: int = 0) -> None:
        for key, found in zip(keys, self._call("look_up", list(keys), True), strict=True):
            self._compare(key, found, at_least, None)

    def restart(self) -> None:
        """End the store and its process; another one opens the same folder."""
        self._call("close_store")
        self._pool.end_all()
        self._open()

    def end(self) -> None:
        self._call("close_store")

    def _pages(self, key: StoreKey) -> list[bytes]:
        pages = pages_of(key, self.block_tokens)
        for number, page in enumerate(pages, 1):
            self._saved.setdefault(page, key.up_to(number * self.block_tokens))
        return pages

    def _compare(self, key: StoreKey, found: Sequence[bytes], at_least: int, at_most: int | None) -> None:
        expected = pages_of(key, self.block_tokens)
        for number, page in enumerate(found):
            if number >= len(expected) or page != expected[number]:
                whose = self._saved.get(page)
                what = (
                    f"what was saved for {whose}" if whose is not None else f"{page[:8].hex()}, never saved"
                )
                raise CheckFailed(f"asked for {key}, block {number} of the answer is {what}")
        if len(found) < at_least:
            raise CheckFailed(
                f"asked for {key}, {len(found)} blocks were found of {at_least} that were saved"
            )
        if at_most is not None and len(found) > at_most:
            raise CheckFailed(f"asked for {key}, {len(found)} blocks were found though {at_most} were saved")

    def _open(self) -> tuple[int, int | None]:
        """The store may import what it needs only now."""
        found: tuple[int, int | None] = self._call("open_store", self._folder, timeout_s=STARTING_S)
        return found

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        (host,) = self._pool.take(1)
        try:
            return host.call(method, *arguments, timeout_s=timeout_s or self._settings.call_s)
        except Raised as error:
            raise Refused(str(error)) from error


def hits(rig: StoreRig, field: str = "") -> None:
    """Equal keys, made anew, find all; a longer prompt finds the part that it shares. Unequal keys have no
    tokens in common, so that nothing else is tried here."""
    for number, same in enumerate(_variants(rig, field)):
        key = replace(same, token_ids=(6000 + number, *same.token_ids[1:]))
        rig.save(key)
        num_blocks = len(key.token_ids) // rig.block_tokens
        rig.look_up(key, at_least=num_blocks)
        longer = replace(key, token_ids=key.token_ids + rig.key(1, first=7000).token_ids)
        rig.look_up_part(longer, num_blocks)


def tokens(rig: StoreRig) -> None:
    """Prompts of equal length that differ in one place, in their order, or only behind a block."""
    key, size = rig.key(3), rig.block_tokens
    ids = key.token_ids
    rig.save(key)
    for place, shared in ((0, 0), (size - 1, 0), (size, 1), (3 * size - 1, 2)):
        other = replace(key, token_ids=(*ids[:place], ids[place] + 5000, *ids[place + 1 :]))
        rig.look_up_part(other, shared)
    rig.look_up(replace(key, token_ids=ids[::-1]), at_most=0)
    rig.look_up(replace(key, token_ids=ids[size:]), at_most=0)


def apart(rig: StoreRig, field: str) -> None:
    """Keys that differ in one field alone: none answers for another, whichever was there first."""
    variants = _variants(rig, field)
    for saved in variants:
        rig.look_up(saved, at_most=0)
        rig.save(saved)
    # Saved again in the other order: no key may take another's place, or change what it has.
    for key in reversed(variants):
        rig.save(key)
    for key in variants:
        rig.look_up(key)


def hashes_alike(rig: StoreRig, _: str) -> None:
    """Hashes that differ in one digit, wherever it is."""
    hashes = [HASH, *(_other_digit(HASH, place) for place in (0, 4, 8, 16, 32, 48, 56, 60, 63))]
    for name in hashes:
        key = _with_items(rig, (name, 2, 6))
        rig.look_up(key, at_most=0)
        rig.save(key)


def places(rig: StoreRig, _: str) -> None:
    """Equal tokens and hashes at other places, or in another order."""
    a, b = HASH, HASH[::-1]
    for items in (
        [(a, 2, 4)],
        [(a, 3, 4)],
        [(a, 2, 4), (b, 8, 4)],
        [(b, 2, 4), (a, 8, 4)],
        [(a, 2, 4), (a, 8, 4)],
        [(a, 8, 4)],
    ):
        key = _with_items(rig, *items)
        rig.look_up(key, at_most=0)
        rig.save(key)


def later_items(rig: StoreRig, _: str) -> None:
    """Items that begin in the second block, or reach into it."""
    size = rig.block_tokens
    for offset, length in ((size + 1, 4), (size - 2, 4)):
        last = 1000 * offset
        keys = [_with_items(rig, (name, offset, length), last=last) for name in (HASH, HASH[::-1])]
        rig.save(keys[0])
        rig.look_up(keys[1], at_most=offset // size)
        rig.save(keys[1])
        rig.look_up(keys[0])


def mixed(rig: StoreRig, one: str, other: str) -> None:
    """A field that says what another says in another key."""
    for number, name in enumerate(("shared-name", HASH), 1):
        left, right = (_with_field(rig.key(first=1000 * number), field, name) for field in (one, other))
        rig.save(left)
        rig.look_up(right, at_most=0)
        rig.save(right)
        rig.look_up(left)


def joined(rig: StoreRig, one: str, other: str) -> None:
    """Two fields that give the same text when they are joined, with any usual separator."""
    for number, separator in enumerate(SEPARATORS):
        key = rig.key(first=1000 * (number + 1))
        left = _with_field(_with_field(key, one, f"a{separator}b"), other, "c")
        right = _with_field(_with_field(key, one, "a"), other, f"b{separator}c")
        rig.save(left)
        rig.look_up(right, at_most=0)


def joined_tokens(rig: StoreRig, field: str) -> None:
    """A field and the tokens behind it that give the same text, or bytes, as other ones."""
    size = rig.block_tokens
    # These digits may end the field or begin the first token.
    rest = rig.key(2).token_ids[1:]
    rig.save(_with_field(StoreKey(token_ids=(12, *rest)), field, "a"))
    rig.look_up(_with_field(StoreKey(token_ids=(2, *rest)), field, "a1"), at_most=0)
    # The field says what a whole first block says, so a first block behind it looks like a second one.
    plain = StoreKey(token_ids=(97,) * size + rig.key(2).token_ids)
    rig.save(plain, _with_field(plain, field, "x"))
    for text in ("a\0\0\0", "\0\0\0a", "a\0\0\0\0\0\0\0", "\0\0\0\0\0\0\0a", "a"):
        rig.look_up(_with_field(rig.key(2), field, text * size), at_most=0)
    for separator in SEPARATORS[1:]:
        written = separator.join(["97"] * size)
        for text in (written, written + separator, f"x{separator}{written}"):
            rig.look_up(_with_field(rig.key(2), field, text), at_most=0)


def prefixes(rig: StoreRig, field: str) -> None:
    """Equal tokens under two values of a field, one prompt longer than the other: each finds its own."""
    one, other = _variants(rig, field, num_blocks=5)[-2:]
    size = rig.block_tokens
    short = replace(other, token_ids=other.token_ids[: 2 * size])
    rig.save(one)
    rig.look_up(other, at_most=0)
    rig.save(short)
    rig.look_up_part(other, 2)
    rig.look_up_part(replace(one, token_ids=one.token_ids[: 3 * size]), 3)
    rig.look_up(one, at_least=5)


def eviction(rig: StoreRig) -> None:
    """Save more than fits: what was given up is not found, or as it was; saved again it is found."""
    assert rig.max_blocks is not None, "asked before"
    keys = [rig.key(first=1000 * number) for number in range(1, rig.max_blocks + 2)]
    for key in keys:
        rig.save(key)
        rig.look_up(key, at_least=2)
    for key in keys:
        rig.look_up(key)
    rig.save(keys[0])
    rig.look_up(keys[0], at_least=2)
    for key in reversed(keys):
        rig.look_up(key)


def threads(rig: StoreRig) -> None:
    """Some prompts saved at once, and looked up at once: each finds its own."""
    for number in range(ROUNDS):
        keys = [rig.key(first=1000 * (NUM_THREADS * number + i + 1)) for i in range(NUM_THREADS)]
        rig.save(*keys, at_once=True)
        rig.look_up_at_once(keys, at_least=2 if (rig.max_blocks or 2 * NUM_THREADS) >= 2 * NUM_THREADS else 0)


def restart(rig: StoreRig, field: str = "") -> None:
    """After a restart an equal key finds all; one that differs in a field finds nothing."""
    *others, saved = _variants(rig, field)
    rig.save(saved)
    rig.restart()
    for other in others:
        rig.look_up(other, at_most=0)
    rig.look_up(saved, at_least=2)


def _variants(rig: StoreRig, field: str, num_blocks: int = 2) -> list[StoreKey]:
    """List keys of equal tokens that differ in one field alone; without a field, in a token."""
    if field == "multimodal":
        plain = _with_items(rig, num_blocks=num_blocks, placeholders=(2, 8))
        items = [MultimodalItem(hash=h, offset=2, length=6) for h in (HASH, HASH[::-1])]
        return [plain, *(replace(plain, multimodal=(item,)) for item in items)]
    key = rig.key(num_blocks)
    if not field:
        return [replace(key, token_ids=(5000, *key.token_ids[1:])), key]
    if field.startswith("adapter_"):
        part, first = field.removeprefix("adapter_"), Adapter(name="same-name")
        values = {"path": "adapters/two", "revision": "2"}
        return [replace(key, adapter=adapter) for adapter in (first, replace(first, **{part: values[part]}))]
    texts = ("a", "b", "ab")
    # Every key has a revision, so that of `key` is a value, too.
    return [key, *(_with_field(key, field, text) for text in texts)]


def _with_field(key: StoreKey, field: str, text: str) -> StoreKey:
    if field == "adapter":
        return replace(key, adapter=Adapter(name=text, path=f"adapters/{text}"))
    if field == "multimodal":
        return replace(key, multimodal=(MultimodalItem(hash=text, offset=0, length=4),))
    assert field in ("salt", "revision"), field
    return replace(key, salt=text) if field == "salt" else replace(key, revision=text)


def _with_items(
    rig: StoreRig,
    *items: tuple[str, int, int],
    num_blocks: int = 2,
    placeholders: tuple[int, int] = (0, 0),
    last: int = 0,
) -> StoreKey:
    """Make a prompt with items (hash, offset, length) that ends with token `last`. With items, all other
    tokens are placeholders, so that tokens do not tell where items lie."""
    ids = [*rig.key(num_blocks).token_ids[:-1], last]
    start, stop = (0, len(ids) - 1) if items else placeholders
    ids[start:stop] = [PLACEHOLDER] * (stop - start)
    made = tuple(MultimodalItem(hash=h, offset=offset, length=length) for h, offset, length in items)
    return StoreKey(token_ids=tuple(ids), multimodal=made)


def _other_digit(text: str, place: int) -> str:
    return text[:place] + ("1" if text[place] != "1" else "2") + text[place + 1 :]


STORE_SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(hits, tokens, apart, hashes_alike, places, later_items, mixed, joined, joined_tokens),
        *(prefixes, eviction, threads, restart),
    )
}
