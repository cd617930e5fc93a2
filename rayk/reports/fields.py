"""Every column of a run's tables: name, type, unit and meaning, said here and nowhere else.

`columns.py` takes the types from here, `dictionary.py` prints the rest (`rayk report --columns`).
`load_fields.py` has the columns of `rayk bench`. Beside these, cells.parquet has a column per axis of the
matrix, under the axis's own name. A column whose name, unit or meaning changes raises
`schema.SCHEMA_VERSION`; one that is added does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

INT, FLOAT, TEXT, BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()
INTS, FLOATS, TEXTS = pa.list_(INT), pa.list_(FLOAT), pa.list_(TEXT)
TOPS = pa.list_(pa.list_(pa.struct([("token_id", INT), ("logprob", FLOAT)])))
WINDOWED = pa.list_(INTS)
DIVERGENCE = pa.struct([("request", INT), ("token_index", INT)])

_COUNTS = ("num_layers", "block_size", "used_bytes", "padding_bytes", "wasted_bytes")
GROUPS = pa.list_(pa.struct([("kind", TEXT), *((name, INT) for name in _COUNTS)]))

PER_KV_GROUP = pa.list_(
    pa.struct(
        [
            ("kind", TEXT),
            *((name, INT) for name in (*_COUNTS[:2], "num_requests", *_COUNTS[2:], "replicated_bytes")),
        ]
    )
)


@dataclass(frozen=True, slots=True)
class Field:
    """Describes one column of a table. A missing value is null: nothing was measured, or it does not
    apply."""

    name: str
    kind: Any  # its type, of pyarrow
    unit: str
    """E.g. ms, bytes, tokens; empty for names, texts and truths."""
    meaning: str


def kinds(fields: Iterable[Field]) -> dict[str, Any]:
    return {field.name: field.kind for field in fields}


STAGES = {
    "queue": "due, and not yet sent to an engine: the coordinator's places are taken, or it is late",
    "dispatch": "the request's way to the engine that prefills; of a push, by the one that decodes",
    "lookup": "at that engine, until its host tier has said what it holds of the prompt",
    "load": "reading that from the host tier and proving it, waits for blocks and for a turn included",
    "prefill_queue": "at the engine that computes the prompt, until a step takes it",
    "prefill": "computing the prompt: from its first step to the first token, others' shares included",
    "ticket": "from the first token until the engine's turn ends and the ticket is written, less digests",
    "digest": "digests of the prompt's KV for the ticket, of the slowest rank",
    "relay": "moving the KV into the host tier, over which it is handed on, until that offers it",
    "handover": "the ticket's way from the prefill engine to the decode engine",
    "reserve": "at the decode engine, until it has blocks and its ranks begin to read",
    "read": "moving the KV, until every rank has seen its last byte: it looks between its engine's steps",
    "fence": "until the blocks' generations have told that the bytes are those of the request",
    "verify": "computing digests of what arrived, and comparing them",
    "notice": "until the decode engine looks between its turns: at the ticket, at the last rank's verdict",
    "retry": "of attempts that failed, from the last stage that ended until the next one was sent",
    "decode_queue": "KV proven, until a decode step takes the request",
    "swap": "preempted, its KV on the way to the host tier, there, or on its way back",
    "decode": "from that step to the last token, times away aside",
}
"""Each stage lasts from one noted moment to the next, so they add up to the request's E2E; a stage that comes
again, in another attempt, is added."""

# what each side ran with where the spec left a choice
EFFECTIVE = {
    "effective_layout": "layout of the KV cache that was taken",
    "attention_implementation": "attention backend that ran",
    "weights_held": "dtype of weights, or how a quantised release is stored and what is kept so",
    "comm": "collectives between tensor-parallel ranks",
    "comm_reason": "why these were not the first choice",
    "decode_graphs": "whether decode steps ran as graphs, or why not",
    "scheduling": "asynchronous: a step begins before the tokens of the one before are known; or why not",
    "node": "node of the Ray cluster that it ran on",
}

# what loading its weights took of each rank, by rank of a side's first engine
LOADED = {
    "weight_bytes": "weights that a rank holds",
    "max_read_bytes": "largest piece of a tensor that it read at once, as stored and dequantised",
    "load_peak_bytes": "by how much its own memory rose at most while it loaded them, pages of files aside",
    "load_device_peak_bytes": "likewise its GPU's memory; null on a CPU",
}

_LOGPROBS = (
    ("num_{}logprobs_checked", INT, "tokens", "{} tokens whose log probability was compared"),
    ("max_{}logprob_error", FLOAT, "nats", "largest error of the log probability of {} tokens"),
    ("{}logprob_bound", FLOAT, "nats", "what that error might have been"),
    (
        "typical_{}logprob_error",
        FLOAT,
        "nats",
        "RMS of the errors of {} tokens; of routed experts their median",
    ),
    ("typical_{}logprob_bound", FLOAT, "nats", "what that might have been"),
    ("num_{}logprobs_settled", INT, "tokens", "{} tokens before which no quantisation step was ambiguous"),
    ("max_settled_{}logprob_error", FLOAT, "nats", "largest error among those"),
)

# errors of log probabilities and KV values against the reference, and their bounds; how pace was kept
MEASURED_FIELDS = (
    *(
        Field(name.format(prefix), kind, unit, meaning.format(word))
        for prefix, word in (("", "output"), ("prompt_", "prompt"))
        for name, kind, unit, meaning in _LOGPROBS
    ),
    Field("max_kv_value_error_of_bound", FLOAT, "ratio", "largest error of a KV row over its layer's bound"),
    Field(
        "num_proposals_compared", INT, "tokens", "proposed and compared with what an aggregated run proposed"
    ),
    Field("num_proposals_differing", INT, "tokens", "of these, others, and no near tie"),
    Field("late_p99_share", FLOAT, "share", "how late paced steps came over their length: p99, all engines"),
    Field("machine_busy_share", FLOAT, "share", "of paced engines' busiest machine, all cores, while it ran"),
)

_TIER = "over all engines and repeats"
_BELIEF = "what cost models believe in the end (median over engines)"
# what a cell's host tier did; null without one
OFFLOAD_FIELDS = (
    Field("host_stored_bytes", INT, "bytes", f"KV that the host tier took from engines; {_TIER}"),
    Field("host_relayed_bytes", INT, "bytes", f"KV that was handed on through it, on its way in; {_TIER}"),
    Field("host_loaded_bytes", INT, "bytes", f"KV of prompts that engines read from it; {_TIER}"),
    Field("swapped_out_bytes", INT, "bytes", f"preempted requests' part, without what was there; {_TIER}"),
    Field("swapped_in_bytes", INT, "bytes", f"what of these came back; {_TIER}"),
    Field(
        "num_loads_declined", INT, "prompts", "prompts that it had something of, and computing was cheaper"
    ),
    Field("num_swaps_declined", INT, "preemptions", "preemptions after which computing again was cheaper"),
    Field("host_tier.num_blocks", INT, "blocks", "blocks of all host tiers"),
    Field(
        "host_tier.num_cached_blocks", INT, "blocks", "of these, found by their tokens when the cell ended"
    ),
    Field("host_tier.hits", INT, "questions", "prompts, and swapped requests, that it had something of"),
    Field("host_tier.misses", INT, "questions", "prompts that it had nothing more of"),
    Field("disk_tier.num_pages", INT, "pages", "on disk when the cell ended"),
    Field("disk_tier.num_written", INT, "pages", "written in the cell"),
    Field("disk_tier.num_read", INT, "pages", "read back in the cell, and right"),
    Field("disk_tier.num_bad", INT, "pages", "found damaged in the cell: computed again, never served"),
    Field("disk_tier.num_evicted", INT, "pages", "deleted in the cell to make room"),
    Field(
        "disk_tier.num_dropped", INT, "pages", "not written in the cell: the disk did not keep up, or was off"
    ),
    Field("offload_out_1mib_ms", FLOAT, "ms", f"storing 1 MiB, all waits included: {_BELIEF}"),
    Field("offload_in_1mib_ms", FLOAT, "ms", f"loading 1 MiB: {_BELIEF}"),
    Field("offload_compute_512_ms", FLOAT, "ms", f"computing a prompt's first 512 tokens: {_BELIEF}"),
    Field("offload_note", TEXT, "", "why the host tier or its disk was off or lost, and what failed there"),
)

# what was proposed, of a request or of all of a cell; null where nothing was
DRAFT_FIELDS = (
    Field("num_drafts", INT, "drafts", "steps of a request that computed proposed tokens, too"),
    Field("num_drafted", INT, "tokens", "tokens that were proposed"),
    Field("num_accepted", INT, "tokens", "of these, what the model agreed to, also beyond a stop"),
    Field("drafted_by_position", INTS, "tokens", "proposed, by position in the draft"),
    Field("accepted_by_position", INTS, "tokens", "of these, accepted"),
    Field("acceptance_rate", FLOAT, "share", "of the proposed tokens, those accepted"),
    Field("num_decode_steps", INT, "steps", "that gave a request tokens after its first, drafts or not"),
    Field("tokens_per_step", FLOAT, "tokens", "tokens after the first over these steps"),
)

_KV_WASTE = "bytes that a request of 4096 tokens holds and does not need, before TP"
_KV_GROUPS = (
    "of the same request by KV group: kind, num_layers, block_size, used_bytes (rows of live tokens), "
    "padding_bytes (positions without a layer, pages smaller than the largest), wasted_bytes (other rows)"
)
_KV_HELD = (
    "what this cell's requests held, each at its fullest, added up, by KV group: as kv_groups, num_requests, "
    "and replicated_bytes (of blocks, what ranks held beyond one copy)"
)

# cells.parquet: a row per cell, beside its axes
CELLS = (
    Field("cell_id", TEXT, "", "name of the cell, unique in the run; key of all tables"),
    Field(
        "verdict", TEXT, "", "PASS, NEAR_TIE, UNSUPPORTED, PREDICTED, or the gravest thing that went wrong"
    ),
    Field("reason", TEXT, "", "why it is not PASS, or what a PASS rests on"),
    Field("refused_by", TEXT, "", "of UNSUPPORTED: what cannot do it, the model, rayk or vllm"),
    Field("num_requests", INT, "requests", "rows of this cell in requests.parquet"),
    Field("num_token_mismatches", INT, "requests", "requests whose tokens differ from the reference's"),
    Field("first_divergence", DIVERGENCE, "", "prompt and index of the first output token that differs"),
    Field("checks_done", TEXTS, "", "checks that were made: tokens, logprobs, kv_bytes, kv_values"),
    Field("near_tie_tolerance", FLOAT, "logits", "gap of logits below which two tokens count as tied"),
    Field(
        "reference_kept_since",
        TEXT,
        "",
        "when the earliest answer of the reference that an earlier run kept was computed; null: this run "
        "computed all",
    ),
    Field("expected_verdict", TEXT, "", "verdict that the planted faults ask for; PASS without faults"),
    Field("met", BOOL, "", "whether the cell ended as expected"),
    Field("prefill.effective_block_sizes", INTS, "tokens", "tokens of a block, by KV group"),
    Field("decode.effective_block_sizes", INTS, "tokens", "likewise, at the decode engines"),
    Field("prefill.effective_kernel_block_sizes", INTS, "tokens", "parts in which kernels address a block"),
    Field("decode.effective_kernel_block_sizes", INTS, "tokens", "likewise, at the decode engines"),
    *(
        Field(f"{side}.{name}", INTS, "bytes", f"{meaning}; by rank of the first {side} engine")
        for side in ("prefill", "decode")
        for name, meaning in LOADED.items()
    ),
    Field("min_cut_kernel_block_size", INT, "tokens", "smallest of the parts; null where blocks are whole"),
    Field("kv_waste_bytes", INT, "bytes", f"{_KV_WASTE}; of the side that wastes more"),
    Field("kv_waste_percent", FLOAT, "%", "the same, of all that the request holds"),
    Field("prefill.kv_waste_bytes", INT, "bytes", f"{_KV_WASTE}; at prefill engines"),
    Field("decode.kv_waste_bytes", INT, "bytes", f"{_KV_WASTE}; at decode engines"),
    Field("prefill.kv_groups", GROUPS, "bytes", f"{_KV_GROUPS}; at prefill engines"),
    Field("decode.kv_groups", GROUPS, "bytes", f"{_KV_GROUPS}; at decode engines"),
    Field("prefill.kv_held", PER_KV_GROUP, "bytes", f"{_KV_HELD}; at prefill engines"),
    Field("decode.kv_held", PER_KV_GROUP, "bytes", f"{_KV_HELD}; at decode engines"),
    *(
        Field(f"{side}.{name}", TEXT, "", f"{meaning}; {side} engines")
        for side in ("prefill", "decode")
        for name, meaning in EFFECTIVE.items()
    ),
    Field("num_fast_prefill_layers", INT, "layers", "layers that compute sampled tokens only"),
    Field("num_token_layers", INT, "tokens x layers", "tokens computed by engines that prefill, over layers"),
    Field("decode.num_token_layers", INT, "tokens x layers", "the same of decode engines"),
    Field(
        "num_kv_bytes_checked",
        INT,
        "bytes",
        "KV whose digests were compared: handed over, loaded, swapped in",
    ),
    Field("num_kv_bytes_mismatched", INT, "bytes", "bytes of KV found to differ"),
    Field("num_kv_values_checked", INT, "values", "elements of the prefill cache that were compared"),
    Field("max_kv_value_error", FLOAT, "absolute", "largest difference among them"),
    *MEASURED_FIELDS,
    Field("num_blocks_leased", INT, "blocks", "blocks put under a lease or reserved for a push"),
    Field("num_blocks_freed", INT, "blocks", "of these, given back"),
    Field("num_blocks_held", INT, "blocks", "of these, still held when the cell ended: leaks"),
    Field("num_recovered", INT, "requests", "requests that failure_policy saved"),
    Field("transfer_bytes", INT, "bytes", "KV handed over between engines, all requests and ranks"),
    Field("held_bytes", INT, "bytes", "KV not moved: the consumers had it in their prefix caches"),
    Field(
        "num_cached_tokens", INT, "tokens", "prompt tokens found in prefix caches, num_host_tokens included"
    ),
    Field("num_host_tokens", INT, "tokens", "prompt tokens whose KV came from the host tier"),
    Field("num_disk_tokens", INT, "tokens", "up to the last block of a prompt that came from disk, added up"),
    Field("num_swaps", INT, "preemptions", "preemptions after which KV was swapped out to the host tier"),
    *OFFLOAD_FIELDS,
    *DRAFT_FIELDS,
    Field("num_descriptors", INT, "descriptors", "of hand-overs, before neighbours are merged"),
    Field("num_descriptors_merged", INT, "descriptors", "left when consecutive blocks go as one"),
    Field("num_staged", INT, "transfers", "transfers that went through a staging buffer"),
    Field(
        "transfer_gb_per_s",
        FLOAT,
        "GB/s",
        "transfer_bytes over the sum of the requests' times, each from its first post to its last byte, all "
        "ranks together; of hand-overs, not of the host tier's loads; 10^9 bytes",
    ),
    Field("digest_percent", FLOAT, "%", "time of digests over the time of the transfers beside them"),
    Field("exposed_ms_p50", FLOAT, "ms", "median of requests.exposed_ms"),
    Field("ttft_ms_p50", FLOAT, "ms", "median time to the first token"),
    Field("ttft_ms_p99", FLOAT, "ms", "99th percentile of it, interpolated"),
    Field("tpot_ms_p50", FLOAT, "ms", "median over requests of requests.tpot_ms"),
    Field("e2e_ms_p50", FLOAT, "ms", "median time to the last token"),
    Field("output_tokens_per_s", FLOAT, "tokens/s", "output tokens from first arrival to last token"),
    Field("wall_s", FLOAT, "s", "from forming the cell's engines to their end, checks not included"),
)

# requests.parquet: a row per cell, repeat and request
REQUESTS = (
    Field("cell_id", TEXT, "", "cell that it belongs to"),
    Field("repeat", INT, "index", "which repeat of the cell's prompts, from 0"),
    Field("request_id", TEXT, "", "name of the request, unique in its cell and repeat"),
    Field("prompt_index", INT, "index", "which prompt, from 0"),
    Field("prompt_token_ids", INTS, "token ids", "the prompt"),
    Field("output_token_ids", INTS, "token ids", "the answer, its stop token included"),
    Field("error", TEXT, "", "what the request died of"),
    Field("num_prompt_tokens", INT, "tokens", "length of the prompt"),
    Field(
        "num_cached_tokens", INT, "tokens", "prompt tokens found in a prefix cache, num_host_tokens included"
    ),
    Field("num_host_tokens", INT, "tokens", "prompt tokens whose KV came from the host tier"),
    Field(
        "num_disk_tokens",
        INT,
        "tokens",
        "up to the end of the last block that had to come from disk for that",
    ),
    Field("load_ms", FLOAT, "ms", "from the question to the host tier until its KV was here; null without"),
    Field(
        "num_swaps", INT, "preemptions", "preemptions after which its KV was swapped out, not computed again"
    ),
    Field("swap_ms", FLOAT, "ms", "how long it was away for that and came back; null where it never was"),
    Field("offload_failure", TEXT, "", "why what the host tier offered was not loaded, but computed"),
    *DRAFT_FIELDS,
    Field(
        "draft_kv",
        TEXT,
        "",
        "own, moved, recomputed or none: where a drafter on ranks had its KV of the prompt from",
    ),
    Field("num_draft_rows_recomputed", INT, "tokens", "whose KV of a drafter had not come, and was computed"),
    Field("num_recomputed_tokens", INT, "tokens", "prompt tokens computed a second time"),
    Field("prefill_engine", TEXT, "", "engine that computed the prompt"),
    Field("decode_engine", TEXT, "", "engine that generated the answer"),
    Field("kv_path", TEXT, "", "remote, local, recomputed or none: where the decode engine had the KV from"),
    Field("due_ms", FLOAT, "ms", "when it was due, after its repeat (of a bench: its load) began"),
    Field("ttft_ms", FLOAT, "ms", "from when it was due to the first token"),
    Field("tpot_ms", FLOAT, "ms", "mean gap between tokens after the first"),
    Field("itl_ms", FLOATS, "ms", "each gap between tokens (of a bench: between chunks that carry tokens)"),
    Field("e2e_ms", FLOAT, "ms", "from when it was due to the last token"),
    *(Field(f"stage_{name}_ns", INT, "ns", meaning) for name, meaning in STAGES.items()),
    Field("exposed_ms", FLOAT, "ms", "what the first decode step waited for, after the first token"),
    Field("num_attempts", INT, "attempts", "times the prompt was placed"),
    Field("failure", TEXT, "", "what the first attempt that failed died of, also where it was saved"),
    Field("recovered_by", TEXT, "", "recompute or migrate: how a failed hand-over was saved"),
    Field("num_valid_tokens", INT, "tokens", "prompt tokens whose KV had arrived and was proven"),
    Field("finish_reason", TEXT, "", "stop, length, abort or error"),
    Field("stop_reason", TEXT, "", "stop text, or stop token id, that ended it"),
    Field("seed", INT, "", "what its tokens were drawn with; null where they were not drawn"),
    Field("output_logprobs", FLOATS, "nats", "log probability of each output token, if asked for"),
    Field("prompt_logprobs", FLOATS, "nats", "of each prompt token, if asked for; the first has none"),
    Field("output_top_logprobs", TOPS, "nats", "best tokens at each output token, best first, if asked for"),
    Field("prompt_top_logprobs", TOPS, "nats", "the same at each prompt token but the first"),
)

# transfers.parquet: a row per request, pair of ranks and KV group
TRANSFERS = (
    Field("cell_id", TEXT, "", "cell that it belongs to"),
    Field("repeat", INT, "index", "which repeat"),
    Field("request_id", TEXT, "", "request whose KV moved"),
    Field(
        "purpose",
        TEXT,
        "",
        "handover (to the engine that decodes), relay (before, into the host tier), load or swap (from it)",
    ),
    Field("producer_rank", INT, "index", "rank of the prefill engine; 0 of the host tier"),
    Field("consumer_rank", INT, "index", "rank of the engine that got it"),
    Field("group", INT, "index", "KV cache group; 0 of reads of vLLM's engines, each of all groups at once"),
    Field("bytes", INT, "bytes", "moved"),
    Field("held_bytes", INT, "bytes", "not moved: the consumer had them in its prefix cache"),
    Field("num_descriptors", INT, "descriptors", "asked of the transport, before neighbours are merged"),
    Field("num_descriptors_merged", INT, "descriptors", "left when consecutive blocks go as one"),
    Field("mode", TEXT, "", "pull (the consumer reads) or push (the producer writes)"),
    Field("post_ms", FLOAT, "ms", "posting the request to the transport"),
    Field(
        "transfer_ms", FLOAT, "ms", "of this row: first post to last completion; of a push, while in flight"
    ),
    Field("begin_ms", FLOAT, "ms", "first post, after the request was due; null of a push"),
    Field("end_ms", FLOAT, "ms", "last completion, as the rank saw it, after the request was due; likewise"),
    Field("gb_per_s", FLOAT, "GB/s", "bytes over transfer_ms: of one pair of ranks; 10^9 bytes"),
    Field("transport", TEXT, "", "NIXL backend that moved it; of device memory also what UCX was told"),
    Field("staged", BOOL, "", "whether whole stretches went through a staging buffer"),
    Field("direct_cost_us", FLOAT, "us", "what the cost model expects run by run"),
    Field("staged_cost_us", FLOAT, "us", "what it expects of staging, repacking included"),
    Field("costs", TEXT, "", "whether what it knows was measured here, or is as coded (and why)"),
    Field("repack_ms", FLOAT, "ms", "copying from the staging buffer into pages"),
    Field("convert_ms", FLOAT, "ms", "turning what arrived into the consumer's KV format"),
    Field("digest_ms", FLOAT, "ms", "digests on the two ranks of the row"),
    Field("num_layers_per_write", INT, "layers", "layers that one write of a push brings"),
    Field("num_writes", INT, "writes", "writes of a push"),
    Field("num_early_writes", INT, "writes", "of these, posted before the prompt's last layer was computed"),
    Field("left_out", TEXT, "", "draft layers that one side has and that did not move, and why"),
    Field("retries", INT, "retries", "times it was tried again"),
    Field("verdict", TEXT, "", "OK, or what went wrong"),
)

# steps.parquet: a row per cell, repeat, engine and step, where engines record their steps
STEPS = (
    Field("cell_id", TEXT, "", "cell that it belongs to"),
    Field("repeat", INT, "index", "which repeat"),
    Field("engine", TEXT, "", "engine that computed it"),
    Field("step", INT, "index", "which step of the engine"),
    Field("begin_ms", FLOAT, "ms", "when its turn began, after its repeat began"),
    Field("turn_ns", INT, "ns", "its turn, from planning to settling it; commands and sampling included"),
    Field("model_ns", INT, "ns", "of these, the forward pass on rank 0"),
    Field("num_commands", INT, "commands", "of hand-overs, that were carried out in its turn"),
    Field("num_requests", INT, "requests", "that it computed tokens of"),
    Field("num_tokens", INT, "tokens", "that it computed"),
    Field("num_logits", INT, "tokens", "of these, those whose logits were computed"),
    Field("num_prefills", INT, "requests", "of these, those with several tokens but drafts, or their first"),
    Field("num_pairs", INT, "pairs", "of a token and one that it sees, itself included"),
    Field("num_seen", INT, "tokens", "whose KV it read, or wrote"),
    Field("num_drafts", INT, "tokens", "of those that it computed, those that were proposed"),
    Field("windowed", WINDOWED, "", "per window of the model, smallest first: pairs and seen within it"),
    Field("num_running", INT, "requests", "that had a row of the engine when it was settled"),
    Field("num_waiting", INT, "requests", "that waited for one"),
    Field("num_free_blocks", INT, "blocks", "free then, cached ones included"),
    Field("num_cached_blocks", INT, "blocks", "of these, those whose KV can still be found"),
)
