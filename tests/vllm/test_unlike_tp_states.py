"""A fault of vLLM 0.32.0 (its issue 55208), predicted to the byte: Mamba2 states with one group of B and C at
unlike tensor-parallel sizes."""

from __future__ import annotations

from pathlib import Path

from tests.markers import needs_vllm
from tests.vllm.interpreter import told_by

X_SHARED = {
    0: {"conv_x": "P0 conv_x 0-79", "ssm": "P0 ssm 0-959"},
    1: {"conv_x": "P0 conv_x 80-159", "ssm": "P0 ssm 960-1919"},
}
X_WHOLE = {"conv_x": "P0 conv_x 0-79, P1 conv_x 0-79", "ssm": "P0 ssm 0-959, P1 ssm 0-959"}
HOLDINGS = {
    # One group, 24 columns of B and of C, is whole on every rank. D takes its own for a half of 48: its C is
    # P's recurrent state, and B of its second rank is P's C.
    "1 group(s), 1 -> 2, rank 0": {**X_SHARED[0], "conv_b": "P0 conv_b 0-23", "conv_c": "P0 ssm 0-23"},
    "1 group(s), 1 -> 2, rank 1": {**X_SHARED[1], "conv_b": "P0 conv_c 0-23", "conv_c": "P0 ssm 24-47"},
    # D takes a rank of P to hold a half of 24: both halves of its B are the first, and no C comes at all.
    "1 group(s), 2 -> 1, rank 0": {
        **X_WHOLE,
        "conv_b": "P0 conv_b 0-11, P1 conv_b 0-11",
        "conv_c": "P0 conv_b 12-23, P1 conv_b 12-23",
    },
    # Two groups are shared out, as D takes them to be.
    "2 group(s), 1 -> 2, rank 0": {**X_SHARED[0], "conv_b": "P0 conv_b 0-23", "conv_c": "P0 conv_c 0-23"},
    "2 group(s), 1 -> 2, rank 1": {**X_SHARED[1], "conv_b": "P0 conv_b 24-47", "conv_c": "P0 conv_c 24-47"},
    "2 group(s), 2 -> 1, rank 0": {
        **X_WHOLE,
        "conv_b": "P0 conv_b 0-23, P1 conv_b 0-23",
        "conv_c": "P0 conv_c 0-23, P1 conv_c 0-23",
    },
}
"""What each field of a D rank holds: ranks of P, fields and columns there. A column is 8 bytes."""
SAID = {
    "1 group(s), 1 -> 2, rank 0": "conv_c, group 0, token 3: block 0 of the sequence missing: token 3 holds "
    "stale or foreign content",
    # What the cells of `falcon_h1-one-group` in jobs/vllm.yaml say of vLLM's own engines.
    "1 group(s), 1 -> 2, rank 1": "conv_b, group 0, token 3: conv_b holds conv_c",
    "1 group(s), 2 -> 1, rank 0": "conv_b, group 0, token 3: sliced as if sharded 2 ways: part 1 of group 0 "
    "holds its part 0",
}


@needs_vllm
def test_one_group_of_b_and_c_is_cut_as_if_ranks_shared_it(vllm_python: Path) -> None:
    told = told_by(vllm_python, "tests.vllm.unlike_tp_states")
    assert {one["of"]: one["holds"] for one in told} == HOLDINGS
    said = {one["of"]: one["said"] for one in told if one["said"] != "equal"}
    assert said == {of: f"KV of r differs: layer 0, group 1, {reason}" for of, reason in SAID.items()}
