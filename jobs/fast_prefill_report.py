"""What jobs/fast_prefill.py shows of its tables: Markdown, and a page with plots."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.benchmarks.harness import command_line, when
from rayk.models.config import DecoderConfig
from rayk.reports.md_table import markdown_table
from rayk.reports.page import Column, Page, Plot, Section, text_rows
from rayk.reports.values import format_bytes

SCRIPT = "jobs/fast_prefill.py"
TABLES = ("prompts", "groups", "requests")

PUBLISHED_LAYERS, PUBLISHED_OWN_LAYERS = 24, 12
PUBLISHED_TOKENS, PUBLISHED_OFF_MS, PUBLISHED_ON_MS = 8192, 16.6, 9.7
PUBLISHED = (
    f"The published experiment: a Qwen2-like model of {PUBLISHED_LAYERS} layers whose last "
    f"{PUBLISHED_LAYERS - PUBLISHED_OWN_LAYERS} reuse the first {PUBLISHED_OWN_LAYERS}, on a GPU; "
    f"at {PUBLISHED_TOKENS:,} tokens the second layer group took {PUBLISHED_OFF_MS} ms without fast prefill "
    f"and {PUBLISHED_ON_MS} ms with it, a ratio of {PUBLISHED_ON_MS / PUBLISHED_OFF_MS:.2f}. Those times and "
    "that ratio are of another machine and another engine and were not measured here: they say nothing of "
    "how fast ours is. What is repeated is the form: two groups of layers, of which the second reuses the "
    "first's keys and values."
)
UNSTEADY = 2.0
"""Slowest over fastest repeat of a group from which on a run says that its times are unsteady."""

COLUMNS = (
    Column(title="prompt tokens", key="num_prompt_tokens", spec=",d"),
    Column(title="first group off, ms", key="first_off_ms", spec=",.1f"),
    Column(title="first group on, ms", key="first_on_ms", spec=",.1f"),
    Column(title="second group off, ms", key="second_off_ms", spec=",.1f"),
    Column(title="second group on, ms", key="second_on_ms", spec=",.2f"),
    Column(title="second group, on / off", key="second_ratio", spec=".4f"),
    Column(title="in the worst repeat", key="second_worst_ratio", spec=".4f"),
    Column(title="TTFT off, ms", key="ttft_off_ms", spec=",.1f"),
    Column(title="TTFT on, ms", key="ttft_on_ms", spec=",.1f"),
    Column(title="TTFT, on / off", key="ttft_ratio", spec=".3f"),
)
COUNTS = (
    Column(title="prompt tokens", key="num_prompt_tokens", spec=",d"),
    Column(title="first group, GFLOP", key="first_gflop", spec=",.3f"),
    Column(title="second group off, GFLOP", key="second_off_gflop", spec=",.3f"),
    Column(title="second group on, GFLOP", key="second_on_gflop", spec=",.5f"),
    Column(title="token-layers off", key="token_layers_off", spec=",d"),
    Column(title="token-layers on", key="token_layers_on", spec=",d"),
    Column(title="KV, MiB", key="kv_mib", spec=",.2f"),
    Column(title="saved by sharing, MiB", key="kv_saved_mib", spec=",.2f"),
    Column(title="tokens on and off", key="tokens"),
    Column(title="tokens and transformers'", key="transformers"),
)

MARKS = "Lines join the medians; small dots and crosses are single repeats of the second and the first group."

Rows = Sequence[Mapping[str, Any]]


def counted(rows: Rows) -> list[dict[str, Any]]:
    """Prompt rows with counts as they are shown."""
    return [
        {
            **row,
            "first_gflop": row["first_off_flops"] / 1e9,
            "second_off_gflop": row["second_off_flops"] / 1e9,
            "second_on_gflop": row["second_on_flops"] / 1e9,
            "kv_mib": row["kv_bytes"] / 2**20,
            "kv_saved_mib": row["kv_saved_bytes"] / 2**20,
            "transformers": row["transformers"] or "not asked",
        }
        for row in rows
    ]


def published(rows: Rows, model: DecoderConfig) -> str:
    """The published experiment, how this run differs from it in form, and this run's own ratios."""
    parts = [PUBLISHED]
    num_layers, num_own = model.num_layers, model.fast_prefill_layers.start
    if (num_layers, num_own) != (PUBLISHED_LAYERS, PUBLISHED_OWN_LAYERS):
        parts.append(
            f"Unlike there, {num_own} of {num_layers} layers have keys and values of their own here."
        )
    if all(row["num_prompt_tokens"] != PUBLISHED_TOKENS for row in rows):
        parts.append(f"No prompt of {PUBLISHED_TOKENS:,} tokens was run here.")
    ratios = "; ".join(
        f"{row['num_prompt_tokens']:,} tokens {row['first_ratio']:.2f} and {row['second_ratio']:.2g}"
        for row in rows
    )
    parts.append(
        f"What this run took with fast prefill of its time without, first and second group: {ratios}."
    )
    return " ".join(parts)


