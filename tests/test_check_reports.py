# SPDX-License-Identifier: Apache-2.0
"""Reports keep to their schemas, whatever is in them, and the page opens without an error."""

from __future__ import annotations

import json
import subprocess
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.engines.check.plots import charts
from nemo_build.engines.check.reports import (
    REPORTS,
    SCHEMA,
    html_report,
    junit_report,
    markdown_report,
    text_report,
)
from nemo_build.engines.check.verdict import Figure, Result, Status, Verdict, Waiver

from .browser import CHROMIUM, FLAGS, needs_chromium

FACTS: dict[str, Any] = {
    "nemo_build": "1",
    "date": "2027-01-31T12:00:00+00:00",
    "engine": {
        "name": "engine",
        "digest": "abc",
        "target": "cpu",
        "backend": {"name": "onnxruntime"},
        "options": {},
        "speculator": "none",
        "nemo_build": "1",
    },
    "before": None,
    "reference": None,
    "baseline": {
        "directory": "baselines",
        "key": {"target": "cpu"},
        "engine": {"digest": "old"},
        "history": [
            {"date": f"2027-01-{d}", "why": "<b>&", "engine": "e", "figures": {"size.bytes": d}}
            for d in (10, 11)
        ],
    },
    "suite": "suite.yaml",
    "machine": {"fingerprint": "f", "cpus": 2},
    "changes": [{"kind": "tensors", "name": "a", "text": "the weights of <a> changed"}],
    "unused_waivers": ["size"],
}

DETAILS: dict[str, dict[str, Any]] = {
    "numerics": {
        "divergence": [0.1, 0.2, "inf"],
        "layers": {"l0": 0.0, "l1": 0.1},
        "reference layers": {"l0": 1e-3},
    },
    "quality": {"now": [1.0, 2.0], "before": [1.0, "nan"]},
    "acceptance": {
        "now": {"mtp": {"steps": 2, "drafted": [4, 2], "accepted": [3, 0]}},
        "before": {"mtp": {"steps": 2, "drafted": [4], "accepted": [4]}},
    },
    "speed": {"now": {"first token s": [1.0, 2.0], "tokens/s": [3.0]}, "before": {"first token s": [1.0]}},
    "size": {"now": {"weights in bf16": 10, "bytes": 1}, "before": {"weights in bf16": 9}},
}

TEXT = st.text(max_size=30)
FIGURES = st.builds(
    Figure,
    TEXT,
    st.sampled_from(list(Status)),
    st.one_of(st.floats(), TEXT, st.lists(st.integers())),
    st.one_of(st.none(), st.floats()),
    TEXT,
    TEXT,
)
RESULTS = st.builds(
    Result,
    TEXT,
    st.sampled_from(sorted(DETAILS)),
    st.sampled_from(list(Status)),
    st.text(min_size=1, max_size=30).map(lambda t: f"x{t}"),
    st.lists(FIGURES, max_size=3),
    st.lists(TEXT, max_size=2),
    st.just({}),
    st.floats(0, 100),
    st.just([]),
)


def report(*results: Result) -> dict[str, Any]:
    return Verdict.of(list(results), [], FACTS).to_json()


def example() -> dict[str, Any]:
    results = [
        Result(
            kind,
            kind,
            Status.REGRESS,
            f"{kind} <worse>",
            [Figure("a|b", Status.REGRESS, 1.5, 1.0, "at most 1")],
            ["because"],
            details,
        )
        for kind, details in DETAILS.items()
    ]
    results += [
        Result("provenance", "provenance", Status.BROKEN, "broken\nall", details={"traceback": "line 1"}),
        Result("memory", "memory", Status.SKIPPED, "not here"),
        Result("fine", "size", Status.PASS, "fine", waived=[Waiver("fine", "2027-01-31", "known")]),
    ]
    return report(*results)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_json_keeps_to_the_schema(schema):
    data = json.loads(REPORTS["json"](example()))
    jsonschema.validate(data, schema)
    for broken in (
        {**data, "status": "ok"},
        {**data, "more": 1},
        {k: v for k, v in data.items() if k != "facts"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


@given(st.lists(RESULTS, max_size=4))
def test_any_result_can_be_reported(results):
    data = report(*results)
    jsonschema.validate(json.loads(REPORTS["json"](data)), json.loads(SCHEMA.read_text()))
    root = ElementTree.fromstring(junit_report(data))
    assert int(root.get("tests")) == sum(max(1, len(r.figures)) for r in results)
    assert text_report(data)
    assert markdown_report(data)
    assert html_report(data).endswith("</html>")


def test_junit():
    root = ElementTree.fromstring(junit_report(example()))
    assert root.tag == "testsuites"
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "8",
        "failures": "5",
        "errors": "1",
        "skipped": "1",
    }
    suites = root.findall("testsuite")
    for name in ("tests", "failures", "errors", "skipped"):
        assert sum(int(s.get(name)) for s in suites) == int(root.get(name))
    failure = root.find("testsuite[@name='numerics']/testcase/failure")
    assert failure.get("message") == "a|b is 1.5, recorded 1 (at most 1)"
    assert "likely cause: because" in failure.text
    assert root.find("testsuite[@name='provenance']/testcase/error") is not None
    assert root.find("testsuite[@name='memory']/testcase/skipped").get("message") == "not here"
    assert len(root.find("testsuite[@name='fine']/testcase")) == 0


def test_text_tells_what_is_wrong_and_why():
    text = text_report(example())
    assert text.startswith("broken: engine (cpu, abc)")
    for part in (
        "regress  numerics",
        "likely cause: because",
        "line 1",
        "not checked: memory",
        "waives nothing",
    ):
        assert part in text


def test_markdown_is_not_torn_by_what_it_tells():
    lines = markdown_report(example()).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 8
    assert all(line.replace("\\|", "").count("|") == 5 for line in table)
    assert "numerics \\<worse\\>" in table[2]


def test_page_escapes_and_draws():
    page = html_report(example())
    assert "numerics &lt;worse&gt;" in page
    assert "<worse>" not in page
    assert "http://" not in page
    assert "https://" not in page
    titles = [c.title for c in charts(example())]
    assert len(titles) == 8
    for title in titles:
        assert title in page


@pytest.mark.slow
@needs_chromium
def test_page_opens_in_a_browser(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(html_report(example()))
    command = [CHROMIUM, *FLAGS, "--headless", f"--user-data-dir={tmp_path}/profile"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.count("<svg") == 8
    assert "CONSOLE" not in done.stderr
