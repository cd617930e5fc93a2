"""Remember which engines are likely to hold the KV of a prompt's first blocks."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.sched.policy import PrefixKeys


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
        self._bits: dict[str, int] = {}  # engine -> its bit
        self._engines: dict[int, str] = {}  # bit -> its engine
        self._all_bits = 0

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def num_cached_tokens(self, keys: PrefixKeys) -> dict[str, int]:
        """Count per engine the tokens of the longest prefix that it holds; engines that hold none are left
        out."""
        young, old = self._young, self._old
        holders, num_blocks = self._all_bits, 0
        found: dict[str, int] = {}
        for num_blocks, key in enumerate(keys):
            known = young.get(key) or old.get(key, 0)
            if holders & known != holders:
                self._note(holders & ~known, num_blocks, found)
                holders &= known
                if not holders:
                    return found
        self._note(holders, len(keys), found)
        return found

    def _note(self, holders: int, num_blocks: int, found: dict[str, int]) -> None:
        while holders and num_blocks:
            bit = holders & -holders
            found[self._engines[bit]] = num_blocks * self._block_tokens
            holders ^= bit

    def put(self, keys: PrefixKeys, engines: Sequence[str]) -> None:
        keys = keys[: self._half]
        if len(self._young) + len(keys) > self._half:
            self._old, self._young = self._young, {}
        mask = 0
        for name in engines:
            mask |= self._bit(name)
        young, old = self._young, self._old
        young.update(zip(keys, [(young.get(key) or old.get(key, 0)) | mask for key in keys], strict=True))

    def forget(self, engine: str) -> None:
        """Forget an engine. Costs as much as the index is long: engines do not die often."""
        bit = self._bits.pop(engine, 0)
        if bit:
            del self._engines[bit]
            self._all_bits &= ~bit
            self._young, self._old = (
                {key: mask & ~bit for key, mask in half.items() if mask & ~bit}
                for half in (self._young, self._old)
            )

    def _bit(self, engine: str) -> int:
        """Find the engine's bit; a new one has the least that nobody has."""
        bit = self._bits.get(engine)
        if bit is None:
            bit = self._bits[engine] = ~self._all_bits & (self._all_bits + 1)
            self._engines[bit] = engine
            self._all_bits |= bit
        return bit
