"""Blocks for states after drafts: each row's own, and none of the pool's."""

from __future__ import annotations

import numpy as np

from rayk.kv.scratch import plan_scratch
from tests.kv.brute import full
from tests.sched.world import one_layer_each, state

GROUPS = one_layer_each(full(8), state(3), full(8), state(1000))
STATES = [g.index for g in GROUPS if not g.spec.has_token_rows]


def test_every_state_has_a_block_of_its_own_behind_the_pool() -> None:
    scratch = plan_scratch(GROUPS, num_blocks=40, max_seqs=5, num_drafts=3)
    assert scratch is not None
    assert len(STATES) == 2
    found = [
        int(scratch.blocks(group, np.array([row]), np.array([drafts]))[0])
        for group in STATES
        for row in range(5)
        for drafts in range(3)
    ]
    assert sorted(found) == list(range(40, 40 + 5 * 3 * 2))
    assert scratch.num_blocks == 5 * 3 * 2


def test_engines_without_drafts_or_states_have_none() -> None:
    assert plan_scratch(GROUPS, num_blocks=40, max_seqs=5, num_drafts=0) is None
    assert plan_scratch(one_layer_each(full(8)), num_blocks=40, max_seqs=5, num_drafts=3) is None
