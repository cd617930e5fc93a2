"""Which engines are likely to hold the KV of a prompt's first blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PrefixKeys = list[int]
"""Of a prompt's prefixes of one block, two blocks and so on: equal for equal prefixes."""


class PrefixIndex:
    """Prefixes of prompts and the engines that were given them, the least recently used forgotten first.

    A prefix is never forgotten before a longer one that begins with it: so whoever is known to hold a prefix
    is known to hold every shorter one, and a lookup ends where nobody is left.
    """

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        """`max_blocks`: so many prefixes are remembered; 0: none, and lookups cost nothing."""
        assert block_tokens > 0, block_tokens
        assert max_blocks >= 0, max_blocks
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._holders: OrderedDict[int, int] = OrderedDict()
        """Prefix -> one bit for each engine that holds it, the last used prefix last."""
        self._bits: dict[str, int] = {}
        """Engine -> its bit."""
        self._engines: dict[int, str] = {}
        """Bit -> its engine."""
        self._all_bits = 0

    def __len__(self) -> int:
        return len(self._holders)

    def keys(self, prompt_token_ids: Sequence[int]) -> PrefixKeys:
        """Of all full blocks of a prompt.

        Python's own hash of ints: it is the same in every process, and fast. Two prefixes that share a key
        cost a detour, not a wrong token: engines compare tokens.
        """
        size, key = self._block_tokens, 0
        found: PrefixKeys = []
        if not self._max_blocks:
            return found
        for start in range(0, len(prompt_token_ids) - size + 1, size):
            key = hash((key, prompt_token_ids[start : start + size]))
            found.append(key)
        return found

    def num_held_tokens(self, keys: PrefixKeys) -> dict[str, int]:
        """Engine -> tokens of the longest prefix that it holds; engines that hold none are left out."""
        holders, num_tokens = self._all_bits, 0
        found: dict[str, int] = {}
        for key in keys:
            still = holders & self._holders.get(key, 0)
            if num_tokens:
                self._note(holders & ~still, num_tokens, found)
            holders = still
            if not holders:
                return found
            num_tokens += self._block_tokens
        if num_tokens:
            self._note(holders, num_tokens, found)
        return found

    def _note(self, holders: int, num_tokens: int, found: dict[str, int]) -> None:
        """The engines of these bits hold so much."""
        while holders:
            bit = holders & -holders
            found[self._engines[bit]] = num_tokens
            holders ^= bit

    def put(self, keys: PrefixKeys, engines: Sequence[str]) -> None:
        """These engines will hold these prefixes."""
        mask, holders = 0, self._holders
        for name in engines:
            mask |= self._bit(name)
        for key in reversed(keys):
            known = holders.get(key)
            if known is None:
                holders[key] = mask
                continue
            if known & mask != mask:
                holders[key] = known | mask
            holders.move_to_end(key)
        while len(holders) > self._max_blocks:
            holders.popitem(last=False)

    def forget(self, engine: str) -> None:
        """It holds nothing any more. Costs as much as the index is long: engines do not die often."""
        bit = self._bits.pop(engine, 0)
        if bit:
            del self._engines[bit]
            self._all_bits &= ~bit
            left = ((key, mask & ~bit) for key, mask in self._holders.items())
            self._holders = OrderedDict((key, mask) for key, mask in left if mask)

    def _bit(self, engine: str) -> int:
        """The engine's bit; a new one has the least that nobody has."""
        bit = self._bits.get(engine)
        if bit is None:
            bit = self._bits[engine] = ~self._all_bits & (self._all_bits + 1)
            self._engines[bit] = engine
            self._all_bits |= bit
        return bit
