"""Print every metric: `python -m rayk.metrics`."""

from __future__ import annotations

import sys

from rayk.metrics import METRICS


def table() -> str:
    """Write all metrics as a Markdown table, by their names on a node's endpoint."""
    lines = ["| name | kind | unit | labels | help |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        name = metric.name if metric.name.startswith("rayk_front_") else f"ray_{metric.name}"
        labels = ", ".join(metric.labels)
        lines.append(f"| {name} | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
