"""The block manager with groups that ride: the same blocks as without, and prefixes known to lack drafts."""

from __future__ import annotations

import pytest

from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.manager import KVCacheManager, LocalPrefix
from rayk.kv.riders import add_riders
from tests.kv.brute import full, keyed, mamba2, mla, sliding

MODEL = group_layers(keyed({0: full(), 1: sliding(6)}))
DRAFTED = add_riders(MODEL, keyed({10: full(kv_heads=1), 11: mla()}))
TOKENS = list(range(100, 140))


def manager(groups: tuple[KVCacheGroup, ...] = DRAFTED, num_blocks: int = 60) -> KVCacheManager:
    return KVCacheManager(groups, num_blocks, prefix_caching=True)


def compute(made: KVCacheManager, name: str, num_tokens: int, tokens: list[int] = TOKENS) -> None:
    """A request computes so many tokens of its own."""
    assert made.extend(name, num_tokens) is not None
    made.remember(name, tokens, num_tokens)


def test_a_drafter_changes_no_block_and_no_update():
    plain, drafted = manager(MODEL), manager()
    for made in (plain, drafted):
        made.check_integrity()
    for step in range(1, 40, 3):
        assert plain.extend("a", step) == drafted.extend("a", step)
        for made in (plain, drafted):
            made.remember("a", TOKENS, step)
            made.trim("a", step)
            made.check_integrity()
        assert plain.block_tables("a") == drafted.block_tables("a")
        assert plain.num_missing_blocks("a", 40) == drafted.num_missing_blocks("a", 40)
        assert plain.max_request_blocks(40, 8) == drafted.max_request_blocks(40, 8)
        assert plain.max_new_blocks(step) == drafted.max_new_blocks(step)
        assert plain.num_live_blocks(step) == drafted.num_live_blocks(step)
        assert plain.next_change("a") == drafted.next_change("a")
    own = drafted.block_tables("a")
    assert len(own) == len(MODEL)
    carrier = DRAFTED[-1].rides
    assert drafted.group_tables("a") == (*own, own[carrier], own[carrier])
    assert plain.group_tables("a") == own
    assert plain.count_blocks() == drafted.count_blocks()
    assert drafted.block_sizes == plain.block_sizes
    assert (plain.has_riders, drafted.has_riders) == (False, True)


def test_computed_prefixes_have_drafts():
    made = manager()
    compute(made, "a", 30)
    made.free("a")
    assert made.match("b", TOKENS, 30) == 28
    assert made.num_undrafted_tokens == 0
    assert made.first_draft_row("b") == 0


def test_what_arrived_without_drafts_is_found_by_nobody_who_drafts():
    made = manager()
    tables = made.reserve_live("a", 30)
    assert tables is not None
    assert len(tables) == len(DRAFTED)
    made.lack_drafts("a", 30)
    assert made.first_draft_row("a") == 30
    made.remember("a", TOKENS, 30)
    compute(made, "a", 40)
    made.free("a")
    assert made.match("b", TOKENS, 40) == 0
    assert made.num_undrafted_tokens == 40
    found = made.find_local_prefix("c", TOKENS, 40, 4)
    assert (found.num_tokens, found.drafts) == (0, True)
    found = made.find_local_prefix("c", TOKENS, 40, 4, drafts=False)
    assert (found.num_tokens, found.drafts) == (40, False)
    made.reserve_live("c", 40, found)
    assert made.first_draft_row("c") == 40
    made.free("c")
    assert made.find_prefix("d", TOKENS, 40).num_tokens == 0
    assert made.find_prefix("d", TOKENS, 40, drafts=False).num_tokens == 40
    # Who computes it leaves blocks that have both, in place of those.
    compute(made, "e", 36)
    made.free("e")
    assert made.match("f", TOKENS, 40) == 36
    assert made.first_draft_row("f") == 0
    made.free("f")
    made.check_integrity()


def test_rows_behind_those_that_lack_do_not_count():
    """20 of 32 rows came without drafts; the others of the model were computed here."""
    made = manager()
    made.reserve_live("a", 20)
    made.lack_drafts("a", 20)
    made.remember("a", TOKENS, 20)
    compute(made, "a", 32)
    assert made.first_draft_row("a") == 32, "nobody computes rows behind those that lack"
    tables = made.share_lease("a", "lease", 32)
    assert tables is not None
    carrier = DRAFTED[-1].rides
    assert tables[carrier] == tables[-1] == made.group_tables("a")[carrier]
    assert len(tables) == len(DRAFTED)
    assert made.first_draft_row("lease") == 32
    made.free("a")
    assert made.first_draft_row("lease") == 32
    made.release("lease")
    made.check_integrity()
    found = made.find_prefix("b", TOKENS, 32, drafts=False)
    taken = made.adopt("b", found)
    assert taken is not None
    assert len(taken) == len(DRAFTED)
    assert made.first_draft_row("b") == 32
    made.free("b")


