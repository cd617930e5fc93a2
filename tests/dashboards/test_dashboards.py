"""The dashboards are what the table says, what the table of metrics knows, and what Grafana reads."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import stat, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import build, queries
from dashboards.table import (
    ABSENT_ON_CPU,
    ABSENT_UNDRAFTED,
    ABSENT_UNPACED,
    DASHBOARDS,
    NOT_SHOWN,
    shown_metrics,
)
from rayk.metrics import METRICS, MetricKind

FOLDER = Path(build.FOLDER)
FILES = sorted(FOLDER.glob("*.json"))
OPTIONS = {"timeseries": timeseries, "stat": stat}


def boards() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in FILES:
        yield path.stem, json.loads(path.read_text())


def as_grafana_has_it(model: Any) -> Any:
    return json.loads(json.dumps(model, cls=JSONEncoder))


def missing(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """What of `given` is not in `kept`, which may have more."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from missing(value, kept[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from missing(one, other, f"{where}[{index}]")
    elif given != kept:
        yield f"{where}: {given!r} became {kept!r}"


def test_the_files_are_what_the_table_says() -> None:
    assert {path.name for path in FILES} == {f"{board.uid}.json" for board in DASHBOARDS}
    assert build.main(["--check"]) == 0


def test_a_stale_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.main(["--check"]) == 1
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
    (tmp_path / "rayk-ranks.json").write_text("{}")
    assert build.main(["--check"]) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grafana_s_own_types_keep_every_field(path: Path) -> None:
    given = json.loads(path.read_text())
    assert list(missing(given, as_grafana_has_it(Dashboard.from_json(given)))) == []
    for panel in given["panels"]:
        types = OPTIONS[panel["type"]]
        options = types.Options.from_json(panel["options"])
        assert list(missing(panel["options"], as_grafana_has_it(options))) == []
        if panel["type"] == "timeseries":
            custom = panel["fieldConfig"]["defaults"]["custom"]
            kept = as_grafana_has_it(timeseries.FieldConfig.from_json(custom))
            assert list(missing(custom, kept)) == []


def test_a_field_that_grafana_does_not_know_is_noticed() -> None:
    given = json.loads(FILES[0].read_text())
    given["panels"][0]["gridpos"] = given["panels"][0].pop("gridPos")
    assert "/panels[0]/gridpos" in list(missing(given, as_grafana_has_it(Dashboard.from_json(given))))


@pytest.mark.parametrize(("name", "board"), boards())
def test_a_dashboard_is_in_order(name: str, board: dict[str, Any]) -> None:
    assert board["uid"] == name
    assert len(board["uid"]) <= 40  # Grafana's limit
    assert board["schemaVersion"] >= 36
    panels = board["panels"]
    assert {panel["type"] for panel in panels} <= {"timeseries", "stat"}  # graph is gone from Grafana 12
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/rayk.yml").read_text())["datasources"]
    defined = {"type": source["type"], "uid": source["uid"]}
    for panel in panels:
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        assert panel["description"]
        assert panel["datasource"] == defined
        assert all(target["datasource"] == defined for target in panel["targets"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert all(variable["datasource"] == defined for variable in board["templating"]["list"])
    used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in panels for t in p["targets"])))
    assert used <= variables | {"__rate_interval"}


@pytest.mark.parametrize(("name", "board"), boards())
def test_panels_lie_in_the_grid_and_not_on_each_other(name: str, board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    cells = Counter(
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1


def test_no_two_dashboards_or_panels_are_called_alike() -> None:
    uids = [board.uid for board in DASHBOARDS]
    assert len(uids) == len(set(uids))
    for board in DASHBOARDS:
        for one, other in combinations(board.panels, 2):
            assert one.title != other.title, board.uid


def test_every_metric_is_shown_or_said_not_to_be() -> None:
    assert shown_metrics() | NOT_SHOWN.keys() == METRICS.keys()
    assert not shown_metrics() & NOT_SHOWN.keys()
    assert all(NOT_SHOWN.values())
    assert METRICS.keys() >= ABSENT_ON_CPU | ABSENT_UNPACED | ABSENT_UNDRAFTED


def test_queries_and_alerts_name_no_other_metric() -> None:
    """Asked of the files themselves, which are what is shipped."""
    suffixed = {queries.exported(name) for name in METRICS}
    for name, metric in METRICS.items():
        if metric.kind is MetricKind.HISTOGRAM:
            ends = [f"{end}{metric.series_ending}" for end in ("bucket", "count", "sum")]
            suffixed |= {f"{queries.exported(name)}_{end}" for end in ends}
    for path in [*FILES, FOLDER / "alerts.yml"]:
        named = set(re.findall(r"\b(?:ray_)?rayk_\w+", path.read_text()))
        assert named
        assert named <= suffixed, path.name


def test_series_are_never_told_apart_by_the_process() -> None:
    """WorkerId and the like have a value per process: bare selectors would draw a line for each."""
    for path in FILES:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                selectors = len(re.findall(r"\b(?:ray_)?rayk_\w+", target["expr"]))
                aggregated = len(re.findall(r"\b(?:sum|max|min|avg)\b", target["expr"]))
                assert aggregated >= selectors, target["expr"]


def test_engines_of_two_models_are_never_one() -> None:
    """Every model's are called prefill0 and decode0. Fronts know of no model: addresses tell them apart."""
    clauses = 0
    for path in FILES:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                for labels in re.findall(r"\b(?:by|on|ignoring) ?\(([^)]*)\)", target["expr"]):
                    if "engine" in labels.split(", "):
                        own = "instance" if "rayk_front_" in target["expr"] else "model"
                        assert own in labels.split(", "), target["expr"]
                        assert f"{{{{{own}}}}}" in target["legendFormat"], target["legendFormat"]
                        clauses += 1
    assert clauses > 60
    for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", (FOLDER / "alerts.yml").read_text()):
        assert "engine" not in by or "model" in by


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: queries.rate("rayk_no_such_total"), "no metric rayk_no_such_total"),
        (lambda: queries.rate("rayk_ttft_seconds"), "is a histogram, not a counter"),
        (lambda: queries.value("rayk_steps_total"), "is a counter, not a gauge"),
        (lambda: queries.rate("rayk_turns_total", "phase"), "has no label phase"),
        (lambda: queries.rate("rayk_steps_total", phase="sleep"), "phase is never sleep"),
        (lambda: queries.value("rayk_kv_blocks", state="!lost"), "state is never lost"),
        (lambda: queries.Query("sum by (engine) (ray_rayk_turns_total)", frozenset()), "this adds them up"),
        (lambda: queries.Query("a and on (engine, rank) b", frozenset()), "this adds them up"),
        (lambda: queries.rate("rayk_turns_total", "engine").named("{{engine}}"), "both be called"),
    ],
)
def test_a_query_of_what_does_not_exist_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_provisioning_is_as_grafana_documents_it() -> None:
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/rayk.yml").read_text())
    assert sources["apiVersion"] == 1
    assert sources["datasources"][0]["url"] == "$RAYK_PROMETHEUS"
    providers = yaml.safe_load((FOLDER / "provisioning/dashboards/rayk.yml").read_text())
    assert providers["apiVersion"] == 1
    (provider,) = providers["providers"]
    assert provider["type"] == "file"
    assert provider["options"] == {"path": "$RAYK_DASHBOARDS"}
