"""What tokens see, from the definitions and in plain Python; and what metadata says that they see.

Nothing here uses a transform of rayk. Block ids are distinct, so that an id says whose block it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from rayk.attention import CommonAttentionMetadata

NOBODYS = -7
"""A block id in every column that no token's keys lie in."""


@dataclass(frozen=True)
class Asked:
    """One request of a step."""

    computed: int
    """Tokens before the step."""
    num_queries: int
    num_wanted: int = 0
    """Of its tokens of this step, the last ones."""

    @property
    def total(self) -> int:
        return self.computed + self.num_queries


requests_of_a_step = st.lists(
    st.builds(
        lambda computed, num_queries, share: Asked(computed, num_queries, round(share * num_queries)),
        st.integers(0, 45),
        st.integers(1, 25),
        st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)),
    ),
    min_size=1,
    max_size=5,
)
"""Up to five requests, with no, few or all tokens wanted."""

Key = tuple[int, int]
"""(request, position)"""


def seen_keys(
    requests: Sequence[Asked], *, window: int | None, chunk: int | None, fast: bool = False
) -> list[set[Key]]:
    """Per packed token that is computed, all (request, position) that it sees."""
    packed = []
    for r, request in enumerate(requests):
        first = request.total - request.num_wanted if fast else request.computed
        for position in range(first, request.total):
            seen = set()
            for key in range(position + 1):
                if window is not None and key <= position - window:
                    continue
                if chunk is not None and key // chunk != position // chunk:
                    continue
                seen.add((r, key))
            packed.append(seen)
    return packed


def wanted_tokens(requests: Sequence[Asked]) -> list[int]:
    """Packed indices of the wanted tokens of a step in which all tokens are computed."""
    wanted, end = [], 0
    for request in requests:
        end += request.num_queries
        wanted += range(end - request.num_wanted, end)
    return wanted


def make_common(
    requests: Sequence[Asked], size: int, live: set[Key] | None = None
) -> CommonAttentionMetadata:
    """A step with as many columns as its longest request has blocks. `live`: blocks that hold none of these
    keys are nobody's, as in a group that gives them back."""
    width = max(-(-request.total // size) for request in requests)
    table = torch.full((len(requests), width), NOBODYS, dtype=torch.int32)
    slots = []
    for r, request in enumerate(requests):
        for column in range(-(-request.total // size)):
            positions = range(column * size, min((column + 1) * size, request.total))
            if live is None or any((r, position) in live for position in positions):
                table[r, column] = block_id(r, column)
        slots += [
            block_id(r, position // size) * size + position % size
            for position in range(request.computed, request.total)
        ]
    return CommonAttentionMetadata.from_host(
        query_lens=[request.num_queries for request in requests],
        seq_lens=[request.total for request in requests],
        block_table=table,
        slot_mapping=torch.tensor(slots),
        block_size=size,
    )


def block_id(request: int, column: int) -> int:
    """Of a request's blocks, in order."""
    return 1 + request * 1000 + column


def told_keys(common: CommonAttentionMetadata, window: int | None) -> list[set[Key]]:
    """Per packed token, all (request, position) that attention reads which is told nothing but this: causal,
    in a window if there is one. Keys of nobody's blocks are at request -1."""
    packed = []
    starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
    for row, total in enumerate(lens):
        num_queries = starts[row + 1] - starts[row]
        for position in range(total - num_queries, total):
            first = 0 if window is None else max(0, position - window + 1)
            seen = set()
            for key in range(first, position + 1):
                block = int(common.block_table[row, key // common.block_size]) - 1
                offset = key % common.block_size
                seen.add(
                    (block // 1000, block % 1000 * common.block_size + offset) if block >= 0 else (-1, key)
                )
            packed.append(seen)
    return packed


def check_consistent(common: CommonAttentionMetadata) -> None:
    """Host and device say the same; lengths are possible; sizes are those of the lengths."""
    starts, lens = list(common.query_start_loc_cpu), list(common.seq_lens_cpu)
    assert common.query_start_loc.tolist() == starts
    assert common.seq_lens.tolist() == lens
    assert common.query_start_loc.dtype == common.seq_lens.dtype == common.block_table.dtype == torch.int32
    assert common.slot_mapping.dtype == torch.int64
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    assert starts[0] == 0
    assert all(0 < n <= total for n, total in zip(counts, lens, strict=True))
    assert starts[-1] == common.num_tokens == len(common.slot_mapping)
    assert common.num_requests == len(lens) == len(common.block_table)
    assert common.max_query_len == max(counts)
    assert common.max_seq_len == max(lens)
    assert common.block_table.shape[1] == -(-max(lens) // common.block_size)
    assert common.block_table.stride(-1) == 1
    assert {type(n) for n in (*common.query_start_loc_cpu, *common.seq_lens_cpu)} == {int}
