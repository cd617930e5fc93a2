"""Write dashboards as Grafana reads them: `python -m dashboards.build`; `--check` says what is stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import QueryEditorMode

from dashboards.panels import Dashboard, Panel
from dashboards.queries import Query, exported
from dashboards.table import DASHBOARDS

FOLDER = Path(__file__).resolve().parent
DATASOURCE = DataSourceRef(type_val="prometheus", uid="rayk-prometheus")
"""As provisioning/datasources/rayk.yml defines it."""
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8}


def dashboard_json(board: Dashboard) -> str:
    """A dashboard's file. Its panels lie in rows, left to right."""
    link = grafana.DashboardLink("rayk").type(DashboardLinkType.DASHBOARDS).tags(["rayk"]).as_dropdown(True)
    made = (
        grafana.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags(["rayk"])
        .version(1)
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .link(link)
        .with_variable(_variable("model"))
        .with_variable(_variable("engine"))
    )
    x, y, height = 0, 0, 0
    for number, panel in enumerate(board.panels, start=1):
        if x + panel.width > COLUMNS or (height and HEIGHTS[panel.kind] != height):
            x, y = 0, y + height
        height = HEIGHTS[panel.kind]
        made.with_panel(_panel(panel).id(number).grid_pos(GridPos(x=x, y=y, w=panel.width, h=height)))
        x += panel.width
    return json.dumps(made.build(), cls=JSONEncoder, indent=2) + "\n"


def _variable(label: str) -> grafana.QueryVariable:
    within = '{model=~"$model"}' if label == "engine" else ""
    query = f"label_values({exported('rayk_turns_total')}{within}, {label})"
    return (
        grafana.QueryVariable(label)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"{label}s"})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text=["All"], value=["$__all"]))
    )


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made = _stat() if panel.kind == "stat" else _timeseries(panel.is_stacked)
    made.title(panel.title).description(panel.help).datasource(DATASOURCE).unit(panel.unit).min(0)
    for number, query in enumerate(panel.queries):
        made.with_target(_target(query, chr(ord("A") + number)))
    return made


def _stat() -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(BigValueColorMode.NONE)
    )


def _timeseries(is_stacked: bool) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    made = (
        timeseries.Panel()
        .legend(legend.show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .line_width(1)
        .fill_opacity(40 if is_stacked else 10)
        .show_points(VisibilityMode.AUTO)
        .span_nulls(False)
    )
    if is_stacked:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return made


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(ref)
        .datasource(DATASOURCE)
        .editor_mode(QueryEditorMode.CODE)
        .expr(query.shown)
        .legend_format(query.legend)
        .range()
    )


def files() -> dict[Path, str]:
    """Every file that is made here."""
    return {FOLDER / f"{board.uid}.json": dashboard_json(board) for board in DASHBOARDS}


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