def unsteady(rows: Rows) -> list[str]:
    """The groups whose repeats differ by more than a factor UNSTEADY, in words."""
    found = []
    for row in rows:
        for group, side in itertools.product(("first", "second"), ("off", "on")):
            low, high = row[f"{group}_{side}_min_ms"], row[f"{group}_{side}_max_ms"]
            if high > UNSTEADY * low:
                what = f"{row['num_prompt_tokens']:,} tokens, {group} group {side}"
                found.append(f"{what}: {low:,.2f} to {high:,.2f} ms")
    return found


def warning(rows: Rows) -> str:
    """What a reader must know of unsteady times; empty where they are steady."""
    found = unsteady(rows)
    if not found:
        return ""
    return (
        f"Unsteady times: repeats of one group differ by more than a factor {UNSTEADY:g}, as on a machine "
        f"that does something else: {'; '.join(found)}."
    )


def about(model: DecoderConfig, options: argparse.Namespace) -> str:
    """The model and the run, in words."""
    second = model.fast_prefill_layers
    chunk = f"steps of {options.chunk:,} tokens" if options.chunk else "one step"
    last_own = options.num_own_layers - 1
    return (
        f"{model.num_layers} Qwen2 layers, hidden {model.hidden_size}, {model.num_query_heads} query and "
        f"{model.num_kv_heads} KV heads of {model.head_size}, MLP {options.intermediate_size}, random "
        f"weights, {options.dtype}; layers {second.start}-{second.stop - 1} (the second group) reuse keys "
        f"and values of layers 0-{last_own} (the first). One request at a time, its prompt in {chunk}; "
        f"medians of {options.repeats} repeats, on and off in turns within one run."
    )


def machine(environment: Mapping[str, Any]) -> list[str]:
    """What measured, in short lines."""
    devices, packages = environment["devices"], environment["packages"]
    threads = environment["threads"]
    cpu = f"{devices['cpu']}, {devices['num_cores']} cores, {threads} thread{'s' if threads > 1 else ''}"
    return [
        f"{', '.join([cpu, *devices['gpus']])}; {environment['platform']}, Python {environment['python']}",
        f"torch {packages['torch']}, transformers {packages['transformers']}; "
        f"attention: {', '.join(environment['attention'])}",
        *when(environment),
    ]


def _reproduce(environment: Mapping[str, Any]) -> list[str]:
    # A Ray job works in a copy of the folder without git.
    commit = environment["git_commit"]
    checkout = [f"git checkout {commit.removesuffix('+changes')}"] if commit else []
    return [*checkout, command_line(SCRIPT, environment)]


