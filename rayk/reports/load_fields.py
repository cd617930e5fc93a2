"""Describe every column of `rayk bench`'s tables; those that a run has, too, mean the same (`fields.py`)."""

from __future__ import annotations

import pandas as pd

from rayk.reports.fields import BOOL, CELLS, FLOAT, INT, REQUESTS, TEXT, Field, kinds
from rayk.reports.values import plural

VERDICTS = ("VALID", "NOISY", "INVALID")  # a load's numbers are to be trusted, imprecise, not what they say

# what each metric is
METRICS = {
    "ttft": "time from when a request was due to its first chunk of tokens",
    "tpot": "time after the first chunk over the tokens after the first",
    "itl": "gaps between chunks that carry tokens",
    "e2e": "time from when a request was due to its last chunk",
}
# percentiles are order statistics, of failed requests infinite
STATISTICS = {"mean": "mean", "p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
ENDS = {"": "", "_low": "lower end of its 95% interval", "_high": "upper end of its 95% interval"}

_RUN_CELLS = {field.name: field for field in CELLS}
_RUN_REQUESTS = {field.name: field for field in REQUESTS}

# what servers that draft tell of it, in usage.completion_tokens_details
DRAFTED = ("num_drafted", "num_accepted", "acceptance_rate")


def _percentile(metric: str, statistic: str, end: str) -> Field:
    text = f"{STATISTICS[statistic]}: {METRICS[metric]}" if not end else ENDS[end]
    return Field(f"{metric}_ms_{statistic}{end}", FLOAT, "ms", text)


# cells.parquet of a bench: a row per load
LOAD_CELLS = (
    _RUN_CELLS["cell_id"],
    Field("verdict", TEXT, "", "VALID, NOISY or INVALID: whether to believe the numbers"),
    Field("reason", TEXT, "", "what is held against them"),
    Field("met", BOOL, "", "whether it is not INVALID"),
    Field("num_requests", INT, "requests", "sent, warm-up and cool-down included"),
    Field("wall_s", FLOAT, "s", "from the start of the load to its last answer"),
    Field("url", TEXT, "", "the server"),
    Field("model", TEXT, "", "the model's name"),
    Field("arrival", TEXT, "", "poisson, gamma, constant, trace or closed"),
    Field("slo", TEXT, "", "limits that a good answer keeps"),
    Field("rate", FLOAT, "requests/s", "of an open load, as asked for"),
    Field("burstiness", FLOAT, "shape", "of gamma arrivals; 1 is Poisson"),
    Field("concurrency", INT, "requests", "in flight in a closed load"),
    Field("seed", INT, "", "of arrivals, lengths and prompts"),
    Field("num_measured", INT, "requests", "between warm-up and cool-down; what follows is of these"),
    Field("num_warmup", INT, "requests", "cut at the start"),
    Field("num_cooldown", INT, "requests", "cut at the end"),
    Field("num_failed", INT, "requests", "not answered"),
    Field("num_refused", INT, "requests", "of these, answered with 429"),
    Field("num_timeouts", INT, "requests", "of these, later than --timeout"),
    Field("num_prompt_tokens", INT, "tokens", "of answers that tell of prompt and cached tokens"),
    Field("num_cached_tokens", INT, "tokens", "of these, found in the server's prefix caches"),
    Field("tokens_per_chunk", FLOAT, "tokens", "output tokens over chunks that carry tokens"),
    *(_RUN_CELLS[name] for name in DRAFTED),
    Field("window_s", FLOAT, "s", "the measured window; what follows is of it"),
    Field("offered_per_s", FLOAT, "requests/s", "requests due in the window"),
    Field("answered_per_s", FLOAT, "requests/s", "answers that ended in the window"),
    Field("output_tokens_per_s", FLOAT, "tokens/s", "tokens read in the window"),
    Field("goodput_per_s", FLOAT, "requests/s", "answers that ended in the window and kept every limit"),
    Field("good_share", FLOAT, "share", "requests due in the window that kept every limit"),
    Field("failed_share", FLOAT, "share", "requests due in the window that failed"),
    Field("mean_in_flight", FLOAT, "requests", "requests in flight, over time"),
    *(_percentile(metric, statistic, end) for metric in METRICS for statistic in STATISTICS for end in ENDS),
    *(Field(f"num_{m}_values", INT, "values", f"values behind the {m} statistics") for m in METRICS),
    Field("generator_cpu_share", FLOAT, "share", "of one core that the generator took"),
    *(
        Field(f"{name}_lag_ms_p{percent}", FLOAT, "ms", f"{text}, {percent}th percentile")
        for name, text in (("send", "sent after it was due"), ("loop", "event loop woke late"))
        for percent in (50, 90, 99)
    ),
)

# requests.parquet of a bench: a row per request
LOAD_REQUESTS = (
    *(
        _RUN_REQUESTS[name]
        for name in (
            "cell_id",
            "repeat",
            "request_id",
            "prompt_index",
            "prompt_token_ids",
            "output_token_ids",
            "error",
            "num_prompt_tokens",
            "num_cached_tokens",
            *DRAFTED,
            "ttft_ms",
            "tpot_ms",
            "itl_ms",
            "e2e_ms",
            "finish_reason",
            "seed",
        )
    ),
    Field("outcome", TEXT, "", "ok, refused, timeout, failed or aborted"),
    Field("http_status", INT, "", "of the answer"),
    Field("phase", TEXT, "", "warmup, measured or cooldown"),
    Field("num_output_tokens", INT, "tokens", "as the server counts them"),
    Field("max_tokens", INT, "tokens", "asked for"),
    Field("num_chunks", INT, "chunks", "that carry tokens"),
    _RUN_REQUESTS["due_ms"],
    Field("send_lag_ms", FLOAT, "ms", "from when it was due to when it was sent"),
    Field("ended_ms", FLOAT, "ms", "when its answer, or its failure, was complete, after its load began"),
    Field("is_good", BOOL, "", "whether it was answered within every limit"),
)

LOAD_CELL_FIELDS = kinds(LOAD_CELLS)
LOAD_REQUEST_FIELDS = kinds(LOAD_REQUESTS)
LOAD_FIELDS = {"cells": LOAD_CELL_FIELDS, "requests": LOAD_REQUEST_FIELDS}


def is_load(cells: pd.DataFrame) -> bool:
    return len(cells) > 0 and bool(cells["verdict"].isin(VERDICTS).all())


def load_headline(cells: pd.DataFrame) -> str:
    """Count verdicts, e.g. `2 loads: 1 VALID, 1 NOISY`."""
    counts = cells["verdict"].value_counts().to_dict()
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    return f"{plural(len(cells), 'load')}: {told}"
