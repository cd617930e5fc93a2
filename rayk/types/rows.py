"""Result rows: what actors hand to reports. Times are ints in nanoseconds of one clock.

Reports turn rows into tables (INTERFACE: requests.parquet, transfers.parquet); nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class RequestRow:
    """One request of one cell."""

    cell_id: str
    repeat: int
    request_id: str
    prompt_index: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Prompt tokens that the decoding engine computed though they had been, there or at a prefill engine: it
    preempted the request. 0 of failed requests."""
    prefill_engine: str | None = None
    decode_engine: str | None = None
    kv_path: str = "none"
    """remote, local, recomputed (it came from elsewhere, and was lost in a preemption) or none."""
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: str | None = None  # the stop string, or the stop token id in decimal, that ended the output
    seed: int | None = None  # what the tokens were drawn with; None where they were not drawn
    output_logprobs: list[float] | None = None
    """Of each output token, if asked for: natural logarithms, of the model's own logits."""
    prompt_logprobs: list[float | None] | None = None
    """Of each prompt token, if asked for; the first has none."""
    output_top_logprobs: list[list[tuple[int, float]]] | None = None
    """(token id, log probability) of the best tokens at each output token, best first, if asked for."""
    prompt_top_logprobs: list[list[tuple[int, float]] | None] | None = None
    """The same at each prompt token but the first."""
    token_times_ns: list[int] = field(default_factory=list)
    """When its engine had each output token, on the coordinator's clock (time.monotonic_ns)."""
    arrival_ns: int = 0  # when it was due: latencies count from then
    due_ns: int = 0  # the same, after the start of its repeat: 0 where all requests arrive at once
    stage_ns: dict[str, int] = field(default_factory=dict)
    """Stage name -> duration; see reports.columns.STAGES."""
    exposed_ns: int | None = None
    """From the first token, sampled where the prompt was computed, to the moment when the decode engine could
    go on: what the first decode step waited for. None where nothing was handed over."""
    num_host_tokens: int = 0
    """Prompt tokens whose KV came from the host tier: they were neither computed nor in the engine's own
    cache."""
    num_disk_tokens: int = 0
    """Prompt tokens up to the end of the last block that the host tier had to bring from disk for that."""
    load_ns: int = 0  # from the question to the host tier until its rows were here, proven
    num_swaps: int = 0
    """Times the request was preempted and its KV swapped out, in place of computing it again."""
    swap_ns: int = 0  # how long it was away for that, together
    offload_failure: str | None = None
    """Why what the host tier had offered could not be loaded: it was computed."""
    num_attempts: int = 1  # times the prompt was placed
    failure: str | None = None  # what the first attempt that failed died of, also where the request was saved
    recovered_by: str | None = None  # recompute or migrate: how a request whose hand-over failed was saved
    num_valid_tokens: int | None = None
    """Prompt tokens of a recomputed request whose KV had arrived and was proven: they were not computed
    again."""


@dataclass(kw_only=True, slots=True)
class TransferRow:
    """What moved from one producer rank to one consumer rank for one request and KV group."""

    cell_id: str
    repeat: int
    request_id: str
    producer_rank: int
    consumer_rank: int
    group: int
    bytes: int
    num_descriptors: int
    """Asked of the transport, before neighbouring blocks are merged: runs, or the whole stretches of a
    read that was staged. What could not be posted was not asked."""
    held_bytes: int = 0  # not moved: the consumer has them in its prefix cache
    num_descriptors_merged: int | None = None  # left when consecutive blocks of dense runs go as one
    mode: str = "pull"  # pull (the consumer reads) or push (the producer writes)
    purpose: str = "handover"
    """handover (to the engine that decodes, from the one that computed the prompt or from the host tier),
    relay (before that, into the host tier), load (from the host tier, not to compute it) or swap (a preempted
    request's, back from the host tier)."""
    post_ns: int = 0
    transfer_ns: int = 0
    """From the first post to the last completion; of a push, while at least one write was in flight."""
    begin_ns: int | None = None
    """The first post, on the clock of who reads; once its request's row has it, after that was due. None of a
    push, whose writes lie within the prefill."""
    end_ns: int | None = None  # the last completion, likewise: when it was seen
    transport: str = ""
    staged: bool = False  # whether whole stretches went through a staging buffer and were repacked there
    direct_cost_us: float | None = None  # what the cost model expects of a transfer run by run
    staged_cost_us: float | None = None
    """What it expects of staging, repacking included; None where nothing can be staged."""
    repack_ns: int = 0  # copying from the staging buffer into pages
    convert_ns: int = 0  # turning what arrived into the consumer's own KV format
    digest_ns: int = 0
    """Digests of the request on the two ranks of the row: the producer's before the ticket, the
    consumer's when all was here."""
    num_layers_per_write: int | None = None
    """Layers that one write of a push brings; the last of a chunk of the prompt may bring fewer."""
    num_writes: int | None = None  # of a push
    num_early_writes: int | None = None  # of these, posted before the prompt's last layer was computed
    retries: int = 0
    verdict: str = "OK"

    def span(self, begin_ns: int, end_ns: int) -> None:
        """One of its reads began and ended then; they may overlap, or follow one another."""
        self.begin_ns = begin_ns if self.begin_ns is None else min(self.begin_ns, begin_ns)
        self.end_ns = end_ns if self.end_ns is None else max(self.end_ns, end_ns)
        self.transfer_ns = self.end_ns - self.begin_ns

    def shift(self, by_ns: int) -> None:
        """Its begin and end on another clock."""
        if self.begin_ns is not None and self.end_ns is not None:
            self.begin_ns, self.end_ns = self.begin_ns + by_ns, self.end_ns + by_ns