def markdown(
    rows: Rows, model: DecoderConfig, options: argparse.Namespace, environment: dict[str, Any]
) -> str:
    """Everything of the prompts' table, as GitHub Markdown."""
    lines = ["# Fast prefill", "", f"    {command_line(SCRIPT, environment)}", "", about(model, options), ""]
    for columns in (COLUMNS, COUNTS):
        lines += [
            *markdown_table([c.title for c in columns], text_rows(columns, counted(rows))),
            "",
        ]
    if warning(rows):
        lines += [f"**{warning(rows)}**", ""]
    lines += [published(rows, model), "", "Environment:", "", *(f"- {line}" for line in machine(environment))]
    return "\n".join(lines)


def make_page(
    tables: Mapping[str, Rows],
    model: DecoderConfig,
    options: argparse.Namespace,
    environment: dict[str, Any],
) -> Page:
    """The report."""
    rows = counted(tables["prompts"])
    best = next((r for r in rows if r["num_prompt_tokens"] == 4096), rows[-1])
    whole_kv = format_bytes(best["kv_bytes"] + best["kv_saved_bytes"])
    equal = all(row["tokens"] == "equal" for row in rows)
    asked = [row for row in rows if row["transformers"] != "not asked"]
    right = all(row["transformers"] == "equal" for row in asked)
    chips = [("met" if equal else "unmet", f"tokens on and off {'equal' if equal else 'differ'}")]
    if asked:
        text = "tokens as transformers'" if right else "tokens are not transformers'"
        chips.append(("met" if right else "unmet", text))
    if warning(rows):
        chips.append(("NEAR_TIE", "unsteady times"))
    return Page(
        eyebrow=f"rayk · fast prefill · {str(environment['started']).replace('T', ' ')[:16]}",
        title=f"Fast prefill: {best['num_prompt_tokens']:,} tokens pass the second layer group in "
        f"{best['second_on_ms']:,.1f} ms, not {best['second_off_ms']:,.0f} ms",
        chips=chips,
        stats=[
            (f"{best['second_ratio']:.4f}", f"of the group's time, at {best['num_prompt_tokens']:,} tokens"),
            (f"{best['ttft_ratio']:.2f}", "of the time to the first token"),
            (f"{best['token_layers_on'] / best['token_layers_off']:.3f}", "of the token-layers"),
            (format_bytes(best["kv_saved_bytes"]), f"of {whole_kv} of KV are not kept"),
        ],
        sections=[
            Section(title="Times", note=f"{about(model, options)} {MARKS}", plots=_time_plots(tables)),
            Section(
                title="By prompt",
                note="Medians in milliseconds; ratios of medians, and the largest of any repeat. "
                + warning(rows),
                columns=COLUMNS,
                rows=rows,
            ),
            Section(
                title="What is computed and kept",
                note=_about_counts(model),
                plots=_count_plots(rows),
                columns=COUNTS,
                rows=rows,
            ),
            Section(title="Published", note=published(rows, model)),
            Section(title="Reproduce", text="\n".join(_reproduce(environment))),
        ],
        environment=environment,
        footer="Tables: prompts, groups and requests (parquet, csv) beside this file.",
    )


def _about_counts(model: DecoderConfig) -> str:
    num_fast = len(model.fast_prefill_layers)
    num_slow = model.num_layers - num_fast
    return (
        "Floating-point operations of prefill, a multiplication and an addition being two, from shapes and "
        "the keys that each token sees (jobs/layer_costs.py says how). Token-layers are tokens computed, "
        "summed over layers, counted as the layers ran: with fast prefill, "
        f"n x {num_slow} + 1 x {num_fast} for n tokens, not n x {model.num_layers}."
    )


