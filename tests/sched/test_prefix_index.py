"""Who holds which prefix, against all prompts that were given out, compared token by token."""

from __future__ import annotations

import itertools
import random
from hashlib import blake2b

import pytest

from rayk.sched.policies import POLICIES
from rayk.sched.policy import EngineLoad, EngineSet, PolicySettings, PrefixKeys
from rayk.sched.prefix_index import PrefixIndex
from rayk.sched.request_describer import RequestDescriber, new_secret, prefix_keys

BLOCK = 4
NAMES = ("p0", "p1", "d0", "d1", "d2")
SECRET = b"of these tests"
Tokens = tuple[int, ...]


def keys_of(prompt: Tokens) -> PrefixKeys:
    return prefix_keys(prompt, BLOCK, SECRET)


def num_cached(index: PrefixIndex, prompt: Tokens) -> dict[str, int]:
    """Count the tokens that each engine holds."""
    found = index.look_up(keys_of(prompt), len(prompt))
    names = [name for held in found for name in held.engines]
    assert len(set(names)) == len(names) == sum(len(held.engines) for held in found)
    return {name: held.num_tokens for held in found for name in held.engines}


def blocks_of(prompt: Tokens) -> list[Tokens]:
    """Its prefixes of whole blocks, the shortest first."""
    return [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]


class Remembered:
    """The same by brute force: all prefixes with the engines they were ever given to, and in which turn of
    the halves each was used last."""

    def __init__(self, max_blocks: int) -> None:
        self.half = max_blocks // 2
        self.turn = 0
        self.entries: dict[Tokens, tuple[int, set[str]]] = {}

    def put(self, prompt: Tokens, engines: list[str]) -> None:
        prefixes = blocks_of(prompt)[: self.half]
        if sum(turn == self.turn for turn, _ in self.entries.values()) + len(prefixes) > self.half:
            self.turn += 1
            self.entries = {p: e for p, e in self.entries.items() if e[0] >= self.turn - 1}
        for prefix in prefixes:
            _, known = self.entries.get(prefix, (0, set()))
            self.entries[prefix] = self.turn, known | set(engines)

    def forget(self, engine: str) -> None:
        self.entries = {p: (t, h - {engine}) for p, (t, h) in self.entries.items() if h - {engine}}

    def num_cached(self, prompt: Tokens) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in NAMES:
            lengths = [len(p) for p, (_, h) in self.entries.items() if name in h and prompt[: len(p)] == p]
            if lengths:
                found[name] = max(lengths)
        return found


def some_prompt(draw: random.Random) -> Tokens:
    """Few tokens, so that many prompts share a beginning."""
    return tuple(draw.choices((1, 2), weights=(8, 1), k=draw.randint(1, 23)))