def moving_ns(rows: Sequence[TransferRow]) -> int:
    """How long these rows of one request were moving, together: from the first post to the last completion.
    Ranks post their reads one after the other, so no row alone tells that. Of a push, which says only how
    long each pair of ranks had something in flight, the longest of these."""
    begins = [row.begin_ns for row in rows if row.begin_ns is not None]
    ends = [row.end_ns for row in rows if row.end_ns is not None]
    if begins and ends:
        return max(ends) - min(begins)
    return max((row.transfer_ns for row in rows), default=0)


@dataclass(kw_only=True, slots=True)
class CellRow:
    """One cell: what the run found. Sums and percentiles over its requests are added by reports."""

    cell_id: str
    axes: dict[str, object]  # every axis under its dotted name; None where it does not apply
    verdict: str
    reason: str = ""
    num_token_mismatches: int | None = None
    """Requests whose tokens differ from the reference's; None when tokens were not compared."""
    first_divergence: tuple[int, int] | None = None
    """(prompt index, token index) of the first output token that differs."""
    checks_done: list[str] = field(default_factory=list)
    near_tie_tolerance: float | None = None  # logit gap below which two tokens count as tied
    expected_verdict: str = "PASS"
    has_idle_faults: bool = False
    """Whether a planted fault was to be recovered from, and nothing was recovered, nor did anything fail."""
    prefill_effective_block_sizes: list[int] | None = None  # per KV group, tokens
    decode_effective_block_sizes: list[int] | None = None
    prefill_effective_kernel_block_sizes: list[int] | None = None
    """Per KV group, tokens of the parts in which attention kernels address a block."""
    decode_effective_kernel_block_sizes: list[int] | None = None
    kv_waste: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Side -> (bytes, percent) that a request of `kv.groups.waste_tokens` (4096, or the model's positions
    where fewer) holds beyond what its layers need, before tensor parallelism: without what replicas and
    padding add on a rank."""
    kv_groups: dict[str, list[dict[str, str | int]]] = field(default_factory=dict)
    """Side -> per KV group kind, num_layers, block_size, used_bytes, padding_bytes and wasted_bytes of the
    same request; padding and waste of all groups are its `kv_waste`."""
    kv_held: dict[str, list[dict[str, str | int]]] = field(default_factory=dict)
    """Side -> per KV group what the cell's own requests held (see kv.request_memory.RequestMemory); of sides
    that had requests which ended well."""
    effective: dict[str, str | None] = field(default_factory=dict)
    """What each side ran with, e.g. prefill.effective_layout; see reports.columns.EFFECTIVE."""
    num_fast_prefill_layers: int | None = None
    """Layers of the model that compute only the tokens whose logits are sampled, where prompts are computed
    (at the prefill engines); 0 without `fast_prefill`."""
    num_token_layers: int | None = None
    """Tokens that the engines which compute prompts computed, prompts' and others, summed over the layers
    that computed them; of all repeats. None where an engine did not live to tell."""
    decode_num_token_layers: int | None = None  # the same of the decode engines
    num_kv_bytes_checked: int | None = None
    num_kv_bytes_mismatched: int | None = None
    num_kv_values_checked: int | None = None
    """Elements of P's cache compared with the reference's; None when not compared."""
    max_kv_value_error: float | None = None  # largest absolute difference among them
    num_blocks_leased: int | None = None
    """Blocks that were put under a lease or reserved for a push, of all engines and repeats."""
    num_blocks_freed: int | None = None
    """Of these, given back: by a release, an expired lease, a cancellation or a failure."""
    num_blocks_held: int | None = None
    """Of these, still held when the cell ended; 0 unless something leaked or an engine died."""
    measured: dict[str, float] = field(default_factory=dict)
    """Errors and bounds of logprobs and kv_values by column; see reports.columns.MEASURED."""
    offloaded: dict[str, float | str] = field(default_factory=dict)
    """What the host tier did, by column (see reports.columns.OFFLOADED); empty without one."""
    wall_ns: int = 0

    @property
    def met(self) -> bool:
        """Whether the cell ended as expected: NEAR_TIE passes for PASS, UNSUPPORTED is no failure. A fault
        that never struck proves nothing."""
        allowed = {self.expected_verdict}
        if self.expected_verdict == "PASS":
            allowed |= {"NEAR_TIE", "UNSUPPORTED"}
        return self.verdict in allowed and not self.has_idle_faults