def test_a_prefix_elsewhere_may_lack_drafts():
    """The first lane is the window's owner's, the last the drafter's: 40 rows of it are only there."""
    made = manager()
    lanes = len(made.groups[DRAFTED[-1].rides].lanes)
    has_all: dict[int, tuple[int, ...]] = {}

    def elsewhere(group: int, key: bytes) -> tuple[int, ...] | None:
        del key
        return has_all.get(group, ())

    assert made.find_prefix("a", TOKENS, 40, elsewhere=elsewhere).num_tokens == 40
    lacking = (*[0] * (lanes - 1), 40)
    has_all[DRAFTED[-1].rides] = lacking
    assert made.find_prefix("a", TOKENS, 40, elsewhere=elsewhere).num_tokens == 0
    found = made.find_prefix("a", TOKENS, 40, elsewhere=elsewhere, drafts=False)
    assert found.num_tokens == 40
    assert made.adopt("a", found) is not None
    made.remember("a", TOKENS, 40)
    assert made.first_draft_row("a") == 40
    made.free("a")
    assert made.match("b", TOKENS, 40) == 0


@pytest.mark.parametrize(
    "groups", [MODEL, group_layers(keyed({0: (full(), mamba2())}))], ids=["window", "states"]
)
def test_without_a_drafter_nothing_lacks(groups: tuple[KVCacheGroup, ...]):
    made = manager(groups)
    made.reserve_live("a", 20, LocalPrefix(0, tuple(() for _ in groups), False))
    made.lack_drafts("a", 20)
    assert made.first_draft_row("a") == 0
    made.remember("a", TOKENS, 20)
    made.free("a")
    made.check_integrity()


def test_rows_that_look_ahead_are_found_by_the_token_behind_them():
    made = KVCacheManager(DRAFTED, 60, prefix_caching=True, looks_ahead=True)
    compute(made, "a", 30)
    made.free("a")
    assert made.match("b", TOKENS, 30) == 28
    made.free("b")
    other = [*TOKENS[:28], 7, *TOKENS[29:]]
    assert made.match("c", other, 30) == 24, "the last row of the seventh block is of another token"
    assert made.extend("c", 30) is not None
    made.remember("c", other, 30)
    made.free("c")
    assert made.match("d", other, 30) == 28
    made.free("d")
    assert made.match("e", TOKENS, 30) == 28, "both are kept"
    made.free("e")
    assert made.find_local_prefix("f", TOKENS[:28], 28, 4).num_tokens == 24, "what comes next is not known"
    made.check_integrity()


def test_a_block_is_named_once_the_token_behind_it_is_known():
    made = KVCacheManager(DRAFTED, 60, prefix_caching=True, looks_ahead=True)
    compute(made, "a", 28, TOKENS[:28])
    assert made.next_change("a") <= 28
    made.remember("a", TOKENS[:29], 28)
    made.free("a")
    assert made.match("b", TOKENS, 30) == 28


def test_drafts_that_were_computed_later_make_blocks_whole():
    """Those that have names without them, those that came from elsewhere, and those that are to get names."""
    made = manager()
    made.reserve_live("a", 30)
    made.lack_drafts("a", 30)
    made.remember("a", TOKENS, 30)
    compute(made, "a", 33)
    assert made.match("b", TOKENS, 40) == 0
    made.have_drafts("a")
    assert made.first_draft_row("a") == 0
    made.remember("a", TOKENS, 33)
    compute(made, "a", 40)
    made.check_integrity()
    made.free("a")
    assert made.match("b", TOKENS, 40) == 40
    assert made.first_draft_row("b") == 0
    made.free("b")
    made.check_integrity()


def test_drafts_of_blocks_from_elsewhere_can_be_computed_later():
    made = manager()
    carrier = DRAFTED[-1].rides
    lacking = (*[0] * (len(made.groups[carrier].lanes) - 1), 40)

    def elsewhere(group: int, key: bytes) -> tuple[int, ...]:
        del key
        return lacking if group == carrier else ()

    found = made.find_prefix("a", TOKENS, 40, elsewhere=elsewhere, drafts=False)
    assert made.adopt("a", found) is not None
    made.remember("a", TOKENS, 40)
    made.have_drafts("a")
    made.remember("a", TOKENS, 40)
    made.free("a")
    assert made.match("b", TOKENS, 40) == 40
    made.free("b")
    made.check_integrity()
