"""Result rows, which actors hand to reports. Times are ints in nanoseconds of one clock. Only reports turn
rows into tables (INTERFACE: requests.parquet, transfers.parquet)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class RequestRow:
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
    """Prompt tokens that the decoding engine computed again after preempting the request. 0 of failed
    requests."""
    prefill_engine: str | None = None
    decode_engine: str | None = None
    kv_path: str = "none"  # remote, local, recomputed (lost in a preemption) or none
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: str | None = None  # the stop string, or the stop token id in decimal, that ended the output
    seed: int | None = None  # None where no token was drawn
    # per output token, if asked for: natural logarithms, of the model's own logits
    output_logprobs: list[float] | None = None
    # per prompt token, if asked for; the first has none
    prompt_logprobs: list[float | None] | None = None
    # (token id, log probability), best first, if asked for
    output_top_logprobs: list[list[tuple[int, float]]] | None = None
    # likewise per prompt token; the first has none
    prompt_top_logprobs: list[list[tuple[int, float]] | None] | None = None
    # when its engine had each token, on the coordinator's clock (time.monotonic_ns)
    token_times_ns: list[int] = field(default_factory=list)
    arrival_ns: int = 0  # when it was due: latencies count from then
    due_ns: int = 0  # after the start of its repeat: 0 where all requests arrive at once
    stage_ns: dict[str, int] = field(default_factory=dict)  # stage -> duration; see reports.columns.STAGES
    exposed_ns: int | None = None
    """From the first token, sampled where the prompt was computed, until the decode engine could go on: what
    the first decode step waited for. None where nothing was handed over."""
    # prompt tokens whose KV came from the host tier: not computed, nor in the engine's cache
    num_host_tokens: int = 0
    # prompt tokens up to the end of the last block that had to come from disk for that
    num_disk_tokens: int = 0
    load_ns: int = 0  # from the question to the host tier until its rows were here, proven
    num_swaps: int = 0  # preemptions after which KV was swapped out, in place of computing it again
    swap_ns: int = 0  # time away for that, added up
    drafted_by_position: list[int] = field(default_factory=list)
    """How many tokens were proposed at each position of drafts, on all engines; empty where none were."""
    accepted_by_position: list[int] = field(default_factory=list)
    """How many of these the model agreed to, those included that the end of the request cut."""
    draft_kv: str | None = None
    """Where the drafter on the ranks of the last engine had its KV of the prompt from: own (it computed it
    with the prompt), moved (it came with the prompt), recomputed, or none: it was not there, and nothing was
    proposed. None: no such drafter."""
    num_draft_rows_recomputed: int = 0
    """Tokens whose rows of a drafter were computed behind the hand-over, since they had not come."""
    proposals: list[tuple[int, list[int]]] = field(default_factory=list)
    """What a drafter on ranks proposed: number of output tokens that it went on from, and the tokens; the
    first so many alone, see sched.drafting.MOST_NOTED."""
    offload_failure: str | None = None  # why what the host tier had offered was computed instead
    num_attempts: int = 1  # times the prompt was placed
    failure: str | None = None  # why the first failed attempt failed, also where the request was saved
    recovered_by: str | None = None  # recompute or migrate: how a request whose hand-over failed was saved
    num_valid_tokens: int | None = None  # prompt tokens of a recomputed request whose proven KV was kept

    @property
    def ttft_ns(self) -> int | None:
        """TTFT: how long after it was due the first token was there; None: there is none."""
        return self.token_times_ns[0] - self.arrival_ns if self.token_times_ns else None

    @property
    def tpot_ns(self) -> float | None:
        """TPOT: the mean time from token to token; None: there are fewer than two."""
        num_gaps = len(self.token_times_ns) - 1
        return (self.token_times_ns[-1] - self.token_times_ns[0]) / num_gaps if num_gaps > 0 else None

    @property
    def e2e_ns(self) -> int | None:
        """E2E: how long after it was due the last token was there; None: there is none."""
        return self.token_times_ns[-1] - self.arrival_ns if self.token_times_ns else None


@dataclass(kw_only=True, slots=True)
class TransferRow:
    """Records what moved from one producer rank to one consumer rank for one request and KV group."""

    cell_id: str
    repeat: int
    request_id: str
    producer_rank: int
    consumer_rank: int
    group: int
    bytes: int
    num_descriptors: int
    """Asked of the transport before neighbouring blocks are merged: runs, or whole stretches of a staged
    read. What could not be posted was not asked."""
    held_bytes: int = 0  # not moved: the consumer has them in its prefix cache
    num_descriptors_merged: int | None = None  # left when consecutive blocks of dense runs go as one
    mode: str = "pull"  # pull (the consumer reads) or push (the producer writes)
    purpose: str = "handover"
    """handover (to the engine that decodes), relay (before that, into the host tier), load (from the host
    tier) or swap (a preempted request's KV, back from the host tier)."""
    post_ns: int = 0
    transfer_ns: int = 0  # first post to last completion; of a push, while a write was in flight
    begin_ns: int | None = None
    """The first post, on the reader's clock, and once its request's row has it, after that was due. None of a
    push, whose writes lie within the prefill."""
    end_ns: int | None = None  # the last completion, likewise: when it was seen
    transport: str = ""
    staged: bool = False  # whether whole stretches went through a staging buffer and were repacked there
    direct_cost_us: float | None = None  # what the cost model expects of a transfer run by run
    staged_cost_us: float | None = None  # with repacking; None where nothing can be staged
    # where the cost model has it from: measured, or as coded and why; none of a push whose layers are set
    costs: str = ""
    repack_ns: int = 0  # copying from the staging buffer into pages
    convert_ns: int = 0  # turning what arrived into the consumer's own KV format
    digest_ns: int = 0  # on both ranks: the producer's before the ticket, the consumer's when all was here
    # layers that one write of a push brings; the last of a chunk may bring fewer
    num_layers_per_write: int | None = None
    num_writes: int | None = None  # None for pulls
    num_early_writes: int | None = None  # those posted before the prompt's last layer was computed
    left_out: str = ""  # draft layers that one side has and that did not move, and why
    retries: int = 0
    verdict: str = "OK"

    def span(self, begin_ns: int, end_ns: int) -> None:
        """Widen the row's time by one of its reads; they may overlap, or follow one another."""
        self.begin_ns = begin_ns if self.begin_ns is None else min(self.begin_ns, begin_ns)
        self.end_ns = end_ns if self.end_ns is None else max(self.end_ns, end_ns)
        self.transfer_ns = self.end_ns - self.begin_ns

    def shift(self, by_ns: int) -> None:
        """Move begin and end to another clock."""
        if self.begin_ns is not None and self.end_ns is not None:
            self.begin_ns, self.end_ns = self.begin_ns + by_ns, self.end_ns + by_ns


def moving_ns(rows: Sequence[TransferRow]) -> int:
    """Measure how long these rows of one request moved together, from the first post to the last completion:
    ranks post reads one after another, so no row alone tells. Of a push it is the longest in-flight time of a
    pair of ranks."""
    begins = [row.begin_ns for row in rows if row.begin_ns is not None]
    ends = [row.end_ns for row in rows if row.end_ns is not None]
    if begins and ends:
        return max(ends) - min(begins)
    return max((row.transfer_ns for row in rows), default=0)


@dataclass(kw_only=True, slots=True)
class CellRow:
    """Records what a cell found. Reports add sums and percentiles over its requests."""

    cell_id: str
    axes: dict[str, object]  # every axis under its dotted name; None where it does not apply
    verdict: str
    reason: str = ""
    refused_by: str | None = None  # of UNSUPPORTED: model, rayk or vllm
    # requests whose tokens differ from the reference's; None: not compared
    num_token_mismatches: int | None = None
    # (prompt index, token index) of the first output token that differs
    first_divergence: tuple[int, int] | None = None
    checks_done: list[str] = field(default_factory=list)
    near_tie_tolerance: float | None = None  # logit gap below which two tokens count as tied
    reference_kept_since: str | None = None
    """When the earliest of the reference's answers that an earlier run kept was computed (ISO 8601, UTC);
    None: this run computed all that the cell was judged by."""
    expected_verdict: str = "PASS"
    # a planted fault was to be recovered from, and neither a recovery nor a failure came
    has_idle_faults: bool = False
    prefill_effective_block_sizes: list[int] | None = None  # per KV group, tokens
    decode_effective_block_sizes: list[int] | None = None
    # per KV group, tokens of the parts in which attention kernels address a block
    prefill_effective_kernel_block_sizes: list[int] | None = None
    decode_effective_kernel_block_sizes: list[int] | None = None
    kv_waste: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Side -> (bytes, percent) that a request of `kv.groups.waste_tokens` holds beyond what its layers need,
    before tensor parallelism: replicas and padding on a rank are not counted."""
    kv_groups: dict[str, list[dict[str, str | int]]] = field(default_factory=dict)
    """Side -> per KV group kind, num_layers, block_size, used_bytes, padding_bytes and wasted_bytes of the
    same request; padding and waste of all groups are its `kv_waste`."""
    kv_held: dict[str, list[dict[str, str | int]]] = field(default_factory=dict)
    """Side -> per KV group what the cell's own requests held, those that ended well (see
    kv.request_memory.RequestMemory)."""
    load_memory: dict[str, list[dict[str, int | None]]] = field(default_factory=dict)
    """Side -> by rank of its first engine, what loading its weights took: models.load_memory.LoadMemory."""
    # what each side ran with; see reports.columns.EFFECTIVE
    effective: dict[str, str | None] = field(default_factory=dict)
    # layers that compute only sampled tokens at the prefill engines; 0 without `fast_prefill`
    num_fast_prefill_layers: int | None = None
    num_token_layers: int | None = None
    """Tokens computed by the engines that compute prompts, summed over layers and repeats. None where an
    engine died."""
    decode_num_token_layers: int | None = None  # at the decode engines
    num_kv_bytes_checked: int | None = None
    num_kv_bytes_mismatched: int | None = None
    # elements of P's cache compared with the reference's; None: not compared
    num_kv_values_checked: int | None = None
    max_kv_value_error: float | None = None  # largest absolute difference among them
    # put under a lease or reserved for a push, of all engines and repeats
    num_blocks_leased: int | None = None
    # given back of these: by release, expired lease, cancellation or failure
    num_blocks_freed: int | None = None
    # still held when the cell ended; 0 unless something leaked or an engine died
    num_blocks_held: int | None = None
    # errors and bounds of logprobs and kv_values, how pace was kept; see reports.columns.MEASURED
    measured: dict[str, float] = field(default_factory=dict)
    # what the host tier did; see reports.columns.OFFLOADED
    offloaded: dict[str, float | str] = field(default_factory=dict)
    wall_ns: int = 0

    @property
    def met(self) -> bool:
        """Tell whether the cell ended as expected: NEAR_TIE passes for PASS, UNSUPPORTED and PREDICTED are
        no failures. A fault that never struck proves nothing."""
        allowed = {self.expected_verdict}
        if self.expected_verdict == "PASS":
            allowed |= {"NEAR_TIE", "UNSUPPORTED", "PREDICTED"}
        return self.verdict in allowed and not self.has_idle_faults
