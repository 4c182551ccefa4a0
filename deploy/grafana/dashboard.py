# SPDX-License-Identifier: Apache-2.0
"""The dashboard as Grafana reads it; ``python -m nemo_build.deploy.grafana.dashboard`` writes the file.

The form is the classic one of "Dashboard JSON model" in Grafana's documentation, which can be imported by hand or
provisioned from a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_build.deploy.grafana.panels import ROWS, Panel

__all__ = ["FILE", "dashboard", "text"]

FILE = Path(__file__).with_name("dashboard.json")

SCHEMA_VERSION = 39
"""Of Grafana 10.4 and 11; later ones convert it."""

COLUMNS = 24
"""Width of Grafana's grid."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana reads it."""
    return {
        "uid": "nemo-build",
        "title": "nemo-build",
        "description": "Servers of `nemo-build serve`.",
        "tags": ["nemo-build", "inference"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(_variables())},
        "panels": list(_placed()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
    }
    for name, label, where in (
        ("model_name", "Model", ""),
        ("instance", "Server", '{model_name=~"$model_name"}'),
    ):
        query = f"label_values(nemo:build_info{where}, {name})"
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "hide": 0,
        }


def _placed() -> Iterator[dict[str, Any]]:
    """Rows and panels with their places in the grid."""
    number, y = 1, 0
    for title, panels in ROWS.items():
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }
        number, x, y, height = number + 1, 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            yield _panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}}
            number, x, height = number + 1, x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    options: dict[str, Any]
    if panel.kind != "timeseries":
        is_number = panel.kind == "number"
        options = {
            "textMode": "value" if is_number else "name",
            "graphMode": "area" if is_number else "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 5, "showPoints": "never"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": "timeseries" if panel.kind == "timeseries" else "stat",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                "range": True,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The file's contents."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