def _time_plots(tables: Mapping[str, Rows]) -> list[Plot]:
    """The groups' times of every repeat, with lines through medians; the ratio on / off."""
    rows = tables["prompts"]
    sizes = [row["num_prompt_tokens"] for row in rows]
    data = []
    for group, symbol in (("second", "circle"), ("first", "x-thin-open")):
        for side, colour in (("off", "mark"), ("on", "mark2")):
            data.append(
                _line(sizes, [row[f"{group}_{side}_ms"] for row in rows], f"{group}, {side}", colour)
                | ({"line": {"color": colour, "width": 1.2, "dash": "dot"}} if group == "first" else {})
            )
            points = [
                r for r in tables["groups"] if r["group"] == group and r["fast_prefill"] == (side == "on")
            ]
            data.append(_marks(points, colour, symbol))
    times = _layout(sizes, "ms", log=True)
    ratios = _layout(sizes, "with fast prefill / without", log=True)
    ratios["shapes"] = [_level(0.1)]
    at = {"x": 0, "xref": "paper", "xanchor": "left", "y": -1, "yanchor": "bottom"}
    ratios["annotations"] = [at | {"text": "a tenth", "showarrow": False, "font": {"color": "soft"}}]
    measured = _line(sizes, [row["second_ratio"] for row in rows], "second group", "mark2")
    whole = _line(sizes, [row["ttft_ratio"] for row in rows], "time to first token", "mark")
    lines = [measured, whole]
    if PUBLISHED_TOKENS in sizes:
        name = "published second group, a GPU"
        theirs = _line([PUBLISHED_TOKENS], [PUBLISHED_ON_MS / PUBLISHED_OFF_MS], name, "soft")
        marker = {"color": "soft", "size": 13, "symbol": "diamond-open"}
        lines.append(theirs | {"mode": "markers", "marker": marker})
    return [
        Plot(id="times", title="Time of the layer groups, by prompt tokens", data=data, layout=times),
        Plot(
            id="ratios",
            title="What is left of the time, by prompt tokens",
            data=lines,
            layout=ratios,
        ),
    ]


def _count_plots(rows: Rows) -> list[Plot]:
    """Operations of the groups; time to first token."""
    sizes = [row["num_prompt_tokens"] for row in rows]
    first = _line(sizes, [row["first_gflop"] for row in rows], "first, off and on", "soft")
    flops = [
        _line(sizes, [row["second_off_gflop"] for row in rows], "second, off", "mark"),
        _line(sizes, [row["second_on_gflop"] for row in rows], "second, on", "mark2"),
        # Dashed: it runs beside the second group's without fast prefill, and the one must not hide the other.
        first | {"line": first["line"] | {"dash": "dash"}},
    ]
    ttft = [
        _line(sizes, [row[f"ttft_{side}_ms"] for row in rows], side, colour)
        for side, colour in (("off", "mark"), ("on", "mark2"))
    ]
    return [
        Plot(
            id="flops",
            title="Operations of the layer groups, by prompt tokens",
            data=flops,
            layout=_layout(sizes, "GFLOP", log=True),
        ),
        Plot(
            id="ttft",
            title="Time to first token, by prompt tokens",
            data=ttft,
            layout=_layout(sizes, "ms", log=False),
        ),
    ]


def _line(x: Sequence[int], y: Sequence[float], name: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7},
        "hovertemplate": "%{x:,} tokens: %{y:.4g}<extra>" + name + "</extra>",
    }


def _marks(rows: Rows, colour: str, symbol: str) -> dict[str, Any]:
    """Every repeat, faint."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [row["num_prompt_tokens"] for row in rows],
        "y": [row["time_ms"] for row in rows],
        "marker": {"color": colour, "size": 4, "opacity": 0.45, "symbol": symbol},
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _level(y: float) -> dict[str, Any]:
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}
    return {"type": "line", **ends, "line": {"color": "soft", "width": 1, "dash": "dash"}}


def _layout(sizes: Sequence[int], unit: str, *, log: bool) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": "log", "dtick": 1} if log else {"rangemode": "tozero"}
    return {
        "height": 360,
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"type": "log", "tickvals": list(sizes), "ticktext": [f"{n:,}" for n in sizes]},
        "yaxis": {"title": {"text": unit}, "exponentformat": "none", "separatethousands": True, **scale},
    }
