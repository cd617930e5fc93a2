"""KV cache groups: layers of equal spec that share one block table.

All groups draw block ids from one pool, so each fills the same block bytes: groups have the same number of
positions (short ones are padded), and attention pages grow by whole blocks towards the largest page. The
choice depends on canonical sizes only, never on TP, rank or layout, so that both sides of a transfer agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rayk.kv.specs import (
    KVCacheSpec,
    max_live_blocks,
    num_kept_blocks,
    page_bytes,
    rows_per_block,
    with_block_size,
)

CacheKey = tuple[int, str]
"""(layer, part): one of a layer's caches; part is the spec's, attention or state."""

REFERENCE_TOKENS = 4096
"""Length of the request by which groupings are compared, each group counted at its fullest up to there: at
4096 itself a chunk often ends, where chunked layers hold nothing."""
REFERENCE_BLOCK_SIZE = 16
"""Tokens of an attention block, before it grows, when groupings are compared."""
BLOCK_COST_BYTES = 8 << 10
"""What a block costs beside its bytes: moving it takes at least one descriptor, 1.6 to 2 us in NIXL at about
5 GB/s (measured, 64 MiB in 128 to 32768 descriptors), the time of 8 to 10 KB."""

SLACK = 1.03
"""A grouping of fewer groups may cost and hold this many times the minimum: each group also costs block
tables and metadata per step, and descriptors per transfer."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers sharing a block table; `layers[i]` is the layer at position i."""

    index: int
    spec: KVCacheSpec
    layers: tuple[int, ...]
    num_positions: int
    """Positions of a block; those from len(layers) on are padding."""
    seen: tuple[KVCacheSpec, ...] = ()
    """By position, the spec of the rows that the layer can see, where the group keeps more (a window among
    full attention); empty if `spec` holds for all."""
    rides: int | None = None
    """Index of the group whose block table and block ids it shares, with page memory of its own for each id:
    layers of a drafter ride on a group of the model. None: it has a block table of its own."""
    first_draft: int = 0
    """The layer that is draft layer 0, of groups that ride."""
    drafter: str = ""
    """Names the drafter whose layers they are, of groups that ride."""
    carries: KVCacheSpec | None = None
    """What tells the rows that groups riding on this one can see, which may lack where its own are present.
    Filled by riders.tabled, for whoever keeps block tables."""

    @property
    def keys(self) -> tuple[CacheKey, ...]:
        return tuple((layer, self.spec.part) for layer in self.layers)

    @property
    def lanes(self) -> tuple[KVCacheSpec, ...]:
        """The distinct specs by which its layers see rows, and last that of groups which ride on it: a row
        may be present for one lane only."""
        return (*self.own_lanes, *(() if self.carries is None else (self.carries,)))

    @property
    def own_lanes(self) -> tuple[KVCacheSpec, ...]:
        """The lanes of its own layers."""
        return tuple(dict.fromkeys(self.seen)) or (self.spec,)

    def name_of(self, layer: int) -> str:
        """Name a layer in messages: `layer 3`, or `draft layer 0`."""
        draft = self.draft_number(layer)
        return f"layer {layer}" if draft is None else f"draft layer {draft}"

    def draft_number(self, layer: int) -> int | None:
        """Return which of a drafter's layers it is; None of the model's own."""
        return None if self.rides is None else layer - self.first_draft

    def seen_by(self, layer: int) -> KVCacheSpec:
        """Return the spec of the rows that later tokens may still read in this layer."""
        return self.seen[self.layers.index(layer)] if self.seen else self.spec


@dataclass(frozen=True, slots=True)
class Waste:
    """What a request holds beyond what its layers need, over all groups, before tensor parallelism: positions
    without a layer, pages smaller than the largest, and rows of blocks without a live token."""

    allocated_bytes: int
    needed_bytes: int

    @property
    def bytes(self) -> int:
        return self.allocated_bytes - self.needed_bytes

    @property
    def percent(self) -> float:
        return 100.0 * self.bytes / self.allocated_bytes if self.allocated_bytes else 0.0


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """How a group uses the bytes that a request holds, before tensor parallelism."""

    kind: str
    num_layers: int
    block_size: int
    used_bytes: int
    """Rows of live tokens."""
    padding_bytes: int
    """Positions without a layer, and pages smaller than the largest."""
    wasted_bytes: int
    """Rows of its blocks without a live token."""


