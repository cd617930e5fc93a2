"""Who holds which prefix, against all prompts ever given out, compared token by token."""

from __future__ import annotations

import random

import pytest

from rayk.sched.prefix_index import PrefixIndex

BLOCK = 4
NAMES = ("p0", "p1", "d0", "d1", "d2")


def blocks_of(prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Its prefixes of whole blocks, the shortest first."""
    return [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]


class Remembered:
    """The same by brute force: every prefix with its holders, the last used last."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.entries: list[tuple[tuple[int, ...], set[str]]] = []

    def put(self, prompt: tuple[int, ...], engines: list[str]) -> None:
        for prefix in reversed(blocks_of(prompt)):
            holders = next((h for p, h in self.entries if p == prefix), set())
            self.entries = [e for e in self.entries if e[0] != prefix]
            self.entries.append((prefix, holders | set(engines)))
        self.entries = self.entries[max(0, len(self.entries) - self.max_blocks) :]

    def forget(self, engine: str) -> None:
        self.entries = [(p, h - {engine}) for p, h in self.entries if h - {engine}]

    def held(self, prompt: tuple[int, ...]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in NAMES:
            lengths = [len(p) for p, h in self.entries if name in h and prompt[: len(p)] == p]
            if lengths:
                found[name] = max(lengths)
        return found


def some_prompt(draw: random.Random) -> tuple[int, ...]:
    """Few tokens, so that many prompts share a beginning."""
    return tuple(draw.choices((1, 2), weights=(8, 1), k=draw.randint(1, 23)))


@pytest.mark.parametrize("seed", range(12))
def test_the_index_knows_what_a_search_through_all_prompts_finds(seed: int) -> None:
    draw = random.Random(seed)
    max_blocks = draw.choice([3, 12, 10_000])
    index, brute = PrefixIndex(BLOCK, max_blocks), Remembered(max_blocks)
    for _ in range(400):
        prompt = some_prompt(draw)
        event = draw.choice(
            ["put", "put", "put", "look", "look", "forget"] if draw.random() < 0.2 else ["put"]
        )
        if event == "put":
            engines = draw.sample(NAMES, draw.randint(1, 2))
            index.put(index.keys(prompt), engines)
            brute.put(prompt, engines)
        elif event == "forget":
            name = draw.choice(NAMES)
            index.forget(name)
            brute.forget(name)
        assert len(index) == len(brute.entries) <= max_blocks
        asked = some_prompt(draw)
        assert index.num_held_tokens(index.keys(asked)) == brute.held(asked)


def test_keys_are_those_of_whole_blocks_and_depend_on_all_before() -> None:
    index = PrefixIndex(BLOCK, 100)
    prompt = tuple(range(11))
    keys = index.keys(prompt)
    assert len(keys) == 2
    assert index.keys(prompt[:8]) == keys
    assert index.keys(prompt[:7]) == keys[:1]
    moved = index.keys((99, *prompt[1:]))
    assert not set(moved) & set(keys), "the second block is the same, its prefix is not"


def test_an_index_of_nothing_holds_nothing() -> None:
    index = PrefixIndex(BLOCK, 0)
    keys = index.keys(tuple(range(100)))
    index.put(keys, ["p0"])
    assert index.num_held_tokens(keys) == {}
    assert len(index) == 0


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    index = PrefixIndex(BLOCK, 100)
    keys = index.keys(tuple(range(8)))
    for i in range(500):
        index.put(keys, [f"engine{i}", "stays"])
        assert index.num_held_tokens(keys) == {f"engine{i}": 8, "stays": 8}
        index.forget(f"engine{i}")
    assert index.num_held_tokens(keys) == {"stays": 8}
    assert max(index._holders.values()) < 4, "bits are used again"
