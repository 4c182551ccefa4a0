# SPDX-License-Identifier: Apache-2.0
"""The dashboard: its form, and that the server exports what it shows."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from prometheus_client.parser import text_string_to_metric_families

from nemo_build.deploy.grafana import dashboard as source
from nemo_build.runtime import FinishReason
from nemo_build.runtime.scheduler import SchedulerStatistics
from nemo_build.runtime.server.backend import Statistics
from nemo_build.runtime.server.metrics import Metrics
from nemo_build.runtime.speculation.acceptance import Acceptance

DASHBOARD = json.loads(source.FILE.read_text())
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"\b(?:nemo|vllm):\w+|\bprocess_\w+")


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels of every sample of a server that has answered and refused a request, by the sample's name."""
    statistics = Statistics(
        SchedulerStatistics(1, 0, 5, 0, 3, 0, 0), acceptance=Acceptance(4, [4, 4], [3, 1])
    )
    backend = SimpleNamespace(
        target="cpu", speculator="mtp", context=1000, slots=4, statistics=lambda: statistics
    )
    metrics = Metrics(backend, "lightning")
    timer = metrics.start(8)
    timer.begin(3, 0, 0.0)
    timer.tokens(2)
    timer.finish(FinishReason.STOP)
    metrics.count_error(400)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_file_is_up_to_date():
    hint = "run python -m nemo_build.deploy.grafana.dashboard"
    assert source.FILE.read_text() == source.text(), hint


def test_every_metric_is_exported(exported):
    names = {name for expression in EXPRESSIONS for name in NAME.findall(expression)}
    names |= {name for v in VARIABLES.values() for name in NAME.findall(str(v["query"]))}
    assert len(names) > 35
    assert names <= set(exported)


def test_expressions_are_promql_over_labels_that_there_are(exported):
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for expression in EXPRESSIONS:
        parsed = expression.replace("$__rate_interval", "5m")
        promql.parse(parsed)
    for expression in EXPRESSIONS:
        [*selected] = re.findall(r"(nemo:\w+)\{([^}]*)\}", expression)
        grouped = {g for found in re.findall(r"\bby \(([^)]*)\)", expression) for g in found.split(", ")}
        labels = set().union(*(exported[name] for name, _ in selected)) | {"instance"}
        matched = {part.split("=~")[0] for _, matchers in selected for part in matchers.split(",")}
        assert matched == {"model_name", "instance"}, expression
        assert grouped <= labels, expression


def test_legends_are_of_labels_that_are_left(exported):
    for target in (target for panel in PANELS for target in panel["targets"]):
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        left = re.match(r"(?:\w+ by|sum by) \(([^)]*)\)", target["expr"])
        if target["expr"].startswith("sum") or left:
            assert shown <= set((left[1] if left else "").split(", ")), target
        else:
            name = NAME.search(target["expr"])
            assert name is not None
            assert shown <= exported[name[0]] | {"instance", "position"}, target


def test_counters_are_only_shown_as_rates(exported):
    for expression in EXPRESSIONS:
        for name in NAME.findall(expression):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert re.search(rf"rate\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", expression), expression
            else:
                assert f"rate({name}" not in expression, expression


def test_panels_have_what_grafana_wants():
    assert DASHBOARD["schemaVersion"] >= 39
    assert isinstance(DASHBOARD["title"], str)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", DASHBOARD["uid"])
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Engine", "Speculation", "Prefix cache"]
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_panels_do_not_overlap_and_leave_no_gap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= source.COLUMNS
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )
        assert not cells & taken, panel["title"]
        taken |= cells
    height = max(y for _, y in taken) + 1
    assert len(taken) == height * source.COLUMNS


def test_the_data_source_is_chosen_by_who_looks():
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    sources = [panel["datasource"] for panel in PANELS]
    sources += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    sources += [v["datasource"] for v in VARIABLES.values() if v["type"] == "query"]
    assert all(found == {"type": "prometheus", "uid": "${datasource}"} for found in sources)
    used = {name for name in re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)) if not name.startswith("__")}
    assert used == set(VARIABLES)