def max_request_blocks(groups: Sequence[KVCacheGroup], num_tokens: int, max_batch_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` holds at a time, with chunks of at most
    `max_batch_tokens`."""
    own = (g for g in groups if g.rides is None)
    return sum(max_live_blocks(g.spec, num_tokens, max_batch_tokens) for g in own)


def group_layers(
    specs: Mapping[CacheKey, KVCacheSpec],
    seen: Mapping[CacheKey, KVCacheSpec] | None = None,
    *,
    dcp: int = 1,
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model's caches, kinds in order of first appearance.

    A kind with more layers than a group has positions is dealt round-robin into several groups. A group's
    spec has the block size to which its pages have grown. `seen`: the spec of the rows each layer can see,
    where `specs` keep more.

    Pages are compared as one of `dcp` ranks that share tokens holds them: a state, which is not shared,
    beside its own rows. A block id then covers `dcp` times as many tokens.
    """
    kinds: dict[KVCacheSpec, list[int]] = {}
    for key in sorted(specs):
        assert key == (key[0], specs[key].part), f"{key} with a spec of {specs[key].part}"
        kinds.setdefault(specs[key], []).append(key[0])
    if not kinds:
        return ()
    positions = choose_positions([(spec, len(layers)) for spec, layers in kinds.items()])
    num_groups = [-(-len(layers) // positions) for layers in kinds.values()]
    groups: list[KVCacheGroup] = []
    grown = unify_pages(tuple(kinds), num_groups, positions)
    grown = tuple(
        with_block_size(spec, spec.block_size * dcp) if spec.has_token_rows else spec for spec in grown
    )
    for spec, count, layers in zip(grown, num_groups, kinds.values(), strict=True):
        for i in range(count):
            group = KVCacheGroup(len(groups), spec, tuple(layers[i::count]), positions)
            own = tuple(with_block_size((seen or specs)[key], spec.block_size) for key in group.keys)
            groups.append(group if set(own) == {spec} else replace(group, seen=own))
    return tuple(groups)


def choose_positions(kinds: Sequence[tuple[KVCacheSpec, int]]) -> int:
    """Choose the positions per group for kinds of layers (spec, number of layers): the cheapest for a
    reference request, or fewer groups if these cost and hold at most SLACK times as much. Block sizes of the
    specs do not count.
    """
    # A state has one block per request.
    specs = [
        with_block_size(spec, REFERENCE_BLOCK_SIZE if spec.has_token_rows else REFERENCE_TOKENS)
        for spec, _ in kinds
    ]
    candidates = []
    for positions in range(1, max(count for _, count in kinds) + 1):
        num_groups = [-(-count // positions) for _, count in kinds]
        grown = unify_pages(specs, num_groups, positions)
        blocks, reference_bytes = _reference_blocks(grown, num_groups, positions)
        cost = reference_bytes + blocks * BLOCK_COST_BYTES
        candidates.append((sum(num_groups), cost, reference_bytes, positions))
    _, least, least_bytes, _ = min(candidates, key=lambda c: (c[1], c[0]))
    return min(c for c in candidates if c[1] <= SLACK * least and c[2] <= SLACK * least_bytes)[-1]


def unify_pages(
    specs: Sequence[KVCacheSpec], num_groups: Sequence[int], positions: int
) -> tuple[KVCacheSpec, ...]:
    """Return the specs with pages made alike as far as whole blocks allow.

    Specs with token rows grow until another block would not fit into the largest page, or just beyond it (the
    largest is then padded), whichever costs a reference request less. States have one row and do not grow.
    """
    largest = max(page_bytes(spec) for spec in specs)
    growing = {page_bytes(spec) for spec in specs if spec.has_token_rows}
    targets = sorted({largest, *(-(-largest // page) * page for page in growing)})
    grown = [tuple(_grow(spec, target) for spec in specs) for target in targets]
    return min(grown, key=lambda candidate: _cost(candidate, num_groups, positions))


def measure_waste(groups: Sequence[KVCacheGroup], num_tokens: int = REFERENCE_TOKENS) -> Waste:
    """Measure the canonical waste of a request of `num_tokens`, each group at its fullest."""
    memories = measure_groups(groups, num_tokens)
    used = sum(m.used_bytes for m in memories)
    return Waste(used + sum(m.padding_bytes + m.wasted_bytes for m in memories), used)


def measure_groups(
    groups: Sequence[KVCacheGroup], num_tokens: int = REFERENCE_TOKENS
) -> tuple[GroupMemory, ...]:
    """Return what each group holds of a request of `num_tokens`, at its fullest. Blocks of other groups than
    the one that carries them have pages of riders too, which are padding."""
    found = []
    num_blocks = [num_kept_blocks(g.spec, g.spec.fullest_at(num_tokens)) for g in groups]
    num_owned = sum(n for g, n in zip(groups, num_blocks, strict=True) if g.rides is None)
    for g, padding, blocks in zip(groups, wasted_bytes(groups), num_blocks, strict=True):
        fullest = g.spec.fullest_at(num_tokens)
        page = page_bytes(g.spec)
        used = len(g.spec.live_rows(fullest)) * len(g.layers) * (page // rows_per_block(g.spec))
        waste = blocks * len(g.layers) * page - used
        unused = blocks * padding if g.rides is None else (num_owned - blocks) * len(g.layers) * page
        found.append(GroupMemory(g.spec.kind, len(g.layers), g.spec.block_size, used, unused, waste))
    return tuple(found)


def waste_tokens(max_positions: int) -> int:
    """Return the length of the request by which waste is reported, limited to the model's positions."""
    return min(REFERENCE_TOKENS, max_positions)


def wasted_bytes(groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """Per group, the canonical bytes of each block that no layer uses: padding positions and pages. A rider
    has none."""
    page = max((page_bytes(g.spec) for g in groups if g.rides is None), default=0)
    return tuple(
        0 if g.rides is not None else g.num_positions * page - len(g.layers) * page_bytes(g.spec)
        for g in groups
    )


def _grow(spec: KVCacheSpec, target_bytes: int) -> KVCacheSpec:
    """Merge as many blocks into one as fit into a page of `target_bytes`."""
    if not spec.has_token_rows:
        return spec
    return with_block_size(spec, spec.block_size * (target_bytes // page_bytes(spec)))


def _reference_blocks(
    specs: Sequence[KVCacheSpec], num_groups: Sequence[int], positions: int
) -> tuple[int, int]:
    """Return (blocks, bytes) that a reference request holds."""
    page = max(page_bytes(spec) for spec in specs)
    num_blocks = (num_kept_blocks(spec, spec.fullest_at(REFERENCE_TOKENS)) for spec in specs)
    blocks = sum(n * count for n, count in zip(num_groups, num_blocks, strict=True))
    return blocks, blocks * positions * page


def _cost(specs: Sequence[KVCacheSpec], num_groups: Sequence[int], positions: int) -> int:
    """Count the bytes of a reference request."""
    blocks, reference_bytes = _reference_blocks(specs, num_groups, positions)
    return reference_bytes + blocks * BLOCK_COST_BYTES