@pytest.mark.parametrize("seed", range(12))
def test_the_index_knows_what_a_search_through_all_prompts_finds(seed: int) -> None:
    draw = random.Random(seed)
    max_blocks = draw.choice([0, 3, 12, 25, 10_000])
    index, brute = PrefixIndex(BLOCK, max_blocks), Remembered(max_blocks)
    for _ in range(400):
        prompt = some_prompt(draw)
        if draw.random() < 0.03:
            name = draw.choice(NAMES)
            index.forget(name)
            brute.forget(name)
        elif draw.random() < 0.9:
            engines = draw.sample(NAMES, draw.randint(1, 2))
            index.put(keys_of(prompt), engines)
            brute.put(prompt, engines)
            num_held = num_cached(index, prompt)
            num_tokens = min(len(blocks_of(prompt)), max_blocks // 2) * BLOCK
            assert all(num_held.get(name, 0) >= num_tokens for name in engines), "it was given them just now"
        assert len(index) == len(brute.entries) <= max_blocks
        asked = some_prompt(draw)
        assert num_cached(index, asked) == brute.num_cached(asked)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_used_last_is_remembered(seed: int) -> None:
    """Of prompts without a common beginning: the last ones, half as many blocks as there is room for."""
    draw, max_blocks, longest = random.Random(seed), 60, 7
    index, given = PrefixIndex(BLOCK, max_blocks), []
    for i in range(200):
        prompt = (i,) * (draw.randint(1, longest) * BLOCK)
        index.put(keys_of(prompt), ["p0"])
        given.append(prompt)
        num_blocks = 0
        for other in reversed(given):
            num_blocks += len(other) // BLOCK
            if num_blocks > max_blocks // 2 - longest:
                break
            assert num_cached(index, other) == {"p0": len(other)}
        assert len(index) <= max_blocks


def test_keys_are_digests_of_all_tokens_up_to_a_block_s_end() -> None:
    draw = random.Random(0)
    prompt = tuple(draw.randrange(2**31) for _ in range(3 * BLOCK + 3))
    expected = []
    for prefix in blocks_of(prompt):
        content = b"".join(token.to_bytes(4, "little") for token in prefix)
        expected.append(int.from_bytes(blake2b(content, digest_size=8, key=SECRET).digest(), "little"))
    assert keys_of(prompt) == tuple(expected)
    assert keys_of(list(prompt[: 2 * BLOCK])) == tuple(expected[:2])  # type: ignore[arg-type]
    assert keys_of(prompt[: BLOCK - 1]) == ()


def test_keys_are_those_of_one_prefix_and_one_secret() -> None:
    seen: dict[int, Tokens] = {}
    for prompt in itertools.product((0, 1, 256, 65_536), repeat=4):
        for key, end in zip(prefix_keys(prompt, 2, SECRET), (2, 4), strict=True):
            assert seen.setdefault(key, prompt[:end]) == prompt[:end]
    assert len(seen) == 4**2 + 4**4
    others = {key for prompt in itertools.product((0, 1), repeat=4) for key in prefix_keys(prompt, 2, b"?")}
    assert not others & set(seen), "whoever does not know the secret cannot tell a key"
    for salt in ("", "a", "ab"):
        salted = {
            key
            for prompt in itertools.product((0, 1), repeat=4)
            for key in prefix_keys(prompt, 2, SECRET, salt)
        }
        assert len(salted) == 2**2 + 2**4
        assert not salted & seen.keys()
        seen |= dict.fromkeys(salted, ())
    assert new_secret() != new_secret()


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_are_digested_for_policies_that_heed_it(policy: str) -> None:
    """An index of no blocks, as without prefix caches, needs no keys either."""
    prompt = tuple(range(150))
    settings = PolicySettings(block_tokens=64)
    describer = RequestDescriber(policy, settings, SECRET)
    asked = describer.describe("r", prompt, max_tokens=9, session="s")
    assert (asked.request_id, asked.num_prompt_tokens, asked.max_tokens, asked.session) == ("r", 150, 9, "s")
    heeds_prefixes = "index_blocks" in POLICIES[policy].heeds
    assert asked.prefix_keys == (prefix_keys(prompt, 64, SECRET) if heeds_prefixes else ())
    salted = describer.describe("r", prompt, cache_salt="a").prefix_keys
    assert salted == (prefix_keys(prompt, 64, SECRET, "a") if heeds_prefixes else ())
    without = PolicySettings(block_tokens=64, index_blocks=0)
    assert RequestDescriber(policy, without, SECRET).describe("r", prompt).prefix_keys == ()


def test_an_index_of_nothing_holds_nothing() -> None:
    index = PrefixIndex(BLOCK, 0)
    prompt = tuple(range(100))
    index.put(keys_of(prompt), ["p0"])
    assert num_cached(index, prompt) == {}
    assert len(index) == 0


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    index, prompt = PrefixIndex(BLOCK, 100), tuple(range(8))
    for i in range(500):
        index.put(keys_of(prompt), [f"engine{i}", "stays"])
        assert num_cached(index, prompt) == {f"engine{i}": 8, "stays": 8}
        index.forget(f"engine{i}")
    assert num_cached(index, prompt) == {"stays": 8}
    assert max(index._young.values()) < 4, "bits are used again"


def test_a_set_s_holders_are_those_of_its_engines_whenever_these_came() -> None:
    """Sets share engines and outlive some of them."""
    draw, index = random.Random(0), PrefixIndex(BLOCK, 10_000)
    sets = [EngineSet(EngineLoad(name=n) for n in draw.sample(NAMES, k=3)) for _ in range(6)]
    prompts = [some_prompt(draw) + (1,) * BLOCK for _ in range(8)]
    for _ in range(300):
        if draw.random() < 0.2:
            index.forget(draw.choice(NAMES))
        index.put(keys_of(draw.choice(prompts)), [draw.choice(NAMES)])
        engines = draw.choice(sets)
        found = index.look_up(keys_of(draw.choice(prompts)), draw.randint(0, 30))
        among = index.among(engines, found)
        expected = {name: num for num, names in found for name in names if name in engines.places}
        assert {name: num for num, names in among for name in names} == expected
        assert [name for name in NAMES for _, names in among if name in names] == sorted(
            expected, key=NAMES.index
        )
        assert sum(len(names) for _, names in among) == len(expected)
