"""Judge from what a machine did during runs whether their times compare. None of it keeps a run from being
resumed or compared: it differs from minute to minute on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.2  # rates of one machine differ by less from run to run; beyond it times are of two machines
FREE_SHARE = 0.8  # below it a probe usually took a quarter longer than its best: others wanted the core


@dataclass(frozen=True, kw_only=True)
class MachineProbe:
    """A rate in environment.json that is measured anew in every run."""

    title: str
    part: str
    key: str
    how: str = ""  # key beside it that says how it was measured: unlike ways are not compared

    def value(self, environment: Mapping[str, Any]) -> float | None:
        return _number(environment, self.part, self.key)


PROBES = (
    MachineProbe(title="one core's copy in host memory, GB/s", part="ceiling", key="gb_per_s", how="what"),
    MachineProbe(title="one core's SHA-256, MB/s", part="load", key="sha256_mb_per_s"),
)
LOAD = MachineProbe(title="load average of the minute before", part="load", key="average_1_min")
FREE = MachineProbe(title="share of a core that was free", part="load", key="free_share")


def probe_rows(environments: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """List [title, value of each run] of every probe that some run has."""
    rows = []
    for probe in (*PROBES, LOAD, FREE):
        values = [probe.value(environment) for environment in environments]
        if any(value is not None for value in values):
            rows.append([probe.title, *("none" if value is None else f"{value:g}" for value in values)])
    return rows


def busy(environment: Mapping[str, Any]) -> list[str]:
    """List reasons to distrust a run's times by themselves: others used the machine when it began."""
    average, free = LOAD.value(environment), FREE.value(environment)
    cores = _number(environment, "devices", "num_cores")
    found = []
    if average is not None and cores is not None and average > cores:
        found.append(
            f"when it began, {average:g} tasks wanted the {cores:g} cores (load average of a minute)"
        )
    if free is not None and free < FREE_SHARE:
        found.append(f"when it began, a core did {free:.0%} of what it can: others wanted it, too")
    return found


def is_predicted(environment: Mapping[str, Any]) -> bool:
    """Tell whether a run's times come from a simulation."""
    return "predicted" in environment


def doubt_text(environment: Mapping[str, Any]) -> str:
    """Say why not to take the times for measured ones, or ""."""
    if is_predicted(environment):
        return predicted_text(environment["predicted"])
    reasons = busy(environment)
    return f"The times are doubtful: {'; '.join(reasons)}." if reasons else ""


def predicted_text(predicted: Mapping[str, Any]) -> str:
    """Say what the times were made of: `costs`, `unmeasured`, `reads_as_coded`, `outside_hull` (steps), as a
    simulation notes them in environment.json."""
    texts = [
        f"PREDICTED, not measured: times are those of the cost tables in {predicted.get('costs') or '?'}"
    ]
    if predicted.get("unmeasured"):
        texts.append("UNMEASURED: the tables are derived from data sheets")
    if predicted.get("reads_as_coded"):
        texts.append("no reads between such engines were measured: they take what the code says")
    if outside := predicted.get("outside_hull"):
        texts.append(f"{outside:,} steps lay outside of what was measured, and are extrapolated")
    return "; ".join(texts) + "."


def unlike(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List reasons to distrust times of `other` beside those of `base`: rates beyond TOLERANCE."""
    found = []
    for probe in PROBES:
        before, now = probe.value(base), probe.value(other)
        if before is None or now is None or _how(probe, base) != _how(probe, other):
            continue
        if max(before, now) > (1 + TOLERANCE) * min(before, now):
            change = 100 * (now / before - 1)
            found.append(f"{probe.title}: {now:g} instead of {before:g} ({change:+.0f}%)")
    return found


def _how(probe: MachineProbe, environment: Mapping[str, Any]) -> object:
    return environment[probe.part].get(probe.how)


def _number(environment: Mapping[str, Any], part: str, key: str) -> float | None:
    found = environment.get(part)
    value = found.get(key) if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None
