"""Remember which engines are likely to hold the KV of a prompt's first blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from rayk.sched.policy import EngineSet, PrefixKeys


class Holders(Collection[str]):
    """Names of engines that hold a prefix: a view on the index, good until it forgets an
    engine."""

    __slots__ = ("_index", "mask")

    def __init__(self, index: PrefixIndex, mask: int) -> None:
        """Take one bit of `mask` for each engine, as the index numbers them."""
        self._index = index
        self.mask = mask

    def __contains__(self, engine: object) -> bool:
        return self.mask & self._index.bits.get(engine, 0) != 0  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __iter__(self) -> Iterator[str]:
        mask, engines = self.mask, self._index.engines
        while mask:
            bit = mask & -mask
            yield engines[bit]
            mask ^= bit


class HeldPrefix(NamedTuple):
    """Engines that hold equally much of a prompt."""

    num_tokens: int
    engines: Holders


def num_held(prompt: Sequence[HeldPrefix], engine: str) -> int:
    """Count the tokens of a prompt that an engine holds."""
    for num_tokens, engines in prompt:
        if engine in engines:
            return num_tokens
    return 0


class PrefixIndex:
    """Prefixes of prompts, by their keys, and the engines that were given them.

    Whatever was used lately is in the young half; once that is full it becomes the old half, and what was
    there and not used since is forgotten, all at once: so nothing is moved about for its age alone, which
    would cost more than all else. A prefix is never forgotten before a longer one that begins with it, and
    whoever is known to hold a prefix is known to hold every shorter one: a lookup ends where nobody is left.
    """

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        """Take `max_blocks`, the most prefixes that are remembered, at least the half used last; below 2
        there are none."""
        assert block_tokens > 0, block_tokens
        assert max_blocks >= 0, max_blocks
        self._block_tokens = block_tokens
        self._half = max_blocks // 2
        self._young: dict[int, int] = {}  # prefix -> one bit for each engine that holds it
        self._old: dict[int, int] = {}  # likewise; where both halves know a prefix the young one is right
        self.bits: dict[str, int] = {}
        """Engine -> its bit."""
        self.engines: dict[int, str] = {}
        """Bit -> its engine."""
        self._all_bits = 0
        self._masks: WeakKeyDictionary[EngineSet, int] = WeakKeyDictionary()
        """Bits of a set's engines, of those that have one."""

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def look_up(self, keys: PrefixKeys, most: int) -> list[HeldPrefix]:
        """Find who holds how many of a prompt's first `most` tokens: each engine once, with the longest
        prefix that it holds; engines that hold none are left out."""
        young, old = self._young, self._old
        holders, num_blocks, last = self._all_bits, 0, -1
        found: list[HeldPrefix] = []
        for num_blocks, key in enumerate(keys):
            known = young.get(key) or old.get(key, 0)
            if known == last:
                continue  # mostly the very number of the prefix before
            last = known
            if holders & known != holders:
                self._note(holders & ~known, num_blocks, most, found)
                holders &= known
                if not holders:
                    return found
        self._note(holders, len(keys), most, found)
        return found

    def _note(self, holders: int, num_blocks: int, most: int, found: list[HeldPrefix]) -> None:
        if holders and num_blocks:
            found.append(HeldPrefix(min(num_blocks * self._block_tokens, most), Holders(self, holders)))

    def among(self, engines: EngineSet, prompt: Sequence[HeldPrefix]) -> list[HeldPrefix]:
        """Keep of those that hold a prompt the ones in a set."""
        mask = self._mask_of(engines)
        found = ((num_tokens, held.mask & mask) for num_tokens, held in prompt)
        return [HeldPrefix(num_tokens, Holders(self, here)) for num_tokens, here in found if here]

    def _mask_of(self, engines: EngineSet) -> int:
        mask = self._masks.get(engines)
        if mask is None:
            mask = 0
            for engine in engines:
                mask |= self.bits.get(engine.name, 0)
            self._masks[engines] = mask
        return mask

    def put(self, keys: PrefixKeys, engines: Sequence[str]) -> None:
        keys = keys[: self._half]
        if len(self._young) + len(keys) > self._half:
            self._old, self._young = self._young, {}
        mask = 0
        for name in engines:
            mask |= self._bit(name)
        young, old = self._young, self._old
        last, both = -1, mask
        for num_known, key in enumerate(keys):
            known = young.get(key) or old.get(key, 0)
            if not known:
                young.update(dict.fromkeys(keys[num_known:], mask))
                return
            if known != last:  # one number for all: where there are many engines it is large
                last, both = known, known | mask
            young[key] = both

    def forget(self, engine: str) -> None:
        """Forget an engine. Costs as much as the index is long: engines do not die often."""
        bit = self.bits.pop(engine, 0)
        if bit:
            del self.engines[bit]
            self._all_bits &= ~bit
            self._masks.clear()
            self._young, self._old = (
                {key: mask & ~bit for key, mask in half.items() if mask & ~bit}
                for half in (self._young, self._old)
            )

    def _bit(self, engine: str) -> int:
        """Find the engine's bit; a new one has the least that nobody has."""
        bit = self.bits.get(engine)
        if bit is None:
            bit = self.bits[engine] = ~self._all_bits & (self._all_bits + 1)
            self.engines[bit] = engine
            self._all_bits |= bit
            for engines in list(self._masks):
                if engine in engines.places:
                    self._masks[engines] |= bit
        return bit
