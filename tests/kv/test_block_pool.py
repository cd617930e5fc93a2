"""The pool against a set of free ids, and its preference for consecutive ones by enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.kv.block_pool import NULL_BLOCK, BlockPool
from rayk.types.errors import OutOfBlocks

EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def best(free: set[int], num_blocks: int, after: int | None) -> list[int]:
    """What the pool promises: the ids following `after`, else the lowest run, else the lowest ids."""
    starts = ([] if after is None else [after + 1]) + sorted(free)
    for start in starts:
        run = list(range(start, start + num_blocks))
        if free.issuperset(run):
            return run
    return sorted(free)[:num_blocks]


@EXAMPLES
@given(data=st.data(), num_blocks=st.integers(2, 24))
def test_allocation_prefers_consecutive_ids(data: st.DataObject, num_blocks: int):
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks - 1)
    free = data.draw(st.sets(st.integers(1, num_blocks - 1)))
    pool.free(free)
    wanted = data.draw(st.integers(0, num_blocks))
    after = data.draw(st.none() | st.integers(0, num_blocks))
    assert pool.num_free_blocks == len(free)
    if wanted > len(free):
        with pytest.raises(OutOfBlocks) as caught:
            pool.allocate(wanted, after)
        assert (caught.value.needed_blocks, caught.value.free_blocks) == (wanted, len(free))
        assert pool.num_free_blocks == len(free)
    else:
        taken = pool.allocate(wanted, after)
        assert taken == best(free, wanted, after)
        assert pool.num_free_blocks == len(free) - wanted
        assert all(type(b) is int for b in taken)
    pool.check_integrity()


@EXAMPLES
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(1, 9)), max_size=40))
def test_references_are_counted(steps: list[tuple[str, int]]):
    pool = BlockPool(10)
    taken_blocks: dict[int, int] = {}
    for action, number in steps:
        if action == "allocate" and number <= 9 - len(taken_blocks):
            taken = pool.allocate(number)
            assert not set(taken) & set(taken_blocks)
            assert NULL_BLOCK not in taken
            taken_blocks |= dict.fromkeys(taken, 1)
        elif action == "share" and number in taken_blocks:
            pool.share([number])
            taken_blocks[number] += 1
        elif action == "free" and number in taken_blocks:
            pool.free([NULL_BLOCK, number, NULL_BLOCK])
            taken_blocks[number] -= 1
            if taken_blocks[number] == 0:
                del taken_blocks[number]
        pool.check_integrity()
        assert [pool.references(b) for b in range(10)] == [taken_blocks.get(b, 0) for b in range(10)]
        assert pool.num_free_blocks == 9 - len(taken_blocks)


def test_a_block_freed_twice_is_a_bug():
    pool = BlockPool(4)
    taken = pool.allocate(2)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken)
    with pytest.raises(AssertionError, match="is not in use"):
        pool.share(taken)


def test_the_null_block_is_nobodys():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    pool.free([NULL_BLOCK])
    assert pool.num_free_blocks == 0
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


@pytest.mark.parametrize("damage", ["null freed", "null held", "free and held", "leaked", "negative"])
def test_integrity_check_sees_damage(damage: str):
    pool = BlockPool(4)
    pool.allocate(1)
    pool.check_integrity()
    if damage == "null freed":
        pool._blank.add(NULL_BLOCK, 1)
    elif damage == "null held":
        pool._references[NULL_BLOCK] = 1
    elif damage == "free and held":
        pool._blank.add(1, 1)
    elif damage == "leaked":
        pool._blank.remove(2, 1)
    else:
        pool._references[1] = -1
    with pytest.raises(AssertionError):
        pool.check_integrity()


@EXAMPLES
@given(data=st.data(), num_blocks=st.integers(2, 40))
def test_kept_blocks_are_lost_last_and_the_oldest_first(data: st.DataObject, num_blocks: int):
    """A model that lists free blocks in the order in which they were given back."""
    lost: list[int] = []
    pool = BlockPool(num_blocks, lost.extend)
    spare = num_blocks // 16
    taken_blocks = set(pool.allocate(num_blocks - 1))
    kept: list[int] = []
    """Free ones with content, those given back longest ago first."""
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["free", "allocate", "find"]))
        if action == "free" and taken_blocks:
            given = data.draw(st.lists(st.sampled_from(sorted(taken_blocks)), unique=True))
            named = [b for b in given if data.draw(st.booleans()) or pool.is_kept(b)]
            for block in named:
                pool.keep(block)
            pool.free(given)
            taken_blocks -= set(given)
            kept += [b for b in reversed(given) if b in named]
        elif action == "find" and kept:
            block = data.draw(st.sampled_from(kept))
            pool.share([block])
            kept.remove(block)
            taken_blocks.add(block)
        elif action == "allocate":
            wanted = data.draw(st.integers(0, pool.num_free_blocks))
            num_blank = pool.num_free_blocks - len(kept)
            lost.clear()
            taken = pool.allocate(wanted)
            may_go = kept[: wanted - num_blank + spare] if wanted > num_blank else []
            assert set(lost) == set(taken) & set(kept) <= set(may_go)
            assert not any(pool.is_kept(block) for block in taken)
            kept = [b for b in kept if b not in taken]
            taken_blocks |= set(taken)
        pool.check_integrity()
        assert pool.num_free_blocks == num_blocks - 1 - len(taken_blocks)


def test_blocks_of_an_old_request_are_taken_as_a_run():
    """Both requests' blocks are kept; a new one gets those of the first, which were given back before."""
    pool = BlockPool(15)
    first, second = pool.allocate(7), pool.allocate(7)
    for block in first + second:
        pool.keep(block)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(3) == first[-3:]
    assert pool.allocate(4) == first[:4]
    assert pool.allocate(1) == [second[-1]]
