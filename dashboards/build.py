"""Write dashboards as Grafana reads them: `python -m dashboards.build`; `--check` says what is stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dashboards.panels import Dashboard, Panel
from dashboards.queries import Query, exported
from dashboards.table import DASHBOARDS

FOLDER = Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "rayk-prometheus"}
"""As provisioning/datasources/rayk.yml defines it."""
SCHEMA_VERSION = 39
"""Of Grafana 11; later ones migrate it when they load it."""
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8}


def dashboard_json(board: Dashboard) -> dict[str, Any]:
    """A dashboard's model. Its panels lie in rows, left to right."""
    panels, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(board.panels, start=1):
        if x + panel.width > COLUMNS or (height and HEIGHTS[panel.kind] != height):
            x, y = 0, y + height
        height = HEIGHTS[panel.kind]
        place = {"x": x, "y": y, "w": panel.width, "h": height}
        panels.append(_panel_json(panel, number, place))
        x += panel.width
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.help,
        "tags": ["rayk"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "tags": ["rayk"], "title": "rayk", "asDropdown": True}],
        "templating": {"list": [_variable("model"), _variable("engine")]},
        "panels": panels,
    }


def _variable(label: str) -> dict[str, Any]:
    within = '{model=~"$model"}' if label == "engine" else ""
    query = f"label_values({exported('rayk_turns_total')}{within}, {label})"
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"{label}s"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "auto", "spanNulls": False}
    if panel.is_stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "stat":
        custom, options = {}, {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [_target(query, chr(ord("A") + n)) for n, query in enumerate(panel.queries)],
    }


def _target(query: Query, ref: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.shown,
        "legendFormat": query.legend,
        "range": True,
    }


def files() -> dict[Path, str]:
    """Every file that is made here."""
    return {
        FOLDER / f"{board.uid}.json": json.dumps(dashboard_json(board), indent=2) + "\n"
        for board in DASHBOARDS
    }


def main(arguments: list[str]) -> int:
    """0; with --check 1 where files are not what the table says."""
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(files()[path])
            print(f"written: {path.name}")
        return 0
    for path in stale:
        print(
            f"{path.name} is not what dashboards/table.py says: run python -m dashboards.build",
            file=sys.stderr,
        )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
